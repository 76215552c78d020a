"""Decode attention in C, in one pass over the pages; all else as the torch backend does it.

Official counterparts, for GPUs: `python/minisgl/attention/fa.py`, `fi.py` and `trtllm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from minisgl.attention import SUPPORTED_ATTENTION_BACKENDS
from minisgl.attention.torch_backend import TorchBackend, TorchMetadata
from minisgl.core import get_global_ctx
from minisgl.kernel.cpu.attention import FixedDecodePlan, PagedDecodePlan, attend_functions

if TYPE_CHECKING:
    from minisgl.attention.torch_plans import AttentionPlan
    from minisgl.core import Batch
    from minisgl.models.config import ModelConfig


class NativeBackend(TorchBackend):
    """The torch backend, but decodes are planned in C, at addresses that can be kept."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.head_dim = self.kv_cache.k_cache(0).shape[-1]
        self.threads = torch.get_num_threads()  # recorded passes keep this number, so plans do

    def make_plan(
        self, q_lens: Sequence[int], kv_lens: Sequence[int], rows: torch.Tensor
    ) -> AttentionPlan:
        """`PagedDecodePlan` for a decode; else as the torch backend."""
        if max(q_lens) > 1:
            return super().make_plan(q_lens, kv_lens, rows)
        return PagedDecodePlan(kv_lens, rows, self.num_qo_heads, self.head_dim, self.threads)

    @property
    def supports_cuda_graph(self) -> bool:
        return True

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        sizes = (max_seq_len, self.num_qo_heads, self.head_dim, self.threads)
        self.fixed = {bs: FixedDecodePlan(bs, *sizes) for bs in bs_list}

    def prepare_for_capture(self, batch: Batch) -> None:
        self.prepare_metadata(batch)
        self.prepare_for_replay(batch)
        cast("TorchMetadata", batch.attn_metadata).plan = self.fixed[batch.padded_size]

    def prepare_for_replay(self, batch: Batch) -> None:
        plan = cast("TorchMetadata", batch.attn_metadata).plan
        self.fixed[batch.padded_size].take(cast("PagedDecodePlan", plan))


@SUPPORTED_ATTENTION_BACKENDS.register("native")
def create_native_backend(config: ModelConfig) -> NativeBackend | None:
    """None where C can't be compiled, or wasn't written for this pool."""
    cache = get_global_ctx().kv_cache.k_cache(0)
    can = cache.is_cpu and cache.shape[-1] % 16 == 0 and cache.dtype in attend_functions()
    return NativeBackend(config) if can else None
