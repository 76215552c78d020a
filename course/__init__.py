"""What the notebooks lean on: building, the model, widgets, checks and exercises.

`%load_ext course` in a notebook turns on build cells. `minisgl` never imports this package.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course.checkpoints import model, tiny
    from course.exercises import check, judge, run_checks
    from course.reference import catch_up, reveal
    from course.status import progress

__all__ = [
    "catch_up",
    "check",
    "judge",
    "load_ipython_extension",
    "model",
    "progress",
    "reveal",
    "run_checks",
    "tiny",
]

_HOMES = {
    "model": "course.checkpoints",
    "tiny": "course.checkpoints",
    "check": "course.exercises",
    "judge": "course.exercises",
    "run_checks": "course.exercises",
    "catch_up": "course.reference",
    "progress": "course.status",
    "reveal": "course.reference",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import course` stays light."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'course' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """IPython's hook for `%load_ext course`."""
    from course import builder

    builder.load(shell)
    shell.user_ns.setdefault("course", sys.modules[__name__])  # `course.catch_up(…)` at once
