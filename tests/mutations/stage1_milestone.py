"""Other loops of the milestone: the first ones are wrong, the last ones right but different."""

from course.judging.mutations import Change

CHANGES = [
    Change(
        "the whole prompt is looked up",
        "",
        "admit",
        "tokens[:-1]",
        "tokens",
        "check_admit",
        "[[5, 6], [8]]; [[5, 6, 7], [8, 9]] was",
    ),
    Change(
        "every prompt is written into row 0",
        "",
        "admit",
        "table.token_pool[row, : len(ids)]",
        "table.token_pool[0, : len(ids)]",
        "check_admit",
        "should lie in the pool",
    ),
    Change(
        "64-bit ids",
        "",
        "admit",
        "dtype=torch.int32",
        "dtype=torch.int64",
        "check_admit",
        "int32",
    ),
    Change(
        "n is the length of the whole sequence",
        "",
        "admit",
        "handle.cached_len, n, uid",
        "handle.cached_len, n - len(ids) + 1, uid",
        "check_admit",
        "lengths (3, 3)",
    ),
    Change(
        "the sampled tokens are not put into the token pool",
        "",
        "turn",
        "table.token_pool[[req.table_idx for req in reqs], ends] = out.next_tokens_gpu  # (h)",
        "pass",
        "check_serve",
        "see (h) and (i)",
    ),
    Change(
        "the sampled tokens go one place too far",
        "",
        "turn",
        "req.device_len - 1",
        "req.device_len",
        "check_serve",
        "the token pool holds",
    ),
    Change(
        "the tokens come to the wrong requests",
        "",
        "turn",
        "zip(reqs, out.next_tokens_cpu",
        "zip(reqs[::-1], out.next_tokens_cpu",
        "check_serve",
        "the token pool holds",
    ),
    Change(
        "nobody appends the tokens",
        "",
        "turn",
        "        req.append_host(token)  # (i)",
        "        pass",
        "check_serve",
        "the token pool holds",
    ),
    Change(
        "pages are given out after their slots were read",
        "",
        "turn",
        """    pages.allocate_paged(batch.reqs)  # (d)
    rows, positions = coordinates(batch.padded_reqs)  # (e)
    batch.positions = positions.to(torch.int32)
    batch.out_loc = engine.page_table[rows, positions]
""",
        """    rows, positions = coordinates(batch.padded_reqs)  # (e)
    batch.positions = positions.to(torch.int32)
    batch.out_loc = engine.page_table[rows, positions]
    pages.allocate_paged(batch.reqs)  # (d)
""",
        "check_serve",
        "",
    ),
    Change(
        "every pass is a prefill",
        "",
        "serve",
        '        phase = "decode"\n',
        "",
        "check_serve",
        "('prefill', 2), ('prefill', 2)",
    ),
    Change(
        "one request after the other",
        "",
        "serve",
        "        turn(engine, table, pages, [req for req in reqs if req.can_decode], phase)  # (c)",
        "        for req in reqs:\n            turn(engine, table, pages, [req], phase)",
        "check_serve",
        "they were [('prefill', 1), ('prefill', 1)",
    ),
    Change(
        "the prompt is returned, too",
        "",
        "serve",
        "req.input_ids[-n:]",
        "req.input_ids",
        "check_serve",
        "the loop says [[5, 6, 7",
    ),
    Change(
        "one token less than asked for",
        "",
        "serve",
        "ids, n, uid) for",
        "ids, n - 1, uid) for",
        "check_serve",
        "the passes should be",
    ),
    Change(
        "nobody gives the pages back",
        "",
        "serve",
        "        pages.cache_req(req, finished=True)  # (j)\n",
        "",
        "check_serve",
        "all 32 pages should be free at the end",
    ),
    Change(
        "watch is called once, at the end",
        "",
        "serve",
        """        watch(reqs, pages)
        phase = "decode"
""",
        """        phase = "decode"
    watch(reqs, pages)
""",
        "check_serve",
        "6 times, not 1",
    ),
    Change(
        "nobody gives the rows back",
        "",
        "serve",
        "        table.free(req.table_idx)\n",
        "",
        "check_serve",
        "2 are not: table.free (j)",
    ),
    Change(
        "nobody gives out pages",
        "",
        "turn",
        "    pages.allocate_paged(batch.reqs)  # (d)\n",
        "",
        "check_serve",
        "allocate_paged (d) comes before it",
    ),
    Change(
        "watch is shown nobody",
        "",
        "serve",
        "watch(reqs, pages)",
        "watch([], pages)",
        "check_serve",
        "all 2 requests, not 0",
    ),
    Change(
        "a decode follows the prefill, whoever is done",
        "",
        "serve",
        "    while any(req.can_decode for req in reqs):\n",
        "    for _ in range(max(n, 2)):\n",
        "check_serve",
        "n = 1",
    ),
    Change(
        "a pass for each token, without asking the requests",
        "",
        "serve",
        """    phase = "prefill"
    while any(req.can_decode for req in reqs):
        turn(engine, table, pages, [req for req in reqs if req.can_decode], phase)  # (c)
        watch(reqs, pages)
        phase = "decode"
""",
        """    for step in range(n):
        turn(engine, table, pages, reqs, "decode" if step else "prefill")
        watch(reqs, pages)
""",
    ),
    Change(
        "the row is written token by token",
        "",
        "admit",
        "    table.token_pool[row, : len(ids)] = tokens\n",
        "    for place, token in enumerate(ids):\n        table.token_pool[row, place] = token\n",
    ),
    Change(
        "the tokens are read from the CPU's copy",
        "",
        "turn",
        "= out.next_tokens_gpu  # (h)\n    out.copy_done_event.synchronize()\n",
        "= out.next_tokens_cpu\n    out.copy_done_event.synchronize()\n",
    ),
]
