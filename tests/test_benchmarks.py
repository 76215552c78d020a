"""`benchmarks/others.py` with stand-ins for the two programs that it measures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hand_driven import compiled, started
from torch.profiler import ProfilerActivity, profile

import course
from benchmarks import bench, others
from minisgl.utils.device import physical_cores

BENCH = f"""#!{sys.executable}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
batch, new = int(options["-npl"]), int(options["-ntg"])
print("what else it has to say")
if options["-m"] == "good":
    cores, room = {physical_cores()}, int(options["-c"]) == batch * (int(options["-npp"]) + new)
    assert room and int(options["-t"]) == cores and options["--output-format"] == "jsonl"
    print(json.dumps({{"pl": batch, "tg": new, "t_tg": 0.5 * new}}))
"""

ENGINE = """
from types import SimpleNamespace as Some

print("what else it has to say")

class SamplingParams(Some):
    pass

class LLM:
    def __init__(self, model, **options):
        assert options["dtype"] == "float32" and not options["enable_prefix_caching"]

    def generate(self, prompts, params, use_tqdm):
        outs = []
        for i, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            tokens = (ids * params.max_tokens)[: params.max_tokens - (ids[0] == 13)]
            times = Some(first_token_ts=i, last_token_ts=len(prompts) - 1 + params.max_tokens)
            outs.append(Some(outputs=[Some(token_ids=tokens)], metrics=times))
        return outs
"""


def test_llama_cpp_is_asked_for_the_right_sizes_and_its_row_is_read(tmp_path: Path) -> None:
    program = tmp_path / "llama-batched-bench"
    program.write_text(BENCH, encoding="utf-8")
    program.chmod(0o755)
    prompts = [[1] * 3, [1] * 5]
    assert others.LlamaCpp(str(program), "good").run(prompts, 8) == ([], 0.5)
    with pytest.raises(SystemExit, match="not one row of 8 tokens"):
        others.LlamaCpp(str(program), "silent").run(prompts, 8)


def test_vllm_answers_from_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MINISGL_MODEL", course.tiny("qwen3"))
    engine = others.VLLM(sys.executable)
    try:
        assert engine.run([[7], [8, 9]], 5) == ([[7] * 5, [8, 9, 8, 9, 8]], 5 / 4)
        assert engine.run([[7]], 3) == ([[7] * 3], 3 / 2)
        with pytest.raises(SystemExit, match="expected 3 tokens"):
            engine.run([[13]], 3)
        with pytest.raises(SystemExit, match="IndexError"):  # what it said before it ended
            engine.run([[]], 3)
    finally:
        engine.close()


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["others", "--llama", "no-llama", "--vllm", "no-python"])
    others.main()
    said = capsys.readouterr().out
    assert "llama.cpp: left out; there is no program no-llama" in said
    assert "vLLM: left out; no-python does not have it" in said


@compiled
def test_the_profile_names_what_runs_in_c() -> None:
    """PyTorch's profiler sees its own operations only; without names, products took 0 %."""
    options = {"cuda_graph_max_bs": 0, "kernels": "labeled"}
    with started(course.tiny("qwen3"), **options) as driver, bench.labeled():
        with profile(activities=[ProfilerActivity.CPU]) as record:
            driver.run([[1, 2, 3]], 3)
        seen = {event.key for event in record.key_averages()}
    assert {"minisgl::linear", "minisgl::attend", "minisgl::store_cache"} <= seen
