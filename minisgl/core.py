"""What all parts of the engine pass around: a request, a batch of requests, the context of a pass.

`SamplingParams` is what a user asks for, `Req` one request in flight, `Batch` the requests of one
forward pass, and `Context` the place where the layers of a model find the batch that is running.
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


def _require(ok: bool, name: str, wanted: str, got: object, hint: str) -> None:
    """Raise ValueError unless `ok`: what was expected, what came, and what to do about it."""
    if not ok:
        raise ValueError(f"{name} must be {wanted}, got {got!r}: {hint}")


def _is_int(value: object, least: int) -> bool:
    """Whether `value` is an integer (of Python or NumPy) of at least `least`."""
    return isinstance(value, Integral) and int(value) >= least


@dataclass
class SamplingParams:
    """How a request wants its next token chosen, and when it wants to stop.

    Raises ValueError for values that no sampler could honor.
    Official: `core.py`, `SamplingParams`.
    """

    temperature: float = 0.0  # divides the logits; 0 or less: take the likeliest
    top_k: int = -1  # choose among the k likeliest tokens; -1 (or 0): among all
    top_p: float = 1.0  # choose among the likeliest that together have this share
    ignore_eos: bool = False  # go on after an end-of-text token
    max_tokens: int = 1024  # generate at most this many tokens

    def __post_init__(self) -> None:
        t, k, p, n = self.temperature, self.top_k, self.top_p, self.max_tokens
        finite = isinstance(t, Real) and math.isfinite(t)
        _require(finite, "temperature", "a finite number", t, "use 0 for the likeliest token")
        _require(_is_int(k, -1), "top_k", "an integer >= -1", k, "use -1 to keep all tokens")
        share = isinstance(p, Real) and 0 <= p <= 1
        _require(share, "top_p", "between 0 and 1", p, "use 1 to keep all tokens")
        _require(_is_int(n, 1), "max_tokens", "an integer >= 1", n, "a prefill always samples one")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, so that no probabilities are needed.

        A `top_p` below 1 takes the sampling path, even at temperature 0.
        """
        return (self.temperature <= 0.0 or self.top_k == 1) and self.top_p == 1.0


