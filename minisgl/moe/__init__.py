"""Mixture-of-experts backends by name. Official counterpart: `moe/__init__.py`."""

from __future__ import annotations

from typing import Protocol

from minisgl.models.register import import_later
from minisgl.moe.base import BaseMoeBackend
from minisgl.utils.registry import Registry


class MoeBackendCreator(Protocol):
    """Makes a backend; called once per engine."""

    def __call__(self) -> BaseMoeBackend: ...


SUPPORTED_MOE_BACKENDS = Registry[MoeBackendCreator]("MoE backend")


@SUPPORTED_MOE_BACKENDS.register("fused")
def create_fused_moe_backend() -> BaseMoeBackend:
    """All experts in one kernel. Raises NotImplementedError until its chapter is built."""
    backend: BaseMoeBackend = import_later("minisgl.moe.fused", "the fused MoE backend").FusedMoe()
    return backend


def create_moe_backend(backend: str) -> BaseMoeBackend:
    """The backend called `backend` ("auto": "fused"); unknown names are refused with the known."""
    return SUPPORTED_MOE_BACKENDS["fused" if backend == "auto" else backend]()


__all__ = ["SUPPORTED_MOE_BACKENDS", "BaseMoeBackend", "create_moe_backend"]
