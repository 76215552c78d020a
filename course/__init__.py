"""What the notebooks lean on: building, the model, widgets, checks and exercises.

`%load_ext course` in a notebook turns on build cells. `minisgl` never imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course.checkpoints import model, tiny
    from course.judging.checks import check, judge, run_checks
    from course.judging.progress import progress
    from course.kernel import load_ipython_extension
    from course.pictures import canvas as draw
    from course.pictures import widgets
    from course.workbooks.reference import catch_up, reveal

__all__ = [
    "catch_up",
    "check",
    "draw",
    "judge",
    "load_ipython_extension",
    "model",
    "progress",
    "reveal",
    "run_checks",
    "tiny",
    "widgets",
]

_HOMES = {
    "catch_up": "workbooks.reference",
    "check": "judging.checks",
    "judge": "judging.checks",
    "load_ipython_extension": "kernel",
    "model": "checkpoints",
    "progress": "judging.progress",
    "reveal": "workbooks.reference",
    "run_checks": "judging.checks",
    "tiny": "checkpoints",
}
_MODULES = {"draw": "pictures.canvas", "widgets": "pictures.widgets"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import course` stays light."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"course.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"course.{_MODULES[name]}")
    raise AttributeError(f"module 'course' has no attribute {name!r}")
