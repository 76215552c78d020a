"""Small pieces of arithmetic that any attention backend needs.

Official counterpart: `python/minisgl/attention/utils.py` (which holds the buffers for CUDA graphs).
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def causal_mask(q_len: int, kv_len: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Who sees whom when the queries are the *last* `q_len` of `kv_len` tokens.

    Returns `[q_len, kv_len]`, bool, True where a query may look. Query i is token
    `kv_len - q_len + i` and sees the keys up to and including itself: the diagonal ends in the
    bottom right corner. Raises ValueError when there are more queries than keys, because the
    first of them would see nothing and its softmax would be 0/0.
    """
    if not 1 <= q_len <= kv_len:
        raise ValueError(
            f"{q_len} queries cannot be the last of {kv_len} tokens: "
            "expected 1 <= q_len <= kv_len. Store K and V of the new tokens before attending."
        )
    everything = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    return everything.tril(diagonal=kv_len - q_len)


def cumulative_lengths(lengths: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Where each segment begins when segments of these lengths lie end to end.

    Returns `[len(lengths) + 1]`, int32: segment i is the half-open range `[c[i], c[i + 1])`.
    """
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
