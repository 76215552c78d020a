"""The operations in C for a CPU, as the table "native".

No official counterpart: there, kernels for GPUs do this.
"""

from __future__ import annotations

from minisgl.kernel.cpu.linear import linear
from minisgl.kernel.cpu.small import (
    native_add_rmsnorm,
    native_rope,
    native_silu_and_mul,
    native_store_cache,
)
from minisgl.kernel.cpu.compile import find_compiler
from minisgl.kernel.table import SUPPORTED_KERNELS, Kernels, keep_as_loaded


@SUPPORTED_KERNELS.register("native")
def create_native_kernels() -> Kernels | None:
    """Everything in C; None where there is no C compiler."""
    if find_compiler() is None:
        return None
    return Kernels(
        name="native",
        pack=keep_as_loaded,
        linear=linear,
        add_rmsnorm=native_add_rmsnorm,
        silu_and_mul=native_silu_and_mul,
        rope=native_rope,
        store_cache=native_store_cache,
    )
