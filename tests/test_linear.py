"""Linear kernels and small operations: what they compute, and what happens where they can't."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hand_driven import compiled, config_for, hf_tokens, started
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import course
from benchmarks import bench
from minisgl.attention.auto_backend import PagedDecodePlan
from minisgl.engine import Engine
from minisgl.engine import engine as engine_module
from minisgl.kernel import (
    apply_rope_with_cos_sin_cache,
    fused_add_rmsnorm,
    get_linear_kernel,
    linear_auto,
    native_linear,
    native_small,
    replace,
    set_linear_kernel,
    silu_and_mul,
    supported_linear_kernels,
    use_native_kernels,
)
from minisgl.kernel.linear_auto import (
    ROWS,
    AutoLinear,
    Form,
    PackedWeight,
    Plan,
    Product,
    as_is,
    create_linear_kernel,
    packed_forms,
    works,
)
from minisgl.kernel.store import store_cache
from minisgl.kernel.utils import load_jit

DTYPES = (torch.float32, torch.bfloat16)
# Of a sum of 64 products of numbers around one: some rounding errors of its size.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


@pytest.fixture(autouse=True)
def _default_kernel() -> Iterator[None]:
    yield
    set_linear_kernel("auto")
    create_linear_kernel.cache_clear()
    use_native_kernels(False)


def forget_machine() -> None:
    works.cache_clear()
    load_jit.cache_clear()
    native_linear._functions.cache_clear()
    native_small._functions.cache_clear()


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For patches of what exists: operators and compilers are asked for again, also after it."""
    forget_machine()
    yield monkeypatch
    forget_machine()


def candidates() -> Iterator[tuple[torch.dtype, Form, Product]]:
    for dtype in DTYPES:
        for form in (as_is(dtype), *packed_forms(dtype)):
            for product in form.products:
                yield dtype, form, product


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (1, 64), (33, 7), (2049, 64)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "form", "product"),
    candidates(),
    ids=lambda v: getattr(v, "name", getattr(v, "__name__", str(v))),
)
def test_candidates(
    dtype: torch.dtype, form: Form, product: Product, shape: tuple[int, int], bias: bool
) -> None:
    if not works(product, form, dtype):
        pytest.skip(f"{product.__name__} of {form.name} is not on this machine")
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    b = torch.randn(shape[0]).to(dtype) if bias else None
    stored = weight if form.pack is None else form.pack(weight)
    for rows in (1, 2, 3, 4, 5, 7, 8, 16, 17, 65):
        x = torch.randn(rows, shape[1]).to(dtype)
        for given in (x, torch.randn(rows, 2 * shape[1]).to(dtype)[:, ::2]):  # not contiguous
            expected = F.linear(given.float(), weight.float(), None if b is None else b.float())
            y = product(given, stored, b)
            assert y.shape == expected.shape and y.dtype == dtype and y.is_contiguous()
            torch.testing.assert_close(y.float(), expected, atol=TOLERANCE[dtype], rtol=2e-2)


def forced(form: Form, product: Product) -> Plan:
    return Plan(form, (product,) * (len(ROWS) + 1), (1.0,) * len(ROWS))


