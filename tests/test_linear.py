"""The operations in C: what they compute, how they are compiled, and what happens where they can't.

Attention in C is in `test_attention.py`, recorded passes are in `test_engine.py`.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hand_driven import compiled, config_for, hf_tokens, started
from transformers import AutoModelForCausalLM

import course
from minisgl.engine import Engine
from minisgl.kernel import (
    apply_rope_with_cos_sin_cache,
    fused_add_rmsnorm,
    get_kernels,
    silu_and_mul,
    use_kernels,
)
from minisgl.kernel.cpu import attention, compile, linear, small
from minisgl.kernel.cpu.compile import Function, find_compiler, load_jit
from minisgl.kernel.cpu.linear import native_linear
from minisgl.kernel.store import store_cache

DTYPES = (torch.float32, torch.bfloat16)
# Of a sum of 64 products of numbers around one: some rounding errors of its size.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
ROWS = (1, 2, 3, 4, 5, 16, 17, 64, 65, 300)
ASKED_ONCE = (
    find_compiler,
    load_jit,
    linear._library,
    linear.has,
    small._functions,
    attention.attend_functions,
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    use_kernels("torch")


def forget_machine() -> None:
    for function in ASKED_ONCE:
        function.cache_clear()


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For patches of what exists: compilers are asked for again, also after it."""
    forget_machine()
    yield monkeypatch
    forget_machine()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the compiling module logs; its logger hands nothing on."""
    name = compile.logger.logger.name
    caplog.set_level(logging.INFO, logger=name)
    logging.getLogger(name).addHandler(caplog.handler)
    yield caplog
    logging.getLogger(name).removeHandler(caplog.handler)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, or the kind of error and its message."""
    try:
        return function(*args)
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error), str(error)


