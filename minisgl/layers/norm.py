"""Normalization layers. Official counterpart: `python/minisgl/layers/norm.py`."""

from __future__ import annotations

import torch

from minisgl.kernel.norm import rmsnorm
from minisgl.kernel.table import get_kernels
from minisgl.layers.base import BaseOP


class RMSNorm(BaseOP):
    """RMS normalization over the last dimension; `eps` comes from the model's config."""

    def __init__(self, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = torch.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized `x` (`[..., size]`), in the dtype of `x`."""
        return rmsnorm(x, self.weight, self.eps)

    def forward_inplace(self, x: torch.Tensor) -> None:
        """Normalize `x` where it lies."""
        rmsnorm(x, self.weight, self.eps, out=x)


class RMSNormFused(BaseOP):
    """The residual addition before a norm and the norm itself, as one operation."""

    def __init__(self, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = torch.empty(size)
        self._add_rmsnorm = get_kernels().add_rmsnorm

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(normalized, residual)` for the next sublayer and the next norm.

        `x` is what the last sublayer computed, `residual` the stream it belongs to; their sum
        is the new residual, and what is normalized. Without `residual`, `x` starts the stream.
        """
        if residual is None:
            return rmsnorm(x, self.weight, self.eps), x
        return self._add_rmsnorm(x, residual, self.weight, self.eps)
