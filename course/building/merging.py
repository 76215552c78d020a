"""Putting a cell into a module, and the module as text.

Merging replaces the pieces of the same names where they stand, appends the others, and unites the
imports.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Collection
from dataclasses import replace

from course.building.source import PACKAGE, WIDTH, BuildError, Import, NotBegun, Piece, Source


def merge(module: Source, cell: Source, gone: Collection[str] = ()) -> Source:
    """`module` with the parts of `cell` in it; neither argument is changed.

    `gone` names members (`Class.member`) that the cell had and lacks now.
    """
    imports = module.imports | cell.imports
    pieces = list(module.pieces)
    for new in cell.pieces:
        old = next((piece for piece in pieces if piece.names == new.names), None)
        if new.goes_on:
            _check_begun(new.names[0], old, imports)
        if new.header is not None and old and old.header is not None:
            new = _merged_class(old, new, gone)
        # The first piece of a cell never touches the one before it.
        _put(pieces, new, len(pieces))
    return Source(
        head=module.head if cell.head is None else cell.head,
        imports=imports,
        typing_imports=(module.typing_imports | cell.typing_imports) - imports,
        pieces=pieces,
    )


def _put(pieces: list[Piece], new: Piece, at: int, *, keep_blank: bool = True) -> int:
    """Put a piece where the one of its name stands, else at an index; returns its index."""
    touched = [i for i, old in enumerate(pieces) if set(old.names) & set(new.names)]
    for i in touched:
        kept = set(pieces[i].names) - set(new.names)
        if kept:
            raise BuildError(
                f"{', '.join(sorted(set(pieces[i].names) & set(new.names)))} is assigned "
                f"together with {', '.join(sorted(kept))} in the file; assign them together "
                "here too."
            )
    if not touched:
        pieces.insert(at, new)
        return at
    first = touched[0]
    pieces[first] = replace(new, blank=pieces[first].blank) if keep_blank else new
    for i in reversed(touched[1:]):
        del pieces[i]
    return first


def _check_begun(name: str, old: Piece | None, imports: set[Import]) -> None:
    """BuildError if a cell cannot go on with the class `name` of its file."""
    home = next((item.module for item in imports if item.bound == name), None)
    if old is None and home is not None:
        raise BuildError(
            f"`class {name}({name})` goes on with a class of the same file, and {name} is imported "
            f"from {home}. Go on with it in a cell that builds that file, or choose another name "
            "for a class that derives from it."
        )
    if old is None:
        raise NotBegun(name)
    if old.header is None:
        raise BuildError(f"`class {name}({name})` goes on with a class, and {name} is none here.")


def _merged_class(old: Piece, new: Piece, gone: Collection[str]) -> Piece:
    """The class of a file with the members of a cell, and with its header if the cell begins it."""
    name = new.names[0]
    lost = set() if new.goes_on else {m for m in gone if m not in new.definitions}
    members = [m for m in old.members if not lost & {f"{name}.{n}" for n in m.names}]
    at = len(members) if new.goes_on else 0
    for i, member in enumerate(new.members):
        is_first = new.goes_on and i == 0  # below `class X(X):`, which is not in the file
        member = replace(member, blank=1) if is_first else member
        at = 1 + _put(members, member, at, keep_blank=is_first)
    begun = old if new.goes_on else new
    merged = begun.with_members(members)
    try:
        ast.parse(merged.text)
    except SyntaxError as error:
        raise BuildError(
            f"{name} cannot be put together: its body must stand on lines of its own, indented "
            "alike in each cell."
        ) from error
    # One statement of nodes from several places: each keeps the lines of where it was read.
    node = ast.copy_location(copy.copy(begun.nodes[0]), new.nodes[0])
    assert isinstance(node, ast.ClassDef)
    rest = len(node.body) - sum(len(m.nodes) for m in begun.members)
    node.body = [*node.body[:rest], *(inner for m in members for inner in m.nodes)]
    return replace(merged, nodes=(node,), line=old.line)


def emit(source: Source) -> str:
    """The module as text, laid out as ruff would: sorted imports, two lines around definitions."""
    blocks = [] if source.head is None else [source.head]
    blocks += _import_sections(source.imports, "")
    if source.typing_imports:
        sections = _import_sections(source.typing_imports, "    ")
        blocks.append("if TYPE_CHECKING:\n" + "\n\n".join(sections))
    text = "\n\n".join(blocks)
    has_imports = bool(source.imports or source.typing_imports)
    previous: Piece | None = None
    for piece in source.pieces:
        if previous is None:
            space = 0 if not text else 2 if piece.is_def and has_imports else 1
            if text and piece.is_def:
                space = 2
        elif piece.is_def or previous.is_def:
            space = 2
        else:
            space = min(piece.blank, 1)
        text += "\n" * (space + 1 if text else 0) + piece.text
        previous = piece
    return text + "\n" if text else ""


def _section(module: str) -> int:
    """Order of import sections: future, standard library, third party, ours."""
    root = module.split(".")[0]
    if root == "__future__":
        return 0
    if root in sys.stdlib_module_names:
        return 1
    return 3 if root in {PACKAGE, "course"} else 2


def _member_key(item: Import) -> tuple[int, str, str]:
    name = item.name or ""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name.lower(), item.alias or ""


def _import_sections(imports: set[Import], indent: str) -> list[str]:
    sections: list[str] = []
    for number in range(4):
        chosen = {item for item in imports if _section(item.module) == number}
        plain = sorted((i for i in chosen if i.name is None), key=lambda i: i.module.lower())
        lines = [f"{indent}import {_alias(i.module, i.alias)}" for i in plain]
        for module in sorted({i.module for i in chosen if i.name is not None}, key=str.lower):
            group = sorted((i for i in chosen if i.module == module and i.name), key=_member_key)
            members = [i.name or "" for i in group if i.alias is None]
            if members:
                lines.append(_from_line(indent, module, members))
            lines += [
                _from_line(indent, module, [_alias(i.name or "", i.alias)])
                for i in group
                if i.alias is not None
            ]
        if lines:
            sections.append("\n".join(lines))
    return sections


def _from_line(indent: str, module: str, members: list[str]) -> str:
    line = f"{indent}from {module} import {', '.join(members)}"
    if len(line) <= WIDTH:
        return line
    inner = "".join(f"{indent}    {member},\n" for member in members)
    return f"{indent}from {module} import (\n{inner}{indent})"


def _alias(name: str, alias: str | None) -> str:
    return name if alias is None else f"{name} as {alias}"
