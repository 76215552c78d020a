"""Rotary position embedding applied to queries and keys.

The official layers call FlashInfer's `apply_rope_with_cos_sin_cache_inplace`. This is a PyTorch
reference in the order of operations of `transformers`.
"""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs `(x[i], x[i + half])` of each head by the angle of its position.

    `x` is `[num_tokens, heads, 2 * half]`, `cos` and `sin` are `[num_tokens, 1, half]`.
    The halves are paired ("rotate half"); the paper pairs neighbors `(x[2i], x[2i + 1])`, which
    is the same rotation with the dimensions in another order.
    Source: Su et al., "RoFormer", 2021, section 3.2.2.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotated `query` and `key`, each in the shape it came in.

    `positions` is `[num_tokens]`; `query` and `key` are `[num_tokens, heads * head_size]`
    or `[num_tokens, heads, head_size]`; row `p` of `cos_sin_cache` (float32,
    `[max_position, head_size]`) holds the cosines, then the sines, of position `p`. Both are
    cast to the dtype of `query` before they are used.
    """
    rows = cos_sin_cache.index_select(0, positions).to(query.dtype)
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    num_tokens = positions.shape[0]
    q, k = (x.view(num_tokens, -1, head_size) for x in (query, key))
    both = rotate(torch.cat((q, k), dim=1), cos, sin)  # one call: half as many small operations
    q, k = both.split((q.shape[1], k.shape[1]), dim=1)
    return q.reshape(query.shape), k.reshape(key.shape)
