"""The operations that do the arithmetic, as PyTorch references.

Official counterpart: `python/minisgl/kernel/__init__.py`.
"""

from __future__ import annotations

from minisgl.kernel.activation import gelu_and_mul, silu_and_mul
from minisgl.kernel.index import indexing
from minisgl.kernel.linear import (
    LinearKernel,
    get_linear_kernel,
    set_linear_kernel,
    supported_linear_kernels,
)
from minisgl.kernel.norm import fused_add_rmsnorm, rmsnorm
from minisgl.kernel.replace import replaceable, use_native_kernels
from minisgl.kernel.rotary import apply_rope_with_cos_sin_cache
