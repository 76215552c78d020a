"""Small helpers around PyTorch. Official counterpart: `python/minisgl/utils/torch_utils.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default for new tensors inside the block, and afterwards the old one again.

    Also after an error inside the block.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def nvtx_annotate(name: str, layer_id_field: str | None = None) -> Callable[[Method], Method]:
    """Decorate a method so that an NVIDIA profiler shows its calls under `name`.

    `layer_id_field` names an attribute whose value fills the `{}` in `name`.
    Without CUDA the method is returned as it is, at no cost.
    """

    def decorate(fn: Method) -> Method:
        if not torch.cuda.is_available():
            return fn

        @functools.wraps(fn)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            label = name.format(getattr(self, layer_id_field)) if layer_id_field else name
            with torch.cuda.nvtx.range(label):
                return fn(self, *args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
