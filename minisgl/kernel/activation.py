"""Gated activations: what stands between the two products of an MLP.

The official layers call FlashInfer's `silu_and_mul` and `gelu_and_mul`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `silu(gate) * up` for `x = [gate | up]`: `[..., 2 * size]` to `[..., size]`.

    Written into `out` when given.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
    """
    gate, up = x.chunk(2, dim=-1)
    gate = F.silu(gate)
    return torch.mul(gate, up, out=gate if out is None else out)


def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `gelu(gate) * up` for `x = [gate | up]`; the exact GELU, by the error function.

    Written into `out` when given.
    """
    gate, up = x.chunk(2, dim=-1)
    gate = F.gelu(gate)
    return torch.mul(gate, up, out=gate if out is None else out)
