"""The operations that do the arithmetic: PyTorch references, and the table that layers take.

Official counterpart: `python/minisgl/kernel/__init__.py`.
"""

from __future__ import annotations

from minisgl.kernel.activation import gelu_and_mul, silu_and_mul
from minisgl.kernel.index import indexing
from minisgl.kernel.norm import fused_add_rmsnorm, rmsnorm
from minisgl.kernel.rotary import apply_rope_with_cos_sin_cache
from minisgl.kernel.table import SUPPORTED_KERNELS, Kernels, get_kernels, use_kernels
