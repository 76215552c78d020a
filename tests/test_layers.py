"""The op layer: edge cases that would clutter chapter 02, and two ranks that really exchange."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import two_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from minisgl.core import reset_global_ctx
from minisgl.distributed.impl import DistributedCommunicator, DistributedImpl, destroy_distributed
from minisgl.distributed.info import (
    DistributedInfo,
    get_tp_info,
    reset_tp_info,
    set_tp_info,
    try_get_tp_info,
)
from minisgl.kernel.activation import gelu_and_mul, silu_and_mul
from minisgl.kernel.index import indexing
from minisgl.kernel.norm import fused_add_rmsnorm, rmsnorm
from minisgl.kernel.table import (
    SUPPORTED_KERNELS,
    create_torch_kernels,
    get_kernels,
    use_kernels,
)
from minisgl.layers.activation import get_activation
from minisgl.layers.attention import AttentionLayer
from minisgl.layers.base import BaseOP, OPList, StateLessOP
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import (
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearReplicated,
    LinearRowParallel,
)
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import get_rope, set_rope_device
from minisgl.utils.misc import align_ceil, align_down, div_ceil, div_even
from minisgl.utils.registry import import_optional
from minisgl.utils.torch_utils import torch_dtype

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """Each test starts as rank 0 of 1, and leaves nothing global behind."""
    reset_tp_info()
    set_tp_info(0, 1)
    use_kernels("torch")
    torch.manual_seed(0)
    yield
    reset_tp_info()
    reset_global_ctx()
    set_rope_device(None)
    use_kernels("torch")


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    reset_tp_info()
    set_tp_info(rank, size)
    try:
        yield
    finally:
        reset_tp_info()
        set_tp_info(0, 1)


def fill(op: BaseOP) -> BaseOP:
    """Random weights, and nothing uninitialized."""
    op.load_state_dict({k: torch.randn(v.shape).to(v.dtype) for k, v in op.state_dict().items()})
    return op


# --- utils and distributed ------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 300))
def test_rounding(a: int, b: int) -> None:
    assert div_ceil(a, b) == -(-a // b) == (a + b - 1) // b
    assert align_down(a, b) <= a <= align_ceil(a, b)
    assert align_ceil(a, b) - align_down(a, b) in (0, b)
    assert align_ceil(a, b) % b == align_down(a, b) % b == 0


def test_div_even() -> None:
    assert div_even(12, 4) == 3
    assert div_even(2, 8, allow_replicate=True) == 1
    assert div_even(8, 2, allow_replicate=True) == 4
    for a, b, replicate in [(9, 2, False), (2, 8, False), (3, 8, True), (5, 2, True)]:
        with pytest.raises(ValueError, match=f"{a} query heads cannot be divided"):
            div_even(a, b, replicate, what="query heads")
    for a, b in [(0, 1), (4, 0), (4, -2)]:
        with pytest.raises(ValueError, match="positive"):
            div_even(a, b)


@pytest.mark.parametrize(
    ("a", "b", "replicate", "would_do"),
    [
        (9, 2, False, "1, 3 or 9"),
        (1, 2, False, "1"),
        (5, 2, False, "1 or 5"),
        (4, 6, True, "1, 2 or a multiple of 4"),
        (1536, 5, False, "1, 2, 3, 4, 6, 8, 12, 16, …"),
    ],
)
def test_div_even_says_what_would_do(a: int, b: int, replicate: bool, would_do: str) -> None:
    with pytest.raises(ValueError, match=f"evenly into {b} parts; {would_do} would do$"):
        div_even(a, b, replicate)


def test_torch_dtype_is_restored() -> None:
    with pytest.raises(ZeroDivisionError), torch_dtype(torch.bfloat16):
        assert torch.empty(1).dtype == torch.bfloat16
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32


def test_tp_info_is_set_once() -> None:
    with pytest.raises(RuntimeError, match="already set"):
        set_tp_info(0, 2)
    assert get_tp_info() == DistributedInfo(0, 1) and get_tp_info().is_primary()
    reset_tp_info()
    assert try_get_tp_info() is None
    with pytest.raises(RuntimeError, match="set_tp_info"):
        get_tp_info()
    for rank, size in [(2, 2), (-1, 2), (0, 0)]:
        with pytest.raises(ValueError, match="rank"):
            set_tp_info(rank, size)
    assert try_get_tp_info() is None


def test_one_rank_needs_no_process_group() -> None:
    x = torch.randn(3, 4)
    assert not dist.is_initialized()
    assert DistributedCommunicator().all_reduce(x) is x
    assert DistributedCommunicator().all_gather(x) is x


# --- BaseOP ---------------------------------------------------------------------------------------


class Inner(BaseOP):
    def __init__(self) -> None:
        self.weight = torch.zeros(2, 3)
        self.bias: torch.Tensor | None = None
        self._scratch = torch.zeros(9)
        self.note = "no weight"


class Outer(BaseOP):
    def __init__(self) -> None:
        self.first = Inner()
        self.scale = torch.zeros(3)
        self.layers = OPList([Inner(), Inner()])
        self._shared = self.first


NAMES = ["first.weight", "scale", "layers.0.weight", "layers.1.weight"]


def test_names_follow_attributes() -> None:
    op = Outer()
    assert list(op.state_dict()) == NAMES
    assert list(op.state_dict(prefix="model")) == [f"model.{name}" for name in NAMES]
    assert op.state_dict()["scale"] is op.scale


def test_load_replaces_and_consumes() -> None:
    with torch.device("meta"):
        op = Outer()
    given = {name: torch.randn(t.shape) for name, t in Outer().state_dict().items()}
    kept = dict(given)
    op.load_state_dict(given)
    assert given == {}
    assert all(op.state_dict()[name] is kept[name] for name in NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.weight": None}, "missing: layers.1.weight"),
        ({"layers.2.weight": torch.zeros(2, 3)}, "unexpected: layers.2.weight"),
        ({"scale": torch.zeros(4)}, r"wrong shape: scale: expected \[3\], got \[4\]"),
        ({"scale": torch.zeros(3).bfloat16()}, "wrong dtype: scale: .*float32, got .*bfloat16"),
    ],
)
def test_bad_state_dict_changes_nothing(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    op = Outer()
    before = op.state_dict()
    given = {name: torch.ones(t.shape) for name, t in before.items()} | change
    given = {name: t for name, t in given.items() if t is not None}
    keys = list(given)
    with pytest.raises(ValueError, match=message):
        op.load_state_dict(given)
    assert list(given) == keys
    assert all(op.state_dict()[name] is before[name] for name in NAMES)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        Outer().load_state_dict({"scale": torch.zeros(9), "lm_head.weight": torch.zeros(1)})
    assert all(name in str(error.value) for name in [*NAMES, "lm_head.weight", "Outer"])


def test_stateless_and_forward() -> None:
    class Holder(StateLessOP):
        def __init__(self) -> None:
            self.norm, self.table = RMSNorm(4, 1e-6), torch.zeros(3)

    assert Holder().state_dict() == {}
    Holder().load_state_dict({})
    with pytest.raises(ValueError, match=r"unexpected: norm\.weight"):
        Holder().load_state_dict({"norm.weight": torch.zeros(4)})
    with pytest.raises(NotImplementedError, match="Outer"):
        Outer().forward()


# --- norms, activations, embedding ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 576])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_rmsnorm_is_bit_equal(dtype: torch.dtype, size: int, scale: float) -> None:
    theirs = modeling_llama.LlamaRMSNorm(size, eps=1e-5).to(dtype).requires_grad_(False)
    theirs.weight.copy_(torch.randn(size))
    ours = RMSNorm(size, eps=1e-5)
    ours.weight = theirs.weight.data
    x = (torch.randn(5, 3, size) * scale).to(dtype)
    assert torch.equal(ours.forward(x), theirs(x))
    ours.forward_inplace(y := x.clone())
    assert torch.equal(y, theirs(x))
    assert rmsnorm(x, theirs.weight.float(), 1e-5).dtype == dtype


def test_rmsnorm_inplace_on_a_slice() -> None:
    x = torch.randn(4, 30)
    before = x.clone()
    norm = fill(RMSNorm(5, eps=1e-6))
    norm.forward_inplace(x[:, 10:20].view(4, 2, 5))
    assert torch.equal(x[:, 10:20], norm.forward(before[:, 10:20].view(4, 2, 5)).flatten(1))
    assert torch.equal(x[:, :10], before[:, :10]) and torch.equal(x[:, 20:], before[:, 20:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_norm(dtype: torch.dtype) -> None:
    with torch_dtype(dtype):
        norm = fill(RMSNormFused(16, eps=1e-6))
    x, residual = torch.randn(3, 16).to(dtype), torch.randn(3, 16).to(dtype)
    copies = x.clone(), residual.clone()
    normed, total = norm.forward(x, residual)
    assert torch.equal(total, residual + x) and total.dtype == normed.dtype == dtype
    assert torch.equal(normed, rmsnorm(residual + x, norm.weight, 1e-6))
    assert torch.equal(x, copies[0]) and torch.equal(residual, copies[1])
    normed, total = norm.forward(x)
    assert total is x and torch.equal(normed, rmsnorm(x, norm.weight, 1e-6))
    assert torch.equal(fused_add_rmsnorm(x, residual, norm.weight, 1e-6)[1], residual + x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 2 * 24) * 3).to(dtype)
    gate, up = x[:, :24], x[:, 24:]
    assert torch.equal(silu_and_mul(x), F.silu(gate) * up)
    assert torch.equal(gelu_and_mul(x), F.gelu(gate) * up)
    out = torch.empty(6, 24, dtype=dtype)
    assert silu_and_mul(x, out=out) is out and torch.equal(out, F.silu(gate) * up)


def test_indexing_parts_add_up() -> None:
    table, ids = torch.randn(10, 4), torch.tensor([0, 9, 4, 5, 5], dtype=torch.int32)
    parts = [indexing(table[a:b], ids, vocab_range=(a, b - a)) for a, b in [(0, 5), (5, 10)]]
    assert torch.equal(parts[0] + parts[1], indexing(table, ids))
    assert torch.equal(indexing(table, ids), table[ids.long()])
    out = torch.empty(5, 4)
    assert indexing(table, ids, output=out) is out and torch.equal(out, table[ids.long()])


# --- RoPE -----------------------------------------------------------------------------------------

SCALINGS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, odd": {
        "rope_type": "yarn",
        "factor": 3.7,
        "original_max_position_embeddings": 1000,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn, given factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.5,
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "base"), [(8, 1e4), (24, 5e5), (64, 1e5), (128, 5e5)])
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_is_bit_equal(name: str, base: float, head_dim: int, dtype: torch.dtype) -> None:
    scaling = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={**scaling, "rope_theta": base},
    )
    theirs = modeling_llama.LlamaRotaryEmbedding(config)
    ours = get_rope(head_dim, head_dim, 8192, base, tuple(scaling.items()))
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 77, 1023, 1024, 5000, 8191])
    n = len(positions)
    q, k = torch.randn(n, 4 * head_dim).to(dtype), torch.randn(n, 2 * head_dim).to(dtype)
    cos, sin = theirs(q, positions[None])
    half = head_dim // 2
    table = ours._cos_sin_cache[positions].to(dtype)
    assert ours._cos_sin_cache.dtype == torch.float32
    assert torch.equal(torch.cat([table[:, :half]] * 2, -1), cos[0])
    assert torch.equal(torch.cat([table[:, half:]] * 2, -1), sin[0])
    q_hf, k_hf = modeling_llama.apply_rotary_pos_emb(
        q.view(1, n, 4, head_dim), k.view(1, n, 2, head_dim), cos, sin, unsqueeze_dim=2
    )
    q_out, k_out = ours.forward(positions.to(torch.int32), q, k)
    assert torch.equal(q_out, q_hf.view(n, -1)) and torch.equal(k_out, k_hf.view(n, -1))
    assert q_out.dtype == k_out.dtype == dtype


def test_rope_settings() -> None:
    by_type = tuple({**SCALINGS["llama3"], "type": "llama3"}.items())
    by_type = tuple((key, value) for key, value in by_type if key != "rope_type")
    one = get_rope(8, 8, 64, 1e4, tuple(SCALINGS["llama3"].items()))
    assert torch.equal(one._cos_sin_cache, get_rope(8, 8, 64, 1e4, by_type)._cos_sin_cache)
    for kind in ["linear", "dynamic", "longrope", "mrope"]:
        with pytest.raises(ValueError, match=f"{kind}.*default, llama3, yarn"):
            get_rope(8, 8, 64, 1e4, (("type", kind), ("short_factor", (1, 2))))
    with pytest.raises(ValueError, match=r"llama3.*(high|low)_freq_factor"):
        get_rope(8, 8, 64, 1e4, (("rope_type", "llama3"), ("factor", 8.0)))
    for head_dim, rotary_dim in [(8, 4), (7, 7)]:
        with pytest.raises(ValueError, match="head_dim"):
            get_rope(head_dim, rotary_dim, 64, 1e4)


def test_rope_table_is_shared_and_real() -> None:
    with torch.device("meta"):
        with pytest.raises(RuntimeError, match="set_rope_device"):
            get_rope(8, 8, 16, 1e4)
    set_rope_device(torch.device("cpu"))
    with torch.device("meta"), torch_dtype(torch.bfloat16):
        rope = get_rope(8, 8, 16, 1e4)
    assert rope._cos_sin_cache.device.type == "cpu"
    assert rope._cos_sin_cache.dtype == torch.float32
    assert get_rope(8, 8, 16, 1e4) is rope
    assert get_rope(8, 8, 16, 1e4, (("rope_type", "default"),)) is not rope
    set_rope_device(torch.device("cpu"))
    assert get_rope(8, 8, 16, 1e4) is not rope  # forgotten on purpose
    with pytest.raises(IndexError):
        rope.forward(torch.tensor([16]), torch.zeros(1, 8), torch.zeros(1, 8))


# --- linear layers --------------------------------------------------------------------------------


def test_shapes_per_rank() -> None:
    with torch.device("meta"), as_rank(1, 2):
        assert LinearReplicated(64, 48, False).weight.shape == (48, 64)
        assert LinearColParallelMerged(64, [96, 96], False).weight.shape == (96, 64)
        assert LinearQKVMerged(64, 16, 4, 2, True).weight.shape == ((2 + 1 + 1) * 16, 64)
        assert LinearQKVMerged(64, 16, 4, 2, True).bias.shape == (64,)
        assert LinearQKVMerged(64, 16, 4, 1, False).weight.shape == ((2 + 1 + 1) * 16, 64)
        assert LinearOProj(64, 48, True).weight.shape == (48, 32)
        assert LinearOProj(64, 48, True).bias.shape == (48,)
        assert LinearRowParallel(96, 64, False).weight.shape == (64, 48)
        assert LinearRowParallel(96, 64, False).bias is None
    with torch.device("meta"), as_rank(3, 4):
        assert LinearQKVMerged(64, 16, 8, 2, False).weight.shape == ((2 + 1 + 1) * 16, 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearQKVMerged(48, 16, 3, 3, False), "3 query heads"),
        (lambda: LinearQKVMerged(48, 16, 5, 2, False), "5 query heads"),
        (lambda: LinearColParallelMerged(48, [7, 7], False), "7 outputs"),
        (lambda: LinearRowParallel(7, 48, False), "7 inputs"),
    ],
)
def test_what_does_not_divide_is_named(make: object, message: str) -> None:
    with as_rank(0, 2), pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_kv_heads_that_do_not_replicate() -> None:
    with as_rank(0, 4), pytest.raises(ValueError, match=r"3 key/value heads.*4 parts"):
        LinearQKVMerged(48, 16, 12, 3, False)


def test_merged_equals_separate() -> None:
    x = torch.randn(5, 24)
    op = fill(LinearQKVMerged(24, 8, 4, 2, True))
    parts = zip(op.weight.split([32, 16, 16]), op.bias.split([32, 16, 16]), strict=True)
    separate = torch.cat([F.linear(x, w, b) for w, b in parts], dim=-1)
    torch.testing.assert_close(op.forward(x), separate)


# --- the table of operations ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minisgl.no", "minisgl.no.deeper", "no", "no.deeper", "json.no"])
def test_a_module_that_is_not_there_is_none(name: str) -> None:
    assert import_optional(name) is None


def test_an_optional_module_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_there.py").write_text("import half_there_not\n", encoding="utf-8")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__init__.py").write_text("import half.gone\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="half_there_not"):
        import_optional("half_there")
    with pytest.raises(ModuleNotFoundError, match=r"half\.gone"):
        import_optional("half")


class Packed:
    """A weight in another form: no tensor, three bytes."""

    nbytes = 3

    def __init__(self, weight: torch.Tensor, name: str, shared: bool) -> None:
        self.weight, self.name, self.shared = weight * 2, name, shared
        self.shape, self.dtype = weight.shape, weight.dtype


def doubling_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.weight, bias)


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a table that packs twice the weight, in a registry of its own."""
    table = create_torch_kernels()._replace(name="doubling", pack=Packed, linear=doubling_linear)
    entries = {"torch": create_torch_kernels, "doubling": lambda: table, "absent": lambda: None}
    monkeypatch.setattr(SUPPORTED_KERNELS, "_table", entries)
    return "doubling"


