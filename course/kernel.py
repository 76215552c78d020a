"""`%load_ext course`: what it changes in the kernel of a notebook.

A cell whose first line is `#| build minisgl/NAME.py` goes to the builder (`course.building`), and
in a workbook what is not written yet is said in a line (`course.workbooks`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from course.building.builder import Builder
from course.building.roots import RootFinder, find_root, is_workbook
from course.building.source import PACKAGE, BuildError, check_path, directive
from course.workbooks.guard import guard, prepare

_OURS = str(Path(__file__).parent) + os.sep
_builder: Builder | None = None


def builder() -> Builder:
    """The builder of this process, made on first use for the root that `find_root` names."""
    global _builder
    if _builder is None:
        _builder = Builder(find_root())
    return _builder


def transform(lines: list[str]) -> list[str]:
    """IPython's input transformer: a build cell becomes a call of `run_cell` on its text."""
    cell = "".join(lines)
    if directive(cell) is None:
        return lines
    return [f"__import__('course.kernel', fromlist=['run_cell']).run_cell({cell!r})\n"]


def run_cell(cell: str) -> None:
    """Build a cell in the running notebook: print the report, bind the names."""
    __tracebackhide__ = True
    shell, note = _shell(), ""
    cell, note = prepare(builder().root, cell)
    try:
        report, names = builder().run(cell)
    except SyntaxError as error:  # which IPython would show with all frames
        shown = shell.SyntaxTB.structured_traceback(type(error), error, [])
        lines = [line.rstrip("\n") for line in shown]
        raise _shown(BuildError(str(error)), cell, lines) from None
    except BaseException as error:
        _shown(error, cell, _lines_from_cell(shell, error))
        raise
    shell.user_ns.update(names)
    print(f"{report}\n{note}" if note else report)


def _shell() -> Any:
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise RuntimeError("build cells run in IPython or Jupyter, after `%load_ext course`")
    return shell


def _lines_from_cell(shell: Any, error: BaseException) -> list[str]:
    """A traceback that begins at the reader's line instead of in ours; [] for one of ours."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_OURS):
        frame = frame.tb_next
    if isinstance(error, BuildError):
        return [f"BuildError: {error}"]
    if frame is None:
        return []
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, frame)
    return lines


def _shown(error: BaseException, cell: str, lines: list[str]) -> BaseException:
    """The error, which IPython will show as these lines and what became of the file."""
    path = directive(cell) or ""
    with suppress(BuildError):  # a path outside the package is no file of ours
        kept = "unchanged" if (builder().root / check_path(path)).exists() else "not written"
        lines = [*lines, f"{path} is {kept}"] if lines else []
    render: Callable[[], list[str]] = lambda: lines  # noqa: E731
    if lines:
        error._render_traceback_ = render  # type: ignore[attr-defined]
    return error


def _without_autoreload(shell: Any) -> None:
    """Turn `%autoreload` off where it is on: it makes every class anew that a cell has built."""
    magic = shell.magics_manager.magics["line"].get("autoreload")
    reloader = getattr(getattr(magic, "__self__", None), "_reloader", None)
    if reloader is not None and reloader.enabled:
        reloader.enabled = False
        print("autoreload is off now: build cells keep what runs and the files in step themselves")


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext course` does: quiet libraries, the import hook, the input transformer."""
    from course.checkpoints import quiet

    if not __debug__:
        raise RuntimeError(
            "Python was started with -O or PYTHONOPTIMIZE, which leaves out every assert, and with "
            "them all checks of this course. Start it without."
        )
    quiet()
    # Without a C compiler the package warns, once; a stored output doesn't have that.
    logging.getLogger(f"{PACKAGE}.kernel.cpu.compile").addFilter(_is_no_warning)
    _without_autoreload(shell)
    shell.events.register("post_run_cell", lambda result: _without_autoreload(shell))
    root = builder().root
    if not any(isinstance(finder, RootFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RootFinder(root))
        loaded = sys.modules.get(PACKAGE)
        elsewhere = loaded is not None and str(root / PACKAGE) not in list(loaded.__path__)
        if elsewhere:
            raise RuntimeError(
                f"{PACKAGE} is already imported from elsewhere; restart the kernel and run "
                "`%load_ext course` first."
            )
    if is_workbook(root):
        os.environ["PYTHONPATH"] = os.pathsep.join(  # what a cell starts finds the same package
            [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        guard(shell, root)
    transformers = shell.input_transformers_cleanup
    if transform not in transformers:
        transformers.append(transform)
    shell.user_ns.setdefault("course", sys.modules["course"])  # `course.catch_up(…)` at once
