"""minisgl beside `transformers.generate`, in one process, and both beside what the machine allows.

    python -m benchmarks.bench decode --batch 1 2 4 8 16 --dtype float32
    python -m benchmarks.bench prefill | pages | lengths | profile | start | limits

README.md in this folder says how each figure comes about and holds the table of one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or PyTorch's profiler talks on stderr

import torch  # noqa: E402
from torch.profiler import record_function  # noqa: E402

import course  # noqa: E402
from minisgl.distributed import DistributedInfo  # noqa: E402
from minisgl.engine import Engine, EngineConfig  # noqa: E402
from minisgl.kernel import SUPPORTED_KERNELS, Kernels  # noqa: E402
from minisgl.kernel.cpu.attention import PagedDecodePlan  # noqa: E402
from minisgl.kernel.table import create_torch_kernels  # noqa: E402
from minisgl.utils.device import physical_cores  # noqa: E402
from tests.hand_driven import Driver  # noqa: E402

# --- what is measured -----------------------------------------------------------------------------


def prose() -> str:
    """The text of the course's own chapters: real English, and the same for everybody."""
    cells = []
    for path in sorted((ROOT / "notebooks").glob("0*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells += ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown"]
    return "\n\n".join(cells)


def make_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """One prompt of each length, cut from different places of the prose."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(course.model()).encode(prose()[:200_000])
    stride = (len(ids) - max(lengths)) // len(lengths)
    return [ids[i * stride : i * stride + n] for i, n in enumerate(lengths)]


def ragged(batch: int, mean: int = 128) -> list[int]:
    """`batch` lengths between 3/4 and 5/4 of `mean`, which is their average."""
    if batch == 1:
        return [mean]
    return [round(mean * (0.75 + 0.5 * i / (batch - 1))) for i in range(batch)]


class Ours:
    """A hand-driven engine: the loop of chapter 06 and the milestone, which the tests use, too."""

    def __init__(
        self,
        dtype: torch.dtype,
        slots: int,
        page_size: int = 1,
        record: bool = True,
        kernels: str = "auto",
    ) -> None:
        config = EngineConfig(
            course.model(),
            DistributedInfo(0, 1),
            dtype,
            device="cpu",
            max_running_req=16,
            page_size=page_size,
            num_page_override=max(2, -(-slots // page_size)),
            cuda_graph_max_bs=None if record else 0,
            kernels=kernels,
            attention_backend="torch" if kernels == "torch" else "auto",
        )
        self.engine = Engine(config)
        self.driver = Driver(self.engine)

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[float]]:
        """The new tokens of each prompt, and the seconds of each pass, the prefill first."""
        marks = [time.perf_counter()]
        reqs = [self.driver.admit(ids, new) for ids in prompts]
        for i in range(new):
            self.driver.step(reqs, "decode" if i else "prefill")
            marks.append(time.perf_counter())
        for req in reqs:
            self.driver.finish(req)
        return [req.input_ids[-new:].tolist() for req in reqs], [b - a for a, b in pairwise(marks)]


class Theirs:
    """`transformers.generate` with its defaults, greedy; a batch is padded on the left."""

    def __init__(self, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(course.model(), dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[float]]:
        """As `Ours.run`: a stopping criterion that never stops takes the time after each pass."""
        longest = max(len(ids) for ids in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        marks = [time.perf_counter()]

        def watch(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            marks.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[watch],
            )
        return out[:, longest:].tolist(), [b - a for a, b in pairwise(marks)]


# --- what the machine allows ----------------------------------------------------------------------


def best_of(run: Callable[[], Any], times: int = 5) -> float:
    """The shortest of a few runs, in seconds: nothing can be faster than it is."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def bandwidth(buffer: torch.Tensor) -> float:
    """Bytes per second at which PyTorch reads memory: the fastest of three ways of reading once."""
    flat = buffer.view(-1)
    ways = (flat.sum, flat.amax, lambda: torch.dot(flat, flat))
    return flat.nbytes / min(best_of(way, 3) for way in ways)


def arithmetic(dtype: torch.dtype, n: int = 1536) -> float:
    """Operations per second in a product of square matrices: as many as PyTorch gets."""
    a = torch.randn(n, n).to(dtype)
    return 2 * n**3 / best_of(lambda: a @ a, 3)


class Limits:
    """Bandwidth and arithmetic of this machine, and the shortest step that they allow."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.bandwidth = bandwidth(torch.ones(128 << 20))  # 512 MiB, far more than any cache
        self.arithmetic = max(arithmetic(torch.float32), arithmetic(dtype))

    def step(self, engine: Engine, lengths: Sequence[int]) -> tuple[float, float]:
        """Seconds to read what a decode step must read, and to do the arithmetic of its weights."""
        read = engine.memory.model + sum(lengths) * engine.memory.bytes_per_page
        weights = engine.memory.model // engine.dtype.itemsize  # the tied table is used once
        return read / self.bandwidth, 2 * weights * len(lengths) / self.arithmetic

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.1f} GB/s, {self.arithmetic / 1e9:.0f} GFLOP/s"


# --- the tables -----------------------------------------------------------------------------------


def table(rows: list[list[str]]) -> None:
    """Print rows as a Markdown table."""
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows[1:]:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def decode(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Decode: medians over rounds in which the two take turns."""
    rows = [
        ["batch", "ours ms/step", "tokens/s", "transformers ms/step", "ratio"]
        + ["read bound ms", "of it", "arithmetic bound ms", "tokens equal"]
    ]
    ours = Ours(dtype, 16 * 256, kernels=args.kernels)
    theirs = None if args.alone else Theirs(dtype)
    for batch in args.batch:
        prompts = make_prompts(ragged(batch))
        limits = Limits(dtype)
        steps: dict[str, list[float]] = {"ours": [], "theirs": []}
        a, _ = ours.run(prompts, 4)
        for _ in range(args.rounds):
            a, seconds = ours.run(prompts, args.new)
            steps["ours"].append(statistics.mean(seconds[1:]))
            if theirs is not None:
                b, seconds = theirs.run(prompts, args.new)
                steps["theirs"].append(statistics.mean(seconds[1:]))
        mine = statistics.median(steps["ours"])
        lengths = [len(p) + args.new // 2 for p in prompts]
        read, compute = limits.step(ours.engine, lengths)
        row = [str(batch), ms(mine), f"{batch / mine:.1f}"]
        if theirs is not None:
            other = statistics.median(steps["theirs"])
            equal = sum(x == y for x, y in zip(a, b, strict=True))
            row += [ms(other), f"{other / mine:.2f}", ms(read), f"{read / mine:.0%}"]
            row += [ms(compute), f"{equal} of {batch}"]
        else:
            row += ["", "", ms(read), f"{read / mine:.0%}", ms(compute), ""]
        rows.append(row)
        print(f"  batch {batch}: {row[1:]} at {limits}", file=sys.stderr, flush=True)
    ours.engine.shutdown()
    print(f"decode, {dtype}, {args.new} new tokens, {args.rounds} rounds, limits {limits}\n")
    table(rows)


def prefill(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Prefill of one prompt: medians over rounds in which the two take turns."""
    rows = [["tokens", "ours ms", "transformers ms", "ratio", "arithmetic bound ms"]]
    ours, theirs, limits = Ours(dtype, 2048, kernels=args.kernels), Theirs(dtype), Limits(dtype)
    layers = sum(w.numel() for n, w in ours.engine.model.state_dict().items() if "layers." in n)
    for n in args.tokens:
        prompts = make_prompts([n])
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(args.rounds + 1):
            for one, other in zip(times, (ours, theirs), strict=True):
                seconds = other.run(prompts, 1)[1][0]
                one.extend([seconds] if i else [])
        a, b = (statistics.median(t) for t in times)
        bound = 2 * layers * n / limits.arithmetic
        rows.append([str(n), ms(a), ms(b), f"{b / a:.2f}", ms(bound)])
    ours.engine.shutdown()
    print(f"prefill, {dtype}, {args.rounds} rounds, limits {limits}\n")
    table(rows)


def pages(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Page size 1 and 16, taking turns at the same batch."""
    rows = [["batch", "page size 1, ms/step", "page size 16, ms/step", "ratio"]]
    for batch in args.batch:
        prompts = make_prompts(ragged(batch))
        steps: dict[int, list[float]] = {1: [], 16: []}
        for _ in range(args.rounds):
            for size in steps:
                ours = Ours(dtype, 16 * 256, size, kernels=args.kernels)
                ours.run(prompts, 2)
                steps[size].append(statistics.median(ours.run(prompts, 16)[1][1:]))
                ours.engine.shutdown()
        one, sixteen = (statistics.median(s) for s in steps.values())
        rows.append([str(batch), ms(one), ms(sixteen), f"{sixteen / one:.3f}"])
    print(f"page sizes, {dtype}, {args.rounds} rounds\n")
    table(rows)


def lengths(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """The cost of a step against the tokens cached, up to a full pool."""
    rows = [["tokens cached", "ms/step", "read bound ms"]]
    limits, ours = Limits(dtype), Ours(dtype, 16 * 1040, kernels=args.kernels)
    for total in (256, 2048, 4096, 8192, 16_384):
        prompts = make_prompts([total // 16] * 16)
        step = statistics.median(ours.run(prompts, 8)[1][1:])
        read, _ = limits.step(ours.engine, [len(p) + 4 for p in prompts])
        rows.append([str(total), ms(step), ms(read)])
    ours.engine.shutdown()
    print(f"cost of a step of 16 requests, {dtype}\n")
    table(rows)


KINDS = {  # by parts of an operation's name
    "products": (
        "minisgl::linear",
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "mkldnn::",
        "aten::mv",
        "aten::bmm",
    ),
    "attention": (
        "minisgl::attend",
        "sampled_addmm",
        "embedding_bag",
        "attention",
        "softmax",
        "index_copy",
    ),
}


def label(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, whose calls a profiler that is running sees as `minisgl::NAME`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"minisgl::{name}"):
            return function(*args, **kwargs)

    return call


@SUPPORTED_KERNELS.register("labeled")
def create_labeled_kernels() -> Kernels:
    """The table "auto", by names that a profiler sees: what runs in C has none of its own."""
    native = SUPPORTED_KERNELS["native"]() if "native" in SUPPORTED_KERNELS else None
    chosen = native or create_torch_kernels()
    operations = ("linear", "add_rmsnorm", "silu_and_mul", "rope", "store_cache")
    return chosen._replace(**{n: label(getattr(chosen, n), n) for n in operations})


@contextmanager
def labeled() -> Iterator[None]:
    """Show a profiler decode attention in C as well."""
    attend = label(PagedDecodePlan.attend, "attend")
    with patch.object(PagedDecodePlan, "attend", attend):
        yield


def profile(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Where the time of a decode step goes, by kind of operation, and the longest operations.

    Python's time within a product or an attention counts as theirs; the rest is between operations.
    Nothing is recorded here: a replay has no operations that a profiler could name.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    ours = Ours(dtype, 16 * 256, record=False, kernels="labeled")
    for batch in args.batch:
        prompts, count = make_prompts(ragged(batch)), 8
        ours.run(prompts, 4)
        plain = statistics.median(ours.run(prompts, count + 1)[1][1:])
        reqs = [ours.driver.admit(ids, count + 1) for ids in prompts]
        ours.driver.step(reqs, "prefill")
        with labeled(), profiler(activities=[ProfilerActivity.CPU]) as record:
            begin = time.perf_counter()
            for _ in range(count):
                ours.driver.step(reqs, "decode")
            whole = 1e6 * (time.perf_counter() - begin)
        for req in reqs:
            ours.driver.finish(req)
        events = record.key_averages()
        spent = dict.fromkeys([*KINDS, "small operations"], 0.0)
        for e in events:
            kind = next((k for k, names in KINDS.items() if any(n in e.key for n in names)), None)
            spent[kind or "small operations"] += e.self_cpu_time_total
        spent["between operations"] = whole - sum(spent.values())
        calls = sum(e.count for e in events) // count
        print(f"batch {batch}: {ms(plain)} ms/step, {calls} operations a step; under the profiler:")
        table([[*spent], [f"{v / whole:.0%} ({v / count / 1000:.1f} ms)" for v in spent.values()]])
        longest = sorted(events, key=lambda e: -e.self_cpu_time_total)[: args.top]
        table(
            [["operation", "calls a step", "ms a step"]]
            + [
                [e.key, f"{e.count / count:g}", f"{e.self_cpu_time_total / count / 1000:.2f}"]
                for e in longest
            ]
        )
    ours.engine.shutdown()


# What a new process does for `start`; prints what it measured as JSON.
_START = """
import json, sys, time
begin = time.perf_counter()
import torch, psutil
sys.path.insert(0, {root!r})
from transformers import AutoModelForCausalLM, AutoConfig
from benchmarks import bench
if {warm}:  # import what both import as they load: code is not what a model takes
    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(bench.course.model()))]
imported = time.perf_counter()
def anonymous():
    full = psutil.Process().memory_full_info()
    return getattr(full, "uss", full.rss)
before = anonymous()
dtype = getattr(torch, {dtype!r})
which = (bench.Ours(dtype, 2048) if {ours} else bench.Theirs(dtype))
ready, after = time.perf_counter(), anonymous()
prompt = bench.make_prompts([128])
start = time.perf_counter()
which.run(prompt, 1)
first = time.perf_counter() - start
which.run(prompt, 8)
pool = which.engine.kv_cache._kv_buffer.nbytes if {ours} else 0
import resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(dict(load=ready - imported, first=ready - begin + first, memory=after - before,
                      later=anonymous() - before, peak=peak, pool=pool)))
"""


def _started(ours: bool, dtype: str, warm: bool) -> dict[str, float]:
    """What a new process measures; `warm`: its memory is counted from when all code is there."""
    code = _START.format(root=str(ROOT), dtype=dtype, ours=ours, warm=warm)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def start(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """From a new process to the first token, and from another one what lies in memory then."""
    found: dict[str, list[dict[str, float]]] = {"minisgl": [], "transformers": []}
    name = str(dtype).removeprefix("torch.")
    for _ in range(args.rounds):
        for which, results in found.items():
            cold, warm = (_started(which == "minisgl", name, warm) for warm in (False, True))
            results.append({**warm, "load": cold["load"], "first": cold["first"]})
    files = Path(course.model()).glob("*.safetensors")
    checkpoint = sum(path.stat().st_size for path in files) * dtype.itemsize / 4
    rows = [
        ["", "load s", "process start to first token s", "memory after loading MB"]
        + ["÷ checkpoint", "after 8 steps MB", "peak MB"]
    ]
    for which, results in found.items():
        m = {key: statistics.median(r[key] for r in results) for key in results[0]}
        held = m["memory"]
        rows.append(
            [which, f"{m['load']:.2f}", f"{m['first']:.2f}", f"{held / 1e6:.0f}"]
            + [f"{held / checkpoint:.2f}", f"{(m['later'] - m['pool']) / 1e6:.0f}"]
            + [f"{m['peak'] / 1e6:.0f}"]
        )
    print(f"start, {name}, medians of {args.rounds}; the KV pool is not counted after 8 steps\n")
    table(rows)


def limits(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Only what the machine allows."""
    print(dtype, Limits(dtype))


COMMANDS = {f.__name__: f for f in (decode, prefill, pages, lengths, profile, start, limits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=[*COMMANDS, "all"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--new", type=int, default=64, help="tokens per request (decode)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=16, help="operations to list (profile)")
    parser.add_argument("--alone", action="store_true", help="without transformers (decode)")
    parser.add_argument("--kernels", default="auto", help="the operations: auto, torch, native")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    args = parser.parse_args()
    course.model()
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(physical_cores())
    print(
        f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}, kernels {args.kernels}\n"
    )
    for name in args.dtype:
        for command in COMMANDS if args.command == "all" else [args.command]:
            COMMANDS[command](args, getattr(torch, name))


if __name__ == "__main__":
    main()
