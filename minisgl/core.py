"""What all parts of the engine pass around: a request, a batch of requests, the context of a pass.

There is no model code and no device code in here. Official: `python/minisgl/core.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from minisgl.attention import BaseAttnBackend, BaseAttnMetadata
    from minisgl.kvcache import BaseCacheHandle, BaseKVCachePool
    from minisgl.moe import BaseMoeBackend


def _check_int(name: str, value: object, least: int, hint: str) -> None:
    """Raise ValueError unless `value` is an integer (of Python or NumPy) of at least `least`."""
    if not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}: {hint}")


@dataclass
class SamplingParams:
    """How a request wants its next tokens chosen. ValueError for what no sampler could honor."""

    temperature: float = 0.0  # divides the logits; 0 or less: take the likeliest
    top_k: int = -1  # choose among the k likeliest tokens; -1 (or 0): among all
    top_p: float = 1.0  # choose among the likeliest that together have this share
    ignore_eos: bool = False  # go on after an end-of-text token
    max_tokens: int = 1024  # generate at most this many tokens

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not math.isfinite(self.temperature):
            raise ValueError(
                f"temperature must be a finite number, got {self.temperature!r}: "
                "use 0 for the likeliest token"
            )
        _check_int("top_k", self.top_k, -1, "use -1 to keep all tokens")
        if not isinstance(self.top_p, Real) or not 0 <= self.top_p <= 1:
            hint = "use 1 to keep all tokens"
            raise ValueError(f"top_p must be between 0 and 1, got {self.top_p!r}: {hint}")
        _check_int("max_tokens", self.max_tokens, 1, "a prefill always samples one")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken; `top_p` below 1 samples, even at temperature 0."""
        return (self.temperature <= 0.0 or self.top_k == 1) and self.top_p == 1.0


@dataclass(eq=False)
class Req:
    """One request in flight: its tokens, and how far its KV cache has come.

    `0 <= cached_len < device_len <= max_device_len`, from creation to the end: the KV of
    tokens `[0, cached_len)` is in the pool, the next pass computes `[cached_len, device_len)`,
    and `[device_len, max_device_len)` may still be generated. ValueError for fields that break
    the order. Compared by identity.
    """

    input_ids: torch.Tensor  # [tokens so far] int32, CPU; at creation the prompt
    table_idx: int  # its row in the page table and in the token pool
    cached_len: int  # tokens whose KV is in the pool
    output_len: int  # tokens that may be generated
    uid: int  # what the outside world calls it
    sampling_params: SamplingParams
    cache_handle: BaseCacheHandle  # the part of the prefix cache that it holds on to

    def __post_init__(self) -> None:
        ids, got = self.input_ids, type(self.input_ids).__name__
        if isinstance(ids, torch.Tensor):
            got = f"{ids.dim()}-D {ids.dtype} on {ids.device}".replace("torch.", "")
        if got != "1-D int32 on cpu":
            hint = "make it with torch.tensor(token_ids, dtype=torch.int32)"
            raise ValueError(f"input_ids must be a 1-D int32 tensor on the CPU, got {got}: {hint}")
        if len(ids) == 0:
            raise ValueError(
                "input_ids must hold at least one token, got none: a pass has to compute "
                "something; give an empty prompt the model's first token (BOS)"
            )
        _check_int("table_idx", self.table_idx, 0, "it is a row of the page table")
        _check_int("output_len", self.output_len, 0, "it counts tokens to generate")
        _check_int("cached_len", self.cached_len, 0, "use 0 without a hit")
        if self.cached_len >= len(ids):
            raise ValueError(
                f"cached_len must be < {len(ids)}, the length of the prompt, got "
                f"{self.cached_len}: the last token has to be computed, since its logits choose "
                "the next one; match the prefix cache with input_ids[:-1]"
            )
        self.device_len = len(ids)  # tokens with a position, the last sampled too
        self.max_device_len = self.device_len + self.output_len  # prompt and output together

    def __repr__(self) -> str:
        names = ("uid", "table_idx", "cached_len", "device_len", "max_device_len")
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)}' for n in names)})"

    @property
    def extend_len(self) -> int:
        """How many tokens the next pass computes."""
        return self.device_len - self.cached_len

    @property
    def remain_len(self) -> int:
        """How many tokens may still be generated."""
        return self.max_device_len - self.device_len

    @property
    def can_decode(self) -> bool:
        """Whether another token may be generated."""
        return self.remain_len > 0

    def complete_one(self) -> None:
        """Book one pass: all KV up to `device_len` is cached, the next token has a place."""
        if self.remain_len <= 0:
            raise RuntimeError(f"no room for a token in {self}: leave it out of the batch")
        self.cached_len = self.device_len
        self.device_len += 1

    def append_host(self, next_token: torch.Tensor) -> None:
        """Append the sampled token (one element, on the CPU) to `input_ids`."""
        is_one = isinstance(next_token, torch.Tensor) and next_token.numel() == 1
        if not is_one or not next_token.is_cpu or next_token.is_floating_point():
            raise ValueError(
                f"next_token must be one token id in a tensor on the CPU, got {next_token!r}: "
                "pass next_tokens_cpu[i], once its copy from the device is done"
            )
        if len(self.input_ids) >= self.device_len:
            raise RuntimeError(
                f"{self} has no place for another token, its {len(self.input_ids)} are all there: "
                "call complete_one() after the pass, before append_host()"
            )
        self.input_ids = torch.cat([self.input_ids, next_token.reshape(1).to(torch.int32)])


