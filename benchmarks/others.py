"""llama.cpp and vLLM's CPU build on the prompts of `bench.py`, where they are installed.

    python -m benchmarks.others --batch 1 4 16

llama.cpp: `llama-batched-bench` has to be on the PATH, and LLAMA_GGUF to name a float32 GGUF of the
model (`convert_hf_to_gguf.py FOLDER --outtype f32`). vLLM: `import vllm` has to work.
What is missing is named and left out; nothing is installed by this.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from importlib.util import find_spec
from statistics import median

import torch

import course
from benchmarks.bench import make_prompts, ms, ragged, table
from minisgl.utils.device import physical_cores


def llama_cpp(batches: list[int], new: int, rounds: int) -> None:
    """Its own benchmark, which prints a table: prompt and decode speed for each batch size."""
    program, model = shutil.which("llama-batched-bench"), os.environ.get("LLAMA_GGUF")
    if program is None or model is None:
        print("llama.cpp: left out; llama-batched-bench is not on the PATH, or LLAMA_GGUF is unset")
        return
    sizes = ",".join(map(str, batches))
    command = [program, "-m", model, "-npp", "128", "-ntg", str(new), "-npl", sizes]
    command += ["-c", str(max(batches) * (128 + new)), "-t", str(physical_cores())]
    for _ in range(rounds):
        subprocess.run(command, check=True)


def vllm(batches: list[int], new: int, rounds: int) -> None:
    """Eager, float32: the time of `new` tokens less that of one, as seconds per decode step."""
    if find_spec("vllm") is None:
        print("vLLM: left out; `import vllm` does not work here")
        return
    from vllm import LLM, SamplingParams

    engine = LLM(course.model(), dtype="float32", enforce_eager=True, max_model_len=1024)
    rows = [["batch", "vLLM ms/step", "tokens/s"]]
    for batch in batches:
        prompts = [{"prompt_token_ids": ids} for ids in make_prompts(ragged(batch))]
        seconds: dict[int, list[float]] = {1: [], new: []}
        for i in range(rounds + 1):
            for n, found in seconds.items():
                params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
                start = time.perf_counter()
                engine.generate(prompts, params, use_tqdm=False)
                found.extend([time.perf_counter() - start] if i else [])
        step = (median(seconds[new]) - median(seconds[1])) / (new - 1)
        rows.append([str(batch), ms(step), f"{batch / step:.1f}"])
    table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{physical_cores()} cores, PyTorch {torch.__version__}")
    llama_cpp(args.batch, args.new, args.rounds)
    vllm(args.batch, args.new, args.rounds)


if __name__ == "__main__":
    main()
