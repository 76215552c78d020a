"""Attention over the paged KV pool, by backends that are made by name.

Official counterpart: `python/minisgl/attention/__init__.py`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from minisgl.attention.base import BaseAttnBackend, BaseAttnMetadata, HybridBackend
from minisgl.utils.registry import Registry

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


class BackendCreator(Protocol):
    """Makes a backend for a model; the global context must already hold the KV pool."""

    def __call__(self, config: ModelConfig) -> BaseAttnBackend: ...


SUPPORTED_ATTENTION_BACKENDS = Registry[BackendCreator]("Attention Backend")

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

    "auto" means that of `attention/auto_backend.py` when it exists, and "torch" until then.
    """
    if backend == "auto" and Path(__file__).with_name("auto_backend.py").is_file():
        made_there = import_module("minisgl.attention.auto_backend").create_auto_backend(config)
        return cast("BaseAttnBackend", made_there)
    names = validate_attn_backend("torch" if backend == "auto" else backend).split(",")
    made = [SUPPORTED_ATTENTION_BACKENDS[name](config) for name in dict.fromkeys(names)]
    return made[0] if len(made) == 1 else HybridBackend(*made)


__all__ = [
    "SUPPORTED_ATTENTION_BACKENDS",
    "BaseAttnBackend",
    "BaseAttnMetadata",
    "HybridBackend",
    "create_attention_backend",
    "validate_attn_backend",
]
