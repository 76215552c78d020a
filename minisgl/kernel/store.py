"""Scatter this pass's keys and values into the pool.

Official counterpart: `python/minisgl/kernel/store.py`, which compiles a CUDA kernel for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def store_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Write `k[i]` and `v[i]` into row `indices[i]` of one layer's cache, in place.

    `k_cache` and `v_cache` are `[num_slots, …]`, `k` and `v` are `[num_tokens, …]` with as many
    numbers a token as the cache has a slot, in any shape; `indices` is `[num_tokens]`, each slot
    at most once (only the dummy's slot may repeat: nobody reads what it holds).

    Raises ValueError, with the shapes, unless `k` and `v` have as many tokens as there are
    indices, and each token as many numbers as a slot. Without that check one token and many
    indices would broadcast: the same K and V in every slot, and no error.
    """
    num_slots, num_tokens = k_cache.shape[0], indices.numel()
    k_cache, v_cache = k_cache.view(num_slots, -1), v_cache.view(num_slots, -1)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.shape[0] != num_tokens or new.numel() != num_tokens * cache.shape[1]:
            raise ValueError(
                f"{name} has shape {tuple(new.shape)}, but {num_tokens} indices into slots of "
                f"{cache.shape[1]} numbers need [{num_tokens}, {cache.shape[1]}]"
            )
    slots = indices.flatten().long()
    k_cache.index_copy_(0, slots, k.reshape(num_tokens, k_cache.shape[1]))
    v_cache.index_copy_(0, slots, v.reshape(num_tokens, v_cache.shape[1]))
