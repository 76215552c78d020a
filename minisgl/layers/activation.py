"""The gated activations, where the layers look for them.

Official counterpart: `python/minisgl/layers/activation.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.kernel.activation import gelu_and_mul, silu_and_mul
from minisgl.kernel.table import get_kernels


def get_activation(name: str) -> Callable[..., torch.Tensor]:
    """The gated activation that configs call `name`; `ValueError` with the names otherwise."""
    known = {"silu": get_kernels().silu_and_mul, "gelu": gelu_and_mul}
    if name not in known:
        raise ValueError(f"unknown activation {name!r}; supported: {', '.join(known)}")
    return known[name]


__all__ = ["gelu_and_mul", "get_activation", "silu_and_mul"]
