"""Taking a module or a build cell apart (see `source`)."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace

from course.building.source import PACKAGE, BuildError, Import, Piece, Source, directive
from course.building.syntax import (
    Definition,
    first_line,
    header_end,
    is_docstring,
    is_type_checking,
)


def parse(text: str, filename: str = "<module>") -> Source:
    """Take a module or a build cell apart.

    Raises SyntaxError as Python does, and BuildError for what a build cell may not hold.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    tree = ast.parse(text, filename)
    lines = text.split("\n")
    if directive(text) is not None:  # the directive is no part of the file
        first = next(i for i, line in enumerate(lines) if line.strip())
        lines[first] = ""
    source = Source()
    end = 0  # lines[:end] are dealt with
    for position, node in enumerate(tree.body):
        start, stop = first_line(node) - 1, node.end_lineno or node.lineno
        if start < end:
            raise BuildError(f"line {node.lineno}: put one statement on a line, not two.")
        gap = lines[end:start]
        comments = _strip_blank(gap)
        body = "\n".join([*comments, *lines[start:stop]])
        if position == 0 and is_docstring(node):
            _refuse_comments(comments, node, "the module docstring")
            source.head = body
        elif isinstance(node, ast.Import | ast.ImportFrom):
            _refuse_comments(comments, node, "an import")
            if "#" in "".join(lines[start:stop]):
                _refuse_comments([""], node, "an import")
            source.imports |= _imports_of(node)
            source.import_nodes.append(node)
        elif is_type_checking(node):
            _refuse_comments(comments, node, "an import")
            source.typing_imports |= _typing_imports(node)
        else:
            names = _bound_names(node)
            if not names:
                raise BuildError(
                    f"line {node.lineno}: `{lines[node.lineno - 1].strip()}` defines nothing. A "
                    "build cell holds imports, functions, classes and assignments; put what should "
                    "run now into a cell of its own."
                )
            tight = bool(source.pieces) and not comments and not gap
            line = start + 1 - len(comments)
            piece = Piece(names, body, isinstance(node, Definition), not tight, line, (node,))
            if isinstance(node, ast.ClassDef):
                piece = _take_apart(piece, node, lines)
                if piece.goes_on:
                    _refuse_comments(comments, node, f"`class {node.name}({node.name}):`")
            _append(source, piece)
        end = stop
    rest = _strip_blank(lines[end:])
    if rest:
        raise BuildError(
            f"`{rest[0].strip()}` stands after the last definition and belongs to none. "
            "Move the comment above a definition, or into one."
        )
    source.typing_imports -= source.imports
    return source


def _append(source: Source, piece: Piece) -> None:
    """Add a piece; neighbors of one name (overloads) become one, others are refused."""
    last = source.pieces[-1] if source.pieces else None
    is_overload = last and last.names == piece.names and last.is_def and piece.is_def
    if last and is_overload and piece.header is None:
        space = "\n\n\n" if piece.blank else "\n"
        source.pieces[-1] = replace(
            last, text=last.text + space + piece.text, nodes=last.nodes + piece.nodes
        )
        return
    twice = set(source.names) & set(piece.names)
    if twice:
        raise BuildError(f"line {piece.line}: {', '.join(sorted(twice))} is defined twice.")
    source.pieces.append(piece)


def _take_apart(piece: Piece, node: ast.ClassDef, lines: list[str]) -> Piece:
    """A class with its header and its members; BuildError for a wrong `class X(X)`."""
    goes_on = _goes_on(node)
    end = top = header_end(node, lines)
    members: list[Piece] = []
    for inner in node.body if node.body[0].lineno > end else ():
        start, stop = first_line(inner) - 1, inner.end_lineno or inner.lineno
        names, is_def = _bound_names(inner), isinstance(inner, Definition)
        blank = next((i for i, line in enumerate(lines[end:start]) if line.strip()), start - end)
        last = members[-1] if members else None
        if last and (not names or start < end or (last.names == names and last.is_def and is_def)):
            # A setter, an overload, a string below a field, what stands on the same line.
            text = "\n".join(lines[last.line - 1 : stop])
            names = tuple(dict.fromkeys(last.names + names))
            members[-1] = replace(last, names=names, text=text, nodes=(*last.nodes, inner))
        elif names:
            twice = {name for member in members for name in member.names} & set(names)
            if twice:
                raise BuildError(
                    f"line {inner.lineno}: {node.name}.{min(twice)} is defined twice; put what "
                    "belongs together, such as a property and its setter, next to each other."
                )
            text = "\n".join(lines[end + blank : stop])
            members.append(Piece(names, text, is_def, blank, end + blank + 1, (inner,)))
        else:
            top = stop
        end = stop
    below = (node.end_lineno or end) - top if members else 0
    header = "\n".join(piece.text.split("\n")[: -below or None])
    return replace(piece, header=header, members=tuple(members), goes_on=goes_on)


