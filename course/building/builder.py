"""Running a build cell: its code becomes a part of a file of `minisgl` and of the live module.

`%load_ext course` makes a cell whose first line is `#| build minisgl/NAME.py` come here. The cell's
definitions are merged into the file's text (`source`), the merged text is tried out in a
scratch module, and only when that imports are the live module and the file changed. The code runs
in the namespace of the live module, so other objects that the module already holds stay the same.
A class stays the same object, too, where only functions of it are new: its instances see them.
"""

from __future__ import annotations
import __future__

import abc
import ast
import hashlib
import importlib
import importlib.util
import linecache
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from filelock import FileLock

from course.building.classes import Body, attributes, can_stay, classes_restored, pass_on
from course.building.merging import emit, merge
from course.building.parsing import parse
from course.building.source import (
    PACKAGE,
    BuildError,
    Piece,
    Source,
    check_path,
    directive,
    module_name,
    write_whole,
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
            return self._run(cell, path, target)

    def _run(self, cell: str, path: PurePosixPath, target: Path) -> tuple[str, dict[str, Any]]:
        name = module_name(path)
        filename = _register_cell(path, cell)
        new = parse(cell, filename)
        old_text = target.read_text(encoding="utf-8") if target.exists() else ""
        old = parse(old_text, str(target))
        _append_classes(old, old_text, new, cell, filename)
        begun = self._begun.get(name, set())
        merged = merge(old, new, gone=begun)
        text = emit(merged)
        in_file = {piece.names: piece for piece in merged.pieces}
        pieces = [in_file[piece.names] for piece in new.pieces]
        module = self._live_module(name, target)
        loaded = self._loaded.get(name, {})
        with _absent_restored(name):
            if text != old_text:
                _try_out(name, merged, new, target, filename)
            stale: list[str] = []
            if module is None:
                _write(target, text, old_text)
                try:
                    module = _load_new(name, target, new, merged, filename, whole=bool(old_text))
                except BaseException:
                    _put_back(target, old_text)
                    raise
                pieces = merged.pieces  # what a kernel has that imports the file
            else:
                before = dict(vars(module))
                texts = {names: piece.text for names, piece in loaded.items()}
                changed = [piece for piece in pieces if texts.get(piece.names) != piece.text]
                with classes_restored(before.get(piece.names[0]) for piece in changed):
                    try:
                        _execute(module, new, changed, loaded, merged, filename)
                        _write(target, text, old_text)
                    except BaseException:
                        vars(module).clear()
                        vars(module).update(before)
                        raise
                stale = pass_on(module, before, changed)
            _finish_package(module, target)
        self._loaded.setdefault(name, {}).update({piece.names: piece for piece in pieces})
        self._begun[name] = _begun_now(begun, new)
        given = {item.bound for item in new.imports if item.module != "__future__"}
        names = {n: vars(module)[n] for n in (*sorted(given), *new.names) if n in vars(module)}
        return "\n".join([_report(path, new), *stale]), names

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


def _write(target: Path, text: str, old_text: str) -> None:
    """Write the file if its text changed, and let the import system see it."""
    if text != old_text or not target.exists():
        write_whole(target, text)
        importlib.invalidate_caches()


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


def _try_out(name: str, merged: Source, cell: Source, target: Path, filename: str) -> None:
    """Run the whole merged file in a scratch module; whatever it raises is the cell's fault.

    Each part is compiled under the name of where it stands, so that a traceback shows the line of
    the cell, or of the part of the file that the cell breaks.
    """
    scratch = ModuleType(name)
    scratch.__file__ = str(target)
    if target.name == "__init__.py":
        scratch.__package__, scratch.__path__ = name, [str(target.parent)]
    else:
        scratch.__package__ = name.rpartition(".")[0]
    sys.modules.setdefault(name, scratch)  # dataclasses look their module up by name
    imports = emit(Source(None, merged.imports, merged.typing_imports))
    _run(cell.import_nodes, vars(scratch), filename, merged)
    _run(ast.parse(imports).body, vars(scratch), str(target), merged)
    ours = {piece.names for piece in cell.pieces}
    for piece in merged.pieces:
        from_cell = piece.names in ours
        _run(piece.nodes, vars(scratch), filename if from_cell else str(target), merged)


def _run(
    nodes: Sequence[ast.stmt],
    namespace: dict[str, Any],
    filename: str,
    merged: Source,
    extra: dict[str, Any] | None = None,
) -> None:
    """Run top-level statements of a module in a namespace (with a few names more)."""
    body = [n for n in nodes if not (isinstance(n, ast.ImportFrom) and n.module == "__future__")]
    flags = __future__.annotations.compiler_flag if merged.has_future_annotations else 0
    tree = ast.Module(body=body, type_ignores=[])
    exec(compile(tree, filename, "exec", flags=flags, dont_inherit=True), namespace, extra)


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


def _load_new(
    name: str, target: Path, cell: Source, merged: Source, filename: str, *, whole: bool
) -> ModuleType:
    """The live module of a file just written: the cell's code, or the file if it held more."""
    sys.modules.pop(name, None)  # the scratch module
    if whole:
        return importlib.import_module(name)
    module = _new_module(name, target)
    _execute(module, cell, cell.pieces, {}, merged, filename)
    return module


def _put_back(target: Path, old_text: str) -> None:
    """Undo a write."""
    if old_text:
        write_whole(target, old_text)
    else:
        target.unlink(missing_ok=True)


def _new_module(name: str, target: Path) -> ModuleType:
    """An empty live module for a file that was just written, known to its parent package."""
    parent, _, last = name.rpartition(".")
    if parent:
        importlib.import_module(parent)
    search = [str(target.parent)] if target.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, target, submodule_search_locations=search)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def _finish_package(module: ModuleType, target: Path) -> None:
    """A folder that was importable without `__init__.py` learns that it has one now."""
    if target.name == "__init__.py" and getattr(module, "__file__", None) is None:
        spec = importlib.util.spec_from_file_location(
            module.__name__, target, submodule_search_locations=[str(target.parent)]
        )
        assert spec is not None
        module.__file__, module.__spec__, module.__loader__ = str(target), spec, spec.loader
        module.__path__ = [str(target.parent)]


