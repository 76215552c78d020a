"""llama.cpp and vLLM's CPU build, each beside minisgl: the decode steps of `bench.py`, in float32.

    python -m benchmarks.others --gguf FILE --vllm PYTHON --batch 1 4 16

FILE is the model as a float32 GGUF, and `llama-batched-bench` is on the PATH, or --llama names it.
PYTHON is one that has vLLM. README.md in this folder says how to get both. What is missing is
named and left out; nothing is installed by this.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import mean, median

import torch

import course
from benchmarks.bench import ROOT, Ours, make_prompts, ms, ragged, table
from minisgl.utils.device import physical_cores

Run = Callable[[list[list[int]], int], tuple[list[list[int]], float]]
"""Prompts and a count to the tokens of each (none, if not told) and the seconds of a step."""


class LlamaCpp:
    """llama.cpp's own benchmark, a process for each run.

    It takes only the number and the average length of the prompts. All tokens are made up, those
    that follow, too: its step is the pass alone, without the choice of a token.
    """

    def __init__(self, program: str, gguf: str) -> None:
        self.command = [program, "-m", gguf, "--output-format", "jsonl"]
        self.command += ["-t", str(physical_cores())]

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
        batch, length = len(prompts), round(mean(map(len, prompts)))
        sizes = {"-npp": length, "-ntg": new, "-npl": batch, "-c": batch * (length + new)}
        command = self.command + [str(word) for pair in sizes.items() for word in pair]
        done = subprocess.run(command, capture_output=True, text=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or [(row["pl"], row["tg"]) for row in rows] != [(batch, new)]:
            said = f"ended with {done.returncode} and gave {rows}, not one row of {new} tokens"
            raise SystemExit(f"{' '.join(command)}\n{said}\n{done.stderr}")
        return [], rows[0]["t_tg"] / new


class VLLM:
    """vLLM in a process of its own, by the Python that has it; `serve` is the other end."""

    def __init__(self, python: str) -> None:
        env = {
            **os.environ,
            # The engine in that process itself: one that waits for another keeps a core busy.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or a core is kept free for the one that waits
            "OMP_NUM_THREADS": str(physical_cores()),
        }
        # Intel's OpenMP comes with it and has to be loaded first; 5 ms is what its workers get.
        intel = Path(python).parent.parent / "lib" / "libiomp5.so"
        if intel.is_file():
            env |= {"LD_PRELOAD": str(intel), "KMP_BLOCKTIME": "5"}
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.others", "--serve"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # then there is no answer, either
            print(json.dumps([prompts, new]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.log.seek(0)
            raise SystemExit(f"{self.log.read()}\nvLLM ended without an answer; see above")
        tokens, seconds = json.loads(answer)
        if [len(ids) for ids in tokens] != [new] * len(prompts):
            raise SystemExit(f"vLLM: expected {new} tokens for each prompt, but it gave {tokens}")
        return tokens, seconds

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.communicate()
        self.log.close()


def serve() -> None:
    """vLLM for another process: each line of the input asks for a `VLLM.run`, one answers it."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what else is printed is no answer
    from vllm import LLM, SamplingParams

    engine = LLM(
        course.model(),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,  # instead of nearly all memory of the machine
        enable_prefix_caching=False,  # the prompts are the same in each round
        enforce_eager=True,
        distributed_executor_backend="uni",
        disable_log_stats=False,  # the times are in them
    )
    for line in sys.stdin:
        prompts, new = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outs = engine.generate(inputs, params, use_tqdm=False)
        first = max(out.metrics.first_token_ts for out in outs)
        last = max(out.metrics.last_token_ts for out in outs)
        tokens = [list(out.outputs[0].token_ids) for out in outs]
        print(json.dumps([tokens, (last - first) / (new - 1)]), file=answers, flush=True)


def compare(name: str, theirs: Run, args: argparse.Namespace) -> None:
    """Medians over rounds in which the two take turns."""
    rows = [["batch", "ours ms/step", "tokens/s", f"{name} ms/step", "ratio", "tokens equal"]]
    ours = Ours(torch.float32, 16 * 256)
    for batch in args.batch:
        prompts = make_prompts(ragged(batch))
        ours.run(prompts, 4)
        theirs(prompts, 4)
        steps: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            a, seconds = ours.run(prompts, args.new)
            steps[0].append(mean(seconds[1:]))
            b, step = theirs(prompts, args.new)
            steps[1].append(step)
        mine, other = map(median, steps)
        equal = f"{sum(x == y for x, y in zip(a, b, strict=True))} of {batch}" if b else "—"
        row = [str(batch), ms(mine), f"{batch / mine:.1f}", ms(other), f"{other / mine:.2f}", equal]
        rows.append(row)
        print(f"  {name}, batch {batch}: {row[1:]}", file=sys.stderr, flush=True)
    ours.engine.shutdown()
    print(f"decode, float32, {args.new} new tokens, {args.rounds} rounds\n")
    table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", default="llama-batched-bench", help="llama.cpp's program")
    parser.add_argument("--gguf", default="", help="the model in float32, for llama.cpp")
    parser.add_argument("--vllm", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=64, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    torch.set_num_threads(physical_cores())
    print(f"{physical_cores()} threads, PyTorch {torch.__version__}\n")
    program = shutil.which(args.llama)
    if program is None:
        print(f"llama.cpp: left out; there is no program {args.llama} (--llama)\n")
    elif not Path(args.gguf).is_file():
        print(f"llama.cpp: left out; {args.gguf!r} is no file (--gguf)\n")
    else:
        compare("llama.cpp", LlamaCpp(program, args.gguf).run, args)
    look = "import sys, importlib.util as u; sys.exit(u.find_spec('vllm') is None)"
    if shutil.which(args.vllm) is None or subprocess.run([args.vllm, "-c", look]).returncode:
        print(f"vLLM: left out; {args.vllm} does not have it (--vllm)\n")
    else:
        engine = VLLM(args.vllm)
        compare("vLLM", engine.run, args)
        engine.close()


if __name__ == "__main__":
    main()