def _filled(record: Batch | Context) -> str:
    """The fields of `record` that others have filled after its creation, or "nothing"."""
    late = [f.name for f in fields(record) if not f.init and not f.name.startswith("_")]
    return ", ".join(name for name in late if hasattr(record, name)) or "nothing"


@dataclass(eq=False)
class Batch:
    """The requests of one forward pass, and the arrays that the pass reads.

    In the arrays the requests lie end to end without padding: `num_tokens` is the sum of
    `extend_len` over `padded_reqs`. Until somebody fills a field, reading it raises AttributeError.
    """

    reqs: list[Req]  # each gets one token from this pass
    phase: Literal["prefill", "decode"]  # decode: every `extend_len` is 1
    input_ids: torch.Tensor = field(init=False)  # scheduler: [num_tokens] int32, on the device
    positions: torch.Tensor = field(init=False)  # scheduler: of each token in its own request
    out_loc: torch.Tensor = field(init=False)  # scheduler: where each token's KV goes in the pool
    padded_reqs: list[Req] = field(init=False)  # graph runner: `reqs`, then dummies
    attn_metadata: BaseAttnMetadata = field(init=False)  # attention backend

    def __post_init__(self) -> None:
        if self.phase not in ("prefill", "decode"):
            hint = "check the spelling"
            raise ValueError(f"phase must be 'prefill' or 'decode', got {self.phase!r}: {hint}")
        if len(self.reqs) == 0:
            hint = "skip an empty pass"
            raise ValueError(f"reqs must be one request or more, got {self.reqs!r}: {hint}")

    @property
    def is_prefill(self) -> bool:
        """Whether prompts are computed, or what is left of them after a prefix hit."""
        return self.phase == "prefill"

    @property
    def is_decode(self) -> bool:
        """Whether each request computes one token, the one that it sampled last."""
        return self.phase == "decode"

    @property
    def size(self) -> int:
        """How many requests get a token from this pass."""
        return len(self.reqs)

    @property
    def padded_size(self) -> int:
        """How many requests the model computes, dummies included."""
        return len(self.padded_reqs)

    def __repr__(self) -> str:
        uids = [req.uid for req in self.reqs]
        return f"Batch({self.phase}, {uids=}, filled: {_filled(self)})"


@dataclass(eq=False)
class Context:
    """What layers need besides their input: the engine's parts and the running batch."""

    page_size: int  # tokens per page of the KV cache
    page_table: torch.Tensor = field(init=False)  # [rows, max_seq_len] int32 locations
    attn_backend: BaseAttnBackend = field(init=False)
    moe_backend: BaseMoeBackend = field(init=False)
    kv_cache: BaseKVCachePool = field(init=False)
    _batch: Batch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        _check_int("page_size", self.page_size, 1, "1 hands out single slots")

    @property
    def batch(self) -> Batch:
        """The batch of the pass that is running. Raises RuntimeError outside a pass."""
        if self._batch is None:
            raise RuntimeError("no pass is running: call it in `with ctx.forward_batch(b):`")
        return self._batch

    @contextmanager
    def forward_batch(self, batch: Batch) -> Iterator[None]:
        """Make `batch` the running one inside a `with`. Raises RuntimeError if there is one."""
        if self._batch is not None:
            raise RuntimeError(f"a pass is already running, over {self._batch}: finish it first")
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def __repr__(self) -> str:
        running = f"running {self._batch}" if self._batch else "no pass running"
        return f"Context(page_size={self.page_size}, filled: {_filled(self)}, {running})"


_GLOBAL_CTX: Context | None = None


def set_global_ctx(ctx: Context) -> None:
    """Make `ctx` the one that layers find. Raises RuntimeError if there is one already."""
    global _GLOBAL_CTX
    if _GLOBAL_CTX is not None:
        raise RuntimeError(
            "the global context is already set: there is one engine at a time; shut down the "
            "other one, or call reset_global_ctx()"
        )
    _GLOBAL_CTX = ctx


def get_global_ctx() -> Context:
    """The context that `set_global_ctx` was given. Raises RuntimeError if there is none."""
    if _GLOBAL_CTX is None:
        hint = "start an engine, or call set_global_ctx(Context(...))"
        raise RuntimeError(f"the global context is not set: {hint}")
    return _GLOBAL_CTX


def reset_global_ctx() -> None:
    """Forget the global context, so that another engine can start. Ours, not official."""
    global _GLOBAL_CTX
    _GLOBAL_CTX = None
