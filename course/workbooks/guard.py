"""The kernel of a workbook: what is not written yet is said in a line, and *Run All* goes on."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from course.building.parsing import parse
from course.building.roots import is_workbook
from course.building.source import directive
from course.building.syntax import Function
from course.workbooks import stubs
from course.workbooks.pieces import Written
from course.workbooks.unwritten import Unwritten, begin, homes


def prepare(root: Path, cell: str) -> tuple[str, str]:
    """A build cell as it may run in a workbook, and a line to print after its report, or ''."""
    path = directive(cell)
    if not is_workbook(root) or path is None or not (root / path).is_file():
        return cell, ""
    cell, kept = stubs.keep_written(cell, (root / path).read_text(encoding="utf-8"))
    if not kept:
        return cell, ""
    return cell, f"kept what the file has, where this cell has a stub: {', '.join(kept)}"


def _is_written(root: Path, home: Written | None) -> bool:
    """Whether the reader's file has more than a stub of a definition."""
    file = root / home.path if home and home.path else None
    if home is None or file is None or not file.is_file():
        return False
    found = stubs.written(file.read_text(encoding="utf-8"))
    return found.get(home.name, False)


class LineEnds:
    """Knows whether what a cell printed last ended its line."""

    def __init__(self) -> None:
        self.is_open = False
        self._restore: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Watch what the cell that begins now prints; whoever watched before goes on doing so."""
        stream, write, self.is_open = sys.stdout, sys.stdout.write, False

        def watched(text: str) -> int:
            self.is_open = not text.endswith("\n") if text else self.is_open
            return write(text)

        stream.write = watched  # type: ignore[method-assign]
        self._restore = functools.partial(setattr, stream, "write", write)

    def end(self) -> None:
        """Stop watching."""
        self._restore()


class Guard:
    """Says in one line that a cell needs something unwritten, and lets *Run All* go on."""

    def __init__(self, shell: Any, root: Path, unwritten: Unwritten) -> None:
        self.shell, self.root, self.unwritten = shell, root, unwritten
        self._quiet: BaseException | None = None
        self._cell = ""
        self._lines = LineEnds()
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)
        shell.set_custom_exc((Exception,), self._handle)

    def _before(self, info: Any) -> None:
        self._cell, self._quiet = info.raw_cell, None
        self._lines.begin()

    def _after(self, result: Any) -> None:
        self._lines.end()
        if self._quiet is not None and result.error_in_exec is self._quiet:
            result.error_in_exec = None  # so that the front end goes on with the next cell

    def _handle(
        self, shell: Any, kind: type, error: Exception, trace: Any, tb_offset: int | None = None
    ) -> None:
        cause = self.unwritten.cause(error)
        if cause is None:
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
            return
        self._quiet = error
        names = _bound_from(self._cell, self._line(trace))
        self.unwritten.forget(self.shell.user_ns, names, cause)
        home = homes().get(cause)
        where = f" ({home.chapter}, “{home.heading}”)" if home else ""
        said = (
            "written, but its cell has not run here: "
            if _is_written(self.root, home)
            else stubs.MARK
        )
        print("\n" * self._lines.is_open, end="")
        print(f"{said}{cause}{where}")

    def _line(self, trace: TracebackType | None) -> int:
        """The line of the cell that an error came from."""
        line = 1
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_globals is self.shell.user_ns and frame.f_code.co_name == "<module>":
                line = trace.tb_lineno
            trace = trace.tb_next
        return line


def _bound_from(cell: str, line: int) -> list[str]:
    """The names that a cell's top-level statements bind, from the one at `line` on."""
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return []
    if directive(cell) is not None:
        source = parse(cell)
        return [*source.names, *(item.bound for item in source.imports)]
    names: dict[str, None] = {}
    for node in tree.body:
        if (node.end_lineno or node.lineno) < line:
            continue
        if isinstance(node, Function | ast.ClassDef):
            names[node.name] = None
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names[inner.id] = None
            elif isinstance(inner, ast.alias):
                names[(inner.asname or inner.name).split(".")[0]] = None
    return list(names)


def guard(shell: Any, root: Path) -> None:
    """Make a workbook's kernel friendly; once per kernel."""
    global _guard
    if _guard is None:
        _guard = Guard(shell, root, begin())


_guard: Guard | None = None
