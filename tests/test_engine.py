"""The engine: agreement with `transformers`, memory, limits, and what it leaves behind."""

from __future__ import annotations

import gc
import io
import json
import os
import platform
import socket
import subprocess
import sys
import warnings
import weakref
from contextlib import redirect_stderr
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hand_driven import Driver, compiled, config_for, hf_tokens, started

from course import checkpoints
from minisgl import core
from minisgl.core import Batch, SamplingParams, get_global_ctx
from minisgl.distributed import DistributedInfo, set_tp_info, try_get_tp_info
from minisgl.engine import Engine, EngineConfig
from minisgl.engine import engine as engine_module
from minisgl.engine.config import check_ranks
from minisgl.engine.engine import bytes_per_page, plan_memory, require_two_pages
from minisgl.engine.graph import GraphCaptureBuffer, _determine_cuda_graph_bs
from minisgl.kernel import SUPPORTED_KERNELS, get_kernels
from minisgl.layers import rotary
from minisgl.models.decoder import LlamaForCausalLM
from minisgl.moe import SUPPORTED_MOE_BACKENDS, create_moe_backend
from minisgl.utils import device as device_module
from minisgl.utils.device import (
    NullEvent,
    NullStream,
    get_free_memory,
    make_device_tensor,
    make_event,
    make_stream,
    physical_cores,
    pin,
    release_freed_memory,
    resolve_device,
    use_stream,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    checkpoints.quiet()


def tiny(name: str = "llama", **options: Any) -> str:
    return str(checkpoints.tiny(name, **options))


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 200, (n,), generator=generator).tolist() for n in lengths]


