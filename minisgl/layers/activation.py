"""The gated activations, where the layers look for them.

Official counterpart: `python/minisgl/layers/activation.py`.
"""

from __future__ import annotations

from minisgl.kernel.activation import gelu_and_mul, silu_and_mul

__all__ = ["gelu_and_mul", "silu_and_mul"]