def _execute(
    module: ModuleType,
    cell: Source,
    pieces: list[Piece],
    loaded: dict[tuple[str, ...], Piece],
    merged: Source,
    filename: str,
) -> None:
    """Run the cell's imports and the given pieces in the module's namespace."""
    if cell.head is not None:
        module.__doc__ = ast.get_docstring(ast.parse(cell.head))
    _run(cell.import_nodes, vars(module), filename, merged)
    for piece in pieces:
        cls, old = vars(module).get(piece.names[0]), loaded.get(piece.names)
        if old is None or not isinstance(cls, type) or not can_stay(old, piece):
            _run(piece.nodes, vars(module), filename, merged)
            continue
        for name in attributes(old) - attributes(piece):
            delattr(cls, name)
        texts = {member.text for member in old.members}
        statement = ast.parse(f"class {cls.__name__}(metaclass=__body__): pass").body[0]
        assert isinstance(statement, ast.ClassDef)
        statement.body = [n for m in piece.members if m.text not in texts for n in m.nodes]
        if statement.body:
            _run([statement], vars(module), filename, merged, {"__body__": Body(cls)})
        abc.update_abstractmethods(cls)


def _report(path: PurePosixPath, cell: Source) -> str:
    lines = sum(piece.num_lines for piece in cell.pieces)
    if not cell.pieces:
        return f"{path}: {'docstring and imports' if cell.head else 'imports'}"
    return f"{path}: {cell.summary} ({lines} line{'s' if lines != 1 else ''})"