def reference(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


# --- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", checkpoints.TINY_NAMES)
def test_same_tokens_as_transformers_at_every_page_size(name: str) -> None:
    path, prompts = tiny(name), prompts_of(5, 17, 1, 33)
    model = reference(path)
    expected = hf_tokens(model, prompts, 8)
    for page_size in (1, 4, 16):
        with started(path, page_size=page_size) as driver:
            assert driver.run(prompts, 8) == expected
            assert [driver.run([ids], 8)[0] for ids in prompts] == expected
            driver.pages.check_integrity()
            assert len(driver.pages.free_pages) == driver.engine.num_pages
            reqs = [driver.admit(ids, 1) for ids in prompts]
            ours = driver.logits(reqs, "prefill")
            with torch.inference_mode():
                theirs = [model(torch.tensor([ids])).logits[0, -1] for ids in prompts]
            assert (ours - torch.stack(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_prefix_that_another_row_has_cached(name: str, page_size: int) -> None:
    first, tail = prompts_of(12, 7, seed=3)
    prompt = first[:8] + tail
    with started(tiny(name), page_size=page_size) as driver:
        expected = driver.run([prompt], 6)
        owner = driver.admit(first, 6)
        driver.step([owner], "prefill")
        req = driver.admit(prompt, 6, shared=(owner, 8))
        batch = driver.batch([req], "prefill")
        assert batch.positions.tolist() == list(range(8, 15))
        driver.engine.forward_batch(batch, driver.engine.sampler.prepare(batch))
        assert (req.cached_len, req.device_len) == (15, 16)
    with started(tiny(name), page_size=page_size) as driver:
        owner = driver.admit(first, 6)
        driver.step([owner], "prefill")
        req = driver.admit(prompt, 6, shared=(owner, 8))
        other = driver.admit(tail, 6)  # a hit and a miss in one batch
        driver.step([req, other], "prefill")
        while req.can_decode:
            driver.step([owner, req, other] if owner.can_decode else [req, other], "decode")
        assert req.input_ids[-6:].tolist() == expected[0]
        for each in (req, other, owner):
            driver.finish(each)
        driver.pages.check_integrity()


def test_positions_grow_by_one() -> None:
    with started(tiny()) as driver:
        req, phase, seen = driver.admit(prompts_of(6)[0], 5), "prefill", []
        while req.can_decode:
            batch = driver.batch([req], phase)
            seen += batch.positions.tolist()
            out = driver.engine.forward_batch(batch, driver.engine.sampler.prepare(batch))
            driver.table.token_pool[req.table_idx, req.device_len - 1] = out.next_tokens_gpu[0]
            phase = "decode"
        assert seen == list(range(10))


@pytest.mark.parametrize("page_size", [1, 4])
def test_dummy_requests_change_nothing(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(5, 9, 2)
    with started(tiny(), page_size=page_size) as driver:
        expected = driver.run(prompts, 6)
        runner, dummy = driver.engine.graph_runner, driver.engine.dummy_req
        dummy_slot = driver.engine.num_pages * page_size
        assert set(driver.engine.page_table[dummy.table_idx].tolist()) == {dummy_slot}

        def pad(batch: Batch) -> None:
            batch.padded_reqs = batch.reqs + [dummy] * (2 if batch.is_decode else 0)

        monkeypatch.setattr(runner, "pad_batch", pad)
        assert driver.run(prompts, 6) == expected
        assert (dummy.cached_len, dummy.device_len) == (0, 1)


def test_sampled_and_greedy_requests_in_one_batch() -> None:
    prompts = prompts_of(4, 8, 6)
    hot = SamplingParams(temperature=1.0, top_k=20, top_p=0.9)
    with started(tiny()) as driver:
        alone = driver.run([prompts[1]], 6)[0]
        torch.manual_seed(0)
        mixed = driver.run(prompts, 6, [hot, SamplingParams(), hot])
        assert mixed[1] == alone
        torch.manual_seed(0)
        assert driver.run(prompts, 6, [hot, SamplingParams(), hot]) == mixed


def test_what_a_pass_returns() -> None:
    with started(tiny()) as driver:
        reqs = [driver.admit(ids, 2) for ids in prompts_of(3, 4)]
        batch = driver.batch(reqs, "prefill")
        out = driver.engine.forward_batch(batch, driver.engine.sampler.prepare(batch))
        assert out.next_tokens_gpu.dtype == torch.int32 and out.next_tokens_gpu.shape == (2,)
        assert torch.equal(out.next_tokens_gpu, out.next_tokens_cpu)
        assert out.copy_done_event.query()


def test_lengths_move_on_before_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tiny()) as driver:
        req = driver.admit(prompts_of(6)[0], 2)
        seen = []

        def sample(logits: torch.Tensor, args: object) -> torch.Tensor:
            seen.append((req.cached_len, req.device_len))
            return logits.argmax(-1)

        monkeypatch.setattr(driver.engine.sampler, "sample", sample)
        driver.step([req], "prefill")
        assert seen == [(6, 7)]


def test_bfloat16_runs() -> None:
    """Tokens are not compared: in bfloat16 a batch of another size may round to another token."""
    with started(tiny("qwen3"), dtype=torch.bfloat16) as driver:
        assert driver.engine.kv_cache.dtype == torch.bfloat16
        assert [len(tokens) for tokens in driver.run(prompts_of(7, 3), 5)] == [5, 5]


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    config = Path(tiny("qwen2"), "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    answers = []
    for _ in range(2):
        torch.manual_seed(len(answers))  # the weights do not depend on it, nor change it
        state = torch.get_rng_state()
        with started(str(tmp_path), use_dummy_weight=True) as driver:
            assert torch.equal(torch.get_rng_state(), state)
            answers.append(driver.run(prompts_of(5), 4))
    assert answers[0] == answers[1]


# --- memory ---------------------------------------------------------------------------------------


class Shape:
    """A model config with nothing but what the plan reads: Qwen3-0.6B's."""

    num_layers, num_kv_heads, head_dim = 28, 8, 128


def plan_config(**changes: Any) -> EngineConfig:
    given = {"dtype": torch.bfloat16, "tp_info": DistributedInfo(0, 1), **changes}
    config = EngineConfig("nowhere", **given)
    config.__dict__["model_config"] = Shape()
    return config


def test_the_plan_for_a_24_gb_card() -> None:
    plan = plan_memory(plan_config(), 24 * 10**9, 1_200_000_000)
    assert plan.bytes_per_page == 112 * 1024
    assert plan.budget == 21_600_000_000 - 1_200_000_000
    assert plan.num_pages == plan.budget // 114_688 == 177_873
    sixteen = plan_memory(plan_config(page_size=16), 24 * 10**9, 1_200_000_000)
    assert sixteen.num_pages == plan.num_pages // 16
    two_ranks = plan_config(tp_info=DistributedInfo(1, 2))
    assert bytes_per_page(two_ranks) == 56 * 1024


def test_the_pool_is_capped_on_a_cpu() -> None:
    capped = plan_memory(plan_config(), 24 * 10**9, 0, pool_limit=2 << 30)
    assert capped.num_pages == (2 << 30) // 114_688
    small = plan_memory(plan_config(), 10**9, 0, pool_limit=2 << 30)
    assert small.num_pages == 900_000_000 // 114_688
    with started(tiny(), num_page_override=None, cpu_kv_cache_bytes=1 << 20) as driver:
        assert driver.engine.num_pages == (1 << 20) // bytes_per_page(driver.engine.config)
        assert driver.engine.memory.model == sum(
            weight.nbytes for weight in driver.engine.model.state_dict().values()
        )


def test_too_little_memory_says_what_to_change() -> None:
    for free, model, cap in ((200_000, 0, None), (10**9, 10**9, None), (10**9, 0, 200_000)):
        with pytest.raises(ValueError, match=r"two pages.*memory_ratio.*dtype"):
            require_two_pages(plan_memory(plan_config(), free, model, cap), plan_config())
    require_two_pages(plan_memory(plan_config(num_page_override=2), 0, 0), plan_config())
    with pytest.raises(ValueError, match="cpu_kv_cache_bytes"):
        Engine(config_for(tiny(), num_page_override=None, cpu_kv_cache_bytes=1000))
    serves_a_request()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_page_override": 1}, "num_page_override must be at least 2, got 1"),
        ({"num_page_override": -3}, "num_page_override must be at least 2"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"max_running_req": 0}, "max_running_req"),
        ({"max_seq_len_override": 0}, "max_seq_len_override"),
        ({"memory_ratio": 1.5}, "memory_ratio"),
        ({"memory_ratio": 0.0}, "memory_ratio"),
        ({"dtype": torch.int32}, "floating-point"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_for(tiny(), **changes)


def test_the_config() -> None:
    config = EngineConfig(tiny("qwen3"), DistributedInfo(0, 1), torch.float32)
    defaults = (config.device, config.max_running_req, config.attention_backend, config.page_size)
    assert defaults == ("auto", 256, "auto", 1)
    assert (config.memory_ratio, config.cpu_kv_cache_bytes) == (0.9, 2 << 30)
    assert (config.distributed_addr, config.distributed_timeout) == ("tcp://127.0.0.1:2333", 60.0)
    assert config.max_seq_len == config.max_forward_len == 512
    assert config.model_config is config.model_config and config.model_config.has_qk_norm
    with pytest.raises(FrozenInstanceError):
        config.page_size = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="512 positions"):
        _ = config_for(tiny(), max_seq_len_override=513).max_seq_len


# --- limits ---------------------------------------------------------------------------------------


def serves_a_request(driver: Driver | None = None) -> None:
    if driver is None:
        with started(tiny()) as driver:
            serves_a_request(driver)
        return
    assert len(driver.run(prompts_of(4), 3)[0]) == 3
    driver.pages.check_integrity()
    assert len(driver.pages.free_pages) == driver.engine.num_pages


def test_the_longest_prompts() -> None:
    with started(tiny(), max_seq_len_override=40, num_page_override=100) as driver:
        assert driver.engine.max_seq_len == 40
        assert driver.engine.page_table.shape == (9, 64)
        for n in (39, 40, 41):
            (ids,) = prompts_of(n)
            if n == 39:
                assert len(driver.run([ids], 1)[0]) == 1
                continue
            with pytest.raises(ValueError, match="max_seq_len is 40"):
                driver.admit(ids, 1)
            serves_a_request(driver)
        req = driver.admit(prompts_of(39)[0], 1)
        driver.step([req], "prefill")
        assert req.device_len == 40  # a token at position 39, the last one, could be computed


def test_the_engine_itself_refuses_a_long_request() -> None:
    path = tiny()
    with started(path, max_seq_len_override=40) as driver:
        req = driver.admit(prompts_of(30)[0], 5)
        req.input_ids, req.device_len = torch.zeros(41, dtype=torch.int32), 41
        batch = driver.batch([req], "prefill")
        with pytest.raises(ValueError, match="41 tokens is longer than max_seq_len=40"):
            driver.engine.forward_batch(batch, driver.engine.sampler.prepare(batch))
        assert (req.cached_len, req.device_len) == (0, 41)
        req.cached_len = 41
        driver.finish(req)
        serves_a_request(driver)
    with started(path, num_page_override=20) as driver:
        assert driver.engine.max_seq_len == 20  # the pool, not the model, is the limit
        with pytest.raises(ValueError, match="max_seq_len is 20"):
            driver.admit(prompts_of(20)[0], 1)
        serves_a_request(driver)


def test_the_last_position_of_the_model() -> None:
    """512 positions: RoPE has an angle for position 511."""
    path = tiny()
    (ids,) = prompts_of(511)
    with started(path, num_page_override=600) as driver:
        expected = hf_tokens(reference(path), [ids], 1)
        assert driver.run([ids], 1) == expected
        req = driver.admit(ids, 1)
        driver.step([req], "prefill")
        req.max_device_len += 1
        batch = driver.batch([req], "decode")
        assert batch.positions.tolist() == [511]
        driver.engine.forward_batch(batch, driver.engine.sampler.prepare(batch))
        assert req.cached_len == 512


def test_more_pages_than_there_are() -> None:
    with started(tiny(), page_size=4, num_page_override=10) as driver:
        reqs = [driver.admit(ids, 4) for ids in prompts_of(16, 20, 9)]
        with pytest.raises(RuntimeError, match="12, free: 10 of 10"):
            driver.step(reqs, "prefill")
        assert [req.cached_len for req in reqs] == [0, 0, 0]
        driver.step(reqs[:2], "prefill")
        for req in reqs:
            driver.finish(req)
        serves_a_request(driver)


def test_more_requests_than_rows() -> None:
    with started(tiny(), max_running_req=2) as driver:
        reqs = [driver.admit(ids, 2) for ids in prompts_of(3, 3)]
        with pytest.raises(RuntimeError, match="row"):
            driver.admit([1], 2)
        for req in reqs:
            driver.finish(req)
        serves_a_request(driver)


def test_an_empty_prompt_takes_nothing_down() -> None:
    with started(tiny()) as driver:
        with pytest.raises(ValueError, match="at least one token"):
            driver.admit([], 3)
        assert driver.table.available_size == 8
        assert len(driver.run(prompts_of(4), 1)[0]) == 1  # one token, and no decode
        serves_a_request(driver)


def test_arrays_that_do_not_fit_the_requests() -> None:
    with started(tiny()) as driver:
        reqs = [driver.admit(ids, 3) for ids in prompts_of(4, 6)]
        batch = driver.batch(reqs, "prefill")
        args = driver.engine.sampler.prepare(batch)
        batch.positions = batch.positions[:-1]
        with pytest.raises(ValueError, match=r"10 tokens.*'positions': 9"):
            driver.engine.forward_batch(batch, args)
        args.temperatures = torch.ones(3)
        batch = Batch(reqs, "prefill")
        batch.padded_reqs = reqs
        batch.input_ids = batch.positions = batch.out_loc = torch.arange(10)
        with pytest.raises(ValueError, match="for 3 requests, but a batch of 2"):
            driver.engine.forward_batch(batch, args)
        assert [req.cached_len for req in reqs] == [0, 0]


def test_an_error_in_the_pass_changes_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tiny()) as driver:
        req = driver.admit(prompts_of(5)[0], 3)
        batch = driver.batch([req], "prefill")

        def broken() -> torch.Tensor:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(driver.engine.model, "forward", broken)
            with pytest.raises(RuntimeError, match="out of luck"):
                driver.engine.forward_batch(batch, driver.engine.sampler.prepare(batch))
        assert (req.cached_len, req.device_len) == (0, 5)
        driver.engine.forward_batch(batch, driver.engine.sampler.prepare(batch))
        driver.finish(req)
        serves_a_request(driver)


# --- what it leaves behind ------------------------------------------------------------------------


def process_state() -> tuple:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        try_get_tp_info(),
        core._GLOBAL_CTX,
        rotary._ROPE_DEVICE,
        rotary._cached_rope.cache_info().currsize,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.distributed.is_initialized(),
    )


def test_two_engines_one_after_the_other() -> None:
    before = process_state()
    answers = {}
    for name, dtype in (("llama", torch.float32), ("qwen3", torch.bfloat16)) * 2:
        with started(tiny(name), dtype=dtype) as driver:
            tokens = driver.run(prompts_of(5, 9), 6)
            assert answers.setdefault(name, tokens) == tokens
        assert process_state() == before


def test_one_engine_at_a_time() -> None:
    with started(tiny()) as driver:
        with pytest.raises(RuntimeError, match="one engine at a time"):
            Engine(config_for(tiny("qwen3")))
        serves_a_request(driver)


def test_shutdown() -> None:
    with started(tiny()) as driver:
        req = driver.admit(prompts_of(4)[0], 3)
        batch = driver.batch([req], "prefill")
        args = driver.engine.sampler.prepare(batch)
        driver.engine.shutdown()
        driver.engine.shutdown()
        assert not hasattr(driver.engine, "kv_cache")
        with pytest.raises(RuntimeError, match="shut down"):
            driver.engine.forward_batch(batch, args)
        with pytest.raises(RuntimeError, match="global context"):
            get_global_ctx()


def test_a_failed_start_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(tiny())
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    settings["architectures"] = ["MambaForCausalLM"]
    (unknown / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    before = process_state()
    small = {"num_page_override": None, "cpu_kv_cache_bytes": 10}
    for where, changes, error in (
        (str(tmp_path), {}, (ValueError, FileNotFoundError)),  # no weights
        (str(unknown), {}, ValueError),
        (str(path), {"dtype": torch.bfloat16, **small}, ValueError),
        (str(path), {"attention_backend": "fa"}, ValueError),
        (str(path), {"device": "tpu"}, ValueError),
        (str(path), {"device": "cuda:99"}, ValueError),
        (str(path), {"max_seq_len_override": 4096}, ValueError),
    ):
        with pytest.raises(error):
            Engine(config_for(where, **changes))
        assert process_state() == before, where
    for name in ("create_kvcache_pool", "create_attention_backend", "GraphRunner"):
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, name, lambda *a, **k: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                Engine(config_for(str(path), dtype=torch.bfloat16))
        assert process_state() == before, name
    serves_a_request()


def test_a_rank_that_was_set_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl.distributed import reset_tp_info

    set_tp_info(0, 1)
    try:
        serves_a_request()
        assert try_get_tp_info() == DistributedInfo(0, 1)
    finally:
        reset_tp_info()


# --- the device, threads and graphs ---------------------------------------------------------------


def test_threads_are_the_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(engine_module, "physical_cores", lambda: 3)
    with started(tiny()):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with started(tiny()):
        assert torch.get_num_threads() == before


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back when asked"
)
def test_freed_memory_goes_back_to_the_system():
    torch.ones(1 << 20)  # 4 MiB: pieces up to this size come from the heap from now on
    pieces = [torch.ones(1 << 18) for _ in range(200)]
    last = torch.ones(1 << 18)  # above them, so that the heap can't shrink by itself
    full = psutil.Process().memory_info().rss
    del pieces
    release_freed_memory()
    assert psutil.Process().memory_info().rss < full - (100 << 20)
    assert last.sum() == 1 << 18


def test_no_more_cores_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        one = {min(os.sched_getaffinity(0))}
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: one)
        assert physical_cores() == 1
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    assert physical_cores() == 1


