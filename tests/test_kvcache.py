"""KV pool, page table and allocator: edge cases, and properties over long random traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import Req, SamplingParams
from minisgl.distributed.info import reset_tp_info, set_tp_info
from minisgl.kernel.store import store_cache
from minisgl.kvcache import (
    SUPPORTED_CACHE_MANAGER,
    create_kvcache_pool,
    create_prefix_cache,
)
from minisgl.kvcache.base import (
    BaseCacheHandle,
    BasePrefixCache,
    InsertResult,
    MatchResult,
    SizeInfo,
)
from minisgl.kvcache.mha_pool import MHAKVCache
from minisgl.kvcache.naive_cache import NaiveCacheHandle, NaivePrefixCache
from minisgl.scheduler.cache import CacheManager, new_pages, own_pages, pages_needed
from minisgl.scheduler.free_list import FreeList
from minisgl.scheduler.table import TableManager

CPU = torch.device("cpu")
PAGE_SIZES = [1, 4, 8, 16]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """A process that is alone, and leaves nothing behind."""
    reset_tp_info()
    set_tp_info(rank=0, size=1)
    yield
    reset_tp_info()


def new_req(row: int, prompt_len: int, max_tokens: int = 8, uid: int = 0) -> Req:
    prompt = torch.arange(prompt_len, dtype=torch.int32)
    return Req(prompt, row, 0, max_tokens, uid, SamplingParams(), NaiveCacheHandle())


def table_for(rows: int, width: int, num_pages: int, page_size: int) -> torch.Tensor:
    return torch.full((rows + 1, width), num_pages * page_size, dtype=torch.int32)


def state_of(manager: CacheManager) -> tuple[object, ...]:
    """Everything that an error must leave alone."""
    pages = manager.free_pages
    return list(pages._free), pages.taken(), manager.page_table.tolist()


# -- the pool -------------------------------------------------------------------------------------


def make_pool(num_pages: int = 5, page_size: int = 4, heads: int = 3, dtype=torch.float32):
    return MHAKVCache(heads, 2, 8, num_pages, page_size, dtype, CPU)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pool_has_one_page_more_than_asked(page_size: int) -> None:
    pool = make_pool(num_pages=5, page_size=page_size)
    assert pool.k_cache(0).shape == pool.v_cache(1).shape == (6, page_size, 3, 8)
    assert (pool.num_layers, pool.dtype, pool.device) == (2, torch.float32, CPU)
    dummy = 5 * page_size  # its first slot can be written, and the slot behind its last cannot
    k = torch.rand(1, 3, 8)
    pool.store_kv(k, k, torch.tensor([dummy], dtype=torch.int32), 0)
    with pytest.raises(IndexError):
        pool.store_kv(k, k, torch.tensor([dummy + page_size], dtype=torch.int32), 0)


def test_pool_bytes_per_token_of_the_default_model() -> None:
    pool = MHAKVCache(3, 30, 64, 1, 1, torch.float32, CPU)
    assert pool._kv_buffer.nbytes == 2 * 46_080  # one page of one slot, and the dummy's
    qwen = MHAKVCache(8, 28, 128, 1, 1, torch.bfloat16, torch.device("meta"))
    assert qwen._kv_buffer.nbytes == 2 * 114_688


@pytest.mark.parametrize(
    ("heads", "ranks", "local"), [(8, 1, 8), (8, 2, 4), (8, 4, 2), (2, 4, 1), (1, 2, 1)]
)
def test_pool_holds_this_ranks_heads(heads: int, ranks: int, local: int) -> None:
    reset_tp_info()
    set_tp_info(rank=ranks - 1, size=ranks)
    assert make_pool(heads=heads).k_cache(0).shape[2] == local


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_store_writes_only_the_named_slots(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    for layer in range(2):
        pool.k_cache(layer).zero_()
        pool.v_cache(layer).zero_()
    locations = torch.tensor([17, 2, 11], dtype=index_dtype)
    k, v = (torch.rand(2, 3, 3, 8) + 1).to(dtype)
    pool.store_kv(k, v, locations, 1)
    for cache, new in ((pool.k_cache(1), k), (pool.v_cache(1), v)):
        slots = cache.flatten(0, 1)
        assert torch.equal(slots[locations.long()], new)
        assert sorted(slots.ne(0).all(-1).all(-1).nonzero().flatten().tolist()) == [2, 11, 17]
    assert not pool.k_cache(0).any() and not pool.v_cache(0).any()


def test_store_takes_flat_and_sliced_inputs() -> None:
    """K and V usually are slices of one projection's output, heads not split off yet."""
    pool = make_pool()
    qkv = torch.rand(3, 5 * 24)
    k, v = qkv[:, 72:96], qkv[:, 96:120]
    locations = torch.tensor([9, 0, 4])
    pool.store_kv(k, v, locations, 0)
    assert torch.equal(pool.k_cache(0).flatten(0, 1)[locations], k.reshape(3, 3, 8))
    assert torch.equal(pool.v_cache(0).flatten(0, 1)[locations], v.reshape(3, 3, 8))