def test_kernels_by_name(doubling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"kernels 'tripling'; supported: torch, doubling, absent"):
        use_kernels("tripling")
    with pytest.raises(ValueError, match=r"'absent' cannot run on this machine.*'torch'"):
        use_kernels("absent")
    assert get_kernels() == create_torch_kernels(), "a refused name changes nothing"
    monkeypatch.setattr(SUPPORTED_KERNELS, "_optional", ())
    use_kernels("auto")
    assert get_kernels().name == "torch"


def test_a_layer_keeps_the_table_it_was_built_with(doubling: str) -> None:
    use_kernels(doubling)
    op, weight, x = LinearReplicated(3, 2, False), torch.randn(2, 3), torch.randn(4, 3)
    use_kernels("torch")
    for _ in range(2):  # what is packed can be loaded anew
        op.load_state_dict({"weight": weight.clone()})
        assert torch.equal(op.forward(x), F.linear(x, weight * 2))
    assert op.nbytes == Packed.nbytes and list(op.state_dict()) == ["weight"]
    plain = LinearReplicated(3, 2, False)
    plain.load_state_dict({"weight": weight})
    assert torch.equal(plain.forward(x), F.linear(x, weight)) and plain.weight is weight
    assert plain.nbytes == weight.nbytes
    with pytest.raises(ValueError, match=r"wrong shape: weight: expected \[2, 3\], got \[3, 2\]"):
        op.load_state_dict({"weight": torch.randn(3, 2)})