def test_cores_that_the_machine_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on ARM: loky falls back to all CPUs, and would warn and print a traceback."""
    from loky.backend import context

    def unknown(*args: object) -> tuple[str, Exception]:
        return "not found", ValueError("could not find any physical core in /proc/cpuinfo")

    monkeypatch.setattr(context, "_count_physical_cores", unknown)
    seen = io.StringIO()
    with redirect_stderr(seen), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 1 <= physical_cores() <= (os.cpu_count() or 1)
    assert seen.getvalue() == ""


def test_free_memory_respects_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get_free_memory(CPU) > 0
    own, above = tmp_path / "above" / "own", tmp_path / "above"
    own.mkdir(parents=True)
    monkeypatch.setattr(device_module, "_memory_groups", lambda: [own, above])

    def write(folder: Path, **files: str) -> None:
        for old in folder.glob("memory.*"):
            old.unlink()
        for name, text in {"stat": "", **files}.items():
            (folder / f"memory.{name}").write_text(text, encoding="utf-8")

    write(own, max="5000\n", current="2000\n")
    assert get_free_memory(CPU) == 3000
    write(above, max="4000\n", current="2500\n", stat="anon 1\ninactive_file 200\n")
    assert get_free_memory(CPU) == 1700
    write(above)
    write(own, max="max\n", current="2000\n")
    assert get_free_memory(CPU) > 5000
    stat = "total_inactive_file 700\ninactive_file 1\n"
    write(own, limit_in_bytes="5000\n", usage_in_bytes="2000\n", stat=stat)
    assert get_free_memory(CPU) == 3700
    write(own, max="1000\n", current="2000\n")
    assert get_free_memory(CPU) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_the_control_groups_of_this_process() -> None:
    folders = device_module._memory_groups()
    assert Path("/sys/fs/cgroup") in folders or not Path("/proc/self/cgroup").exists()


def test_stand_ins_for_a_cpu() -> None:
    stream, event = make_stream(CPU), make_event(CPU)
    assert isinstance(stream, NullStream) and isinstance(event, NullEvent)
    with use_stream(stream):
        event.record(stream)  # type: ignore[arg-type]
        stream.wait_stream(stream)  # type: ignore[arg-type]
        event.synchronize()
        stream.synchronize()
    assert event.query()
    tensor = torch.ones(2)
    assert pin(tensor, CPU) is tensor
    made = make_device_tensor([1, 2], torch.int32, CPU)
    assert made.tolist() == [1, 2] and made.dtype == torch.int32


def test_device_names() -> None:
    assert resolve_device("cpu") == CPU
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device("auto").type == expected
    for name in ("tpu", "mps", "meta", "cuda:99"):
        with pytest.raises(ValueError, match="cpu"):
            resolve_device(name)


@pytest.mark.parametrize(
    "changes", [{"attention_backend": "torch"}, {"cuda_graph_max_bs": 0}, {"cuda_graph_bs": []}]
)
def test_nothing_is_recorded(changes: dict[str, Any]) -> None:
    with started(tiny(), **changes) as driver:
        runner = driver.engine.graph_runner
        assert runner.graphs == {} and runner.graph_bs_list == []
        req = driver.admit([1, 2], 2)
        for phase in ("prefill", "decode"):
            batch = Batch([req], phase)  # type: ignore[arg-type]
            runner.pad_batch(batch)
            assert not runner.can_use_cuda_graph(batch)
            assert batch.padded_reqs == [req]


@compiled
def test_sizes_that_are_recorded_on_a_cpu() -> None:
    for changes, sizes in [
        ({"max_running_req": 5}, [1, 2, 4]),
        ({"max_running_req": 64}, [1, 2, 4, 8, 16]),
        ({"max_running_req": 64, "cuda_graph_max_bs": 24}, [1, 2, 4, 8, 16, 24]),
        ({"max_running_req": 5, "cuda_graph_bs": [3, 1]}, [1, 3]),
    ]:
        with started(tiny(), **changes) as driver:
            runner = driver.engine.graph_runner
            assert runner.graph_bs_list == sizes == sorted(runner.graphs)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", checkpoints.TINY_NAMES)
def test_a_replay_is_the_pass(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, for sizes that were recorded and others, while requests come and go."""
    with started(tiny(name), dtype=dtype, page_size=4, max_running_req=6) as driver:
        runner, seen = driver.engine.graph_runner, []
        assert runner.graph_bs_list == [1, 2, 4]
        replay = runner.replay

        def both(batch: Batch) -> torch.Tensor:
            logits = replay(batch).clone()
            eager = driver.engine.model.forward()[: batch.size]
            assert torch.equal(logits, eager.float())
            seen.append((batch.size, batch.padded_size))
            return logits

        monkeypatch.setattr(runner, "replay", both)
        reqs = [driver.admit(ids, 40) for ids in prompts_of(5, 33, 1, 17, 60)]
        driver.step(reqs, "prefill")
        for running in (reqs[:3], reqs[:1], reqs, reqs[1:4], reqs[2:4], reqs[:4], reqs[:3]):
            driver.step(running, "decode")
        assert seen == [(3, 4), (1, 1), (3, 4), (2, 2), (4, 4), (3, 4)]  # five: as it was


