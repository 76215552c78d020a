"""Running a build cell: its code becomes a part of a file of `minisgl` and of the live module.

`%load_ext course` makes a cell whose first line is `#| build minisgl/NAME.py` come here. The cell's
definitions are merged into the file's text (`source`), the merged text is tried out in a
scratch module, and only when that imports are the live module and the file changed. The code runs
in the namespace of the live module, so other objects that the module already holds stay the same.
A class stays the same object, too, where only functions of it are new: its instances see them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import linecache
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from filelock import FileLock

from course.building.merging import emit, merge
from course.building.parsing import parse
from course.building.plan import Plan
from course.building.source import (
    PACKAGE,
    BuildError,
    Piece,
    Source,
    check_path,
    directive,
    module_name,
)


class Builder:
    """Builds `minisgl` under one root, cell by cell, and keeps the live modules in step."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._loaded: dict[str, dict[tuple[str, ...], Piece]] = {}  # module → its pieces as run
        self._begun: dict[str, set[str]] = {}  # module → members that a class's first cell has

    def run(self, cell: str) -> tuple[str, dict[str, Any]]:
        """Build one cell: its report (what a notebook prints) and the names it gives.

        Raises SyntaxError or what the cell's code raises, with the file and the live module as
        they were, and BuildError for a cell that cannot be built.
        """
        path = check_path(directive(cell) or "")
        target = self._target(path)
        with FileLock(_lock_file(target)):  # another kernel may be building the same file
            plan = self._plan(cell, path, target)
            live = self._live_module(plan.name, target)
            with _absent_restored(plan.name):
                plan.try_out()
                module, stale = self._commit(plan, live)
        return "\n".join([plan.report, *stale]), plan.given(module)

    def _plan(self, cell: str, path: PurePosixPath, target: Path) -> Plan:
        """What building the cell would do; nothing is changed yet."""
        name, filename = module_name(path), _register_cell(path, cell)
        new = parse(cell, filename)
        old_text = target.read_text(encoding="utf-8") if target.exists() else ""
        old = parse(old_text, str(target))
        _append_classes(old, old_text, new, cell, filename)
        merged = merge(old, new, gone=self._begun.get(name, set()))
        return Plan(name, path, target, filename, new, merged, old_text, emit(merged))

    def _commit(self, plan: Plan, live: ModuleType | None) -> tuple[ModuleType, list[str]]:
        """Bring file and live module to what is planned: the module, and what stays behind."""
        stale: list[str] = []
        if live is None:
            live, pieces = plan.load_new(), plan.merged.pieces  # as a kernel that imports the file
        else:
            pieces, stale = plan.pieces, plan.update(live, self._loaded.get(plan.name, {}))
        plan.finish_package(live)
        self._loaded.setdefault(plan.name, {}).update({piece.names: piece for piece in pieces})
        self._begun[plan.name] = _begun_now(self._begun.get(plan.name, set()), plan.cell)
        return live, stale

    def _target(self, path: PurePosixPath) -> Path:
        """The file to write; BuildError when a link would lead out of the package."""
        target = self.root / path
        inside = (self.root / PACKAGE).resolve()
        if inside != self.root / PACKAGE or inside not in target.resolve().parents:
            raise BuildError(
                f"{path} is, or lies behind, a link out of {PACKAGE}/, and building writes inside "
                "it only. Remove the link."
            )
        return target

    def _live_module(self, name: str, target: Path) -> ModuleType | None:
        """The module as it is loaded now, importing it if its file is there and sound."""
        module = sys.modules.get(name)
        is_folder = target.name == "__init__.py" and target.parent.is_dir()
        if module is None and (target.exists() or is_folder):
            try:
                module = importlib.import_module(name)
            except Exception:  # a file broken by hand: the cell may be about to mend it
                return None
        if module is None:
            return None
        if name not in self._loaded and target.exists():
            on_disk = parse(target.read_text(encoding="utf-8"), str(target))
            self._loaded[name] = {piece.names: piece for piece in on_disk.pieces}
        return module


def _begun_now(before: set[str], cell: Source) -> set[str]:
    """The members that the cells which begin classes have, now that `cell` has run."""
    begun = set(before)
    for piece in cell.pieces:
        own = set(piece.definitions)
        if not piece.goes_on:
            begun = {name for name in begun if name.partition(".")[0] not in piece.names} | own
        else:
            begun -= own
    return begun


def _lock_file(target: Path) -> Path:
    """The file that two processes lock to take turns with `target`; it lies outside the course."""
    digest = hashlib.sha256(str(target).encode("utf-8")).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"minisgl-{digest}.lock"


def _register_cell(path: PurePosixPath, cell: str) -> str:
    """A file name for the cell that tracebacks and `inspect` can read its lines from."""
    digest = hashlib.sha256(cell.encode("utf-8")).hexdigest()[:6]
    filename = f"<cell of {module_name(path)} {digest}>"
    linecache.cache[filename] = (len(cell), None, cell.splitlines(keepends=True), filename)
    return filename


def _append_classes(
    file: Source, file_text: str, cell: Source, cell_text: str, filename: str
) -> None:
    """Number the lines of what the file adds to a class of the cell as if it stood below the cell.

    A class of a file and a cell is one statement, and so has one file name in tracebacks.
    """
    lines = cell_text.splitlines(keepends=True) + ["\n"]
    ours, built = {piece.names for piece in cell.pieces}, set(cell.definitions)
    for piece in file.pieces:
        if piece.names in ours and piece.members and not set(piece.definitions) <= built:
            for node in piece.nodes:
                ast.increment_lineno(node, len(lines))
            both = lines + file_text.splitlines(keepends=True)
            linecache.cache[filename] = (len(both), None, both, filename)


@contextmanager
def _absent_restored(name: str) -> Iterator[None]:
    """Take a module that was not loaded before out of `sys.modules` again if building fails."""
    was_absent = name not in sys.modules
    try:
        yield
    except BaseException:
        if was_absent:
            sys.modules.pop(name, None)
        raise
