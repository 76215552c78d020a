"""Edits made in `minisgl/` go back into the cells that they belong to: `python -m course pull`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nbformat

from course.building.merging import emit
from course.building.notebooks import (
    BuildCell,
    CourseError,
    build_cells,
    chapters,
    notebook_path,
    read,
)
from course.building.package import python_files
from course.building.parsing import parse
from course.building.source import BuildError, Piece, Source, write_whole


def pull(root: Path) -> list[str]:
    """Write what was edited in `minisgl/` back into the cells that it belongs to.

    Returns the cells changed. Raises CourseError, with nothing written, for a definition that no
    cell builds, or one that a cell builds and the file has no more.
    """
    notebooks = {chapter: read(root, chapter) for chapter in chapters(root)}
    cells = build_cells(root)
    faults: list[str] = []
    changed: dict[tuple[str, int], str] = {}
    for path in sorted({cell.path for cell in cells} | set(python_files(root))):
        own = [cell for cell in cells if cell.path == path]
        target = root / path
        if not own:
            faults.append(f"{path}: no build cell writes this file; add one to a chapter")
            continue
        if not target.exists():
            continue
        try:
            module = parse(target.read_text(encoding="utf-8"), path)
        except (BuildError, SyntaxError) as error:
            faults.append(f"{path}: {error}")
            continue
        parsed = [cell.parse() for cell in own]
        spread = {p.names[0] for source in parsed for p in source.pieces if p.goes_on}
        in_file = _to_match(module, spread)
        in_cells = {name for source in parsed for name in _to_match(source, spread)}
        for name in sorted(in_file - in_cells):
            faults.append(f"{path}: {name} is in the file but in no build cell")
        for name in sorted(in_cells - in_file):
            faults.append(f"{path}: {name} is in a build cell but not in the file")
        for number, (cell, source) in enumerate(zip(own, parsed, strict=True)):
            text = _pulled(cell, source, module, spread, parsed, is_first=number == 0)
            if text != cell.text:
                changed[cell.chapter, cell.index] = text
    if faults:
        raise CourseError("nothing was pulled:\n" + "\n".join(f"  {fault}" for fault in faults))
    for (chapter, index), text in changed.items():
        notebooks[chapter].cells[index].source = text
    for chapter in {chapter for chapter, _ in changed}:
        text = nbformat.writes(notebooks[chapter]) + "\n"
        write_whole(notebook_path(root, chapter), text)
    return [f"notebooks/{chapter}.ipynb, cell {index + 1}" for chapter, index in changed]


def _to_match(source: Source, spread: set[str]) -> set[str]:
    """What must be in a file and in its cells: definitions, and members of classes in `spread`."""
    return {n for n in source.definitions if "." not in n or n.partition(".")[0] in spread}


def _pulled(
    cell: BuildCell,
    source: Source,
    module: Source,
    spread: set[str],
    parsed: list[Source],
    *,
    is_first: bool,
) -> str:
    """The cell's text with the file's version of its parts; the same text if nothing differs.

    `spread` are the classes that several cells build: of these a cell gets only its own members.
    """
    in_file = {piece.names: piece for piece in module.pieces}
    pieces = []
    for piece in source.pieces:
        there = in_file.get(piece.names, piece)
        if there.header is not None and there.names[0] in spread:
            there = _own_members(piece, there)
        pieces.append(replace(there, blank=piece.blank))
    imports = {item for item in source.imports if item in module.imports}
    typing_imports = {item for item in source.typing_imports if item in module.typing_imports}
    if is_first:  # imports new in the file, which no cell has
        imports |= module.imports - {item for other in parsed for item in other.imports}
        known = {item for other in parsed for item in other.typing_imports}
        typing_imports |= module.typing_imports - known
    head = source.head if source.head is None else module.head
    same = (
        [p.text for p in pieces] == [p.text for p in source.pieces]
        and imports == source.imports
        and typing_imports == source.typing_imports
        and head == source.head
    )
    if same:
        return cell.text
    body = emit(Source(head, imports, typing_imports, pieces))
    return f"{cell.text.splitlines()[0]}\n{body}".rstrip("\n")


def _own_members(piece: Piece, there: Piece) -> Piece:
    """A cell's part of a class as the file has it: its members, in the file's order."""
    own = {member.names: member for member in piece.members}
    members: list[Piece] = []
    for above, member in zip([None, *there.members], there.members, strict=False):
        if member.names in own:
            is_below = (members[-1].names if members else None) == (above.names if above else None)
            blank = member.blank if is_below else own[member.names].blank
            members.append(replace(member, blank=blank))
    return piece.with_members(members, None if piece.goes_on else there.header)
