# ruff: noqa: F821
def check_store_refuses_a_misfit():
    """one token and three indices don't fit together, and are not broadcast"""
    k_cache, v_cache = torch.zeros(2, 6, 1, 2)
    k = torch.ones(1, 1, 2)
    try:
        store_cache(k_cache, v_cache, torch.tensor([4, 0, 3]), k, k)
    except ValueError:
        assert not k_cache.any(), "a refused store must write nothing"
    else:
        raise AssertionError("one K for three slots should raise ValueError, and was stored thrice")


def check_rows_and_token_pool():
    """rows are handed out but the dummy's; every token of the pool is valid from the start"""
    table = torch.full((3, 8), 16, dtype=torch.int32)
    tables = TableManager(2, table)
    rows = {tables.allocate(), tables.allocate()}
    assert rows == {0, 1}, f"the last row is the dummy's, rows 0 and 1 are to give; got {rows}"
    assert tables.available_size == 0, "row 2, the dummy's, is not free"
    pool = tables.token_pool
    assert pool.shape == table.shape and pool.dtype == torch.int32
    pool[0, 0] = 7
    assert table[0, 0] == 16, "the token pool must be memory of its own, not the page table"
    assert int(pool.min()) >= 0, "what nobody wrote must be a valid token id, it is to be embedded"


def check_last_token_is_never_looked_up():
    """match_req asks the prefix cache for all but the last token"""
    manager = CacheManager(4, 4, torch.full((2, 16), 16, dtype=torch.int32), "naive")
    asked, match = [], manager.prefix_cache.match_prefix
    manager.prefix_cache.match_prefix = lambda ids: asked.append(ids.tolist()) or match(ids)
    manager.match_req(new_req(0, 3, 1))
    assert asked == [[0, 1]], f"a prompt of 0, 1, 2 should be looked up as [0, 1], not {asked}"


def check_a_finished_row_points_at_the_dummy():
    """after its request has left, a row holds only the dummy's slot, and a second end is refused"""
    table = torch.full((2, 16), 16, dtype=torch.int32)
    manager, req = CacheManager(4, 4, table, "naive"), new_req(0, 6, 1)
    manager.allocate_paged([req])
    req.complete_one()
    manager.cache_req(req, finished=True)
    assert table[0].tolist() == [16] * 16, f"the row should point at the dummy, is {table[0]}"
    assert len(manager.free_pages) == 4, "all pages come back"