@compiled
def test_a_batch_that_was_not_padded_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(5, 9, 2)
    with started(tiny(), max_running_req=4) as driver:
        expected, runner = driver.run(prompts, 6), driver.engine.graph_runner
        monkeypatch.setattr(runner, "pad_batch", lambda b: setattr(b, "padded_reqs", b.reqs))
        assert driver.run(prompts, 6) == expected


@compiled
def test_a_replay_refuses_what_the_pass_refuses() -> None:
    """The same error, and the engine goes on."""
    for largest in (0, 4):
        with started(tiny(), max_running_req=4, cuda_graph_max_bs=largest) as driver:
            req = driver.admit([3, 1, 4], 6)
            driver.step([req], "prefill")
            for name in ("positions", "out_loc", "input_ids"):
                batch = driver.batch([req], "decode")
                setattr(batch, name, torch.full_like(getattr(batch, name), 10**6))
                with pytest.raises(IndexError):
                    driver.engine.forward_batch(batch, driver.engine.sampler.prepare(batch))
                assert (req.cached_len, req.device_len) == (3, 4)
            left = [driver.step([req], "decode")[0] for _ in range(5)]
        with started(tiny(), max_running_req=4, cuda_graph_max_bs=0) as driver:
            assert driver.run([[3, 1, 4]], 6)[0][1:] == left