def test_store_of_no_tokens_is_nothing() -> None:
    pool = make_pool()
    pool.k_cache(0).zero_()
    pool.store_kv(torch.empty(0, 3, 8), torch.empty(0, 3, 8), torch.empty(0, dtype=torch.int32), 0)
    assert not pool.k_cache(0).any()


@pytest.mark.parametrize("shape", [(1, 3, 8), (4, 3, 8), (3, 3, 4), (3, 24, 2)])
def test_store_refuses_what_would_broadcast(shape: tuple[int, ...]) -> None:
    cache, good = torch.zeros(6, 3, 8), torch.ones(3, 3, 8)
    for k, v in ((torch.ones(shape), good), (good, torch.ones(shape))):
        with pytest.raises(ValueError, match="3 indices into slots of 24 numbers"):
            store_cache(cache, cache, torch.tensor([0, 1, 2]), k, v)
        assert not cache.any(), "nothing is written when K and V don't fit"


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (3, 0), (-1, 4)])
def test_pool_needs_pages(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="pages with slots"):
        make_pool(num_pages, page_size)


# -- the free list and the rows --------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 20), st.data())
def test_free_list_over_random_traces(size: int, data: st.DataObject) -> None:
    pages, taken = FreeList(size, "page"), set()
    for _ in range(data.draw(st.integers(0, 30))):
        if data.draw(st.booleans()):
            count = data.draw(st.integers(-1, size + 1))
            if 0 <= count <= size - len(taken):
                got = pages.take(count)
                assert len(set(got)) == count and not taken & set(got), "handed out twice"
                assert set(got) <= set(range(size))
                taken |= set(got)
            else:
                with pytest.raises(RuntimeError):
                    pages.take(count)
        else:
            back = data.draw(st.lists(st.integers(-1, size), max_size=4))
            if set(back) <= taken and len(set(back)) == len(back):
                pages.give_back(back)
                taken -= set(back)
            else:
                with pytest.raises(ValueError):
                    pages.give_back(back)
        assert pages.taken() == taken and len(pages) == size - len(taken)
        pages.check_integrity()


def test_what_came_back_last_goes_out_first() -> None:
    pages = FreeList(10, "page")
    assert pages.take(3) == [0, 1, 2]
    pages.give_back([2, 0])
    assert pages.take(3) == [2, 0, 3]


def test_free_list_checks_itself() -> None:
    for harm in (lambda p: p._free.append(p._free[0]), lambda p: p._free.pop()):
        pages = FreeList(4, "page")
        pages.take(1)
        pages.check_integrity()
        harm(pages)
        with pytest.raises(RuntimeError, match="exactly once"):
            pages.check_integrity()


def test_rows() -> None:
    table = torch.full((4, 8), 99, dtype=torch.int32)
    tables = TableManager(3, table)
    assert tables.page_table is table
    assert tables.token_pool.shape == table.shape and tables.token_pool.dtype == torch.int32
    assert not tables.token_pool.any(), "every entry is a valid token"
    rows = {tables.allocate() for _ in range(3)}
    assert rows == {0, 1, 2} and tables.available_size == 0, "the dummy's row is never handed out"
    with pytest.raises(RuntimeError, match="rows needed: 1, free: 0 of 3"):
        tables.allocate()
    tables.free(1)
    for wrong in (1, 3, -1):
        with pytest.raises(ValueError):
            tables.free(wrong)
    assert tables.available_size == 1 and tables.allocate() == 1


@pytest.mark.parametrize("shape", [(3, 8), (24,), (2, 4, 8)])
def test_table_needs_a_row_for_the_dummy(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="4 rows"):
        TableManager(3, torch.zeros(shape, dtype=torch.int32))


# -- pages of requests ----------------------------------------------------------------------------