def same_in_torch(native: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> None:
    """C is not called, and the reference's result or error comes out."""
    expected, calls = outcome(reference, *args), []
    Function.listening = calls
    try:
        got = outcome(native, *args)
    finally:
        Function.listening = None
    assert not calls, "C got what it wasn't written for"
    if isinstance(expected, tuple) and isinstance(expected[0], type):
        assert got == expected
    else:
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# --- The product ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(96, 64), (1, 64), (33, 7), (2049, 64), (7, 96), (64, 70)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_product(dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    weight = torch.randn(shape).to(dtype)
    b = torch.randn(shape[0]).to(dtype) if bias else None
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        for given in (x, torch.randn(rows, 2 * shape[1]).to(dtype)[:, ::2]):  # not contiguous
            expected = F.linear(given.float(), weight.float(), None if b is None else b.float())
            y = native_linear(given, weight, b)
            assert y.shape == expected.shape and y.dtype == dtype and y.is_contiguous()
            torch.testing.assert_close(y.float(), expected, atol=TOLERANCE[dtype], rtol=2e-2)


def test_products_left_to_torch() -> None:
    x, weight, bias = torch.randn(4, 64), torch.randn(96, 64), torch.randn(96)
    wide = torch.randn(4, 128)[:, ::2]
    for given in (
        (wide, weight, bias),
        (x, torch.randn(64, 96).t(), None),
        (x, weight, torch.randn(192)[::2]),
        (x.double(), weight.double(), None),
        (x[:0], weight, bias),
        (x[0], weight, bias),
        (x.view(2, 2, 64), weight, bias),
        (torch.randn(65, 64), weight, None),
        (x[:, :7].contiguous(), weight[:, :7].contiguous(), None),
        (x, weight, bias[:1]),
        (x[:, :32].contiguous(), weight, None),
        (x, weight, bias[:3]),
        (x.bfloat16(), weight, None),
        (x, weight, bias.bfloat16()),
    ):
        same_in_torch(native_linear, F.linear, *given)
    assert native_linear(x.to("meta"), weight.to("meta")).is_meta


FLAGS = {
    "as it is": compile.FLAGS,
    "no tiles": (*compile.FLAGS, "-mno-amx-bf16"),
    "no bfloat16": (*compile.FLAGS, "-mno-avx512bf16"),
    "any processor": tuple(flag for flag in compile.FLAGS if flag != "-march=native"),
}


@compiled
@pytest.mark.parametrize("flags", FLAGS)
def test_as_exact_as_torch(other_machine: pytest.MonkeyPatch, flags: str) -> None:
    """In float32 C adds up in another order, which is worth some factor; bfloat16 is rounded last.

    Also without the instructions that this processor happens to have.
    """
    other_machine.setattr(compile, "FLAGS", FLAGS[flags])
    if linear._library() is None:
        pytest.skip(f"the compiler doesn't know {FLAGS[flags][-1]}")
    assert not (flags != "as it is" and linear.has("tiles"))
    assert not (flags in ("no bfloat16", "any processor") and linear.has("bfloat16"))
    for dtype, factor in zip(DTYPES, (6, 1.1), strict=True):
        weight, bias = torch.randn(96, 576).to(dtype), torch.randn(96).to(dtype)
        for rows in ROWS:
            x = torch.randn(rows, 576).to(dtype)
            exact = F.linear(x.double(), weight.double(), bias.double())
            got, in_torch = (
                float((y.double() - exact).norm() / exact.norm())
                for y in (native_linear(x, weight, bias), F.linear(x, weight, bias))
            )
            assert got <= factor * in_torch + 1e-8, (dtype, rows)
    if not linear.has("bfloat16"):
        wide = F.linear(x.float(), weight.float(), bias.float()).bfloat16()
        assert torch.equal(native_linear(x, weight, bias), wide)


@compiled
@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_threads_nor_neighbors_count(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tiles: bool
) -> None:
    if not tiles:
        monkeypatch.setattr(linear, "has", lambda feature: False)
    elif not linear.has("tiles"):
        pytest.skip("no tiles")
    x, weight, results = torch.randn(64, 64).to(dtype), torch.randn(102, 64).to(dtype), []
    for w in (weight, weight[:96]):
        for rows in (1, 4, 5, 16, 17, 64):
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(native_linear(x[:rows], w))
            one, two, three = results[-3:]
            assert torch.equal(one, two) and torch.equal(one, three)
        for y in results:
            close = {"rtol": 1e-2, "atol": TOLERANCE[dtype]}
            torch.testing.assert_close(y[0, :96], results[0][0, :96], **close)


@compiled
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_defaults_of_torch_do_not_reach_c(default: torch.dtype | str) -> None:
    """Memory that C writes to is float32 on the CPU, whatever a new tensor is by default."""
    x, w, weight = torch.randn(40, 64), torch.randn(96, 64), torch.randn(64)
    q, k, v = torch.randn(2, 9, 64), torch.randn(20, 3, 64), torch.randn(20, 3, 64)
    table, page_table = torch.randn(50, 64), torch.arange(20, dtype=torch.int32).view(2, 10)
    positions = torch.tensor([3, 7])

    def results() -> list[torch.Tensor]:
        fixed = attention.FixedDecodePlan(2, 10, 9, 64, 2)
        fixed.take(attention.PagedDecodePlan([10, 4], page_table, 9, 64, 2))
        return [
            native_linear(x[:2], w),
            native_linear(x, w),
            *small.native_add_rmsnorm(x, x, weight, 1e-5),
            small.native_silu_and_mul(x),
            *small.native_rope(positions, q, q, 64, table),
            fixed.attend(q, k, v),
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


# --- Compiling ------------------------------------------------------------------------------------

SIX = "int six(void) { return 6; }"


@compiled
def test_what_was_compiled_is_kept(other_machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = load_jit(SIX, six="")
    assert library is not None and library.six() == 6
    (kept,) = (tmp_path / "minisgl").iterdir()
    before = kept.stat().st_mtime_ns
    load_jit.cache_clear()
    again = load_jit(SIX, six="")
    assert again is not None and again.six() == 6 and kept.stat().st_mtime_ns == before
    other = load_jit(SIX.replace("6", "7"), six="")
    assert other is not None and other.six() == 7, "another source is another library"


BROKEN_C = r"""
int seven_TYPE(TYPE x) {
  return x + nothing_of_this_name;
}
"""


@compiled
def test_an_error_in_c_names_the_line(
    other_machine: pytest.MonkeyPatch, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_jit(*compile.COMMON_C, BROKEN_C, file=__file__) is None
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.startswith("  return x + nothing"))
    (record,) = log.records
    assert re.search(rf"test_linear\.py:{line}:.*nothing_of", record.getMessage())
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("tmp*"))


PROMPTS = [[5, 75, 82, 49, 14], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [100]]


@pytest.mark.parametrize("why", ["switched off", "no compiler", "no cc", "no cache"])
def test_without_c_torch_does_the_same(
    other_machine: pytest.MonkeyPatch, tmp_path: Path, log: pytest.LogCaptureFixture, why: str
) -> None:
    """The same tokens in both dtypes, and the log says why once, however many engines start."""
    if why == "no cache" and find_compiler() is None:
        pytest.skip("no compiler")
    forget_machine()
    log.clear()
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    variable, value, message = {
        "switched off": ("MINISGL_JIT", "0", "MINISGL_JIT=0: nothing is compiled"),
        "no compiler": ("CC", "/nonexistent", "no C compiler (/nonexistent)"),
        "no cc": ("PATH", str(tmp_path), "no C compiler (cc)"),
        "no cache": ("XDG_CACHE_HOME", str(tmp_path), "C that can't be compiled"),
    }[why]
    if why in ("no compiler", "no cc"):
        other_machine.delenv("MINISGL_JIT", raising=False)
    if why == "no cc":
        other_machine.delenv("CC", raising=False)
    if why == "no cache":
        (tmp_path / "minisgl").write_text("a file where the folder should be", encoding="utf-8")
    other_machine.setenv(variable, value)
    assert load_jit(SIX) is None and linear._library() is None
    assert small._functions() == attention.attend_functions() == {}
    for dtype in DTYPES:
        answers = []
        for kernels in ("auto", "torch"):
            with started(course.tiny("llama"), dtype=dtype, kernels=kernels) as driver:
                assert driver.engine.graph_runner.graph_bs_list == []
                answers.append(driver.run(PROMPTS, 6))
        assert answers[0] == answers[1]
    messages = [record.getMessage() for record in log.records]
    assert all(message in text for text in messages)
    assert len(messages) == (4 if why == "no cache" else 1), "one for each source, or one in all"
    if why != "no cache":
        config = config_for(course.tiny("llama"), kernels="native")
        for start in (partial(use_kernels, "native"), partial(Engine, config)):
            with pytest.raises(ValueError, match="'native' cannot run on this machine"):
                start()
            assert get_kernels().name == "torch"


@compiled
@pytest.mark.parametrize("compiler", ["clang", "one without OpenMP"])
def test_other_compilers(other_machine: pytest.MonkeyPatch, tmp_path: Path, compiler: str) -> None:
    """All of the C compiles, and the engine's tokens are those of PyTorch."""
    path, usual = shutil.which(compiler), find_compiler()
    if compiler != "clang":
        script = tmp_path / "compiler"
        refuse = 'case " $* " in *" -fopenmp "*) echo "no OpenMP" >&2; exit 1;; esac'
        script.write_text(f'#!/bin/sh\n{refuse}\nexec {usual} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        path = str(script)
    if path is None:
        pytest.skip(f"{compiler} is not installed")
    with started(course.tiny("llama"), kernels="torch", attention_backend="torch") as driver:
        expected = driver.run(PROMPTS, 6)
    forget_machine()
    other_machine.setenv("CC", path)
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert linear._library() and small._functions() and attention.attend_functions()
    with started(course.tiny("llama"), kernels="native") as driver:
        assert driver.run(PROMPTS, 6) == expected
    for dtype in DTYPES:
        test_the_product(dtype, (96, 64), True)


# --- Small operations -----------------------------------------------------------------------------

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# The references round each of their steps to bfloat16, C only the last.
NEAR = {torch.float32: CLOSE, torch.bfloat16: {"rtol": 0.02, "atol": 1e-2}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 16, 64, 584])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (100,), (2, 5), (0,)], ids=str)
def test_norm_and_silu(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape, size).to(dtype)
    weight, gate_up = torch.randn(size).to(dtype), (20 * torch.randn(*shape, 2 * size)).to(dtype)
    kept = [t.clone() for t in (x, residual, gate_up)]
    expected = fused_add_rmsnorm(x, residual, weight, 1e-5), silu_and_mul(gate_up)
    got = small.native_add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(got[1], expected[0][1])
    torch.testing.assert_close(got[0], expected[0][0], **NEAR[dtype])
    torch.testing.assert_close(small.native_silu_and_mul(gate_up), expected[1], **NEAR[dtype])
    assert all(map(torch.equal, kept, (x, residual, gate_up)))


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    """Sums of 65,536 pairs, halfway cases, infinities and NaN among them: the same bits."""
    x = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    y = x.flatten()[torch.randperm(1 << 16)].view_as(x)
    _, total = small.native_add_rmsnorm(x, y, torch.ones(64).bfloat16(), 1e-5)
    torch.testing.assert_close(total, x + y, rtol=0, atol=0, equal_nan=True)


