"""Picking rows of a table by number.

Official counterpart: `python/minisgl/kernel/index.py` (a CUDA kernel).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def indexing(
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    vocab_range: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return `weights[indices]`: `[rows, size]` and `[n]` to `[n, size]`.

    `vocab_range = (start, length)` says that `weights` holds only the rows
    `start <= i < start + length` of a larger table. Indices of other rows then give zeros, so
    that the sum over all ranks is the full lookup. Written into `output` when given.
    """
    if vocab_range is None:
        result = F.embedding(indices, weights)
    else:
        start, length = vocab_range
        local = indices - start
        mine = (local >= 0) & (local < length)
        result = F.embedding(local.where(mine, 0), weights) * mine.unsqueeze(-1)
    return result if output is None else output.copy_(result)