def test_pages_2_and_5_at_page_size_16() -> None:
    table = table_for(1, 32, 6, 16)
    manager = CacheManager(6, 16, table, "naive")
    manager.free_pages.take(6)
    manager.free_pages.give_back([2, 5])
    req = new_req(0, 20)
    manager.allocate_paged([req])
    row = table[0]
    assert row.tolist() == [*range(32, 48), *range(80, 96)]
    assert (row[::16] // 16).tolist() == [2, 5]
    assert row[14:20].tolist() == [46, 47, 80, 81, 82, 83]


@pytest.mark.parametrize(
    ("page_size", "prompt_len"),
    [(size, size + off) for size in PAGE_SIZES for off in (-1, 0, 1) if size + off],
)
def test_growth_around_a_page_border(page_size: int, prompt_len: int) -> None:
    """(length, pages, slot) in the prefill and three decode passes, with pages from the back."""
    table = table_for(1, 64, 9, page_size)
    manager = CacheManager(9, page_size, table, "naive")
    manager.free_pages.give_back(reversed(manager.free_pages.take(9)))
    req = new_req(0, prompt_len, 4)
    for step in range(4):
        assert req.device_len == prompt_len + step, "the token sampled last counts"
        manager.allocate_paged([req])
        held = len(manager.free_pages.taken())
        assert held == -(-(prompt_len + step) // page_size)
        position = req.device_len - 1
        page = 8 - position // page_size
        assert table[0, position] == page * page_size + position % page_size
        req.complete_one()
        assert own_pages(req, table, page_size) == [8 - i for i in range(held)]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_predicted_pages_are_the_pages_taken(page_size: int) -> None:
    lengths = [7, 8, 9, 15, 16]
    manager = CacheManager(200, page_size, table_for(5, 64, 200, page_size), "naive")
    reqs = [new_req(row, length, 20, uid=row) for row, length in enumerate(lengths)]
    for _ in range(20):
        free, predicted = len(manager.free_pages), pages_needed(reqs, page_size)
        assert predicted == sum(last - first for _, first, last in new_pages(reqs, page_size))
        manager.allocate_paged(reqs)
        assert free - len(manager.free_pages) == predicted
        assert manager.available_size == len(manager.free_pages) * page_size
        for req in reqs:
            req.complete_one()
        manager.check_integrity(reqs)


def test_running_out_names_pages_and_changes_nothing() -> None:
    manager = CacheManager(3, 8, table_for(5, 32, 3, 8), "naive")
    first = new_req(0, 9)
    manager.allocate_paged([first])
    before = state_of(manager)
    with pytest.raises(RuntimeError, match="pages needed: 3, free: 1 of 3"):
        manager.allocate_paged([new_req(1, 7), new_req(2, 16)])
    with pytest.raises(ValueError, match="33"):
        manager.allocate_paged([new_req(1, 7), new_req(2, 33)])
    assert state_of(manager) == before
    manager.allocate_paged([new_req(1, 8)])


def test_a_row_may_end_inside_its_last_page() -> None:
    table = table_for(1, 10, 4, 4)
    manager = CacheManager(4, 4, table, "naive")
    req = new_req(0, 10, 0)
    manager.allocate_paged([req])
    assert table[0].tolist() == list(range(10)) and len(manager.free_pages) == 1
    assert (table[-1] == 16).all(), "the dummy's row is untouched"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_finishing_gives_back_once(page_size: int) -> None:
    table = table_for(2, 64, 80, page_size)
    manager = CacheManager(80, page_size, table, "naive")
    a, b = new_req(0, 17, uid=0), new_req(1, 9, uid=1)
    manager.allocate_paged([a, b])
    a.complete_one(), b.complete_one()
    manager.check_integrity([a, b])
    manager.cache_req(a, finished=False)
    manager.check_integrity([a, b])
    manager.cache_req(a, finished=True)
    assert (table[0] == 80 * page_size).all(), "a finished row points at the dummy's page"
    before = state_of(manager)
    with pytest.raises(ValueError, match="not handed out"):
        manager.cache_req(a, finished=True)
    assert state_of(manager) == before
    manager.check_integrity([b])
    manager.cache_req(b, finished=True)
    manager.check_integrity()
    assert manager.available_size == 80 * page_size


def test_check_integrity_finds_what_is_wrong() -> None:
    table = table_for(3, 16, 8, 4)
    manager = CacheManager(8, 4, table, "naive")
    a, b = new_req(0, 6, uid=0), new_req(1, 6, uid=1)
    manager.allocate_paged([a, b])
    a.complete_one(), b.complete_one()
    manager.check_integrity([a, b])
    with pytest.raises(RuntimeError, match="2 unaccounted for"):
        manager.check_integrity([a])
    with pytest.raises(RuntimeError, match="4 unaccounted for"):
        manager.check_integrity()
    table[1, :4] = table[0, :4]
    with pytest.raises(RuntimeError, match=r"pages \[0\] have two owners"):
        manager.check_integrity([a, b])
    table[1, :4] = torch.arange(24, 28)
    with pytest.raises(RuntimeError, match=r"pages \[6\] have an owner"):
        manager.check_integrity([a, b])


def test_allocating_twice_for_one_pass_is_found() -> None:
    manager = CacheManager(8, 4, table_for(1, 16, 8, 4), "naive")
    req = new_req(0, 6)
    manager.allocate_paged([req])
    manager.allocate_paged([req])
    req.complete_one()
    with pytest.raises(RuntimeError, match="2 unaccounted for"):
        manager.check_integrity([req])


def test_lazy_free_region() -> None:
    manager = CacheManager(8, 4, table_for(3, 16, 8, 4), "naive")
    reqs = [new_req(row, 5, uid=row) for row in range(3)]
    manager.allocate_paged(reqs)
    for req in reqs:
        req.complete_one()
    with pytest.raises(KeyError), manager.lazy_free_region():
        manager.cache_req(reqs[0], finished=True)
        assert len(manager.free_pages) == 2, "not before the end"
        raise KeyError
    assert len(manager.free_pages) == 4, "also when the block raises"
    with manager.lazy_free_region():
        manager.cache_req(reqs[1], finished=True)
        manager.cache_req(reqs[2], finished=True)
    manager.check_integrity()
    with manager.lazy_free_region():
        pass
    before = state_of(manager)
    with pytest.raises(ValueError), manager.lazy_free_region():
        manager._free(torch.tensor([0], dtype=torch.int32))
    assert state_of(manager) == before


# -- the prefix cache -----------------------------------------------------------------------------


def test_naive_cache() -> None:
    cache = create_prefix_cache(CPU, "naive")
    assert isinstance(cache, NaivePrefixCache)
    ids = torch.arange(5, dtype=torch.int32)
    handle = cache.match_prefix(ids).cuda_handle
    assert handle.cached_len == 0 and handle.get_matched_indices().shape == (0,)
    assert handle.get_matched_indices().dtype == torch.int32
    assert cache.insert_prefix(ids, ids).cached_len == 0
    assert cache.size_info == SizeInfo(0, 0) and cache.size_info.total_size == 0
    assert len(cache.evict(0)) == 0
    with pytest.raises(ValueError, match="holds none"):
        cache.evict(1)
    cache.lock_handle(handle)
    cache.lock_handle(handle, unlock=True)
    cache.reset()
    cache.check_integrity()


def test_unknown_prefix_cache_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"'nothing'.*naive"):
        create_prefix_cache(CPU, "nothing")
    with pytest.raises(ValueError, match="naive"):
        CacheManager(4, 1, torch.zeros(2, 4, dtype=torch.int32), "nothing")


def test_pool_from_a_config() -> None:
    @dataclass
    class Config:
        num_kv_heads: int = 2
        num_layers: int = 3
        head_dim: int = 5

    pool = create_kvcache_pool(Config(), 7, 4, torch.bfloat16, CPU)  # type: ignore[arg-type]
    assert pool.k_cache(2).shape == (8, 4, 2, 5)
    assert (pool.num_layers, pool.dtype) == (3, torch.bfloat16)


def test_empty_prompt_is_refused() -> None:
    manager = CacheManager(4, 1, torch.zeros(2, 4, dtype=torch.int32), "naive")
    with pytest.raises(ValueError, match="empty prompt"):
        manager.match_req(Prompt([]))


# A prefix cache that does remember, page by page, as simply as can be. The radix cache of a later
# part must fit the manager as it is now: this stands in for it.


@dataclass
class Prompt:
    tokens: list[int]
    input_ids: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.input_ids = torch.tensor(self.tokens, dtype=torch.int32)


@dataclass(frozen=True)
class PagesHandle(BaseCacheHandle):
    keys: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]

    def get_matched_indices(self) -> torch.Tensor:
        return torch.tensor(self.slots, dtype=torch.int32)


