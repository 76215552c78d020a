"""Checks and exercises: run the chapter's checks, judge a reader's attempt."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any


def run_checks(*checks: Callable[[], object]) -> None:
    """Run each check and print its name with the first line of its docstring.

    A check is a function without arguments that asserts; the first failure is raised.
    """
    for check in checks:
        check()
        print(f"ok  {check.__name__}: {_summary(check)}")


def judge(attempt: Any, check: Callable[[Any], object], *, must_pass: bool = False) -> None:
    """Say how far an attempt at an exercise is: not started, not yet (and why), or right.

    `check(attempt)` asserts what a right answer does, with messages for the reader; an attempt
    that still raises NotImplementedError counts as not started. Never raises, so that an open
    exercise does not stop the notebook, unless `must_pass` (for the answers that come with the
    book).
    """
    name = getattr(attempt, "__name__", type(attempt).__name__)
    try:
        check(attempt)
    except NotImplementedError as missing:
        print(f"{name} · not started: {missing or 'replace the line that raises'}")
    except AssertionError as wrong:
        print(f"{name} · not yet: {wrong or _failed_line(wrong)}")
    except Exception as error:
        print(f"{name} · not yet: it raised {type(error).__name__}: {error} ({_place(error)})")
    else:
        print(f"{name} · right: {_summary(check)}")
        return
    if must_pass:
        raise AssertionError(f"{name} should be right; the line above says what it is not")


def _summary(function: Callable[..., object]) -> str:
    return (function.__doc__ or "passed").strip().splitlines()[0]


def _failed_line(error: AssertionError) -> str:
    """The source of an assert without a message."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line if frames else None) or "a check failed"


def _place(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"in {frame.name}, line {frame.lineno}"
