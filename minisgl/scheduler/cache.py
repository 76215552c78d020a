"""Gives requests their pages, writes the page table, and takes the pages back.

Official counterpart: `python/minisgl/scheduler/cache.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from minisgl.kvcache import create_prefix_cache
from minisgl.scheduler.free_list import FreeList
from minisgl.utils.misc import div_ceil

if TYPE_CHECKING:
    from minisgl.core import Req
    from minisgl.kvcache.base import BaseCacheHandle, MatchResult


def new_pages(reqs: Iterable[Req], page_size: int) -> list[tuple[int, int, int]]:
    """What the next pass of `reqs` has to allocate: (row, first page, page after the last).

    The tokens [0, cached_len) lie in pages that a request has, and the pass writes
    [cached_len, device_len). Requests whose last page has room for that are left out.
    """
    spans = [
        (req.table_idx, div_ceil(req.cached_len, page_size), div_ceil(req.device_len, page_size))
        for req in reqs
    ]
    return [(row, first, last) for row, first, last in spans if first < last]


def pages_needed(reqs: Iterable[Req], page_size: int) -> int:
    """How many pages the next pass of `reqs` has to allocate."""
    return sum(last - first for _, first, last in new_pages(reqs, page_size))


class CacheManager:
    """Knows the owner of each page: nobody, a running request, or the prefix cache `type`.

    Takes pages from the free list, writes them into the page table, and gives them back.
    `num_pages` doesn't count the dummy's page. Every error leaves everything as it was.
    """

    def __init__(self, num_pages: int, page_size: int, page_table: torch.Tensor, type: str) -> None:
        self.free_pages = FreeList(num_pages, "page")
        self.prefix_cache = create_prefix_cache(page_table.device, type)
        self.num_pages, self.page_size, self.page_table = num_pages, page_size, page_table
        self._freed_later: list[torch.Tensor] | None = None

    @property
    def available_size(self) -> int:
        """Tokens there is room for: in free pages, and in pages that the cache can give back."""
        return len(self.free_pages) * self.page_size + self.prefix_cache.size_info.evictable_size

    def _allocate(self, needed_pages: int) -> torch.Tensor:
        """Take pages from the free list: `[needed_pages]`, page numbers.

        If too few are free, the prefix cache gives up what is missing. That is free at once, also
        inside a `lazy_free_region`.
        """
        missing = (needed_pages - len(self.free_pages)) * self.page_size
        if 0 < missing <= self.prefix_cache.size_info.evictable_size:
            evicted = self.prefix_cache.evict(missing)
            self.free_pages.give_back((evicted[:: self.page_size] // self.page_size).tolist())
        pages = self.free_pages.take(needed_pages)
        return torch.tensor(pages, dtype=torch.int32, device=self.page_table.device)

    def _page_to_token(self, pages: torch.Tensor) -> torch.Tensor:
        """All slots of `pages`, in order: `[len(pages) * page_size]`."""
        offsets = torch.arange(self.page_size, dtype=pages.dtype, device=pages.device)
        return (pages[:, None] * self.page_size + offsets).flatten()

    def allocate_paged(self, reqs: list[Req]) -> None:
        """Give each request the pages that its next pass writes into; once for each pass.

        Raises ValueError if a request is longer than a row, RuntimeError if the pages run out.
        """
        width = self.page_table.shape[1]
        if too_long := [req.device_len for req in reqs if req.device_len > width]:
            raise ValueError(f"requests of {too_long} tokens don't fit rows of {width} positions")
        if allocation_info := new_pages(reqs, self.page_size):
            needed_pages = sum(last - first for _, first, last in allocation_info)
            slots = self._page_to_token(self._allocate(needed_pages))
            _write_page_table(self.page_table, slots, allocation_info, self.page_size)

    def check_integrity(self, reqs: Iterable[Req] = ()) -> None:
        """Raise RuntimeError unless each page is free, the cache's, or one running request's.

        `reqs` are all running requests, seen between two passes.
        """
        self.prefix_cache.check_integrity()
        self.free_pages.check_integrity()
        owned = [own_pages(req, self.page_table, self.page_size) for req in reqs]
        owners = Counter(page for pages in owned for page in pages)
        if shared := sorted(page for page, count in owners.items() if count > 1):
            raise RuntimeError(f"pages {shared} have two owners")
        if strangers := sorted(owners.keys() - self.free_pages.taken()):
            raise RuntimeError(f"pages {strangers} have an owner, but were not handed out")
        free = len(self.free_pages)
        cached = self.prefix_cache.size_info.total_size // self.page_size
        if lost := self.num_pages - free - len(owners) - cached:
            raise RuntimeError(
                f"{self.num_pages} pages, but {free} free, {len(owners)} owned by requests "
                f"and {cached} by the prefix cache: {lost} unaccounted for"
            )

    def match_req(self, req: HasPrompt) -> MatchResult:
        """Look the prompt up, less its last token: a pass must compute at least one."""
        if len(req.input_ids) == 0:
            raise ValueError("an empty prompt leaves nothing to compute")
        return self.prefix_cache.match_prefix(req.input_ids[:-1])

    def lock(self, handle: BaseCacheHandle) -> None:
        """Protect what `handle` covers from eviction."""
        self.prefix_cache.lock_handle(handle)

    def unlock(self, handle: BaseCacheHandle) -> None:
        """Take the protection of one `lock` away."""
        self.prefix_cache.lock_handle(handle, unlock=True)

    def _free(self, indices: torch.Tensor) -> None:
        """Give back the pages of the slots `indices`: whole pages, only the last cut short."""
        pages = indices[:: self.page_size] // self.page_size
        if self._freed_later is None:
            self.free_pages.give_back(pages.tolist())
        else:
            self._freed_later.append(pages)

    @contextmanager
    def lazy_free_region(self) -> Iterator[None]:
        """Collect what is freed inside, and give it back at the end, or at an error, in one go.

        On a GPU each `_free` waits until page numbers have reached the host; this waits once.
        """
        self._freed_later = []
        try:
            yield
        finally:
            freed, self._freed_later = self._freed_later, None
            if freed:
                self.free_pages.give_back(torch.cat(freed).tolist())

    def cache_req(self, req: Req, *, finished: bool) -> None:
        """Offer `req`'s KV to the prefix cache; when `finished`, give up all of `req`'s pages.

        A finished row points at the dummy's page from then on: finishing twice is a ValueError.
        """
        # Whose are the slots of the row? Here `old` and `new` are the `cached_len` of the handles.
        #
        #   positions          what is there               before         after
        #   [0, old)           the hit at admission        the cache's    the cache's
        #   [old, known)       others cached it meanwhile  the request's  `spare`: free
        #   [known, new)       new to the cache            the request's  the cache's
        #   [new, cached_len)  not taken by the cache      the request's  `tail`: free if finished
        row, old = self.page_table[req.table_idx, : req.cached_len], req.cache_handle
        known, new = self.prefix_cache.insert_prefix(req.input_ids[: req.cached_len], row)
        spare = row[old.cached_len : known]
        tail = row[max(old.cached_len, new.cached_len) :]
        self._free(torch.cat([spare, tail]) if finished else spare)
        if finished:
            self.page_table[req.table_idx] = self.num_pages * self.page_size
        else:
            row[: new.cached_len] = new.get_matched_indices()
            req.cache_handle = new
            self.lock(new)
        self.unlock(old)


def _write_page_table(
    page_table: torch.Tensor,
    allocated: torch.Tensor,
    allocation_info: list[tuple[int, int, int]],
    page_size: int,
) -> None:
    """Write the slots `allocated` into their rows, in one go however many rows there are.

    `allocation_info` is what `new_pages` returns, in the order of `allocated`. Slots of a last
    page that lie beyond the end of the row are left out.
    """
    spans = [torch.arange(a * page_size, b * page_size) for _, a, b in allocation_info]
    positions, lengths = torch.cat(spans), torch.tensor([len(span) for span in spans])
    rows = torch.tensor([row for row, _, _ in allocation_info]).repeat_interleave(lengths)
    inside = positions < page_table.shape[1]
    page_table[rows[inside], positions[inside]] = allocated[inside]


def own_pages(req: Req, page_table: torch.Tensor, page_size: int) -> list[int]:
    """The pages that belong to `req` alone, seen between two passes.

    Those of its first `cache_handle.cached_len` tokens belong to the prefix cache.
    """
    row = page_table[req.table_idx, req.cache_handle.cached_len : req.cached_len]
    return (row[::page_size] // page_size).tolist()


class HasPrompt(Protocol):
    """A request that has no row and no pages yet."""

    input_ids: torch.Tensor
