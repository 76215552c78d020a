"""Attention over the paged pool in plain PyTorch, for any device.

Official counterparts, for GPUs: `python/minisgl/attention/fa.py`, `fi.py` and `trtllm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl.attention.base import BaseAttnMetadata, EagerBackend
from minisgl.attention.torch_plans import (
    GatheredDecodePlan,
    PerRequestPlan,
    SparseDecodePlan,
    as_slice,
    sparse_products_work,
)
from minisgl.attention.utils import cumulative_lengths
from minisgl.core import get_global_ctx
from minisgl.distributed.info import get_tp_info
from minisgl.utils.misc import div_even

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.attention.torch_plans import AttentionPlan
    from minisgl.core import Batch
    from minisgl.models.config import ModelConfig


@dataclass
class TorchMetadata(BaseAttnMetadata):
    """One batch as attention sees it; tensors are int32, padding requests included.

    Queries of request i are rows `[cu_seqlens_q[i], cu_seqlens_q[i + 1])` of the packed q; its K
    and V lie in the slots `page_table[i, :cache_seqlens[i]]`. What is right of that is undefined.
    """

    cu_seqlens_q: torch.Tensor  # [bs + 1], cumulative numbers of new tokens
    cu_seqlens_k: torch.Tensor  # [bs + 1], cumulative numbers of all tokens
    cache_seqlens: torch.Tensor  # [bs], tokens of each request once this pass has stored its own
    max_seqlen_q: int
    max_seqlen_k: int
    page_table: torch.Tensor  # [bs, max_seqlen_k], token locations
    plan: AttentionPlan

    def get_last_indices(self, bs: int) -> torch.Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


class TorchBackend(EagerBackend):
    """Stores K and V first and reads second; how it reads is the batch's plan.

    Made after the global context has its KV pool, `kv_cache` here, whose shape says `num_slots` and
    this rank's `num_kv_heads`; `num_qo_heads` are this rank's too, `dtype` is the pool's, and
    `slots` are the K and V of each layer. Raises ValueError if the query heads cannot be shared out
    evenly among the ranks, or a rank's among its KV heads. `forward` wants the batch's metadata:
    `prepare_metadata` is first.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.kv_cache = pool = get_global_ctx().kv_cache
        pages, page_size, self.num_kv_heads, _ = pool.k_cache(0).shape
        self.num_slots, self.dtype = pages * page_size, pool.dtype
        self.num_qo_heads = div_even(config.num_qo_heads, get_tp_info().size, what="query heads")
        div_even(self.num_qo_heads, self.num_kv_heads, what="query heads")
        shape = (self.num_slots, self.num_kv_heads, -1)
        self.slots = [  # K and V of each layer, views that are made here and not in each pass
            (pool.k_cache(layer).view(shape), pool.v_cache(layer).view(shape))
            for layer in range(pool.num_layers)
        ]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        metadata = batch.attn_metadata
        assert isinstance(metadata, TorchMetadata), "prepare_metadata(batch) comes first"
        self.kv_cache.store_kv(k, v, batch.out_loc, layer_id)
        return metadata.plan.attend(q, *self.slots[layer_id])

    def prepare_metadata(self, batch: Batch) -> None:
        """Fill `batch.attn_metadata` for its padded requests.

        Raises ValueError, with both numbers, for a request that is longer than the page table.
        """
        reqs, table = batch.padded_reqs, get_global_ctx().page_table
        q_lens, kv_lens = [req.extend_len for req in reqs], [req.device_len for req in reqs]
        longest, width = max(kv_lens), table.shape[1]
        if longest > width:
            raise ValueError(f"a request of {longest} tokens in a page table of {width} positions")
        rows = table[torch.tensor([req.table_idx for req in reqs]), :longest]
        batch.attn_metadata = TorchMetadata(
            cu_seqlens_q=cumulative_lengths(q_lens, rows.device),
            cu_seqlens_k=cumulative_lengths(kv_lens, rows.device),
            cache_seqlens=torch.tensor(kv_lens, dtype=torch.int32, device=rows.device),
            max_seqlen_q=max(q_lens),
            max_seqlen_k=longest,
            page_table=rows,
            plan=self.make_plan(q_lens, kv_lens, rows),
        )

    def make_plan(
        self, q_lens: Sequence[int], kv_lens: Sequence[int], rows: torch.Tensor
    ) -> AttentionPlan:
        """The fastest plan that can do it; a backend that knows a faster one overrides this.

        `rows` are the requests' rows of the page table. Request by request if any brings more than
        one query, or if a single request lies in consecutive slots; else the sparse plan where
        `sparse_products_work`, and the gathered one where they do not.
        """
        lone_run = len(kv_lens) == 1 and isinstance(as_slice(rows[0, : kv_lens[0]]), slice)
        if max(q_lens) > 1 or lone_run:
            return PerRequestPlan(q_lens, kv_lens, rows, self.dtype)
        if sparse_products_work(self.dtype, rows.device.type):
            heads = (self.num_qo_heads, self.num_kv_heads)
            return SparseDecodePlan(kv_lens, rows, self.num_slots, *heads, self.dtype)
        return GatheredDecodePlan(kv_lens, rows, self.dtype)
