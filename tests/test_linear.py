"""Operations in C: what they compute, and what happens where they can't run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hand_driven import compiled, config_for, hf_tokens, started
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import course
from benchmarks import bench
from minisgl.engine import Engine
from minisgl.engine import engine as engine_module
from minisgl.kernel import (
    apply_rope_with_cos_sin_cache,
    fused_add_rmsnorm,
    get_kernels,
    silu_and_mul,
    use_kernels,
)
from minisgl.kernel.cpu import attention, linear, small
from minisgl.kernel.cpu import compile as jit
from minisgl.kernel.cpu.attention import PagedDecodePlan
from minisgl.kernel.cpu.compile import Function, assemble, find_compiler, load_jit
from minisgl.kernel.cpu.linear import MOST_ROWS, native_linear
from minisgl.kernel.store import store_cache

DTYPES = (torch.float32, torch.bfloat16)
ROOT = Path(__file__).resolve().parent.parent


def forget_machine() -> None:
    for cached in (find_compiler, load_jit, linear._library, linear.has, small._functions):
        cached.cache_clear()
    attention.attend_functions.cache_clear()


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For patches of what exists: compilers are asked for again, also after it."""
    forget_machine()
    yield monkeypatch
    forget_machine()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiling module logs."""
    told: list[str] = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(jit.logger, level, lambda text, *args: told.append(text % args))
    return told


def runs_in_c(function: object, *given: object) -> bool:
    """Whether a call comes down to calls of C, which are not made while somebody listens."""
    Function.listening = []
    try:
        function(*given)  # type: ignore[operator]
        return bool(Function.listening)
    finally:
        Function.listening = None


# --- The product ----------------------------------------------------------------------------------

# Instruction sets that this processor may have besides all of its own: today's path of each.
WITHOUT = {
    "all": (),
    "no tiles": ("-mno-amx-bf16", "-mno-amx-tile"),
    "no bfloat16": ("-mno-amx-bf16", "-mno-amx-tile", "-mno-avx512bf16"),
    "eight lanes": ("-mno-amx-bf16", "-mno-amx-tile", "-mno-avx512bf16", "-mno-avx512f"),
}


@compiled
@pytest.mark.parametrize("lacks", WITHOUT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_against_float64(
    other_machine: pytest.MonkeyPatch, dtype: torch.dtype, lacks: str
) -> None:
    other_machine.setattr(jit, "FLAGS", (*jit.FLAGS, *WITHOUT[lacks]))
    if linear._library() is None:
        pytest.skip("this compiler doesn't know these options")
    if lacks != "all":
        assert not linear.has("tiles") and (lacks == "no tiles" or not linear.has("bfloat16"))
    torch.manual_seed(0)
    ulp = torch.finfo(dtype).eps
    for out, width in ((96, 64), (1, 64), (33, 32), (7, 576), (2048, 96), (64, 1536)):
        weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
        for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 48, 64):
            x = torch.randn(n, width).to(dtype)
            for b in (None, bias):
                wide = None if b is None else b.double()
                right = F.linear(x.double(), weight.double(), wide)
                size = F.linear(x.double().abs(), weight.double().abs())  # bounds the rounding
                off = (native_linear(x, weight, b).double() - right).abs()
                limit = width * 2.0**-23 * size + ulp * right.abs() + 1e-30
                assert (off <= limit).all(), (n, out, width, b is not None)


@compiled
def test_product_of_numbers_that_are_not_finite() -> None:
    for dtype in DTYPES:
        for n in (1, 8, 40):
            x, weight = torch.ones(n, 64).to(dtype), torch.ones(96, 64).to(dtype)
            weight[3, 5], weight[4, 6] = torch.nan, torch.inf
            y = native_linear(x, weight)
            assert y[:, 3].isnan().all() and (y[:, 4] == torch.inf).all()
            assert (y[:, 5:] == 64).all()


def test_the_rule() -> None:
    """In C up to MOST_ROWS rows of whole vectors; everything else as F.linear, errors too."""
    there = find_compiler() is not None
    weight, wide = torch.randn(96, 64), torch.randn(64, 128)
    for inside, *given in (
        (there, torch.randn(1, 64), weight),
        (there, torch.randn(MOST_ROWS, 64), weight),
        (there, torch.randn(9, 64).bfloat16(), weight.bfloat16(), torch.randn(96).bfloat16()),
        (False, torch.randn(MOST_ROWS + 1, 64), weight),
        (False, torch.randn(0, 64), weight),
        (False, torch.randn(2, 64).double(), weight.double()),
        (False, torch.randn(2, 64).half(), weight.half()),
        (False, torch.randn(2, 3, 64), weight),
        (False, torch.randn(64), weight),
        (False, torch.randn(2, 48), torch.randn(5, 48)),
        (False, wide[:3, ::2], weight),
        (False, wide[:, :64].t()[:3], weight),
        (False, torch.randn(2, 64), wide[:, ::2]),
        (False, torch.randn(2, 64), weight, torch.randn(192)[::2]),
        (False, torch.empty(2, 64, device="meta"), weight.to("meta")),
    ):
        assert runs_in_c(native_linear, *given) == inside
        if not inside and not given[0].is_meta:
            assert torch.equal(native_linear(*given), F.linear(*given))
    x, half = torch.ones(2, 64), torch.ones(96).bfloat16()
    for bad in ((x[:, :32], None), (x, torch.ones(95)), (x.bfloat16(), None), (x, half)):
        with pytest.raises(RuntimeError):
            native_linear(bad[0], weight, bad[1])


@compiled
def test_many_rows_of_bfloat16_without_instructions(other_machine: pytest.MonkeyPatch) -> None:
    """Then `F.linear` multiplies them in a slow loop; in float32 it doesn't."""
    other_machine.setattr(jit, "FLAGS", (*jit.FLAGS, *WITHOUT["no bfloat16"]))
    if linear._library() is None:
        pytest.skip("this compiler doesn't know these options")
    x, weight, bias = (torch.randn(s).bfloat16() for s in ((100, 64), (96, 64), (96,)))
    y = native_linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, F.linear(x.float(), weight.float(), bias.float()).bfloat16())