def test_packing_is_told_the_full_name(doubling: str) -> None:
    class Model(BaseOP):
        def __init__(self) -> None:
            self.embed = VocabParallelEmbedding(5, 3)
            self.layers = OPList([LinearRowParallel(3, 3, False)])
            self.lm_head = ParallelLMHead(5, 3, False, True, self.embed)

    use_kernels(doubling)
    model, table = Model(), torch.randn(5, 3)
    model.load_state_dict({"embed.weight": table, "layers.0.weight": torch.randn(3, 3)})
    layer, head = model.layers.op_list[0].weight, model.lm_head._packed
    assert (layer.name, layer.shared) == ("layers.0.weight", False)
    assert (head.name, head.shared) == ("lm_head.weight", True)
    assert model.embed.weight is table and model.lm_head.state_dict() == {}
    assert model.nbytes == table.nbytes + 2 * Packed.nbytes
    x = torch.randn(2, 3)
    logits = two_ranks.run_batch(
        lambda: model.lm_head.forward(x), phase="decode", positions=torch.arange(2), last=[0, 1]
    )
    assert torch.equal(logits, F.linear(x, table * 2))


def test_rope_and_activations_follow_the_table(doubling: str) -> None:
    before = get_rope(8, 8, 64, 1e4)
    assert get_rope(8, 8, 64, 1e4) is before and get_activation("silu") is silu_and_mul
    use_kernels(doubling)
    assert get_rope(8, 8, 64, 1e4) is not before, "bound to other operations"
    with pytest.raises(ValueError, match="unknown activation 'relu'; supported: silu, gelu"):
        get_activation("relu")


