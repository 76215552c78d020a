"""The KV pool and the prefix caches, each made by name.

Official counterpart: `python/minisgl/kvcache/__init__.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from minisgl.kvcache.base import (
    BaseCacheHandle,
    BaseKVCachePool,
    BasePrefixCache,
    InsertResult,
    MatchResult,
    SizeInfo,
)
from minisgl.utils.registry import Registry

if TYPE_CHECKING:
    import torch

    from minisgl.models.config import ModelConfig


def create_kvcache_pool(
    model_config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> BaseKVCachePool:
    """The pool for a model: `num_pages` pages for requests, and one more for the dummy request."""
    from minisgl.kvcache.mha_pool import MHAKVCache

    return MHAKVCache(
        num_kv_heads=model_config.num_kv_heads,
        num_layers=model_config.num_layers,
        head_dim=model_config.head_dim,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
        device=device,
    )


class CacheManagerCreator(Protocol):
    """Makes a prefix cache whose slots are named by tensors on `device`."""

    def __call__(self, device: torch.device) -> BasePrefixCache: ...


SUPPORTED_CACHE_MANAGER = Registry[CacheManagerCreator](
    "prefix cache", optional=("minisgl.kvcache.radix_cache",)
)


@SUPPORTED_CACHE_MANAGER.register("naive")
def create_naive_cache(device: torch.device) -> BasePrefixCache:
    """The prefix cache that never hits."""
    from minisgl.kvcache.naive_cache import NaivePrefixCache

    return NaivePrefixCache(device=device)


def create_prefix_cache(device: torch.device, type: str) -> BasePrefixCache:
    """The prefix cache called `type`; an unknown name is refused with the list of known ones."""
    return SUPPORTED_CACHE_MANAGER[type](device)


__all__ = [
    "SUPPORTED_CACHE_MANAGER",
    "BaseCacheHandle",
    "BaseKVCachePool",
    "BasePrefixCache",
    "InsertResult",
    "MatchResult",
    "SizeInfo",
    "create_kvcache_pool",
    "create_prefix_cache",
]