# --- Compiling ------------------------------------------------------------------------------------

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
def test_jit_says_none(
    other_machine: pytest.MonkeyPatch, log: list[str], tmp_path: Path, why: str
) -> None:
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    if why == "switched off":
        other_machine.setenv("MINISGL_JIT", "0")
    if why == "no compiler":
        other_machine.setenv("CC", "there-is-no-such-compiler")
    source = "int six(void) { return" if why.startswith("an") else SIX
    assert load_jit(source) is None and load_jit(source, six="") is None
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("tmp*"))
    if find_compiler() is None:
        assert len(log) == 1, "said once"
        assert ("MINISGL_JIT=0" if why == "switched off" else "no C compiler") in log[0]


def test_jit_survives_a_cache_that_cannot_be_written(
    other_machine: pytest.MonkeyPatch, log: list[str], tmp_path: Path
) -> None:
    (tmp_path / "minisgl").write_text("a file where the folder should be", encoding="utf-8")
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_jit(SIX) is None
    x, weight = torch.ones(1, 32), torch.ones(4, 32)
    assert torch.equal(native_linear(x, weight), F.linear(x, weight))
    assert small.native_silu_and_mul(x).shape == (1, 16)


@compiled
def test_an_error_in_c_names_the_line_of_the_python_file(
    other_machine: pytest.MonkeyPatch, log: list[str], tmp_path: Path
) -> None:
    package = tmp_path / "minisgl" / "kernel" / "cpu"
    package.mkdir(parents=True)
    good, bad = "\ntypedef TYPE kind_TYPE;\n", "\nint f_TYPE(void) {\n  return missing;\n}\n"
    text = f'"""A file."""\n\nGOOD_C = r"""{good}"""\nBAD_C = r"""{bad}"""\n'
    (package / "wrong.py").write_text(text, encoding="utf-8")
    line = text.splitlines().index("  return missing;") + 1
    assert load_jit(*jit.COMMON_C, good, bad, file=str(package / "wrong.py")) is None
    assert f"minisgl/kernel/cpu/wrong.py:{line}:" in "".join(log)
    for i, name in enumerate(("f_float", "f_bfloat16")):  # both copies, at the same line
        assert "".join(log).count(name) > 0, i


def test_lines_do_not_count_for_the_name_of_what_is_kept(tmp_path: Path) -> None:
    """Prose above a piece of C may change, and nothing is compiled again."""
    if (compiler := find_compiler()) is None:
        pytest.skip("no C compiler")
    names = [jit._compile(f'#line {n} "x.py"\n{SIX}', compiler, jit.FLAGS) for n in (1, 2)]
    assert names[0] == names[1]