@compiled
def test_what_cannot_be_recorded_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tiny()) as driver:
        expected = driver.run([[1, 2, 3]], 4)
    forward = LlamaForCausalLM.forward

    def curious(self: LlamaForCausalLM) -> torch.Tensor:
        logits = forward(self)
        assert logits.sum().item() is not None
        return logits

    monkeypatch.setattr(LlamaForCausalLM, "forward", curious)
    with started(tiny()) as driver:
        assert driver.engine.graph_runner.graph_bs_list == []
        assert driver.run([[1, 2, 3]], 4) == expected


@compiled
def test_recordings_end_with_their_engine() -> None:
    with started(tiny()) as driver:
        runner = driver.engine.graph_runner
        pools = {id(graph.pool): weakref.ref(graph.pool) for graph in runner.graphs.values()}  # type: ignore[attr-defined]
        assert len(pools) == 1, "all recordings share their memory"
    del driver
    assert runner.graphs == {}
    gc.collect()
    assert [pool() for pool in pools.values()] == [None]


def test_padding_to_a_recorded_size() -> None:
    with started(tiny()) as driver:
        runner = driver.engine.graph_runner
        runner.graph_bs_list = [1, 2, 4, 8]
        reqs = [driver.admit([1, 2], 2) for _ in range(8)] + [driver.engine.dummy_req]
        for size, padded in ((1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 9)):
            batch = Batch(reqs[:size], "decode")
            runner.pad_batch(batch)
            assert (batch.size, batch.padded_size) == (size, padded)
            assert set(batch.padded_reqs[size:]) <= {driver.engine.dummy_req}
            assert runner.can_use_cuda_graph(batch) == (size <= 8)
        prefill = Batch(reqs[:3], "prefill")
        runner.pad_batch(prefill)
        assert prefill.padded_size == 3
        runner.destroy_cuda_graphs()
        assert runner.graph_bs_list == []


