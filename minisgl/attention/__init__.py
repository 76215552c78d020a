"""Attention over the paged KV pool, by backends that are made by name.

Official counterpart: `python/minisgl/attention/__init__.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from minisgl.attention.base import BaseAttnBackend, BaseAttnMetadata, HybridBackend
from minisgl.utils.registry import Registry

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


class BackendCreator(Protocol):
    """Makes a backend for a model, or returns None where that backend cannot run.

    The global context must already hold the KV pool.
    """

    def __call__(self, config: ModelConfig) -> BaseAttnBackend | None: ...


SUPPORTED_ATTENTION_BACKENDS = Registry[BackendCreator](
    "Attention Backend", optional=("minisgl.attention.native_backend",)
)

# What the official engine has and this package does not: kernels for NVIDIA GPUs.
OFFICIAL_GPU_BACKENDS = {"fa": "FlashAttention", "fi": "FlashInfer", "trtllm": "TensorRT-LLM"}


@SUPPORTED_ATTENTION_BACKENDS.register("torch")
def create_torch_backend(config: ModelConfig) -> BaseAttnBackend:
    """The backend in plain PyTorch, for any device."""
    from minisgl.attention.torch_backend import TorchBackend

    return TorchBackend(config)


def validate_attn_backend(backend: str, allow_auto: bool = True) -> str:
    """Return `backend` if it names one backend, a pair "prefill,decode", or (if allowed) "auto".

    Raises ValueError otherwise, with the list of the names that there are.
    """
    if backend == "auto" and allow_auto:
        return backend
    names = [name.strip() for name in backend.split(",")]
    known = SUPPORTED_ATTENTION_BACKENDS.supported_names()
    unknown = [name for name in names if name not in known]
    if not unknown and len(names) <= 2:
        return ",".join(names)
    official = [f"{n} ({OFFICIAL_GPU_BACKENDS[n]})" for n in unknown if n in OFFICIAL_GPU_BACKENDS]
    hint = f" Only the official engine has {', '.join(official)}, for GPUs." if official else ""
    raise ValueError(
        f"attention backend {backend!r}: expected one of {known}, or two of them for prefill and "
        f"decode, such as 'torch,torch'.{hint}"
    )


def create_attention_backend(backend: str, config: ModelConfig) -> BaseAttnBackend:
    """The backend called `backend`, or a `HybridBackend` for two different names "a,b".

    "auto" is "native" if there is such a backend and it can run, else "torch". Raises ValueError
    for a name that isn't there, and for a backend that cannot run here.
    """
    creators = SUPPORTED_ATTENTION_BACKENDS
    if backend == "auto":
        native = creators["native"](config) if "native" in creators else None
        if native is not None:
            return native
        backend = "torch"
    made = []
    for name in dict.fromkeys(validate_attn_backend(backend).split(",")):
        one = creators[name](config)
        if one is None:
            raise ValueError(
                f"attention backend {name!r} cannot run on this machine, or not with this model's "
                "device, dtype and head size; 'auto' takes one that can"
            )
        made.append(one)
    return made[0] if len(made) == 1 else HybridBackend(*made)


__all__ = [
    "SUPPORTED_ATTENTION_BACKENDS",
    "BaseAttnBackend",
    "BaseAttnMetadata",
    "HybridBackend",
    "create_attention_backend",
    "validate_attn_backend",
]
