"""Random prompts in random company: every token is the one that `transformers` gives.

The full size, 200 prompts on the default model, takes minutes: MINISGL_SLOW=1 pytest -k 200.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from hand_driven import Driver, hf_tokens, started

from course import checkpoints
from minisgl.core import Req


def serve_in_random_order(
    driver: Driver, prompts: list[list[int]], n: int, rng: random.Random
) -> list[list[int]]:
    """Admit, prefill and decode in an order that `rng` chooses; the tokens of each prompt."""
    waiting = list(enumerate(prompts))
    running: dict[int, Req] = {}
    answers: dict[int, list[int]] = {}
    while waiting or running:
        arrivals = rng.randint(0, min(len(waiting), driver.table.available_size, 4))
        if arrivals:
            new = {i: driver.admit(ids, n) for i, ids in waiting[:arrivals]}
            waiting = waiting[arrivals:]
            driver.step(list(new.values()), "prefill")
            running |= new
        if running:  # some of those that run, in any order
            chosen = rng.sample(list(running), rng.randint(1, len(running)))
            chosen = [i for i in chosen if running[i].can_decode]
            if chosen:
                driver.step([running[i] for i in chosen], "decode")
        for i in [i for i, req in running.items() if not req.can_decode]:
            req = running.pop(i)
            answers[i] = req.input_ids[-n:].tolist()
            driver.finish(req)
    driver.pages.check_integrity()
    assert len(driver.pages.free_pages) == driver.engine.num_pages
    return [answers[i] for i in range(len(prompts))]


def compare(path: str, count: int, longest: int, vocab: int, seed: int, **changes: Any) -> None:
    from transformers import AutoModelForCausalLM

    checkpoints.quiet()
    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(count)]
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    with started(path, **changes) as driver:
        for i in range(driver.engine.kv_cache.num_layers):  # reading what nobody wrote would show
            driver.engine.kv_cache.k_cache(i).fill_(float("nan"))
            driver.engine.kv_cache.v_cache(i).fill_(float("nan"))
        ours = serve_in_random_order(driver, prompts, 16, rng)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wrong = []
    for i, (ids, tokens) in enumerate(zip(prompts, ours, strict=True)):
        (theirs,) = hf_tokens(model, [ids], 16)
        if theirs != tokens:
            wrong.append(f"prompt {i} of {len(ids)} tokens: {tokens}, transformers {theirs}")
    assert not wrong, f"{len(wrong)} of {count} prompts differ:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "name, page_size, seed", [("llama", 1, 0), ("qwen3", 4, 1), ("qwen2", 16, 2), ("yarn", 4, 3)]
)
def test_random_prompts_on_tiny_models(name: str, page_size: int, seed: int) -> None:
    path = str(checkpoints.tiny(name))
    pages = {"page_size": page_size, "num_page_override": 2560 // page_size}
    compare(path, 12, 300, 200, seed, **pages)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("MINISGL_SLOW"), reason="minutes; set MINISGL_SLOW=1")
def test_200_random_prompts_on_the_default_model() -> None:
    pages = {"page_size": 4, "num_page_override": 640}
    compare(str(checkpoints.model()), 200, 300, 49_152, 4, **pages)
