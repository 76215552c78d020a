"""What the engine expects of a KV pool and of a prefix cache.

Three things that are easy to mix up:

* the **pool** (`BaseKVCachePool`) is the memory: it holds keys and values and knows nothing of
  requests;
* the **prefix cache** (`BasePrefixCache`) remembers which slots of the pool hold the KV of which
  tokens, so that a later request with the same beginning need not compute it again;
* a **handle** (`BaseCacheHandle`) is what a request keeps of a prefix-cache hit.

Official counterpart: `python/minisgl/kvcache/base.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class BaseKVCachePool(ABC):
    """The keys and values of every layer, in slots; a slot holds one token's K and V."""

    @abstractmethod
    def k_cache(self, index: int) -> torch.Tensor:
        """Keys of layer `index`, a view: `[pages, page_size, local_kv_heads, head_dim]`."""

    @abstractmethod
    def v_cache(self, index: int) -> torch.Tensor:
        """Values of layer `index`, a view of the same shape as `k_cache(index)`."""

    @abstractmethod
    def store_kv(
        self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int
    ) -> None:
        """Write the K and V of token i of this pass into slot `out_loc[i]` of layer `layer_id`.

        `k` and `v` are `[num_tokens, local_kv_heads, head_dim]`, `out_loc` is `[num_tokens]`.
        """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the pool lies."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of a stored number."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """How many layers have a share of every slot."""


@dataclass(frozen=True)
class BaseCacheHandle(ABC):
    """A hit in the prefix cache: the first `cached_len` tokens of a prompt are in the pool."""

    cached_len: int

    @abstractmethod
    def get_matched_indices(self) -> torch.Tensor:
        """The slots that hold those tokens, in order: `[cached_len]`, int32."""


class SizeInfo(NamedTuple):
    """How many tokens a prefix cache holds."""

    evictable_size: int  # tokens nobody uses now: `evict` may give their slots back
    protected_size: int  # tokens locked by a running request

    @property
    def total_size(self) -> int:
        """Both together, in tokens."""
        return self.evictable_size + self.protected_size


class InsertResult(NamedTuple):
    """What `insert_prefix` did."""

    cached_len: int  # this many tokens were in the cache already, in slots of their own
    handle: BaseCacheHandle  # covers everything that the cache now holds of this prompt


class MatchResult(NamedTuple):
    """What `match_prefix` found."""

    cuda_handle: BaseCacheHandle


class BasePrefixCache(ABC):
    """Remembers which slots hold the KV of which tokens. Sizes are in tokens, not in pages."""

    @abstractmethod
    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        """Find the longest cached prefix of `input_ids`.

        The hit isn't protected yet: `lock_handle` it before anything may evict.
        """

    @abstractmethod
    def lock_handle(self, handle: BaseCacheHandle, unlock: bool = False) -> None:
        """Protect what `handle` covers from eviction, or with `unlock` stop protecting it."""

    @abstractmethod
    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        """Offer the tokens `input_ids`, whose KV lies in the slots `indices`, to the cache.

        The cache takes over the slots of tokens that it didn't know; the others stay the caller's.
        It copies what it keeps: `indices` may be a view of a row that is written again later.
        """

    @abstractmethod
    def evict(self, size: int) -> torch.Tensor:
        """Forget at least `size` tokens nobody uses and return their slots, whole pages in order.

        Raises ValueError when fewer than `size` tokens are evictable; then nothing is forgotten.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo:
        """How much the cache holds, in tokens."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise RuntimeError if the cache's own records contradict each other."""
