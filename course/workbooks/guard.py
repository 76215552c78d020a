"""The kernel of a workbook: what is not written yet is said in a line, and *Run All* goes on."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from course.building.roots import is_workbook, reference_root
from course.building.source import PACKAGE, NotBegun, directive, parse
from course.workbooks import stubs
from course.workbooks.generate import dotted, running_chapter
from course.workbooks.reference import Written, code_cells, to_write


def prepare(root: Path, cell: str) -> tuple[str, str]:
    """A build cell as it may run in a workbook, and a line to print after its report, or ''."""
    path = directive(cell)
    if not is_workbook(root) or path is None or not (root / path).is_file():
        return cell, ""
    cell, kept = stubs.keep_written(cell, (root / path).read_text(encoding="utf-8"))
    if not kept:
        return cell, ""
    return cell, f"kept what the file has, where this cell has a stub: {', '.join(kept)}"


class Unwritten:
    """What a process lacks because nobody has written it yet."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # a name that could not be made → what was not written

    def cause(self, error: BaseException | None) -> str | None:
        """What is not written, if that is why the error came; None for any other error."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            found = self._cause(error)
            if found is not None:
                return found
            error = error.__cause__ or error.__context__
        return None

    def _cause(self, error: BaseException) -> str | None:
        text = str(error)
        if isinstance(error, NotImplementedError) and text.startswith(stubs.MARK):
            return text.removeprefix(stubs.MARK)
        if isinstance(error, ModuleNotFoundError):
            is_ours = (error.name or "").split(".")[0] == PACKAGE
            return error.name if is_ours else None
        if isinstance(error, ImportError):
            found = re.match(rf"cannot import name '(\w+)' from '?{PACKAGE}[\w.]*", text)
            return found[1] if found else None
        if isinstance(error, NotBegun):
            return error.name
        if isinstance(error, NameError) and error.name:
            return self._names.get(error.name) or (error.name if error.name in _homes() else None)
        if isinstance(error, AttributeError):
            found = re.match(rf"module '{PACKAGE}[\w.]*' has no attribute '(\w+)'", text)
            return found[1] if found else _unwritten_member(error)
        return None

    def forget(self, namespace: dict[str, Any], names: list[str], cause: str) -> None:
        """Drop the values of names that should have become something else and could not.

        Nothing that runs later then goes on with what an earlier cell called by the same name. A
        module or function stays: it may be right, though a file that is being built lacks it.
        """
        for name in names:
            self._names[name] = cause
            value = namespace.get(name)
            if not (isinstance(value, ModuleType) or callable(value)):
                namespace.pop(name, None)


unwritten: Unwritten | None = None  # of this process, where it runs a reader's package


@functools.cache
def _homes() -> dict[str, Written]:
    """Where the book writes each name: in the running chapter, else in a file, else in a cell."""
    homes: dict[str, Written] = {}
    root, running = reference_root(), running_chapter()

    def in_turn(found: list[Written]) -> list[Written]:
        return sorted(found, key=lambda w: (w.chapter != running, not w.path))

    builds = [
        Written(c.chapter, c.path, name, heading, c)
        for c, heading in code_cells(root)
        if c.path
        for name in ("", *c.parse().definitions)
    ]
    written = in_turn(to_write(root))
    for item in written:
        homes.setdefault(item.name, item)
    begin = {(item.cell.where, item.name) for item in builds}
    for item in written:  # a class is where a cell begins it, though others go on with it
        if (item.cell.where, top := item.name.split(".")[0]) in begin:
            homes.setdefault(top, item)
    for item in in_turn(builds):
        homes.setdefault(item.name, item)
        module = dotted(item.path)
        while module:
            homes.setdefault(module, item)
            module = module.rpartition(".")[0]  # a folder that is not there is missed by its name
    return homes


def _unwritten_member(error: AttributeError) -> str | None:
    """The method that an object lacks, if a cell that the book has would have added it."""
    cls = error.obj if isinstance(error.obj, type) else type(error.obj)
    for base in cls.__mro__ if cls.__module__.split(".")[0] == PACKAGE else ():
        name = f"{base.__name__}.{error.name}"
        home = _homes().get(name)
        if home is not None and home.cell.parse().definitions[name].is_def:
            return name
    return None


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
        home = _homes().get(cause)
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
        if isinstance(node, stubs.Function | ast.ClassDef):
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
    global unwritten
    if unwritten is None:
        unwritten = Unwritten()
        Guard(shell, root, unwritten)
