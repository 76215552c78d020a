"""Mixture-of-experts backends by name. Official counterpart: `moe/__init__.py`."""

from __future__ import annotations

from collections.abc import Callable

from minisgl.moe.base import BaseMoeBackend
from minisgl.utils.registry import Registry

SUPPORTED_MOE_BACKENDS = Registry[Callable[[], BaseMoeBackend]](
    "MoE backend", optional=("minisgl.moe.fused",)
)


def create_moe_backend(backend: str) -> BaseMoeBackend:
    """The backend called `backend` ("auto": "fused"); ValueError for a name that nothing has."""
    return SUPPORTED_MOE_BACKENDS["fused" if backend == "auto" else backend]()


__all__ = ["SUPPORTED_MOE_BACKENDS", "BaseMoeBackend", "create_moe_backend"]
