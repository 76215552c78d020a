"""The operations that layers and the KV pool are bound to: a table of them, chosen by name.

No official counterpart: upstream's layers import FlashInfer's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minisgl.kernel.activation import silu_and_mul
from minisgl.kernel.norm import fused_add_rmsnorm
from minisgl.kernel.rotary import apply_rope_with_cos_sin_cache
from minisgl.utils.registry import Registry, import_optional


class Kernels(NamedTuple):
    """A table: one function for each operation, with what it takes and gives.

    A function that can't take some input calls the reference in `minisgl.kernel` for it.
    """

    name: str
    # (weight as loaded, its full name, whether others read it too) -> the form `linear` likes
    # best: a tensor, or an object with the weight's `shape` and `dtype`, and `nbytes`. The layer
    # keeps only that. What others read too must stay as it is.
    pack: Callable[[torch.Tensor, str, bool], Any]
    # (x [n, in], weight [out, in], packed or not, bias [out] or None) -> [n, out]
    linear: Callable[..., torch.Tensor]
    # (x, residual, weight, eps) -> (normalized sum, sum)
    add_rmsnorm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (x [..., 2 * size], out=None) -> [..., size]
    silu_and_mul: Callable[..., torch.Tensor]
    # (positions, query, key, head_size, cos_sin_cache) -> (query, key)
    rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (k_cache, v_cache, indices, k, v): writes into both caches
    store_cache: Callable[..., None]


# From a name to what creates its table, or returns None where it cannot run.
SUPPORTED_KERNELS = Registry[Callable[[], Kernels | None]](
    "kernels", optional=("minisgl.kernel.cpu",)
)


def keep_as_loaded(weight: torch.Tensor, name: str, shared: bool) -> torch.Tensor:
    """The `pack` of the references: nothing to do."""
    return weight


@SUPPORTED_KERNELS.register("torch")
def create_torch_kernels() -> Kernels:
    """The references in PyTorch, for any device."""
    store: Any = import_optional("minisgl.kernel.store")  # comes with the KV pool, None before
    return Kernels(
        name="torch",
        pack=keep_as_loaded,
        linear=F.linear,
        add_rmsnorm=fused_add_rmsnorm,
        silu_and_mul=silu_and_mul,
        rope=apply_rope_with_cos_sin_cache,
        store_cache=store and store.store_cache,
    )


_CHOSEN: Kernels | None = None


def use_kernels(name: str) -> None:
    """Choose the table for all layers and pools that are made from now on.

    "auto" is "native" where that can run, else "torch". Raises `ValueError` for an unknown name,
    and for one that cannot run on this machine; the old choice then stays.
    """
    global _CHOSEN
    if name == "auto":
        native = SUPPORTED_KERNELS["native"]() if "native" in SUPPORTED_KERNELS else None
        _CHOSEN = native or create_torch_kernels()
        return
    chosen = SUPPORTED_KERNELS[name]()
    if chosen is None:
        raise ValueError(
            f"the kernels {name!r} cannot run on this machine: is a compiler for them installed, "
            "and allowed (MINISGL_JIT)? 'auto' takes 'torch' in such a case"
        )
    _CHOSEN = chosen


def get_kernels() -> Kernels:
    """The table that `use_kernels` chose; "torch" until somebody chooses."""
    kernels = _CHOSEN or create_torch_kernels()
    assert kernels is not None, "the references run everywhere"
    return kernels
