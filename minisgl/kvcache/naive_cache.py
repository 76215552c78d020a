"""A prefix cache that remembers nothing: every prompt is computed from its first token.

Official counterpart: `python/minisgl/kvcache/naive_cache.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.kvcache.base import (
    BaseCacheHandle,
    BasePrefixCache,
    InsertResult,
    MatchResult,
    SizeInfo,
)


@dataclass(frozen=True)
class NaiveCacheHandle(BaseCacheHandle):
    """The handle of a miss: it covers no token."""

    cached_len: int = 0
    device: torch.device | None = None

    def get_matched_indices(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int32, device=self.device)


class NaivePrefixCache(BasePrefixCache):
    """Never finds anything, keeps nothing, and so has nothing to protect or to evict."""

    def __init__(self, device: torch.device) -> None:
        self._miss = NaiveCacheHandle(device=device)

    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        return MatchResult(self._miss)

    def lock_handle(self, handle: BaseCacheHandle, unlock: bool = False) -> None:
        pass

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        return InsertResult(cached_len=0, handle=self._miss)

    def evict(self, size: int) -> torch.Tensor:
        if size > 0:
            raise ValueError(f"cannot evict {size} tokens: the naive cache holds none")
        return self._miss.get_matched_indices()

    def reset(self) -> None:
        pass

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(evictable_size=0, protected_size=0)

    def check_integrity(self) -> None:
        pass
