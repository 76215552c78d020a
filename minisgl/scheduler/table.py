"""Which row of the page table, and of the token pool, belongs to which request.

Official counterpart: `python/minisgl/scheduler/table.py`.
"""

from __future__ import annotations

import torch

from minisgl.scheduler.free_list import FreeList


class TableManager:
    """Hands out the first `max_running_reqs` rows; the row after them is the dummy request's.

    `page_table` is `[max_running_reqs + 1, max_seq_len]`, int32: which slot holds the KV of the
    token at that position. `token_pool` has the same shape: which token stands at that position.

    Raises ValueError, with the rows that are needed and the shape that came, for a page table
    without a row for each request and one for the dummy.
    """

    def __init__(self, max_running_reqs: int, page_table: torch.Tensor) -> None:
        if page_table.ndim != 2 or page_table.shape[0] <= max_running_reqs:
            raise ValueError(
                f"a page table for {max_running_reqs} requests and the dummy needs "
                f"{max_running_reqs + 1} rows, got shape {tuple(page_table.shape)}"
            )
        self._rows = FreeList(max_running_reqs, "row")
        self.page_table = page_table
        # Zero is a token of every vocabulary: what nobody wrote can still be embedded.
        self.token_pool = torch.zeros_like(page_table, dtype=torch.int32)

    @property
    def available_size(self) -> int:
        """How many more requests can be admitted, as far as rows go."""
        return len(self._rows)

    def allocate(self) -> int:
        """A free row. Raises RuntimeError when all are taken."""
        return self._rows.take(1)[0]

    def free(self, slot: int) -> None:
        """Give row `slot` back. Raises ValueError if it isn't taken."""
        self._rows.give_back([slot])