# --- embedding, LM head, attention layer ----------------------------------------------------------


def test_lm_head_rows() -> None:
    head = fill(ParallelLMHead(11, 8))
    x = torch.randn(9, 8)
    positions = torch.arange(9)
    logits = two_ranks.run_batch(
        lambda: head.forward(x), phase="prefill", positions=positions, last=[2, 8]
    )
    assert torch.equal(logits, F.linear(x[[2, 8]], head.weight))
    logits = two_ranks.run_batch(
        lambda: head.forward(x), phase="decode", positions=positions, last=[2, 8]
    )
    assert torch.equal(logits, F.linear(x, head.weight))


def test_tied_head_has_no_weight_of_its_own() -> None:
    embedding = fill(VocabParallelEmbedding(11, 8))
    head = ParallelLMHead(11, 8, tie_word_embeddings=True, tied_embedding=embedding)
    assert head.state_dict() == {}
    x = torch.randn(2, 8)
    logits = two_ranks.run_batch(
        lambda: head.forward(x), phase="decode", positions=x[:, 0], last=[0, 1]
    )
    assert torch.equal(logits, F.linear(x, embedding.weight))
    embedding.load_state_dict({"weight": torch.zeros(11, 8)})
    logits = two_ranks.run_batch(
        lambda: head.forward(x), phase="decode", positions=x[:, 0], last=[0, 1]
    )
    assert logits.abs().max() == 0
    for tie, tied in [(True, None), (False, embedding)]:
        with pytest.raises(ValueError, match="tied_embedding"):
            ParallelLMHead(11, 8, tie_word_embeddings=tie, tied_embedding=tied)
    biased = ParallelLMHead(11, 8, bias=True, tie_word_embeddings=True, tied_embedding=embedding)
    assert list(biased.state_dict()) == ["bias"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_block(family: str, kv_heads: int, dtype: torch.dtype) -> None:
    n, hidden, heads, dim = 7, 40, 4, 16  # head_dim is not hidden / heads
    module = modeling_llama if family == "llama" else modeling_qwen3
    config = (LlamaConfig if family == "llama" else Qwen3Config)(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        attn_implementation="sdpa",
    )
    name = "Llama" if family == "llama" else "Qwen3"
    with torch.no_grad():
        theirs = getattr(module, f"{name}Attention")(config, layer_idx=0).to(dtype)
        rope = getattr(module, f"{name}RotaryEmbedding")(config)
        x, steps = torch.randn(n, hidden).to(dtype), torch.arange(n)[None]
        expected, _ = theirs(x[None], attention_mask=None, position_embeddings=rope(x, steps))
        rotary = SimpleNamespace(
            head_dim=dim, rotary_dim=dim, max_position=64, base=1e4, scaling={"type": "default"}
        )
        with torch_dtype(dtype):
            qkv = LinearQKVMerged(hidden, dim, heads, kv_heads, False)
            out = LinearOProj(heads * dim, hidden, False)
            norms = [RMSNorm(dim, 1e-6), RMSNorm(dim, 1e-6)] if family == "qwen3" else [None, None]
        layer = AttentionLayer(0, heads, kv_heads, dim, rotary, *norms)
        qkv.weight = torch.cat([p.weight for p in (theirs.q_proj, theirs.k_proj, theirs.v_proj)])
        out.weight = theirs.o_proj.weight
        if norms[0] is not None and norms[1] is not None:
            norms[0].weight.copy_(torch.randn(dim))
            norms[1].weight.copy_(torch.randn(dim))
            theirs.q_norm.weight.copy_(norms[0].weight)
            theirs.k_norm.weight.copy_(norms[1].weight)
            expected, _ = theirs(x[None], attention_mask=None, position_embeddings=rope(x, steps))
        assert layer.state_dict() == {}
        got = two_ranks.run_batch(
            lambda: out.forward(layer.forward(qkv.forward(x))),
            phase="prefill",
            positions=torch.arange(n),
            last=[n - 1],
        )
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected[0], atol=tolerance, rtol=tolerance)


# --- two ranks ------------------------------------------------------------------------------------


def test_two_ranks_agree_with_one(capfd: pytest.CaptureFixture[str]) -> None:
    expected = two_ranks.block_logits(0, 1)
    assert expected.shape == (2, two_ranks.VOCAB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(two_ranks.rank_main, args=(2, port, expected), nprocs=2)
    assert "Warning" not in capfd.readouterr().err, "a collective that PyTorch wants to get rid of"


def test_plugins() -> None:
    class Marker(DistributedImpl):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x = torch.zeros(2)
    DistributedCommunicator.plugins.append(Marker())
    try:
        assert torch.equal(DistributedCommunicator().all_reduce(x), x + 1)
    finally:
        destroy_distributed()
    assert DistributedCommunicator().all_reduce(x) is x
