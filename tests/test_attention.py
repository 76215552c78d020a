"""Attention over the paged pool against plain attention, request by request, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hand_driven import compiled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl import attention
from minisgl.attention import (
    SUPPORTED_ATTENTION_BACKENDS,
    BaseAttnBackend,
    HybridBackend,
    create_attention_backend,
    native_backend,
    torch_backend,
    validate_attn_backend,
)
from minisgl.attention.torch_backend import TorchBackend, TorchMetadata
from minisgl.attention.torch_plans import (
    GatheredDecodePlan,
    PerRequestPlan,
    SparseDecodePlan,
    as_slice,
    sparse_products_work,
)
from minisgl.attention.utils import causal_mask, cumulative_lengths
from minisgl.core import (
    Batch,
    Context,
    Req,
    SamplingParams,
    reset_global_ctx,
    set_global_ctx,
)
from minisgl.distributed import info as tp
from minisgl.kernel.cpu.attention import LARGEST_PART, PagedDecodePlan
from minisgl.kvcache.mha_pool import MHAKVCache
from minisgl.utils.registry import Registry

NUM_LAYERS = 2
SPARSE = sparse_products_work(torch.float32, "cpu")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """TP size 1 and no global context, before and after each test."""
    tp.reset_tp_info()
    tp.set_tp_info(0, 1)
    reset_global_ctx()
    yield
    reset_global_ctx()
    tp.reset_tp_info()


@dataclass
class Case:
    """What a batch looks like: for each request (tokens cached, tokens new)."""

    lengths: list[tuple[int, int]]
    qo_heads: int = 3
    kv_heads: int = 1
    head_dim: int = 8
    page_size: int = 1
    padding: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    fill: float = float("nan")
    backend: str = "torch"


class World:
    """A pool in which every slot that no request owns holds `fill`, and a batch ready to run."""

    def __init__(self, case: Case, layer_id: int = 1) -> None:
        self.case, self.layer_id = case, layer_id
        generator = torch.Generator().manual_seed(case.seed)
        page_size, lengths = case.page_size, [*case.lengths, *[(0, 1)] * case.padding]
        need = [-(-(cached + new) // page_size) for cached, new in lengths]
        num_pages = sum(need) + 5
        pool = MHAKVCache(
            case.kv_heads,
            NUM_LAYERS,
            case.head_dim,
            num_pages,
            page_size,
            case.dtype,
            torch.device("cpu"),
        )
        for layer in range(NUM_LAYERS):
            pool.k_cache(layer).fill_(case.fill)
            pool.v_cache(layer).fill_(case.fill)
        self.k_slots, self.v_slots = pool.k_cache(layer_id), pool.v_cache(layer_id)
        self.k_slots, self.v_slots = self.k_slots.flatten(0, 1), self.v_slots.flatten(0, 1)

        ctx = Context(page_size=page_size)
        ctx.kv_cache = pool
        width = max(cached + new for cached, new in lengths) + page_size
        # Rows that nobody owns, and tails beyond a request's end, point at the dummy's page.
        ctx.page_table = torch.full((len(lengths) + 2, width), num_pages * page_size).int()
        set_global_ctx(ctx)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        pages = torch.randperm(num_pages, generator=generator).tolist()
        rows = torch.randperm(len(lengths), generator=generator).tolist()
        reqs, out_loc, new_q, new_k, new_v = [], [], [], [], []
        self.history: list[tuple[torch.Tensor, ...]] = []
        for row, (cached, new), count in zip(rows, lengths, need, strict=True):
            mine = torch.tensor([pages.pop() for _ in range(count)]) * page_size
            slots = (mine[:, None] + torch.arange(page_size)).flatten()[: cached + new]
            ctx.page_table[row, : cached + new] = slots.int()
            q = rand(new, case.qo_heads, case.head_dim)
            k, v = (rand(cached + new, case.kv_heads, case.head_dim) for _ in "kv")
            self.k_slots[slots[:cached]], self.v_slots[slots[:cached]] = k[:cached], v[:cached]
            reqs.append(make_req(row, cached, new))
            out_loc.append(slots[cached:])
            self.history.append((q, k, v))
            new_q.append(q)
            new_k.append(k[cached:])
            new_v.append(v[cached:])
        decode = all(new == 1 for _, new in lengths)
        self.batch = Batch(reqs[: len(case.lengths)], "decode" if decode else "prefill")
        self.batch.padded_reqs = reqs
        self.batch.out_loc = torch.cat(out_loc).int()
        self.qkv = torch.cat(new_q), torch.cat(new_k), torch.cat(new_v)
        self.backend = create_attention_backend(case.backend, model_config(case))
        self.backend.prepare_metadata(self.batch)

    @property
    def metadata(self) -> TorchMetadata:
        metadata = self.batch.attn_metadata
        assert isinstance(metadata, TorchMetadata)
        return metadata

    def run(self) -> torch.Tensor:
        return self.backend.forward(*self.qkv, self.layer_id, self.batch)

    def expected(self) -> torch.Tensor:
        return torch.cat([plain_attention(*qkv) for qkv in self.history])


def make_req(row: int, cached: int, new: int) -> Req:
    ids = torch.zeros(cached + new, dtype=torch.int32)
    return Req(ids, row, cached, 4, row, SamplingParams(), SimpleNamespace(cached_len=cached))  # type: ignore[arg-type]


def model_config(case: Case) -> SimpleNamespace:
    return SimpleNamespace(
        num_qo_heads=case.qo_heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim
    )


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, for one request: query i is token `len(k) - len(q) + i` and sees up to it."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    query_position = torch.arange(len(k) - len(q), len(k))
    future = torch.arange(len(k)) > query_position[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def run(case: Case) -> tuple[torch.Tensor, World]:
    reset_global_ctx()
    world = World(case)
    return world.run(), world


def check(case: Case) -> World:
    out, world = run(case)
    assert out.shape == world.qkv[0].shape and out.dtype == case.dtype
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), world.expected(), rtol=0, atol=1e-5)
    return world


HEADS = [(1, 1), (3, 3), (3, 1), (9, 3), (4, 1), (4, 2)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["no prefix", "prefix", "decode", "mixed"]))
    cached, new = st.integers(0, 14), st.integers(1, 9)
    one = {
        "no prefix": st.tuples(st.just(0), new),
        "prefix": st.tuples(st.integers(1, 14), new),
        "decode": st.tuples(cached, st.just(1)),
        "mixed": st.one_of(st.tuples(cached, new), st.tuples(cached, st.just(1))),
    }[kind]
    qo_heads, kv_heads = draw(st.sampled_from(HEADS))
    return Case(
        draw(st.lists(one, min_size=1, max_size=4)),
        qo_heads,
        kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 16, 24, 48])),
        page_size=draw(st.sampled_from([1, 4, 16])),
        padding=draw(st.integers(0, 2)) if kind == "decode" else 0,
        seed=draw(st.integers(0, 2**16)),
        backend=draw(st.sampled_from(["torch", "auto"])),
    )


@settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases(), sparse=st.booleans())
def test_paged_packed_attention_is_plain_attention(case: Case, sparse: bool) -> None:
    with patch.object(torch_backend, "sparse_products_work", lambda *_: sparse and SPARSE):
        check(case)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_compiled_plan(dtype: torch.dtype, threads: int) -> None:
    """Lengths on both sides of a part's, several parts, grouped heads, in any number of threads."""
    part = LARGEST_PART
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for sizes in ((1, 2, 9, part - 1, part, part + 1, 2 * part + 7), (100,), (65, 3), (1,)):
            reset_global_ctx()
            lengths = [(n - 1, 1) for n in sizes]
            out, world = run(Case(lengths, 8, 2, 48, page_size=4, dtype=dtype, backend="auto"))
            plan = world.metadata.plan
            assert isinstance(plan, PagedDecodePlan)
            if sizes == (100,):
                assert len(plan.parts) == threads, "one request, shared by all threads"
            assert out.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(out.double(), world.expected(), rtol=0, atol=tolerance)
            assert torch.equal(out, world.run()), "the same bits, whoever computes which part"
    finally:
        torch.set_num_threads(before)