def test_sizes_to_record() -> None:
    assert _determine_cuda_graph_bs([4, 1, 4], None, 0) == [1, 4]
    assert _determine_cuda_graph_bs([], 64, 0) == []
    assert _determine_cuda_graph_bs(None, 0, 0) == []
    assert _determine_cuda_graph_bs(None, 3, 0) == [1, 2]
    assert _determine_cuda_graph_bs(None, 20, 0) == [1, 2, 4, 8, 16]
    assert _determine_cuda_graph_bs(None, None, 20 << 30)[-1] == 160
    assert _determine_cuda_graph_bs(None, None, 139 << 30)[-1] == 256


def test_the_capture_buffer() -> None:
    buffer = GraphCaptureBuffer.init(4, 10, CPU)
    batch = Batch([object()] * 3, "decode")  # type: ignore[list-item]
    batch.padded_reqs = batch.reqs
    batch.input_ids, batch.out_loc, batch.positions = torch.arange(9, dtype=torch.int32).view(3, 3)
    buffer.copy_from(batch)
    buffer.set_batch(batch)
    assert batch.input_ids.tolist() == [0, 1, 2] and batch.positions.tolist() == [6, 7, 8]
    assert batch.out_loc.data_ptr() == buffer.out_loc.data_ptr()


def test_moe_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "of my own"):
        with pytest.raises(ValueError, match=f"unknown MoE backend '{name}'"):
            create_moe_backend(name)
    monkeypatch.setattr(SUPPORTED_MOE_BACKENDS, "_table", {})
    monkeypatch.setattr(SUPPORTED_MOE_BACKENDS, "_optional", ())
    with pytest.raises(ValueError, match="unknown MoE backend 'fused'; supported: none yet"):
        create_moe_backend("auto")
    made = object()
    SUPPORTED_MOE_BACKENDS.register("fused")(lambda: made)  # type: ignore[arg-type,return-value]
    assert create_moe_backend("auto") is create_moe_backend("fused") is made


