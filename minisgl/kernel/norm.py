"""RMS normalization, plain and with the residual addition.

The official layers call FlashInfer's `rmsnorm` and `fused_add_rmsnorm`. These are PyTorch
references in the order of operations of `transformers`, which makes them equal to the last bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Divide each row by its root mean square and scale it: `x / sqrt(mean(x²) + eps) * weight`.

    `x` is `[..., size]`, `weight` is `[size]`. The mean is taken in float32; the result is
    cast back to the dtype of `x` *before* the multiplication by `weight`, and stays in it
    whatever the dtype of `weight`. Written into `out` when given, which may be `x` itself.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    y = F.rms_norm(x.to(torch.float32), weight.shape, None, eps).to(x.dtype).mul_(weight)
    return y if out is None else out.copy_(y)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream, and normalize the sum: `(rmsnorm(sum), sum)`.

    All are `[..., size]`. Neither `x` nor `residual` is modified.
    """
    total = residual + x
    return rmsnorm(total, weight, eps), total