def _goes_on(node: ast.ClassDef) -> bool:
    """Whether it is `class X(X):`; BuildError for one that has what only a beginning may have."""
    name = node.name
    if name not in [ast.unparse(base) for base in node.bases]:
        return False
    fields = [ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)]
    wrong = ""
    if len(node.bases) > 1 or node.keywords or node.decorator_list:
        wrong = "Its other bases, keywords and decorators belong"
    elif ast.get_docstring(node, clean=False) is not None:
        wrong = "Its docstring belongs"
    elif fields:
        wrong = f"Fields (`{fields[0]}: …`) are made when the class is, so they belong"
    if wrong:
        raise BuildError(
            f"line {node.lineno}: `class {name}({name})` goes on with the class {name}. {wrong} in "
            f"the cell that begins it (`class {name}:`)."
        )
    return True


def _refuse_comments(comments: list[str], node: ast.stmt, what: str) -> None:
    if comments:
        raise BuildError(
            f"line {node.lineno}: a comment beside {what} would be lost, since those are merged "
            "over all cells of the file. Move it above a definition, or into the docstring."
        )


def _imports_of(node: ast.Import | ast.ImportFrom) -> set[Import]:
    if isinstance(node, ast.Import):
        return {Import(name.name, None, name.asname) for name in node.names}
    if node.level or node.module is None:
        raise BuildError(
            f"line {node.lineno}: import from `{PACKAGE}.…` by its whole name; a relative import "
            "works in the file but not in the notebook."
        )
    if any(name.name == "*" for name in node.names):
        raise BuildError(
            f"line {node.lineno}: name what you import; `*` hides where names are from."
        )
    return {Import(node.module, name.name, name.asname) for name in node.names}


def _typing_imports(node: ast.stmt) -> set[Import]:
    assert isinstance(node, ast.If)
    found: set[Import] = set()
    for inner in node.body:
        if not isinstance(inner, ast.Import | ast.ImportFrom):
            raise BuildError(
                f"line {inner.lineno}: an `if TYPE_CHECKING:` block of a build cell holds imports "
                "only."
            )
        found |= _imports_of(inner)
    return found


def _bound_names(node: ast.stmt) -> tuple[str, ...]:
    """What a top-level statement binds; () for one that a build cell may not hold."""
    if isinstance(node, Definition):
        return (node.name,)
    if isinstance(node, ast.Assign):
        found = [_target_names(target) for target in node.targets]
        return tuple(n for names in found for n in names) if all(found) else ()
    if isinstance(node, ast.AnnAssign):
        return _target_names(node.target)
    if sys.version_info >= (3, 12) and isinstance(node, ast.TypeAlias):
        return _target_names(node.name)
    if isinstance(node, ast.Try | ast.If):
        blocks = [node.body, node.orelse]
        if isinstance(node, ast.Try):
            blocks += [handler.body for handler in node.handlers] + [node.finalbody]
        names: dict[str, None] = {}
        for inner in (statement for block in blocks for statement in block):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                names.update(dict.fromkeys(i.bound for i in _imports_of(inner)))
            else:
                names.update(dict.fromkeys(_bound_names(inner)))
        return tuple(names)
    return ()


def _target_names(target: ast.expr) -> tuple[str, ...]:
    if isinstance(target, ast.Name):
        return (target.id,)
    if isinstance(target, ast.Tuple | ast.List):
        found = [_target_names(t.value if isinstance(t, ast.Starred) else t) for t in target.elts]
        return tuple(n for names in found for n in names) if all(found) else ()
    return ()


def _strip_blank(lines: list[str]) -> list[str]:
    """`lines` without blank ones at either end."""
    while lines and not lines[0].strip():
        lines = lines[1:]
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines
