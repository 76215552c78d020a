"""What building a cell does to its file and to the live module: tried out first, all or nothing."""

from __future__ import annotations
import __future__

import abc
import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from course.building.classes import Body, attributes, can_stay, classes_restored, pass_on
from course.building.merging import emit
from course.building.source import Piece, Source, write_whole


@dataclass(frozen=True)
class Plan:
    """A cell, the file that it is merged into, and the file that comes of it."""

    name: str  # of the module
    path: PurePosixPath  # within the root
    target: Path
    filename: str  # of the cell, in tracebacks
    cell: Source
    merged: Source
    old_text: str  # of the file; "" if there is none
    text: str

    @property
    def pieces(self) -> list[Piece]:
        """What the cell builds, as the file will have it: a class is whole."""
        in_file = {piece.names: piece for piece in self.merged.pieces}
        return [in_file[piece.names] for piece in self.cell.pieces]

    @property
    def report(self) -> str:
        """What a notebook prints."""
        lines = sum(piece.num_lines for piece in self.cell.pieces)
        if not self.cell.pieces:
            return f"{self.path}: {'docstring and imports' if self.cell.head else 'imports'}"
        return f"{self.path}: {self.cell.summary} ({lines} line{'s' if lines != 1 else ''})"

    def given(self, module: ModuleType) -> dict[str, Any]:
        """The names that the notebook gets: what the cell imports and what it defines."""
        imported = {item.bound for item in self.cell.imports if item.module != "__future__"}
        names = (*sorted(imported), *self.cell.names)
        return {name: vars(module)[name] for name in names if name in vars(module)}

    def try_out(self) -> None:
        """Run the whole file in a scratch module; whatever it raises is the cell's fault.

        Each part is compiled under the name of where it stands, so that a traceback shows the line
        of the cell, or of the part of the file that the cell breaks.
        """
        if self.text == self.old_text:
            return
        scratch = ModuleType(self.name)
        scratch.__file__ = str(self.target)
        if self.target.name == "__init__.py":
            scratch.__package__, scratch.__path__ = self.name, [str(self.target.parent)]
        else:
            scratch.__package__ = self.name.rpartition(".")[0]
        sys.modules.setdefault(self.name, scratch)  # dataclasses look their module up by name
        imports = emit(Source(None, self.merged.imports, self.merged.typing_imports))
        space, file, ours = vars(scratch), str(self.target), {p.names for p in self.cell.pieces}
        self._run(self.cell.import_nodes, space)
        self._run(ast.parse(imports).body, space, file)
        for piece in self.merged.pieces:
            self._run(piece.nodes, space, self.filename if piece.names in ours else file)

    def load_new(self) -> ModuleType:
        """Write the file and make its module: of the cell, or of the file if it held more."""
        self._write()
        try:
            sys.modules.pop(self.name, None)  # the scratch module
            if self.old_text:
                return importlib.import_module(self.name)
            module = self._new_module()
            self._execute(module, self.cell.pieces, {})
            return module
        except BaseException:
            if self.old_text:
                write_whole(self.target, self.old_text)
            else:
                self.target.unlink(missing_ok=True)
            raise

    def update(self, module: ModuleType, loaded: dict[tuple[str, ...], Piece]) -> list[str]:
        """Run in the live module what is new in it, and write the file; a line for what stays old.

        `loaded` has the module's pieces as they ran. Whatever is raised leaves both as they were.
        """
        before = dict(vars(module))
        texts = {names: piece.text for names, piece in loaded.items()}
        changed = [piece for piece in self.pieces if texts.get(piece.names) != piece.text]
        with classes_restored(before.get(piece.names[0]) for piece in changed):
            try:
                self._execute(module, changed, loaded)
                self._write()
            except BaseException:
                vars(module).clear()
                vars(module).update(before)
                raise
        return pass_on(module, before, changed)

    def finish_package(self, module: ModuleType) -> None:
        """A folder that was importable without `__init__.py` learns that it has one now."""
        if self.target.name == "__init__.py" and getattr(module, "__file__", None) is None:
            spec = self._spec()
            module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
            module.__path__ = [str(self.target.parent)]

    def _write(self) -> None:
        """Write the file if its text changes, and let the import system see it."""
        if self.text != self.old_text or not self.target.exists():
            write_whole(self.target, self.text)
            importlib.invalidate_caches()

    def _spec(self) -> ModuleSpec:
        is_package = self.target.name == "__init__.py"
        search = [str(self.target.parent)] if is_package else None
        spec = importlib.util.spec_from_file_location(
            self.name, self.target, submodule_search_locations=search
        )
        assert spec is not None
        return spec

    def _new_module(self) -> ModuleType:
        """An empty live module for a file that was just written, known to its parent package."""
        parent, _, last = self.name.rpartition(".")
        if parent:
            importlib.import_module(parent)
        module = importlib.util.module_from_spec(self._spec())
        sys.modules[self.name] = module
        if parent:
            setattr(sys.modules[parent], last, module)
        return module

    def _execute(
        self, module: ModuleType, pieces: list[Piece], loaded: dict[tuple[str, ...], Piece]
    ) -> None:
        """Run the cell's imports and the given pieces in the module's namespace."""
        space = vars(module)
        if self.cell.head is not None:
            module.__doc__ = ast.get_docstring(ast.parse(self.cell.head))
        self._run(self.cell.import_nodes, space)
        for piece in pieces:
            cls, old = space.get(piece.names[0]), loaded.get(piece.names)
            if old is None or not isinstance(cls, type) or not can_stay(old, piece):
                self._run(piece.nodes, space)
                continue
            for name in attributes(old) - attributes(piece):
                delattr(cls, name)
            texts = {member.text for member in old.members}
            statement = ast.parse(f"class {cls.__name__}(metaclass=__body__): pass").body[0]
            assert isinstance(statement, ast.ClassDef)
            statement.body = [n for m in piece.members if m.text not in texts for n in m.nodes]
            if statement.body:
                self._run([statement], space, extra={"__body__": Body(cls)})
            abc.update_abstractmethods(cls)

    def _run(
        self,
        nodes: Sequence[ast.stmt],
        namespace: dict[str, Any],
        filename: str = "",
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Run top-level statements of the module in a namespace (with a few names more)."""
        body = [
            n for n in nodes if not (isinstance(n, ast.ImportFrom) and n.module == "__future__")
        ]
        flags = __future__.annotations.compiler_flag if self.merged.has_future_annotations else 0
        tree = ast.Module(body=body, type_ignores=[])
        code = compile(tree, filename or self.filename, "exec", flags=flags, dont_inherit=True)
        exec(code, namespace, extra)