# --- weights, logits and kernels ------------------------------------------------------------------


@pytest.mark.parametrize("largest", [0, 4])
def test_weights_that_are_replaced_count_from_the_next_pass(largest: int) -> None:
    """Whether passes were recorded or not: the tokens of the new model."""
    from minisgl.models import load_weight

    paths = [tiny("llama"), tiny("llama", seed=5)]
    changes = {"max_running_req": 4, "cuda_graph_max_bs": largest}
    answers = []
    for path in paths:
        with started(path, **changes) as driver:
            answers.append(driver.run(prompts_of(5, 9), 8))
    assert answers[0] != answers[1]
    with started(paths[0], **changes) as driver:
        assert driver.run(prompts_of(5, 9), 8) == answers[0]
        driver.engine.model.load_state_dict(dict(load_weight(paths[1], CPU)))
        assert driver.run(prompts_of(5, 9), 8) == answers[1]
        if largest:
            assert driver.engine.graph_runner.graph_bs_list == []


@pytest.mark.parametrize("threads", [1, 4])
def test_another_number_of_threads_after_the_start(threads: int) -> None:
    """A prompt of 119 tokens met a plan for the number that was."""
    prompts, before = prompts_of(119, 5), torch.get_num_threads()
    try:
        torch.set_num_threads(5 - threads)
        with started(tiny(), max_running_req=4) as driver:
            expected = driver.run(prompts, 8)
            torch.set_num_threads(threads)
            assert driver.run(prompts, 8) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_logits_that_are_not_finite(phase: str, wrong: float) -> None:
    """The request is named, nothing has moved, and the others go on without it."""
    with started(tiny(), cuda_graph_max_bs=0) as driver:
        prompts = prompts_of(4, 6, 3)
        expected = driver.run(prompts, 4)
        params = SamplingParams(temperature=1.0, top_k=5)
        reqs = [driver.admit(ids, 4, params if i == 1 else None) for i, ids in enumerate(prompts)]
        if phase == "decode":
            driver.step(reqs, "prefill")
        lengths = [(req.cached_len, req.device_len) for req in reqs]
        forward = driver.engine.model.forward

        def broken() -> torch.Tensor:
            logits = forward()
            logits[1, 7] = wrong
            return logits

        driver.engine.model.forward = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=rf"requests \[{reqs[1].uid}\] are not finite"):
            driver.step(reqs, phase)
        driver.engine.model.forward = forward  # type: ignore[method-assign]
        assert [(req.cached_len, req.device_len) for req in reqs] == lengths
        left = [reqs[0], reqs[2]]
        if phase == "prefill":
            driver.step(left, "prefill")
        while left[0].can_decode:
            driver.step(left, "decode")
        assert [req.input_ids[-4:].tolist() for req in left] == [expected[0], expected[2]]


