"""An engine driven by hand, as chapter 06 does it; what a scheduler will do in a later part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from minisgl.core import Batch, Req, SamplingParams
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine, EngineConfig
from minisgl.kernel import SUPPORTED_KERNELS
from minisgl.kvcache.naive_cache import NaiveCacheHandle
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.table import TableManager

compiled = pytest.mark.skipif(
    "native" not in SUPPORTED_KERNELS or SUPPORTED_KERNELS["native"]() is None,
    reason="no kernels in C: no compiler",
)


class Driver:
    """Rows, pages and passes for one engine. Every error leaves what was there usable."""

    def __init__(self, engine: Engine) -> None:
        self.engine, config = engine, engine.config
        self.table = TableManager(config.max_running_req, engine.page_table)
        self.pages = CacheManager(engine.num_pages, config.page_size, engine.page_table, "naive")
        self.uid = 0

    def admit(
        self,
        ids: Sequence[int],
        max_tokens: int,
        params: SamplingParams | None = None,
        shared: tuple[Req, int] | None = None,
    ) -> Req:
        """A row for a prompt. `shared`: a running request, and how many of its tokens to reuse."""
        limit = self.engine.max_seq_len
        if len(ids) + max_tokens > limit:
            raise ValueError(f"{len(ids)} + {max_tokens} tokens, but max_seq_len is {limit}")
        row = self.table.allocate()
        try:
            tokens = torch.tensor(ids, dtype=torch.int32)
            hit = 0
            if shared is not None:
                source, hit = shared
                self.engine.page_table[row, :hit] = self.engine.page_table[source.table_idx, :hit]
            handle = NaiveCacheHandle(cached_len=hit)
            req = Req(tokens, row, hit, max_tokens, self.uid, params or SamplingParams(), handle)
            self.table.token_pool[row, : len(tokens)] = tokens
        except BaseException:
            self.table.free(row)
            raise
        self.uid += 1
        return req

    def batch(self, running: Sequence[Req], phase: str) -> Batch:
        """A batch with all its arrays, and pages for what it will write."""
        batch = Batch(list(running), phase)  # type: ignore[arg-type]
        self.engine.graph_runner.pad_batch(batch)
        self.pages.allocate_paged(batch.reqs)
        padded = batch.padded_reqs
        positions = torch.cat([torch.arange(r.cached_len, r.device_len) for r in padded])
        rows = torch.cat([torch.full((r.extend_len,), r.table_idx) for r in padded])
        batch.positions = positions.to(torch.int32)
        batch.input_ids = self.table.token_pool[rows, positions]
        batch.out_loc = self.engine.page_table[rows, positions]
        self.engine.attn_backend.prepare_metadata(batch)
        return batch

    def logits(self, reqs: Sequence[Req], phase: str) -> torch.Tensor:
        """The logits of the pass that `step` would make; changes no length."""
        batch = self.batch(reqs, phase)
        with self.engine.ctx.forward_batch(batch), torch.inference_mode():
            return self.engine.model.forward()

    def step(self, reqs: Sequence[Req], phase: str) -> list[int]:
        """One pass over `reqs`; the tokens that came out."""
        batch = self.batch(reqs, phase)
        out = self.engine.forward_batch(batch, self.engine.sampler.prepare(batch))
        rows = [req.table_idx for req in reqs]
        places = [req.device_len - 1 for req in reqs]
        self.table.token_pool[rows, places] = out.next_tokens_gpu
        out.copy_done_event.synchronize()
        for req, token in zip(reqs, out.next_tokens_cpu, strict=True):
            req.append_host(token)
        return out.next_tokens_cpu.tolist()

    def finish(self, req: Req) -> None:
        """Give the request's own pages, and its row, back."""
        row = self.engine.page_table[req.table_idx, req.cache_handle.cached_len : req.cached_len]
        self.pages._free(row)
        self.table.free(req.table_idx)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        params: Sequence[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """All prompts in one batch: one prefill, then decodes; the tokens of each."""
        reqs = [
            self.admit(ids, max_tokens, params[i] if params else None)
            for i, ids in enumerate(prompts)
        ]
        self.step(reqs, "prefill")
        while reqs[0].can_decode:
            self.step(reqs, "decode")
        for req in reqs:
            self.finish(req)
        return [req.input_ids[-max_tokens:].tolist() for req in reqs]


def config_for(path: str, **changes: Any) -> EngineConfig:
    """A small engine in float32 on the CPU."""
    small: dict[str, Any] = {
        "tp_info": DistributedInfo(0, 1),
        "device": "cpu",
        "max_running_req": 8,
        "num_page_override": 512 // max(1, changes.get("page_size", 1)),
    }
    return EngineConfig(path, **{"dtype": torch.float32, **small, **changes})


@contextmanager
def started(path: str, **changes: Any) -> Iterator[Driver]:
    """An engine and its driver, shut down at the end whatever happens."""
    engine = Engine(config_for(path, **changes))
    try:
        yield Driver(engine)
    finally:
        engine.shutdown()


def hf_tokens(model: Any, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """What `generate` answers, one prompt at a time, greedily and without stopping early."""
    model.generation_config.eos_token_id = None
    answers = []
    for ids in prompts:
        inputs = torch.tensor([list(ids)])
        with torch.inference_mode():
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
            )
        answers.append(out[0, len(ids) :].tolist())
    return answers