def packable(dtype: torch.dtype) -> list[Form]:
    return [form for form in packed_forms(dtype) if works(form.products[0], form, dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_weight_stands_in_for_the_weight(dtype: torch.dtype) -> None:
    for form in packable(dtype):
        weight = torch.randn(48, 32).to(dtype)
        kept, gone = PackedWeight.of(weight, forced(form, form.products[0])), weakref.ref(weight)
        assert (kept.shape, kept.dtype, kept.nbytes) == (weight.shape, dtype, weight.nbytes)
        assert torch.equal(kept.clone(), weight) and torch.equal(kept[3], weight[3])
        del weight
        gc.collect()
        assert gone() is None, "the unpacked weight is still held"


def test_fbgemm_refuses_what_float16_cannot_hold() -> None:
    with pytest.raises(RuntimeError, match="float16"):
        linear_auto.pack_fbgemm(torch.full((16, 16), 1e6, dtype=torch.bfloat16))


def test_a_weight_that_does_not_fit_the_form_of_its_shape_stays() -> None:
    kernel, weight = AutoLinear(), torch.full((256, 256), 1e6, dtype=torch.bfloat16)
    form = packed_forms(torch.bfloat16)[-1]
    kernel.best[weight.shape, weight.dtype] = forced(form, form.products[0])
    assert kernel.prepare(weight) is weight
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    assert torch.equal(kernel.apply(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_the_private_operators(
    other_machine: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    other_machine.setattr(torch.ops, "mkldnn", Nothing())
    other_machine.setattr(torch.ops, "quantized", Nothing())
    other_machine.setenv("MINISGL_JIT", "0")
    kernel, weight = AutoLinear(), torch.randn(300, 256).to(dtype)
    assert kernel.prepare(weight) is weight
    (plan,) = kernel.best.values()
    assert {p.__name__ for p in plan.products} <= {"linear", "swapped", "blocks", "widened"}
    x = torch.randn(3, 256).to(dtype)
    expected = F.linear(x.float(), weight.float())
    torch.testing.assert_close(kernel.apply(x, weight).float(), expected, atol=0.5, rtol=2e-2)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_defaults_of_torch_do_not_reach_c(default: torch.dtype | str) -> None:
    """Memory that C writes to is float32 on the CPU, whatever a new tensor is by default."""
    if not native_small._functions():
        pytest.skip("no C compiler")
    x, w, weight = torch.randn(40, 64), torch.randn(96, 64), torch.randn(64)
    q, k, v = torch.randn(2, 9, 64), torch.randn(20, 3, 64), torch.randn(20, 3, 64)
    table, page_table = torch.randn(50, 64), torch.arange(20, dtype=torch.int32).view(2, 10)
    positions = torch.tensor([3, 7])

    def results() -> list[torch.Tensor]:
        plan = PagedDecodePlan([10, 4], page_table, 9, 64)
        return [
            native_linear.native(x[:2], w, None),
            native_linear.native(x, w, None),
            *native_small.native_add_rmsnorm(x, x, weight, 1e-5),
            native_small.native_silu_and_mul(x),
            *native_small.native_rope(positions, q, q, 64, table),
            plan.attend(q, k, v),
        ]

    expected, before = results(), torch.get_default_dtype()
    try:
        if isinstance(default, str):
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        got = results()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    assert all(map(torch.equal, got, expected))


def test_native_refuses_what_does_not_fit() -> None:
    x, half = torch.ones(2, 8), torch.ones(4).bfloat16()
    unfit = [(x[:, :7], None), (x, torch.ones(3)), (x, torch.ones(1)), (x, torch.ones(1, 4))]
    for given, bias in [*unfit, (x.bfloat16(), None), (x, half), (x.bfloat16(), half)]:
        with pytest.raises((ValueError, RuntimeError), match=r"expected x|no C compiler"):
            native_linear.native(given, torch.ones(4, 8), bias)


def test_a_long_run_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def product(x: torch.Tensor, *_: object) -> torch.Tensor:
        runs.append(time.sleep(0.003))
        return x

    for most, count in ((0.001, 2), (60.0, 4)):  # one doesn't count
        runs.clear()
        monkeypatch.setattr(linear_auto, "LONG", most)
        assert linear_auto.time_product(product, torch.ones(1, 1), repeat(None), 60.0) >= 0.003
        assert len(runs) == count


def test_less_is_not_enough_where_there_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured alone, `F.linear` may look a little faster; between other products it is not."""
    seconds = {"native": 1.0, "linear": 0.8, "fbgemm": 0.72}
    form, packed = as_is(torch.bfloat16), Form("packed", (linear_auto.fbgemm,), pack=torch.clone)
    weights = [torch.ones(16, 16).bfloat16()]
    there = set(seconds)
    monkeypatch.setattr(linear_auto, "works", lambda product, *_: product.__name__ in there)
    monkeypatch.setattr(linear_auto, "time_product", lambda product, *_: seconds[product.__name__])

    def chosen() -> tuple[str, str]:
        plans = [plan for f in (form, packed) if (plan := linear_auto.measure(f, weights))]
        return plans[0].products[0].__name__, linear_auto.decide(plans).form.name

    assert chosen() == ("native", "as loaded")
    seconds["linear"] = 0.6
    assert chosen() == ("linear", "as loaded"), "clearly faster"
    there.remove("native")
    seconds |= {"linear": 0.8, "fbgemm": 0.7}
    assert chosen() == ("linear", "packed"), "without a compiler"


SIX = "int six(void) { return 6; }"


def test_jit_keeps_what_it_compiled(other_machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = load_jit(SIX)
    if library is None:
        pytest.skip("no C compiler")
    assert library.six() == 6
    (kept,) = (tmp_path / "minisgl").iterdir()
    before = kept.stat().st_mtime_ns
    load_jit.cache_clear()
    again = load_jit(SIX)
    assert again is not None and again.six() == 6 and kept.stat().st_mtime_ns == before
    other = load_jit(SIX.replace("6", "7"))
    assert other is not None and other.six() == 7, "another source is another library"


@pytest.mark.parametrize("why", ["switched off", "no compiler", "an error in the source"])
def test_jit_says_none(other_machine: pytest.MonkeyPatch, tmp_path: Path, why: str) -> None:
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    if why == "switched off":
        other_machine.setenv("MINISGL_JIT", "0")
    if why == "no compiler":
        other_machine.setenv("CC", "there-is-no-such-compiler")
    assert load_jit("int six(void) { return" if why.startswith("an") else SIX) is None
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("tmp*"))


def test_jit_survives_a_cache_that_cannot_be_written(
    other_machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "minisgl").write_text("a file where the folder should be", encoding="utf-8")
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_jit(SIX) is None
    with pytest.raises(RuntimeError, match="no C compiler"):
        native_linear.native(torch.ones(1, 8), torch.ones(4, 8), None)


def test_measured_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, measure = [], linear_auto.measure

    def watch(form: Form, weights: list[torch.Tensor]) -> Plan | None:
        shapes.append((form.name, tuple(weights[0].shape)))
        return measure(form, weights)

    monkeypatch.setattr(linear_auto, "measure", watch)
    kernel = AutoLinear()
    before = torch.get_num_threads()
    for _ in range(3):
        kernel.prepare(torch.randn(320, 256))
        kernel.prepare(torch.randn(640, 256), shared=True)
    assert torch.get_num_threads() == before
    assert len(shapes) == len(set(shapes)) == 3  # as loaded and packed; as loaded


def test_left_alone() -> None:
    kernel = AutoLinear()
    for weight in (
        torch.randn(16, 16),
        torch.randn(512, 512).double(),
        torch.randn(512, 512).half(),
    ):
        assert kernel.prepare(weight) is weight
    assert kernel.prepare(torch.empty(512, 512, device="meta")).is_meta
    table = torch.randn(512, 256)
    assert kernel.prepare(table, shared=True) is table
    assert not kernel.best


def test_rows_between_those_tried() -> None:
    names = [lambda x, w, b, n=n: n for n in (*ROWS, 0)]
    plan = Plan(as_is(torch.float32), tuple(names), (1.0,) * len(ROWS))
    chosen = {
        rows: plan.product(rows)(None, None, None) for rows in (1, 2, 4, 5, 16, 17, 128, 129, 999)
    }
    assert chosen == {1: 1, 2: 4, 4: 4, 5: 16, 16: 16, 17: 128, 128: 128, 129: 0, 999: 0}


def test_what_is_plain_stays_unless_it_is_clearly_slower() -> None:
    plain, other, third = (lambda x, w, b, i=i: i for i in range(3))
    assert linear_auto.fastest([(1.0, plain), (0.95, other)], 0.93) == (1.0, plain)
    assert linear_auto.fastest([(1.0, plain), (0.9, other)], 0.93) == (0.9, other)
    assert linear_auto.fastest([(1.0, plain), (0.9, other)], 0.8) == (1.0, plain)
    timed = [(1.0, plain), (0.9, other), (0.8, third)]
    assert linear_auto.fastest(timed, 0.93) == (0.8, third)


def test_the_product_for_few_rows_is_not_for_long_prefills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even where nothing that was tried is as fast: it is measured with 128 rows at most."""

    def timed(product: Product, *args: object) -> float:
        return {"native": 1.0, "linear": 5.0, "blocks": 2.0}.get(product.__name__, 9.0)

    monkeypatch.setattr(linear_auto, "works", lambda *args: True)
    monkeypatch.setattr(linear_auto, "time_product", timed)
    plan = linear_auto.measure(as_is(torch.float32), [torch.ones(2, 2)])
    assert plan is not None
    assert [p.__name__ for p in plan.products] == ["native"] * len(ROWS) + ["blocks"]


def test_selectable() -> None:
    assert {"auto", "torch"} <= set(supported_linear_kernels())
    set_linear_kernel("torch")
    assert type(get_linear_kernel()).__name__ == "TorchLinear"
    set_linear_kernel("auto")
    assert get_linear_kernel() is get_linear_kernel() is create_linear_kernel()


PROMPTS = [[504, 3575, 282, 4649, 314], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [100]]


def test_tokens_of_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model with each product forced on all its layers: always the same tokens."""
    folder = course.model()
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = hf_tokens(hf, PROMPTS, 6)
    with torch.inference_mode():
        reference = hf(torch.tensor([PROMPTS[1]])).logits[0, -1]
    del hf
    runs = [(f, p) for t, f, p in candidates() if t == torch.float32 and works(p, f, t)]
    for form, product in runs:

        def prepare(
            self: AutoLinear,
            weight: torch.Tensor,
            *,
            shared: bool = False,
            plan: Plan = forced(form, product),  # noqa: B008
        ) -> torch.Tensor:
            if shared or plan.form.pack is None:
                self.as_loaded[weight.shape, weight.dtype] = (
                    plan if plan.form.pack is None else forced(as_is(weight.dtype), F.linear)
                )
                return weight
            return PackedWeight.of(weight, plan)

        create_linear_kernel.cache_clear()
        monkeypatch.setattr(AutoLinear, "prepare", prepare)
        with started(folder) as driver:
            assert driver.run(PROMPTS, 6) == expected, (form.name, product.__name__)
            req = driver.admit(PROMPTS[1], 1)
            logits = driver.logits([req], "prefill")[0]
            assert float((logits - reference).abs().max()) < 1e-3


def test_memory_of_an_engine() -> None:
    """The engine holds each weight once: as many bytes as the checkpoint, whatever was chosen."""
    with started(course.model()) as driver:
        engine = driver.engine
        weights = engine.model.state_dict()
        held = sum(
            w.packed.nbytes if isinstance(w, PackedWeight) else w.untyped_storage().nbytes()
            for w in weights.values()
        )
        assert held <= 1.02 * engine.memory.model
        assert driver.run(PROMPTS[:1], 2)[0]


# --- Small operations -----------------------------------------------------------------------------

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# The references round each of their steps to bfloat16, C only the last.
NEAR = {torch.float32: CLOSE, torch.bfloat16: {"rtol": 0.02, "atol": 1e-2}}


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 16, 64, 584])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (100,), (2, 5), (0,)], ids=str)
def test_norm_and_silu_in_c(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape, size).to(dtype)
    weight, gate_up = torch.randn(size).to(dtype), (20 * torch.randn(*shape, 2 * size)).to(dtype)
    kept = [t.clone() for t in (x, residual, gate_up)]
    expected = fused_add_rmsnorm(x, residual, weight, 1e-5), silu_and_mul(gate_up)
    got = native_small.native_add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(got[1], expected[0][1])
    torch.testing.assert_close(got[0], expected[0][0], **NEAR[dtype])
    torch.testing.assert_close(
        native_small.native_silu_and_mul(gate_up), expected[1], **NEAR[dtype]
    )
    assert all(map(torch.equal, kept, (x, residual, gate_up)))


@compiled
def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    """Sums of 65,536 pairs, halfway cases, infinities and NaN among them: the same bits."""
    x = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    y = x.flatten()[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))].view_as(x)
    _, total = native_small.native_add_rmsnorm(x, y, torch.ones(64).bfloat16(), 1e-5)
    torch.testing.assert_close(total, x + y, rtol=0, atol=0, equal_nan=True)


@compiled
def test_silu_in_c_at_the_ends() -> None:
    gate = torch.tensor([-1e4, -100.0, -87.5, -20.0, -0.0, 0.0, 1e-30, 88.0, 1e4, torch.nan])
    gate = torch.cat((gate, torch.ones(6)))
    x = torch.cat((gate, torch.ones(16)))
    got, expected = native_small.native_silu_and_mul(x), silu_and_mul(x)
    torch.testing.assert_close(got, expected, equal_nan=True, **CLOSE)


@compiled
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (1, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("size", [16, 48, 64])
@pytest.mark.parametrize("n", [1, 3, 200])
def test_rope_in_c(n: int, size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    angles = torch.randn(50, size // 2)
    table, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.randint(0, 50, (n,))
    widths = [heads[0] * size, heads[1] * size, heads[1] * size]
    q, k, _ = torch.randn(n, sum(widths)).split(widths, -1)
    for given in ((q, k), [x.unflatten(1, (-1, size)) for x in (q, k)], (q.contiguous(), k)):
        expected = apply_rope_with_cos_sin_cache(positions.to(dtype), *given, size, table)
        got = native_small.native_rope(positions.to(dtype), *given, size, table)
        for y, want in zip(got, expected, strict=True):
            assert y.shape == want.shape
            torch.testing.assert_close(y, want, **CLOSE)
    turned = torch.randn(heads[0], n, size).transpose(0, 1)  # heads that lie apart
    expected = apply_rope_with_cos_sin_cache(positions, turned.contiguous(), k, size, table)
    got = native_small.native_rope(positions, turned, k, size, table)
    torch.testing.assert_close(got, expected, **CLOSE)
    q, k = q.bfloat16(), k.bfloat16()
    expected = apply_rope_with_cos_sin_cache(positions, q.float(), k.float(), size, table)
    got = native_small.native_rope(positions.to(dtype), q, k, size, table)
    for y, want in zip(got, expected, strict=True):
        assert torch.equal(y, want.bfloat16()) or (y - want).abs().max() < 0.02
        assert y.dtype == torch.bfloat16


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_store_in_c(n: int, index: torch.dtype, dtype: torch.dtype) -> None:
    rows, slots = (50 * torch.randn(n, 100)).to(dtype), torch.randperm(12)[:n].to(index)
    k, v = rows[:, 10:34], rows[:, 40:64].unflatten(1, (3, 8))
    before = (50 * torch.randn(2, 12, 3, 8)).to(dtype)
    expected, got = before.clone(), before.clone()
    store_cache(*expected, slots, k, v)
    assert native_small.native_store_cache(*got, slots, k, v) is None
    assert torch.equal(got, expected)
    repeated = torch.tensor([3, 3, 3], dtype=index)
    k, v = torch.arange(2 * 3 * 24).view(2, 3, 24).to(dtype)
    assert native_small.native_store_cache(*got, repeated, k, v) is None
    assert torch.equal(got[:, 3].flatten(1), torch.stack((k[2], v[2])))


def test_left_to_the_references() -> None:
    x, weight, declined = torch.randn(4, 16), torch.randn(16), NotImplemented
    norm, silu, rope, store = native_small.REPLACEMENTS.values()
    for dtype in (torch.float16, torch.float64):
        assert norm(x.to(dtype), x.to(dtype), weight.to(dtype), 1e-5) is declined
        assert silu(x.to(dtype)) is declined
    assert norm(x, x.double(), weight, 1e-5) is declined
    assert norm(x[:, :12], x[:, :12], weight[:12], 1e-5) is declined
    odd = torch.randn(4, 12)
    assert norm(odd, odd, odd[0], 1e-5) is declined and silu(odd) is declined
    assert silu(torch.randn(4, 24)) is declined and norm(*torch.empty(3, 0), 1e-5) is declined
    assert norm(x, x, weight.bfloat16(), 1e-5) is declined
    assert norm(x, x[:1], weight, 1e-5) is declined and norm(x, x, weight[:1], 1e-5) is declined
    assert silu(x.t()) is declined and silu(x.to("meta")) is declined
    assert silu(x, torch.empty(4, 8)) is declined and silu(x, out=torch.empty(4, 8)) is declined
    positions, table = torch.arange(4), torch.randn(4, 16)
    assert rope(positions, x, x, 8, torch.randn(4, 8)) is declined
    assert rope(positions, x, x, 16, table.double()) is declined
    assert rope(positions + 1, x, x, 16, table) is declined
    assert rope(positions - 1, x, x, 16, table) is declined
    assert rope(positions, x, x.bfloat16(), 16, table) is declined
    assert rope(positions, x, x.t().contiguous().t(), 16, table) is declined
    assert rope(positions[:3], x, x, 16, table) is declined
    assert rope(positions.float(), x, x, 16, table) is declined
    assert rope(positions, x, x, 16, torch.randn(4, 32)) is declined
    assert rope(positions, x, x[:, :8], 16, table) is declined
    assert rope(positions[:, None], x, x, 16, table) is declined
    assert rope(positions, x[0], x, 16, table) is declined
    caches, new = torch.zeros(2, 6, 2, 8), torch.ones(2, 4, 16)
    for slots in (positions + 3, positions - 1, positions.short(), positions[None], positions[:3]):
        assert store(*caches, slots, *new) is declined
    assert store(*caches, torch.arange(8)[::2], *new) is declined
    assert store(*caches, torch.tensor(3), *new[:, :1]) is declined
    assert store(*caches, positions, new[0], new[1].double()) is declined
    assert store(*caches, positions, new[0], new[1, :, :8]) is declined
    assert store(*caches, positions, new[0, :, :8], new[1, :, :8]) is declined
    assert store(*caches.transpose(1, 2), positions, *new) is declined
    assert store(caches[0], caches[1, :5], positions, *new) is declined
    assert store(caches[0], caches[1].double(), positions, *new) is declined
    assert store(*caches, positions, *new.transpose(1, 2).contiguous().transpose(1, 2)) is declined
    assert store(*caches, positions, *new.to("meta")) is declined
    assert not caches.any()
    use_native_kernels(True)
    out = torch.empty(4, 8)
    assert silu_and_mul(x, out=out) is out
    torch.testing.assert_close(out, silu_and_mul(x.double()).float(), **CLOSE)
    with pytest.raises(IndexError):
        apply_rope_with_cos_sin_cache(positions + 1, x, x, 16, table)


def test_small_operations_without_a_compiler(other_machine: pytest.MonkeyPatch) -> None:
    other_machine.setenv("MINISGL_JIT", "0")
    x, weight = torch.randn(4, 16), torch.randn(16)
    expected = fused_add_rmsnorm(x, x, weight, 1e-5)
    use_native_kernels(True)
    assert native_small.native_silu_and_mul(x) is NotImplemented
    got = fused_add_rmsnorm(x, x, weight, eps=1e-5)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_replacements_live_as_long_as_the_engine(kernel: str) -> None:
    set_linear_kernel(kernel)
    assert not replace._ACTIVE, "off by default"
    expected = {} if kernel == "torch" else native_small.REPLACEMENTS
    with started(course.tiny("qwen3")) as driver:
        assert expected == replace._ACTIVE
        assert driver.run([[1, 2, 3]], 3)[0]
    assert not replace._ACTIVE


@compiled
def test_the_profile_of_the_benchmarks_names_what_runs_in_c() -> None:
    """PyTorch's profiler sees its own operations only; without names, products took 0 %."""
    with started(course.tiny("qwen3"), cuda_graph_max_bs=0) as driver, bench.labeled():
        with profile(activities=[ProfilerActivity.CPU]) as record:
            driver.run([[1, 2, 3]], 3)
        seen = {event.key for event in record.key_averages()}
        assert {"minisgl::apply", "minisgl::attend", "minisgl::store_cache"} <= seen
    assert not replace._ACTIVE


def test_replacements_after_failed_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(course.tiny("llama"))
    seen = []

    def fail(*args: object) -> None:
        seen.append(dict(replace._ACTIVE))
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "_make_page_table", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            Engine(config)
    assert seen == [native_small.REPLACEMENTS] and not replace._ACTIVE
    engine = Engine(config)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        Engine(config)
    assert replace._ACTIVE, "the first engine lives on"
    engine.shutdown()
    assert not replace._ACTIVE