class RememberingCache(BasePrefixCache):
    """Whole pages by the tokens up to their end; evicts the longest unlocked ones first."""

    page_size = 1

    def __init__(self, device: torch.device) -> None:
        self.pages: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.locks: dict[tuple[int, ...], int] = {}

    def _keys(self, input_ids: torch.Tensor) -> list[tuple[int, ...]]:
        ids, size = tuple(input_ids.tolist()), self.page_size
        return [ids[:end] for end in range(size, len(ids) + 1, size)]

    def _handle(self, keys: list[tuple[int, ...]]) -> PagesHandle:
        slots = tuple(slot for key in keys for slot in self.pages[key])
        return PagesHandle(len(slots), tuple(keys), slots)

    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        return MatchResult(self._handle([k for k in self._keys(input_ids) if k in self.pages]))

    def lock_handle(self, handle: BaseCacheHandle, unlock: bool = False) -> None:
        assert isinstance(handle, PagesHandle)
        for key in handle.keys:
            self.locks[key] += -1 if unlock else 1
            assert self.locks[key] >= 0

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        keys, size = self._keys(input_ids), self.page_size
        known = sum(key in self.pages for key in keys) * size
        for i, key in enumerate(keys):
            if key not in self.pages:
                self.pages[key] = tuple(indices[i * size : (i + 1) * size].tolist())
                self.locks[key] = 0
        return InsertResult(known, self._handle(keys))

    def evict(self, size: int) -> torch.Tensor:
        loose = sorted((k for k in self.pages if not self.locks[k]), key=len, reverse=True)
        count = -(-size // self.page_size)
        assert count <= len(loose), "the manager asks for no more than there is"
        slots = [slot for key in loose[:count] for slot in self.pages.pop(key)]
        return torch.tensor(slots, dtype=torch.int32)

    def reset(self) -> None:
        self.pages.clear()

    @property
    def size_info(self) -> SizeInfo:
        locked = sum(bool(self.locks[key]) for key in self.pages)
        return SizeInfo((len(self.pages) - locked) * self.page_size, locked * self.page_size)

    def check_integrity(self) -> None:
        pages = [slots[0] // self.page_size for slots in self.pages.values()]
        if len(set(pages)) != len(pages):
            raise RuntimeError("a page stands for two prefixes")


if "remembering" not in SUPPORTED_CACHE_MANAGER.supported_names():
    SUPPORTED_CACHE_MANAGER.register("remembering")(RememberingCache)


# -- long random traces ---------------------------------------------------------------------------


class World:
    """Real managers and a real pool. A slot's K is a fingerprint of all tokens up to its own."""

    def __init__(self, page_size: int, num_pages: int, rows: int, cache: str, width: int) -> None:
        self.page_size, self.width = page_size, width
        self.table = table_for(rows, width, num_pages, page_size)
        self.rows = TableManager(rows, self.table)
        self.manager = CacheManager(num_pages, page_size, self.table, cache)
        if cache == "remembering":
            self.manager.prefix_cache.page_size = page_size  # type: ignore[attr-defined]
        self.pool = MHAKVCache(1, 1, 1, num_pages, page_size, torch.float64, CPU)
        self.pool.k_cache(0).fill_(float("nan"))
        self.live: list[Req] = []
        self.uid = 0

    @staticmethod
    def fingerprints(ids: torch.Tensor) -> torch.Tensor:
        value, values = 1, []
        for token in ids.tolist():
            value = (value * 31 + token + 1) % 1_000_003
            values.append(value)
        return torch.tensor(values, dtype=torch.float64)[:, None, None]

    def admit(self, tokens: list[int], max_tokens: int) -> None:
        if not self.rows.available_size:
            with pytest.raises(RuntimeError):
                self.rows.allocate()
            return
        prompt = Prompt(tokens)
        handle = self.manager.match_req(prompt).cuda_handle
        self.manager.lock(handle)
        row = self.rows.allocate()
        assert all(req.table_idx != row for req in self.live), "a row in use was handed out"
        self.table[row, : handle.cached_len] = handle.get_matched_indices()
        hit, params = handle.cached_len, SamplingParams()
        assert hit < len(tokens)
        self.live.append(Req(prompt.input_ids, row, hit, max_tokens, self.uid, params, handle))
        self.uid += 1

    def run(self, reqs: list[Req], keep: bool, token: Callable[[], int]) -> None:
        """A pass of `reqs`, or the proof that it is refused as a whole."""
        if not reqs:
            return
        needed = pages_needed(reqs, self.page_size)
        info = self.manager.prefix_cache.size_info
        room = len(self.manager.free_pages) + info.evictable_size // self.page_size
        assert self.manager.available_size == room * self.page_size
        if needed > room:
            before = state_of(self.manager)
            with pytest.raises(RuntimeError, match=f"pages needed: {needed}"):
                self.manager.allocate_paged(reqs)
            assert state_of(self.manager) == before
            assert self.manager.prefix_cache.size_info == info
            return
        self.manager.allocate_paged(reqs)
        for req in reqs:
            new = slice(req.cached_len, req.device_len)
            k = self.fingerprints(req.input_ids)[new]
            self.pool.store_kv(k, k, self.table[req.table_idx, new], 0)
        for req in reqs:
            req.complete_one()
            req.append_host(torch.tensor([token()]))
            if keep:
                self.manager.cache_req(req, finished=False)

    def finish(self, req: Req) -> None:
        self.live.remove(req)
        if req.cached_len:
            self.manager.cache_req(req, finished=True)
        self.rows.free(req.table_idx)

    def check(self) -> None:
        self.manager.check_integrity(self.live)
        slots = self.pool.k_cache(0).flatten(0, 1)
        for req in self.live:
            row = self.table[req.table_idx, : req.cached_len]
            want = self.fingerprints(req.input_ids[: req.cached_len])
            assert torch.equal(slots[row], want), "a request reads what is not its own"
            assert len(set(row.tolist())) == req.cached_len
        assert (self.table[-1] == len(slots) - self.page_size).all()


@pytest.mark.parametrize("cache", ["naive", "remembering"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_long_random_traces(cache: str, page_size: int, data: st.DataObject) -> None:
    """Nothing owned twice, nothing lost, each request reads its own, errors change nothing."""
    reset_tp_info()
    set_tp_info(rank=0, size=1)
    num_pages = data.draw(st.integers(2, 40 // page_size + 6), "pages")
    world = World(page_size, num_pages, rows=4, cache=cache, width=64)
    tokens = st.integers(0, 1)  # few tokens, so that prompts begin alike
    for _ in range(data.draw(st.integers(1, 40), "steps")):
        what = data.draw(st.sampled_from(["admit", "run", "run", "run", "finish"]))
        ready = [req for req in world.live if req.can_decode]
        if what == "admit":
            prompt = data.draw(st.lists(tokens, min_size=1, max_size=40))
            world.admit(prompt, data.draw(st.integers(1, 20)))
        elif what == "run" and ready:
            chosen = data.draw(st.lists(st.sampled_from(ready), unique_by=id, min_size=1))
            world.run(chosen, data.draw(st.booleans()), lambda: data.draw(tokens))
        elif what == "finish" and world.live:
            world.finish(data.draw(st.sampled_from(world.live)))
        world.check()
    for req in list(world.live):
        world.finish(req)
    world.check()
    assert world.manager.available_size == num_pages * page_size, "all of it is available again"


def test_the_same_prompt_twice_in_one_batch() -> None:
    """Both compute it, one copy is kept, and the other's row moves to the copy that is kept."""
    world = World(4, 12, rows=3, cache="remembering", width=32)
    prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1]
    world.admit(prompt, 4)
    world.admit(prompt, 4)
    world.run(list(world.live), keep=True, token=lambda: 1)
    a, b = world.live
    assert world.table[a.table_idx, :8].equal(world.table[b.table_idx, :8])
    assert len(world.manager.free_pages) == 12 - 4, "2 shared pages, and a tail for each"
    world.admit(prompt, 4)  # takes pages that were freed
    assert world.live[2].cached_len == 8
    world.run(list(world.live), keep=False, token=lambda: 0)
    world.check()


def test_a_locked_prefix_is_not_evicted() -> None:
    world = World(4, 4, rows=3, cache="remembering", width=32)
    world.admit([1] * 8, 1)
    world.run(list(world.live), keep=True, token=lambda: 0)
    world.finish(world.live[0])
    assert world.manager.available_size == 16
    world.admit([1] * 9, 1)  # hits both pages and locks them
    assert world.live[0].cached_len == 8 and world.manager.available_size == 8
    world.admit([0] * 12, 1)
    world.run([world.live[1]], keep=False, token=lambda: 0)  # needs 3 pages: refused as a whole
    assert world.live[1].cached_len == 0
    world.run([world.live[0]], keep=False, token=lambda: 0)
    world.check()
