"""The KV pool of multi-head (and grouped-query) attention: one tensor for the whole model.

Official counterpart: `python/minisgl/kvcache/mha_pool.py`.
"""

from __future__ import annotations

import torch

from minisgl.distributed.info import get_tp_info
from minisgl.kernel.table import get_kernels
from minisgl.kvcache.base import BaseKVCachePool
from minisgl.utils.misc import div_even


class MHAKVCache(BaseKVCachePool):
    """`num_pages` pages of `page_size` slots, and one more page for the dummy request.

    The memory is one tensor `[2, num_layers, num_pages + 1, page_size, local_kv_heads, head_dim]`,
    K before V. Page p owns the slots `p * page_size` up to, not including, `(p + 1) * page_size`;
    the dummy's page is page `num_pages`, so no page that is handed out can ever be it.

    Raises ValueError that names both numbers unless there is at least one page of at least one
    slot, and the one of `div_even` if the KV heads do not divide.
    """

    def __init__(
        self,
        num_kv_heads: int,
        num_layers: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages with slots, got {num_pages} × {page_size}")
        local_kv_heads = div_even(num_kv_heads, get_tp_info().size, allow_replicate=True)
        shape = (2, num_layers, num_pages + 1, page_size, local_kv_heads, head_dim)
        self._kv_buffer = torch.empty(shape, dtype=dtype, device=device)
        k_slots, v_slots = self._kv_buffer.view(2, num_layers, -1, local_kv_heads, head_dim)
        self._slots = list(zip(k_slots, v_slots, strict=True))  # of each layer, made once
        self.num_pages, self.page_size = num_pages, page_size
        self._store_cache = get_kernels().store_cache

    def k_cache(self, index: int) -> torch.Tensor:
        return self._kv_buffer[0, index]

    def v_cache(self, index: int) -> torch.Tensor:
        return self._kv_buffer[1, index]

    def store_kv(
        self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int
    ) -> None:
        self._store_cache(*self._slots[layer_id], out_loc, k, v)

    @property
    def device(self) -> torch.device:
        return self._kv_buffer.device

    @property
    def dtype(self) -> torch.dtype:
        return self._kv_buffer.dtype

    @property
    def num_layers(self) -> int:
        return self._kv_buffer.shape[1]