def test_pieces_are_found_where_they_stand() -> None:
    """`#line` names the line on which the Python string begins."""
    lines = {
        "/".join(Path(str(m.__file__)).parts[-4:]): Path(str(m.__file__)).read_text("utf-8")
        for m in (jit, linear, small, attention)
    }
    for module in (linear, small, attention):
        for name in (name for name in vars(module) if name.endswith("_C") and name != "COMMON_C"):
            told = assemble([getattr(module, name)], str(module.__file__)).splitlines()
            for _, number, file in (line.split() for line in told if line.startswith("#line ")):
                line = lines[file.strip('"')].splitlines()[int(number) - 1]
                assert line.startswith(f"{name} = r"), (name, number, line)


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")
def test_clang_compiles_everything(other_machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other_machine.setenv("CC", "clang")
    other_machine.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert linear._library() is not None and small._functions() and attention.attend_functions()
    for dtype in DTYPES:
        for n in (1, 6, 16, 40):
            x, w = torch.randn(n, 64).to(dtype), torch.randn(70, 64).to(dtype)
            right = F.linear(x.float(), w.float())
            torch.testing.assert_close(native_linear(x, w).float(), right, atol=0.25, rtol=2e-2)
    with started(course.tiny("llama")) as driver:
        tokens = driver.run([[1, 2, 3], [4, 5]], 4)
    use_kernels("torch")
    with started(course.tiny("llama"), kernels="torch", attention_backend="torch") as driver:
        assert driver.run([[1, 2, 3], [4, 5]], 4) == tokens


def test_no_compiler_is_said_once_and_everything_runs() -> None:
    """In a process of its own, with and without `MINISGL_JIT`."""
    code = (
        "import torch, course\n"
        "from minisgl.distributed import DistributedInfo\n"
        "from minisgl.engine import Engine, EngineConfig\n"
        "from minisgl.kernel import get_kernels\n"
        "options = dict(device='cpu', num_page_override=64, max_running_req=2)\n"
        "for _ in range(2):\n"
        "    engine = Engine(EngineConfig(course.tiny('llama'), DistributedInfo(0, 1),\n"
        "                                 torch.float32, **options))\n"
        "    print(get_kernels().name, type(engine.attn_backend).__name__)\n"
        "    engine.shutdown()\n"
    )
    for change, said in ({"CC": "no-such-compiler"}, 1), ({"MINISGL_JIT": "0"}, 0):
        env = {**os.environ, "PYTHONPATH": str(ROOT), **change}
        env.pop("LOG_LEVEL", None)
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines() == ["torch TorchBackend"] * 2
        assert run.stderr.count("no C compiler") == said


# --- Engines --------------------------------------------------------------------------------------

PROMPTS = [[504, 3575, 282, 4649, 314], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [100]]


def test_tokens_of_every_table() -> None:
    """The default model with the operations of each name: always the tokens of transformers."""
    folder = course.model()
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = hf_tokens(hf, PROMPTS, 6)
    with torch.inference_mode():
        reference = hf(torch.tensor([PROMPTS[1]])).logits[0, -1]
    del hf
    for name in ("torch", "auto"):
        with started(folder, kernels=name) as driver:
            assert driver.run(PROMPTS, 6) == expected, name
            req = driver.admit(PROMPTS[1], 1)
            logits = driver.logits([req], "prefill")[0]
            assert float((logits - reference).abs().max()) < 1e-3


def test_memory_of_an_engine() -> None:
    """The engine holds each weight once: as many bytes as the checkpoint."""
    with started(course.model()) as driver:
        weights = driver.engine.model.state_dict().values()
        held = sum(w.untyped_storage().nbytes() for w in weights)
        assert held <= 1.02 * driver.engine.memory.model
        assert driver.run(PROMPTS[:1], 2)[0]


@compiled
@pytest.mark.parametrize("threads", [(1, 4), (3, 1)], ids=str)
def test_the_number_of_threads_may_change_after_the_start(threads: tuple[int, int]) -> None:
    """Plans at fixed addresses are made for the number that they were recorded with."""
    before, prompt = torch.get_num_threads(), [5 + i % 50 for i in range(119)]
    tiny = course.tiny("llama")
    try:
        torch.set_num_threads(threads[0])
        with started(tiny, num_page_override=400) as driver:
            torch.set_num_threads(threads[0])
            expected = driver.run([prompt, prompt[:3]], 5)
            torch.set_num_threads(threads[1])
            assert driver.run([prompt, prompt[:3]], 5) == expected
            assert driver.run([prompt], 5) == expected[:1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_table_lives_as_long_as_the_engine(name: str) -> None:
    assert get_kernels().name == "torch", "until somebody chooses"
    expected = "native" if name == "auto" and find_compiler() else "torch"
    with started(course.tiny("qwen3"), kernels=name) as driver:
        assert get_kernels().name == expected
        assert driver.run([[1, 2, 3]], 3)[0]
    assert get_kernels().name == "torch"


@compiled
def test_tables_after_failed_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = config_for(course.tiny("llama")), []

    def fail(*args: object) -> None:
        seen.append(get_kernels().name)
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "GraphRunner", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            Engine(config)
    assert seen == ["native"] and get_kernels().name == "torch"


@compiled
def test_the_profile_of_the_benchmarks_names_what_runs_in_c() -> None:
    """PyTorch's profiler sees its own operations only; without names, products took 0 %."""
    with bench.labeled(), started(course.tiny("qwen3"), cuda_graph_max_bs=0) as driver:
        with profile(activities=[ProfilerActivity.CPU]) as record:
            driver.run([[1, 2, 3]], 3)
        seen = {event.key for event in record.key_averages()}
    assert {"minisgl::linear", "minisgl::store_cache", "minisgl::add_rmsnorm"} <= seen
    assert {"minisgl::attend", "minisgl::silu_and_mul", "minisgl::rope"} <= seen


# --- Small operations -----------------------------------------------------------------------------

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# The references round each of their steps to bfloat16, C only the last.
NEAR = {torch.float32: CLOSE, torch.bfloat16: {"rtol": 0.02, "atol": 1e-2}}


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 64, 592])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (100,), (2, 5), (0,)], ids=str)
def test_norm_and_silu_in_c(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape, size).to(dtype)
    weight, gate_up = torch.randn(size).to(dtype), (20 * torch.randn(*shape, 2 * size)).to(dtype)
    kept = [t.clone() for t in (x, residual, gate_up)]
    expected = fused_add_rmsnorm(x, residual, weight, 1e-5), silu_and_mul(gate_up)
    got = small.native_add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(got[1], expected[0][1])
    torch.testing.assert_close(got[0], expected[0][0], **NEAR[dtype])
    torch.testing.assert_close(small.native_silu_and_mul(gate_up), expected[1], **NEAR[dtype])
    assert all(map(torch.equal, kept, (x, residual, gate_up)))