def test_silu_at_the_ends() -> None:
    gate = torch.tensor([-1e4, -100.0, -87.5, -20.0, -0.0, 0.0, 1e-30, 88.0, 1e4, torch.nan])
    x = torch.cat((gate, torch.ones(22)))
    got, expected = small.native_silu_and_mul(x), silu_and_mul(x)
    torch.testing.assert_close(got, expected, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (1, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("size", [16, 48, 64])
@pytest.mark.parametrize("n", [1, 3, 200])
def test_rope(n: int, size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    angles = torch.randn(50, size // 2)
    table, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.randint(0, 50, (n,))
    positions = positions.to(dtype)
    widths = [heads[0] * size, heads[1] * size, heads[1] * size]
    q, k, _ = torch.randn(n, sum(widths)).split(widths, -1)
    for given in ((q, k), [x.unflatten(1, (-1, size)) for x in (q, k)], (q.contiguous(), k)):
        expected = apply_rope_with_cos_sin_cache(positions, *given, size, table)
        got = small.native_rope(positions, *given, size, table)
        assert [y.shape for y in got] == [y.shape for y in expected]
        torch.testing.assert_close(got, expected, **CLOSE)
    turned = torch.randn(heads[0], n, size).transpose(0, 1)  # heads that lie apart
    expected = apply_rope_with_cos_sin_cache(positions, turned, k, size, table)
    got = small.native_rope(positions, turned, k, size, table)
    torch.testing.assert_close(got, expected, **CLOSE)
    q, k = q.bfloat16(), k.bfloat16()
    expected = apply_rope_with_cos_sin_cache(positions, q.float(), k.float(), size, table)
    got = small.native_rope(positions, q, k, size, table)
    for y, want in zip(got, expected, strict=True):
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), want, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_store(n: int, index: torch.dtype, dtype: torch.dtype) -> None:
    rows, slots = (50 * torch.randn(n, 100)).to(dtype), torch.randperm(12)[:n].to(index)
    k, v = rows[:, 10:34], rows[:, 40:64].unflatten(1, (3, 8))
    before = (50 * torch.randn(2, 12, 3, 8)).to(dtype)
    expected, got = before.clone(), before.clone()
    store_cache(*expected, slots, k, v)
    small.native_store_cache(*got, slots, k, v)
    assert torch.equal(got, expected)


def test_left_to_the_references() -> None:
    x, weight, odd = torch.randn(4, 16), torch.randn(16), torch.randn(4, 12)
    for given in (
        *((x.to(t), x.to(t), weight.to(t)) for t in (torch.float16, torch.float64)),
        (x, x.double(), weight),
        (x[:, :12], x[:, :12], weight[:12]),
        (odd, odd, odd[0]),
        torch.empty(3, 0).unbind(),
        (x, x, weight.bfloat16()),
        (x, x[:1], weight),
        (x, x[:3], weight),
        (x, x, weight[:1]),
        (x, x, weight[:3]),
        (x, x, torch.randn(32)),
    ):
        same_in_torch(small.native_add_rmsnorm, fused_add_rmsnorm, *given, 1e-5)
    for y in (x.half(), x.double(), odd, torch.randn(4, 24), x.t(), torch.randn(64, 4).t()):
        same_in_torch(small.native_silu_and_mul, silu_and_mul, y)
    out = torch.empty(4, 8)
    assert small.native_silu_and_mul(x, out=out) is out
    assert small.native_silu_and_mul(x.to("meta")).is_meta
    positions, table = torch.arange(4), torch.randn(4, 32)
    x = torch.randn(4, 32)
    for args in (
        (positions, x, x, 16, torch.randn(4, 16)),
        (positions, x, x, 8, torch.randn(4, 8)),
        (positions, x, x, 32, table.double()),
        (positions, x, x.bfloat16(), 32, table),
        (positions, x, x.t().contiguous().t(), 32, table),
        (positions[:3], x, x, 32, table),
        (positions.float(), x, x, 32, table),
        (positions, x, x, 32, torch.randn(4, 64)),
        (positions, x, x[:, :8].contiguous(), 32, table),
        (positions[:, None], x, x, 32, table),
        (positions, x[0], x, 32, table),
    ):
        same_in_torch(small.native_rope, apply_rope_with_cos_sin_cache, *args)


def test_slots_left_to_the_reference() -> None:
    slots, new = torch.arange(4), torch.randn(2, 4, 16)
    apart = new.transpose(1, 2).contiguous().transpose(1, 2)
    for changes in (
        {"indices": slots.short()},
        {"indices": slots[None]},
        {"indices": slots[:3]},
        {"indices": torch.arange(8)[::2]},
        {"indices": slots[0], "k": new[0, :1], "v": new[1, :1]},
        {"v": new[1].double()},
        {"v": new[1, :, :8]},
        {"k": new[0, :, :8], "v": new[1, :, :8]},
        {"k": apart[0], "v": apart[1]},
        {"v_cache": torch.zeros(5, 2, 8)},
        {"v_cache": torch.zeros(6, 2, 8).double()},
        {"k_cache": torch.zeros(2, 6, 8).transpose(0, 1)},
    ):

        def store(function: Callable[..., None], changes: dict[str, Any] = changes) -> Any:
            k_cache, v_cache = torch.zeros(2, 6, 2, 8)
            given = {"k_cache": k_cache, "v_cache": v_cache, "indices": slots}
            given |= {"k": new[0], "v": new[1], **changes}
            caches = given["k_cache"], given["v_cache"]
            for cache in caches:
                cache.zero_()
            function(*given.values())
            return [cache.clone() for cache in caches]

        same_in_torch(partial(store, small.native_store_cache), partial(store, store_cache))


@pytest.mark.parametrize("wrong", [-1, 6, 10**6])
def test_a_place_that_does_not_exist(wrong: int) -> None:
    """The same error as the reference's, and nothing is written."""
    places, x, table = torch.tensor([0, 1, wrong, 3]), torch.randn(4, 32), torch.randn(6, 32)
    rope = places, x, x, 32, table
    expected = outcome(apply_rope_with_cos_sin_cache, *rope)
    assert expected[0] is IndexError and outcome(small.native_rope, *rope) == expected
    (k, v), new = torch.zeros(2, 6, 2, 16), torch.randn(2, 4, 32)
    expected = outcome(store_cache, k.clone(), v.clone(), places, *new)
    assert expected[0] is IndexError
    assert outcome(small.native_store_cache, k, v, places, *new) == expected


# --- The table, and engines with it ---------------------------------------------------------------


@compiled
def test_names_of_tables() -> None:
    for name, chosen in (("auto", "native"), ("torch", "torch"), ("native", "native")):
        use_kernels(name)
        assert get_kernels().name == chosen
    with pytest.raises(ValueError, match="unknown kernels 'fast'; supported: torch, native"):
        use_kernels("fast")
    assert get_kernels().name == "native", "a refused name changes nothing"
    assert get_kernels().linear is native_linear


@compiled
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_tokens_with_either_table(name: str) -> None:
    folder = course.tiny(name)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected, logits = hf_tokens(hf, PROMPTS, 12), []
    for kernels in ("native", "torch"):
        with started(folder, kernels=kernels) as driver:
            assert get_kernels().name == kernels
            assert driver.run(PROMPTS, 12) == expected
        assert get_kernels().name == "torch"
        with started(folder, kernels=kernels, dtype=torch.bfloat16) as driver:
            assert [len(answer) for answer in driver.run(PROMPTS, 12)] == [12, 12, 12]
            logits.append(driver.logits([driver.admit(PROMPTS[1], 1)], "prefill").float())
    assert (logits[0] - logits[1]).norm() < 0.03 * logits[1].norm()


@compiled
def test_logits_of_the_default_model() -> None:
    folder = course.model()
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        reference = hf(torch.tensor([PROMPTS[1]])).logits[0, -1]
    expected = hf_tokens(hf, PROMPTS, 6)
    del hf
    with started(folder, kernels="native") as driver:
        assert driver.run(PROMPTS, 6) == expected
        logits = driver.logits([driver.admit(PROMPTS[1], 1)], "prefill")[0]
        assert float((logits - reference).abs().max()) < 1e-3


@compiled
def test_more_threads_than_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded passes keep one thread's plans; a prompt of 119 tokens once met another's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    prompts = [[7 * i % 200 for i in range(119)], [1, 2, 3]]
    with started(course.tiny("llama"), kernels="native") as driver:
        expected = driver.run(prompts, 8)
        torch.set_num_threads(4)
        assert driver.run(prompts, 8) == expected


@compiled
def test_the_table_after_failed_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = config_for(course.tiny("llama")), []

    def fail(*args: object) -> None:
        seen.append(get_kernels().name)
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_make_page_table", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            Engine(config)
    assert seen == ["native"] and get_kernels().name == "torch"
    engine = Engine(config)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        Engine(config)
    assert get_kernels().name == "native", "the first engine lives on"
    engine.shutdown()
    assert get_kernels().name == "torch"
