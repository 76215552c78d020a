"""Where a reference in PyTorch may be replaced by one that a later file brings.

No official counterpart: upstream calls FlashInfer's fused kernels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_ACTIVE: dict[str, Callable[..., Any]] = {}  # by the name of the function that it replaces


def replaceable(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a reference: a call runs the active replacement of the same name, if there is one.

    A replacement that cannot do what is asked returns `NotImplemented`; then the reference runs.
    """
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        replacement = _ACTIVE.get(name)
        result = NotImplemented if replacement is None else replacement(*args, **kwargs)
        return function(*args, **kwargs) if result is NotImplemented else result

    return call


def use_native_kernels(on: bool) -> None:
    """Activate the replacements of `kernel/native_small.py`, if that file exists, or none."""
    _ACTIVE.clear()
    if on and Path(__file__).with_name("native_small.py").is_file():
        _ACTIVE.update(importlib.import_module("minisgl.kernel.native_small").REPLACEMENTS)