@compiled
def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    """Sums of 65,536 pairs, halfway cases, infinities and NaN among them: the same bits."""
    x = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    y = x.flatten()[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))].view_as(x)
    _, total = small.native_add_rmsnorm(x, y, torch.ones(64).bfloat16(), 1e-5)
    torch.testing.assert_close(total, x + y, rtol=0, atol=0, equal_nan=True)


@compiled
def test_silu_in_c_at_the_ends() -> None:
    gate = torch.tensor([-1e4, -100.0, -87.5, -20.0, -0.0, 0.0, 1e-30, 88.0, 1e4, torch.nan])
    gate = torch.cat((gate, torch.ones(6)))
    x = torch.cat((gate, torch.ones(16)))
    got, expected = small.native_silu_and_mul(x), silu_and_mul(x)
    torch.testing.assert_close(got, expected, equal_nan=True, **CLOSE)


@compiled
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (1, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("size", [32, 96, 64])
@pytest.mark.parametrize("n", [1, 3, 200])
def test_rope_in_c(n: int, size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    angles = torch.randn(50, size // 2)
    table, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.randint(0, 50, (n,))
    widths = [heads[0] * size, heads[1] * size, heads[1] * size]
    q, k, _ = torch.randn(n, sum(widths)).split(widths, -1)
    for given in ((q, k), [x.unflatten(1, (-1, size)) for x in (q, k)], (q.contiguous(), k)):
        expected = apply_rope_with_cos_sin_cache(positions.to(dtype), *given, size, table)
        got = small.native_rope(positions.to(dtype), *given, size, table)
        for y, want in zip(got, expected, strict=True):
            assert y.shape == want.shape
            torch.testing.assert_close(y, want, **CLOSE)
    turned = torch.randn(heads[0], n, size).transpose(0, 1)  # heads that lie apart
    expected = apply_rope_with_cos_sin_cache(positions, turned.contiguous(), k, size, table)
    got = small.native_rope(positions, turned, k, size, table)
    torch.testing.assert_close(got, expected, **CLOSE)
    q, k = q.bfloat16(), k.bfloat16()
    expected = apply_rope_with_cos_sin_cache(positions, q.float(), k.float(), size, table)
    got = small.native_rope(positions.to(dtype), q, k, size, table)
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
    assert small.native_store_cache(*got, slots, k, v) is None
    assert torch.equal(got, expected)
    repeated = torch.tensor([3, 3, 3], dtype=index)
    k, v = torch.arange(2 * 3 * 24).view(2, 3, 24).to(dtype)
    assert small.native_store_cache(*got, repeated, k, v) is None
    assert torch.equal(got[:, 3].flatten(1), torch.stack((k[2], v[2])))


def test_left_to_the_references() -> None:
    """What C was not written for gets the reference's result to the last bit, or its error."""
    x, weight = torch.randn(4, 32), torch.randn(32)
    pairs = {
        "norm": (small.native_add_rmsnorm, fused_add_rmsnorm),
        "silu": (small.native_silu_and_mul, silu_and_mul),
        "rope": (small.native_rope, apply_rope_with_cos_sin_cache),
    }
    positions, table, odd = torch.arange(4), torch.randn(4, 32), torch.randn(4, 24)
    gap = torch.randn(4, 64)[:, ::2]
    for name, *given in (
        ("norm", x.half(), x.half(), weight.half(), 1e-5),
        ("norm", x.double(), x.double(), weight.double(), 1e-5),
        ("norm", x, x.double(), weight, 1e-5),
        ("norm", odd, odd, odd[0], 1e-5),
        ("norm", x, x, weight.bfloat16(), 1e-5),
        ("norm", x, x[:1], weight, 1e-5),
        ("norm", gap, x, weight, 1e-5),
        ("silu", x.half()),
        ("silu", odd),
        ("silu", x.t()[:, :4]),
        ("silu", torch.randn(4, 48)),
        ("silu", gap),
        ("rope", positions, odd, odd, 24, torch.randn(4, 24)),
        ("rope", positions, x, x, 32, table.double()),
        ("rope", positions, x, x.bfloat16(), 32, table),
        ("rope", positions, x, x.t().contiguous().t(), 32, table),
    ):
        ours, reference = pairs[name]
        assert not runs_in_c(ours, *given), (name, [getattr(t, "shape", t) for t in given])
        try:
            want = reference(*given)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                ours(*given)
            continue
        got = ours(*given)
        both = zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True)
        assert all(torch.equal(a, b) for a, b in both)
    assert small.native_silu_and_mul(x.to("meta")).is_meta
    out = torch.empty(4, 16)
    assert small.native_silu_and_mul(x, out=out) is out
    torch.testing.assert_close(out, silu_and_mul(x.double()).float(), **CLOSE)
    for wrong in (positions + 1, positions - 5):
        with pytest.raises((IndexError, RuntimeError)):
            small.native_rope(wrong, x, x, 32, table)


def test_storing_left_to_the_reference() -> None:
    new, slots = torch.ones(2, 4, 16), torch.arange(4)
    for caches, indices, k, v in (
        (torch.zeros(2, 6, 2, 8), slots + 3, *new),
        (torch.zeros(2, 6, 2, 8), slots[:3], *new),
        (torch.zeros(2, 6, 2, 8), slots, new[0], new[1, :, :8]),
        (torch.zeros(2, 6, 2, 8), slots, new[0, :, :8], new[1, :, :8]),
        (torch.zeros(2, 6, 2, 8), slots, new[0].double(), new[1].double()),
    ):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            small.native_store_cache(*caches, indices, k, v)
    for indices in (torch.arange(8)[::2], slots.short(), slots[None]):
        caches, expected = torch.zeros(2, 2, 8, 2, 8)
        small.native_store_cache(*caches, indices, *new)
        store_cache(*expected, indices, *new)
        assert torch.equal(caches, expected) and caches.any()
    apart = torch.zeros(2, 12, 16)[:, ::2]
    small.native_store_cache(*apart, slots, *new)
    assert apart[:, :4].all() and not apart[:, 4:].any()


@compiled
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_defaults_of_torch_do_not_reach_c(default: torch.dtype | str) -> None:
    """Memory that C writes to is float32 on the CPU, whatever a new tensor is by default."""
    x, w, weight = torch.randn(40, 64), torch.randn(96, 64), torch.randn(64)
    q, k, v = torch.randn(2, 9, 64), torch.randn(20, 3, 64), torch.randn(20, 3, 64)
    table, page_table = torch.randn(50, 64), torch.arange(20, dtype=torch.int32).view(2, 10)
    positions = torch.tensor([3, 7])

    def results() -> list[torch.Tensor]:
        plan = PagedDecodePlan([10, 4], page_table, 9, 64, 2)
        return [
            native_linear(x[:2], w, None),
            native_linear(x, w, None),
            *small.native_add_rmsnorm(x, x, weight, 1e-5),
            small.native_silu_and_mul(x),
            *small.native_rope(positions, q, q, 64, table),
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