@compiled
def test_the_compiled_plan_with_large_scores() -> None:
    """Scores of hundreds: the largest takes all, in whichever part it is, and nothing overflows."""
    reset_global_ctx()
    world = World(Case([(600, 1), (3, 1)], 2, 1, 16, backend="auto"))
    q, k, v = world.qkv
    world.qkv = q * 500, k, v
    world.history = [(x * 500, y, z) for x, y, z in world.history]
    torch.testing.assert_close(world.run().double(), world.expected(), rtol=0, atol=1e-4)


@compiled
@pytest.mark.parametrize("token", [0, 5, 8])
def test_the_compiled_plan_hides_no_nan(token: int) -> None:
    """A NaN among a request's own keys is that request's result, and nobody else's."""
    world = World(Case([(8, 1), (3, 1)], 2, 1, 16, backend="auto"))
    world.run()
    world.k_slots[world.metadata.page_table[0, token]] = float("nan")
    plan = world.metadata.plan
    out = plan.attend(world.qkv[0], world.k_slots, world.v_slots)
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("missing", ["compiler", "vectors", "dtype"])
def test_without_compiled_attention(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """No compiler, a head that is no whole number of vectors, another dtype: "auto" is "torch"."""
    case = Case([(5, 1), (9, 1)], head_dim=24 if missing == "vectors" else 16, backend="auto")
    if missing == "compiler":
        monkeypatch.setattr(native_backend, "attend_functions", dict)
    if missing == "dtype":
        case.dtype = torch.float64
    world = check(case)
    assert type(world.backend) is TorchBackend
    with pytest.raises(ValueError, match=r"'native' cannot run .*'auto' takes one"):
        create_attention_backend("torch,native", model_config(case))  # type: ignore[arg-type]


@compiled
def test_the_native_backend_prefills_as_torch_does() -> None:
    world = check(Case([(0, 4)], head_dim=16, backend="native"))
    assert type(world.backend) is native_backend.NativeBackend
    assert isinstance(world.metadata.plan, PerRequestPlan)


def test_the_worked_example() -> None:
    world = check(Case([(0, 6), (4, 3), (8, 1)], page_size=4))
    metadata = world.metadata
    assert metadata.cu_seqlens_q.tolist() == [0, 6, 9, 10]
    assert metadata.cu_seqlens_k.tolist() == [0, 6, 13, 22]
    assert metadata.cache_seqlens.tolist() == [6, 7, 9]
    assert (metadata.max_seqlen_q, metadata.max_seqlen_k) == (6, 9)
    assert metadata.get_last_indices(3).tolist() == [5, 8, 9]
    assert metadata.get_last_indices(2).tolist() == [5, 8]
    for name in ("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "page_table"):
        assert getattr(metadata, name).dtype == torch.int32, name


def test_cumulative_lengths_without_a_hit_and_in_pure_decode() -> None:
    no_hit = World(Case([(0, 5), (0, 2)])).metadata
    assert no_hit.cu_seqlens_q.tolist() == no_hit.cu_seqlens_k.tolist() == [0, 5, 7]
    reset_global_ctx()
    decode = World(Case([(9, 1), (4, 1), (0, 1)])).metadata
    assert decode.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert decode.cu_seqlens_k.tolist() == [0, 10, 15, 16]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("lengths", [[(9, 1), (30, 1), (0, 1)], [(0, 6), (4, 3), (8, 1)]])
def test_foreign_slots_change_nothing(lengths: list[tuple[int, int]], sparse: bool) -> None:
    with patch.object(torch_backend, "sparse_products_work", lambda *_: sparse and SPARSE):
        outputs = [run(Case(lengths, fill=fill))[0] for fill in (0.0, float("nan"), float("inf"))]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("page_size", [1, 4])
def test_hits_and_misses_in_one_batch_equal_each_request_alone(page_size: int) -> None:
    lengths = [(8, 4), (0, 5), (4, 5)]
    out, world = run(Case(lengths, 4, 1, page_size=page_size))
    last = out[world.metadata.get_last_indices(3)]
    for i, (q, k, v) in enumerate(world.history):
        # From scratch: the cached tokens need queries too; any will do, nobody looks at them.
        everything = torch.cat([torch.zeros(len(k) - len(q), *q.shape[1:]), q])
        reset_global_ctx()
        alone = World(Case([(0, len(k))], 4, 1, page_size=page_size, seed=i))
        alone.qkv = everything, k, v
        torch.testing.assert_close(alone.run()[-1], last[i], rtol=0, atol=1e-5)


def test_causal_mask_is_aligned_bottom_right() -> None:
    assert causal_mask(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(3, 7).sum(1).tolist() == [5, 6, 7]
    assert causal_mask(1, 4).all()
    assert torch.equal(causal_mask(4, 4), torch.ones(4, 4).tril().bool())
    for q_len, kv_len in [(3, 2), (1, 0), (0, 3)]:
        with pytest.raises(ValueError, match="queries cannot be the last of"):
            causal_mask(q_len, kv_len)


def test_more_queries_than_keys_is_an_error_and_not_nan() -> None:
    table = torch.arange(4, dtype=torch.int32)[None]
    with pytest.raises(ValueError, match="4 queries cannot be the last of 3 tokens"):
        PerRequestPlan([4], [3], table, torch.float32)


def test_lengths_beyond_the_table_are_refused() -> None:
    world = World(Case([(3, 1)]))
    world.batch.padded_reqs = [make_req(0, 50, 1)]
    with pytest.raises(ValueError, match="51 tokens in a page table of 5"):
        world.backend.prepare_metadata(world.batch)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match="5 query heads"):
        World(Case([(0, 3)], qo_heads=5, kv_heads=2))


@pytest.mark.parametrize("lengths", [[(0, 6), (4, 3)], [(9, 1)], [(9, 1), (3, 1), (0, 1)]])
def test_bfloat16_stays_bfloat16(lengths: list[tuple[int, int]]) -> None:
    out, world = run(Case(lengths, 4, 1, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), world.expected(), rtol=0, atol=3e-2)


def test_a_non_contiguous_q_is_fine() -> None:
    """The layer hands over views into the merged q/k/v product."""
    for lengths in ([(5, 1), (2, 1)], [(0, 3), (2, 2)]):
        reset_global_ctx()
        world = World(Case(lengths, 4, 2))
        q, k, v = world.qkv
        merged = torch.cat([q, k, v], dim=1)
        world.qkv = tuple(merged.split([4, 2, 2], dim=1))  # type: ignore[assignment]
        torch.testing.assert_close(world.run().double(), world.expected(), rtol=0, atol=1e-5)


class Ops(TorchDispatchMode):
    """Records the name, and the largest result, of every PyTorch operation inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if all(returned.alias_info is None for returned in func._schema.returns):  # no view
            results = result if isinstance(result, (tuple, list)) else [result]
            for x in results:
                if isinstance(x, torch.Tensor):
                    stored = x.values() if x.layout is torch.sparse_csr else x
                    self.largest = max(self.largest, stored.numel())
        return result


def record(world: World) -> Ops:
    world.run()
    with Ops() as ops:
        world.run()
    return ops


needs_sparse = pytest.mark.skipif(not SPARSE, reason="this PyTorch has no sparse products")


@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=needs_sparse)])
def test_decode_does_the_same_operations_whatever_the_batch_size(sparse: bool) -> None:
    counts = {}
    with patch.object(torch_backend, "sparse_products_work", lambda *_: sparse):
        for bs in (2, 4, 16):
            reset_global_ctx()
            world = World(Case([(3 + i, 1) for i in range(bs)]))
            expected = SparseDecodePlan if sparse else GatheredDecodePlan
            assert isinstance(world.metadata.plan, expected)
            counts[bs] = record(world).names
    assert counts[2] == counts[4] == counts[16]
    sdpa = sum("scaled_dot_product" in name for name in counts[16])
    assert sdpa == (0 if sparse else 1)


def test_prefill_calls_sdpa_once_per_request() -> None:
    world = World(Case([(0, 4), (3, 2), (5, 1)]))
    names = record(world).names
    assert sum("scaled_dot_product" in name for name in names) == 3


def test_a_lone_request_in_consecutive_slots_is_read_in_place() -> None:
    assert as_slice(torch.tensor([4, 5, 6])) == slice(4, 7)
    assert as_slice(torch.tensor([4])) == slice(4, 5)
    for other in ([4, 6, 5], [4, 5, 7], [6, 5, 4], [4, 6]):
        assert isinstance(as_slice(torch.tensor(other)), torch.Tensor)
    world = World(Case([(200, 1)], page_size=256))
    assert isinstance(world.metadata.plan, PerRequestPlan)
    assert isinstance(world.metadata.plan.segments[0].slots, slice)
    assert record(world).largest < 200 * world.case.head_dim
    check(Case([(200, 1)], page_size=256))


@needs_sparse
def test_sparse_decode_makes_nothing_as_large_as_what_it_reads() -> None:
    case = Case([(200 + i, 1) for i in range(8)], qo_heads=2, kv_heads=2, head_dim=64)
    ops = record(World(case))
    read = sum(cached + new for cached, new in case.lengths) * case.kv_heads * case.head_dim
    assert ops.largest < read / 16


def test_one_metadata_serves_every_layer_and_layers_do_not_mix() -> None:
    case = Case([(5, 1), (9, 1)])
    world = World(case, layer_id=0)
    first = world.run()
    assert torch.isnan(world.backend.kv_cache.k_cache(1)).all()  # type: ignore[attr-defined]
    assert torch.equal(world.run(), first)


def test_k_and_v_are_stored_before_they_are_read() -> None:
    world = World(Case([(0, 1), (0, 1)]))
    assert torch.isnan(world.k_slots).all()
    torch.testing.assert_close(world.run(), world.qkv[2].expand(-1, 3, -1), rtol=0, atol=1e-6)


def test_cumulative_lengths() -> None:
    assert cumulative_lengths([6, 3, 1]).tolist() == [0, 6, 9, 10]
    assert cumulative_lengths([]).tolist() == [0]


def test_names() -> None:
    assert SUPPORTED_ATTENTION_BACKENDS.supported_names() == ["torch", "native"]
    assert validate_attn_backend("auto") == "auto"
    assert validate_attn_backend("torch") == "torch"
    assert validate_attn_backend(" torch , torch ") == "torch,torch"
    for wrong in ("auto", "flash", "torch,flash", "torch,torch,torch", "", "torch,"):
        with pytest.raises(ValueError, match=r"expected one of \['torch', 'native'\]"):
            validate_attn_backend(wrong, allow_auto=False)
    with pytest.raises(
        ValueError, match=r"official engine has fa \(FlashAttention\), fi \(FlashInfer\)"
    ):
        validate_attn_backend("fa,fi")


class Recorder(BaseAttnBackend):
    """Writes down who was called with what."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log

    def _note(self, what: str) -> None:
        self.log.append((self.name, what))

    def forward(self, q, k, v, layer_id, batch):  # type: ignore[no-untyped-def]
        self._note("forward")
        return q

    def prepare_metadata(self, batch: Batch) -> None:
        self._note("prepare")

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        self._note("init")

    def prepare_for_capture(self, batch: Batch) -> None:
        self._note("capture")

    def prepare_for_replay(self, batch: Batch) -> None:
        self._note("replay")


def test_a_hybrid_picks_by_phase_and_graphs_belong_to_decode() -> None:
    log: list[tuple[str, str]] = []
    hybrid = HybridBackend(Recorder("p", log), Recorder("d", log))
    req = make_req(0, 0, 1)
    x = torch.zeros(1)
    for phase in ("prefill", "decode"):
        batch = Batch([req], phase)  # type: ignore[arg-type]
        hybrid.prepare_metadata(batch)
        hybrid.forward(x, x, x, 0, batch)
    hybrid.init_capture_graph(8, [1])
    hybrid.prepare_for_capture(batch)
    hybrid.prepare_for_replay(batch)
    assert log == [
        ("p", "prepare"),
        ("p", "forward"),
        ("d", "prepare"),
        ("d", "forward"),
        ("d", "init"),
        ("d", "capture"),
        ("d", "replay"),
    ]


@pytest.mark.parametrize("runs", [True, False, None])
def test_auto_is_native_where_that_can_run(
    monkeypatch: pytest.MonkeyPatch, runs: bool | None
) -> None:
    """None: there is no such backend."""
    world = World(Case([(0, 2)]))
    config: Any = model_config(world.case)
    native = Recorder("native", []) if runs else None
    names = Registry[Any]("attention backend")
    names.register("torch")(TorchBackend)
    if runs is not None:
        names.register("native")(lambda config: native)
    monkeypatch.setattr(attention, "SUPPORTED_ATTENTION_BACKENDS", names)
    made = create_attention_backend("auto", config)
    assert made is native if runs else type(made) is TorchBackend


def test_the_backend_reads_its_parameters_off_the_pool() -> None:
    world = World(Case([(0, 5)], 4, 2, page_size=4, dtype=torch.bfloat16))
    for ranks in (1, 2):
        tp.reset_tp_info()
        tp.set_tp_info(0, ranks)
        backend = TorchBackend(SimpleNamespace(num_qo_heads=4 * ranks))  # type: ignore[arg-type]
        assert (backend.num_slots, backend.dtype) == (len(world.k_slots), torch.bfloat16)
        assert (backend.num_qo_heads, backend.num_kv_heads) == (4, 2)


def test_pairs_make_backends_by_name() -> None:
    world = World(Case([(0, 2)]))
    config = model_config(world.case)
    assert type(create_attention_backend("torch", config)) is TorchBackend  # type: ignore[arg-type]
    assert type(create_attention_backend("torch,torch", config)) is TorchBackend  # type: ignore[arg-type]
    SUPPORTED_ATTENTION_BACKENDS.register("other")(lambda config: Recorder("other", []))
    try:
        pair = create_attention_backend("torch,other", config)  # type: ignore[arg-type]
        assert isinstance(pair, HybridBackend)
        assert type(pair.prefill_backend) is TorchBackend
        assert type(pair.decode_backend) is Recorder
        assert pair.supports_cuda_graph and not world.backend.supports_cuda_graph
    finally:
        del SUPPORTED_ATTENTION_BACKENDS._table["other"]


def test_graph_hooks_say_why_not() -> None:
    world = World(Case([(0, 2)]))
    for hook in (
        lambda: world.backend.init_capture_graph(8, [1]),
        lambda: world.backend.prepare_for_capture(world.batch),
        lambda: world.backend.prepare_for_replay(world.batch),
    ):
        with pytest.raises(NotImplementedError, match="without graphs"):
            hook()