def test_the_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown kernels 'of my own'"):
        config_for(tiny(), kernels="of my own")
    with started(tiny(), kernels="torch", attention_backend="torch") as driver:
        assert get_kernels().name == "torch"
        expected = driver.run(prompts_of(5, 9), 6)
    with started(tiny()) as driver:
        assert driver.run(prompts_of(5, 9), 6) == expected
    assert get_kernels().name == "torch"


class Packed:
    """A weight of half the size, in a form of its own."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.half, self.shape, self.dtype = weight.bfloat16(), weight.shape, weight.dtype
        self.nbytes = self.half.nbytes


def test_the_plan_counts_weights_as_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(weight: torch.Tensor, name: str, shared: bool) -> Any:
        return weight if shared else Packed(weight)

    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        full = weight.half.float() if isinstance(weight, Packed) else weight
        return torch.nn.functional.linear(x, full, bias)

    halves = SUPPORTED_KERNELS["torch"]()._replace(name="halves", pack=pack, linear=linear)  # type: ignore[union-attr]
    monkeypatch.setattr(SUPPORTED_KERNELS, "_table", dict(SUPPORTED_KERNELS._table))
    SUPPORTED_KERNELS.register("halves")(lambda: halves)
    sizes = {}
    for name in ("llama", "llama-untied"):
        for kernels in ("torch", "halves"):
            with started(tiny(name), kernels=kernels, attention_backend="torch") as driver:
                state = driver.engine.model.state_dict()
                sizes[name, kernels] = driver.engine.memory.model
                assert sizes[name, kernels] == sum(weight.nbytes for weight in state.values())
                assert len(driver.run(prompts_of(5), 3)[0]) == 3
        halved = sum(w.shape.numel() * 2 for w in state.values() if isinstance(w, Packed))
        assert sizes[name, "halves"] == sizes[name, "torch"] - halved > 0


# --- several ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, sizes",
    [((9, 3, 1536), [1, 3]), ((8, 2, 64), [1, 2, 4, 8]), ((6, 2, 60), [1, 2, 6])],
)
def test_numbers_of_ranks(shape: tuple[int, int, int], sizes: list[int]) -> None:
    class Model:
        num_qo_heads, num_kv_heads, intermediate_size = shape
        is_moe = False

    for size in range(1, 10):
        if size in sizes:
            check_ranks(size, Model())  # type: ignore[arg-type]
        else:
            listed = ", ".join(map(str, sizes))
            with pytest.raises(ValueError, match=rf"^{size} ranks can't share.*do: {listed}$"):
                check_ranks(size, Model())  # type: ignore[arg-type]


def test_a_number_of_ranks_is_refused_before_they_meet() -> None:
    """At once, and nothing is left behind."""
    before = process_state()
    config = EngineConfig(
        tiny("llama"), DistributedInfo(1, 3), torch.float32, device="cpu", distributed_port=1
    )
    with pytest.raises(ValueError, match=r"3 ranks can't share 4 query heads.*would do: 1, 2, 4"):
        Engine(config)
    assert process_state() == before


def on_two_ranks(path: str, prompts: list[list[int]], hot: bool) -> list[dict[str, Any]]:
    """What `two_ranks.serve` returns on each rank, a process of its own.

    What one of them prints to stderr is an error: it would show in every notebook.
    """
    script = Path(__file__).with_name("two_ranks.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps([rank, port, path, prompts, hot])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parent.parent)},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0 and errors == "", errors
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_two_ranks_give_the_tokens_of_one(name: str) -> None:
    path, prompts = tiny(name), prompts_of(5, 9, 3)
    with started(path) as driver:
        expected = driver.run(prompts, 6)
    for rank in on_two_ranks(path, prompts, hot=False):
        assert rank["tokens"] == expected
        assert rank["pages"] == 64, "the smaller number of the two"


def test_two_ranks_draw_the_same_tokens() -> None:
    """Their random numbers differ; the first one's count. A greedy request beside stays greedy."""
    path, prompts = tiny("llama"), prompts_of(5, 9, 3)
    with started(path) as driver:
        greedy = driver.run(prompts, 12)
    first, second = on_two_ranks(path, prompts, hot=True)
    assert first["tokens"] == second["tokens"]
    assert first["alone"] != second["alone"]
    assert first["tokens"][1] == greedy[1] and first["tokens"][0] != greedy[0]
