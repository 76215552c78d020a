"""The book's code, handed out on request: `course.reveal` and `course.catch_up`.

In a workbook the reference package is never imported. What a reader asks for is read from the text
of the chapters, one definition at a time, and joined with what the reader has written.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from course.building import notebooks
from course.building.merging import emit, merge
from course.building.notebooks import BuildCell, CourseError
from course.building.package import package, write_changed
from course.building.parsing import parse
from course.building.roots import find_root, is_workbook, reference_root
from course.building.source import PACKAGE, Piece, Source
from course.building.syntax import parts
from course.workbooks import stubs
from course.workbooks.pieces import dotted


def _find(root: Path, name: str) -> tuple[BuildCell, str]:
    """The build cell of a definition and its dotted name in it; CourseError if there is none."""
    wanted = name.removeprefix(f"{PACKAGE}.")
    found: list[tuple[BuildCell, str]] = []
    similar: dict[str, None] = {}
    for cell in notebooks.build_cells(root):
        module = dotted(cell.path).removeprefix(PACKAGE).lstrip(".")
        known = [*cell.parse().names, *(part.name for part in parts(cell.text))]
        for inner in dict.fromkeys(known):
            if wanted in (inner, f"{module}.{inner}") or (
                module and wanted == f"{module.split('.')[-1]}.{inner}"
            ):
                found.append((cell, inner))
            elif inner.split(".")[-1] == wanted.split(".")[-1]:
                similar[f"{module}.{inner}"] = None
    if not found:
        hint = f"; did you mean {', '.join(list(similar)[:6])}?" if similar else ""
        raise CourseError(f"no chapter builds {name}{hint}")
    if len({cell.path for cell, _ in found}) > 1:
        places = [f"{dotted(c.path).removeprefix(PACKAGE + '.')}.{n}" for c, n in found]
        said = ", ".join(dict.fromkeys(places))
        raise CourseError(f"{name} is in several files; say which: {said}")
    return found[0]


def reference(root: Path, name: str) -> tuple[BuildCell, str]:
    """The book's source of one definition or method (`Req`, `core.Req.complete_one`), unindented
    as it stands in the file: a class is whole, whichever cells build it."""
    cell, inner = _find(root, name)
    for part in parts(cell.text):
        if part.name == inner:
            return cell, part.text(cell.text.split("\n"))
    return cell, _in_file(root, cell.path).definitions[inner].text


def _in_file(root: Path, path: str) -> Source:
    """A file as the chapters build it."""
    return package([c for c in notebooks.build_cells(root) if c.path == path])[path]


def reveal(name: str, *, insert: bool = False) -> Any:
    """Show the book's version of a definition or method, `Req` or `Req.complete_one`.

    With `insert` a new cell below holds it, ready to run: a build cell, which of a class replaces
    just that method. Names may be qualified (`core.Req`) when several files have one.
    """
    root = reference_root()
    cell, text = reference(root, name)
    if insert:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            raise RuntimeError("insert=True needs a notebook; without it the source is shown")
        shell.set_next_input(_build_cell_for(root, name), replace=False)
        return None
    return _Shown(f"# {cell.path}\n{text}", cell.path)


class _Shown:
    """Source that a notebook shows highlighted and a terminal as it is."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def _build_cell_for(root: Path, name: str) -> str:
    """A build cell with the book's version of `name`: of a method, a cell that goes on with its
    class and touches nothing else of it."""
    cell, inner = _find(root, name)
    source, top = cell.parse(), inner.split(".")[0]
    if "." in inner:
        member = source.definitions[".".join(inner.split(".")[:2])]
        text = f"class {top}({top}):\n{member.text}"
    else:
        source = _in_file(root, cell.path)
        text = source.definitions[top].text
    imports = Source(None, source.imports, source.typing_imports)
    return f"#| build {cell.path}\n{emit(imports)}\n\n{text}"


def catch_up(chapter: int | str, *, overwrite: bool = False) -> None:
    """Write into your `minisgl` what the chapters before `chapter` build and you have not written.

    `chapter` is a number or a name (`3`, `"03"`, `"03_models"`). What you wrote stays, method by
    method, unless `overwrite`. Prints how much came from the book, and whether the kernel has to be
    restarted, because it had loaded files that changed.
    """
    root, folder = reference_root(), find_root()
    if not is_workbook(folder):
        raise CourseError(f"{folder} is not a folder of workbooks; the chapters build everything")
    before = chapters_before(root, chapter)
    texts: dict[str, str] = {}
    taken: list[str] = []
    for cell in notebooks.build_cells(root, before):
        target = folder / cell.path
        if cell.path not in texts and target.exists():
            texts[cell.path] = target.read_text(encoding="utf-8")
        mine = texts.get(cell.path, "")
        texts[cell.path], new = _caught_up(cell, mine, str(target), overwrite=overwrite)
        taken += new
    _report_catch_up(before, taken, write_changed(folder, texts))


def chapters_before(root: Path, chapter: int | str) -> list[str]:
    """The chapters before one that is named as `chapter_named` has it."""
    names = notebooks.chapters(root)
    return names[: names.index(chapter_named(root, chapter))]


def chapter_named(root: Path, chapter: int | str) -> str:
    """The chapter of a number or (the beginning of) a name: `3`, `"03"`, `"03_models"`."""
    names = notebooks.chapters(root)
    wanted = f"{chapter:02d}" if isinstance(chapter, int) else str(chapter)
    found = [name for name in names if wanted in (name, name.split("_")[0])]
    if len(found) != 1:
        raise CourseError(f"there is no chapter {chapter!r}; the chapters are {', '.join(names)}")
    return found[0]


def _caught_up(
    cell: BuildCell, mine: str, filename: str, *, overwrite: bool
) -> tuple[str, list[str]]:
    """The reader's file with what a build cell adds to it, and the names that it added."""
    try:
        module = parse(mine, filename)
    except SyntaxError as error:
        raise CourseError(f"{filename}, line {error.lineno}: {error.msg}; mend it first") from error
    source = cell.parse()
    there = {piece.names: piece for piece in module.pieces}
    known = {name: _own_text(part) for name, part in module.definitions.items()}
    pieces: list[Piece] = []
    taken: list[str] = []
    for piece in source.pieces:
        own = there.get(piece.names)
        if own is None or overwrite:
            pieces.append(piece)
            parts = piece.definitions.items()
            taken += [name for name, part in parts if known.get(name) != _own_text(part)]
            continue
        text, grafted = stubs.graft(own.text, piece.text, lambda _, is_stub: is_stub)
        own = parse(text).pieces[0]
        have = {name for member in own.members for name in member.names}
        new = [m for m in piece.members if (m.is_def or piece.goes_on) and not have & {*m.names}]
        pieces += [own, replace(piece, goes_on=True).with_members(new)] if new else [own]
        taken += [*grafted, *(f"{piece.names[0]}.{name}" for m in new for name in m.names)]
    head = source.head if module.head is None or overwrite else module.head
    merged = merge(module, replace(source, head=head, pieces=pieces))
    return emit(merged), taken


def _own_text(part: Piece) -> str:
    """The text of a definition, of a class without its members, which are definitions too."""
    return part.text if part.header is None else part.header


def _report_catch_up(before: list[str], taken: list[str], changed: list[str]) -> None:
    print(f"{len(taken)} definitions from {len(before)} chapters, {len(changed)} files written")
    loaded = [path for path in changed if dotted(path) in sys.modules]
    if loaded:
        print(f"restart the kernel: it has loaded {', '.join(loaded)} as they were before")