def _describe(value: object) -> str:
    """What `value` is, in a few words: for a tensor its dimensions, dtype and device."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dim()}-D {str(value.dtype).removeprefix('torch.')} on {value.device}"


def _check_req(req: Req) -> None:
    """Raise ValueError unless the fields that a new `Req` was given describe a request."""
    ids, cached, n, row = req.input_ids, req.cached_len, req.output_len, req.table_idx
    is_host_tensor = isinstance(ids, torch.Tensor) and ids.is_cpu
    if not is_host_tensor or ids.dim() != 1 or ids.dtype != torch.int32:
        raise ValueError(
            f"input_ids must be a 1-D int32 tensor on the CPU, got {_describe(ids)}: "
            "make it with torch.tensor(token_ids, dtype=torch.int32)"
        )
    if len(ids) == 0:
        raise ValueError(
            "input_ids must hold at least one token, got none: a pass has to compute "
            "something; give an empty prompt the model's first token (BOS)"
        )
    _require(_is_int(row, 0), "table_idx", "an integer >= 0", row, "it is a row of the page table")
    _require(_is_int(n, 0), "output_len", "an integer >= 0", n, "it counts tokens to generate")
    _require(_is_int(cached, 0), "cached_len", "an integer >= 0", cached, "use 0 without a hit")
    if cached >= len(ids):
        raise ValueError(
            f"cached_len must be < {len(ids)}, the length of the prompt, got {cached}: "
            "the last token has to be computed, since its logits choose the next one; "
            "match the prefix cache with input_ids[:-1]"
        )


@dataclass(eq=False)
class Req:
    """One request in flight: its tokens, and how far its KV cache has come.

    `0 <= cached_len < device_len <= max_device_len`, from creation to the end: the KV of
    tokens `[0, cached_len)` is in the pool, the next pass computes `[cached_len, device_len)`,
    and `[device_len, max_device_len)` may still be generated. Compared by identity.
    Raises ValueError for fields that break the order. Official: `core.py`, `Req`.
    """

    input_ids: torch.Tensor  # [tokens so far] int32, CPU; at creation the prompt
    table_idx: int  # its row in the page table and in the token pool
    cached_len: int  # tokens whose KV is in the pool
    output_len: int  # tokens that may be generated
    uid: int  # what the outside world calls it
    sampling_params: SamplingParams
    cache_handle: BaseCacheHandle  # the part of the prefix cache that it holds on to
    device_len: int = field(init=False)  # tokens with a position, the last sampled too
    max_device_len: int = field(init=False)  # prompt and output together

    def __post_init__(self) -> None:
        _check_req(self)
        self.device_len = len(self.input_ids)
        self.max_device_len = self.device_len + self.output_len

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
        _check_append(self, next_token)
        token = next_token.reshape(1).to(torch.int32)
        self.input_ids = torch.cat([self.input_ids, token])

    def __repr__(self) -> str:
        lens = f"device_len={self.device_len}, max_device_len={self.max_device_len}"
        row = f"table_idx={self.table_idx}, cached_len={self.cached_len}"
        return f"{type(self).__name__}(uid={self.uid}, {row}, {lens})"


def _check_append(req: Req, next_token: torch.Tensor) -> None:
    """Raise unless `next_token` is one token id on the CPU and `req` has a place for it."""
    one = isinstance(next_token, torch.Tensor) and next_token.numel() == 1
    if not one or not next_token.is_cpu or next_token.is_floating_point():
        raise ValueError(
            f"next_token must be one token id in a tensor on the CPU, got {next_token!r}: "
            "pass next_tokens_cpu[i], once its copy from the device is done"
        )
    if len(req.input_ids) >= req.device_len:
        raise RuntimeError(
            f"{req} has no place for another token, its {len(req.input_ids)} are all there: "
            "call complete_one() after the pass, before append_host()"
        )


def _filled(record: Batch | Context) -> str:
    """The late fields of `record` that are filled, or "nothing", for a readable repr.

    Late are those that `__init__` does not take, but for names that begin with an underscore.
    """
    names = [f.name for f in fields(record) if not f.init and not f.name.startswith("_")]
    return ", ".join(name for name in names if hasattr(record, name)) or "nothing"


@dataclass(eq=False)
class Batch:
    """The requests of one forward pass, and the arrays that the pass reads.

    In the arrays the requests lie end to end without padding: `num_tokens` is the sum of
    `extend_len` over `padded_reqs`. They are filled after creation, by whom the comments
    name; reading one too early raises AttributeError. Official: `core.py`, `Batch`.
    """

    reqs: list[Req]  # each gets one token from this pass
    phase: Literal["prefill", "decode"]  # decode: every `extend_len` is 1
    # By the scheduler: [num_tokens] int32, on the device.
    input_ids: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)  # of each token in its own request
    out_loc: torch.Tensor = field(init=False)  # where each token's KV goes in the pool
    # By the graph runner: `reqs`, then dummies up to a size that has a CUDA graph.
    padded_reqs: list[Req] = field(init=False)
    # By the attention backend.
    attn_metadata: BaseAttnMetadata = field(init=False)

    def __post_init__(self) -> None:
        known = self.phase in ("prefill", "decode")
        _require(known, "phase", "'prefill' or 'decode'", self.phase, "check the spelling")
        _require(len(self.reqs) > 0, "reqs", "one request or more", self.reqs, "skip an empty pass")

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
        uids = ", ".join(str(req.uid) for req in self.reqs)
        return f"Batch({self.phase}, uids=[{uids}], filled: {_filled(self)})"


@dataclass(eq=False)
class Context:
    """What layers need besides their input: the engine's parts and the running batch.

    The engine fills the fields as it starts. Official: `core.py`, `Context`.
    """

    page_size: int  # tokens per page of the KV cache
    page_table: torch.Tensor = field(init=False)  # [rows, max_seq_len] int32 locations
    attn_backend: BaseAttnBackend = field(init=False)
    moe_backend: BaseMoeBackend = field(init=False)
    kv_cache: BaseKVCachePool = field(init=False)
    _batch: Batch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        size = self.page_size
        _require(_is_int(size, 1), "page_size", "an integer >= 1", size, "1 hands out single slots")

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
        raise RuntimeError(
            "the global context is not set: start an engine, or call set_global_ctx(Context(...))"
        )
    return _GLOBAL_CTX


def reset_global_ctx() -> None:
    """Forget the global context, so that another engine can start. Ours, not official."""
    global _GLOBAL_CTX
    _GLOBAL_CTX = None
