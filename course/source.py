"""The text side of building: take a module or a build cell apart, merge the two, write the result.

Nothing here runs any code. A module is four things in this order: its docstring (the *head*), its
imports, the imports under `if TYPE_CHECKING:`, and its *pieces*: definitions and assignments, each
with the comment lines above it. Merging a cell into a module replaces the pieces of the same names
where they stand, appends the others, and unites the imports.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

PACKAGE = "minisgl"
WIDTH = 100
DIRECTIVE = re.compile(r"^#\|\s*build\s+(?P<path>.+?)\s*$")


class BuildError(ValueError):
    """A build cell that cannot become a part of its file; the message says why and what to do."""


@dataclass(frozen=True, order=True)
class Import:
    """One imported name: `import module as alias` (`name` is None) or `from module import name`."""

    module: str
    name: str | None = None
    alias: str | None = None

    @property
    def bound(self) -> str:
        """The name that the import binds, `a` for `import a.b`."""
        return self.alias or self.name or self.module.split(".")[0]


@dataclass(frozen=True)
class Piece:
    """One definition or assignment of a module, with the comment lines above it.

    `names` are what it binds, `nodes` its statements, `tight` says that no blank line parts it
    from the piece before, `line` is its first line (1-based) where it was read.
    """

    names: tuple[str, ...]
    text: str
    is_def: bool
    tight: bool = False
    line: int = 1
    nodes: tuple[ast.stmt, ...] = field(default=(), compare=False, repr=False)

    @property
    def num_lines(self) -> int:
        """Lines of source, the comments above included."""
        return self.text.count("\n") + 1


@dataclass
class Source:
    """A module or a build cell, taken apart."""

    head: str | None = None
    imports: set[Import] = field(default_factory=set)
    typing_imports: set[Import] = field(default_factory=set)
    pieces: list[Piece] = field(default_factory=list)
    import_nodes: list[ast.stmt] = field(default_factory=list, compare=False, repr=False)

    @property
    def names(self) -> list[str]:
        """Every name that a piece binds, in order."""
        return [name for piece in self.pieces for name in piece.names]

    @property
    def has_future_annotations(self) -> bool:
        """Whether annotations stay unevaluated (`from __future__ import annotations`)."""
        return Import("__future__", "annotations") in self.imports


def directive(source: str) -> str | None:
    """The path that a cell's first line names (`#| build PATH`), or None for any other cell."""
    for line in source.splitlines():
        if line.strip():
            found = DIRECTIVE.match(line.rstrip())
            return found["path"] if found else None
    return None


def check_path(path: str) -> PurePosixPath:
    """`path` as a path inside the package; BuildError for anything that could lie outside."""
    pure = PurePosixPath(path)
    parts = pure.parts
    inside = (
        "\\" not in path
        and not pure.is_absolute()
        and len(parts) > 1
        and parts[0] == PACKAGE
        and pure.suffix == ".py"
        and all(part.isidentifier() for part in (*parts[:-1], pure.stem))
    )
    if not inside:
        raise BuildError(
            f"a build cell writes inside {PACKAGE}/ only, and this one names {path!r}. "
            f"Write the first line as `#| build {PACKAGE}/NAME.py`."
        )
    return pure


def module_name(path: PurePosixPath) -> str:
    """`minisgl/kvcache/base.py` → `minisgl.kvcache.base`; an `__init__.py` names its package."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        stop = node.end_lineno or node.lineno
        if start < end:
            raise BuildError(f"line {node.lineno}: put one statement on a line, not two.")
        gap = lines[end:start]
        comments = _strip_blank(gap)
        body = "\n".join([*comments, *lines[start:stop]])
        if position == 0 and _is_docstring(node):
            _refuse_comments(comments, node, "the module docstring")
            source.head = body
        elif isinstance(node, ast.Import | ast.ImportFrom):
            _refuse_comments(comments, node, "an import")
            if "#" in "".join(lines[start:stop]):
                _refuse_comments([""], node, "an import")
            source.imports |= _imports_of(node)
            source.import_nodes.append(node)
        elif _is_type_checking(node):
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
            is_def = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            tight = bool(source.pieces) and not comments and not gap
            _append(source, Piece(names, body, is_def, tight, start + 1, (node,)))
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
    if last and last.names == piece.names and last.is_def and piece.is_def:
        space = "\n" if piece.tight else "\n\n\n"
        source.pieces[-1] = replace(
            last, text=last.text + space + piece.text, nodes=last.nodes + piece.nodes
        )
        return
    twice = set(source.names) & set(piece.names)
    if twice:
        raise BuildError(f"line {piece.line}: {', '.join(sorted(twice))} is defined twice.")
    source.pieces.append(piece)


def _strip_blank(lines: list[str]) -> list[str]:
    """`lines` without blank ones at either end."""
    while lines and not lines[0].strip():
        lines = lines[1:]
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines


def _refuse_comments(comments: list[str], node: ast.stmt, what: str) -> None:
    if comments:
        raise BuildError(
            f"line {node.lineno}: a comment beside {what} would be lost, since those are merged "
            "over all cells of the file. Move it above a definition, or into the docstring."
        )


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_type_checking(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        and not node.orelse
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
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
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


def merge(module: Source, cell: Source) -> Source:
    """`module` with the parts of `cell` in it; neither argument is changed."""
    pieces = list(module.pieces)
    for new in cell.pieces:
        touched = [i for i, old in enumerate(pieces) if set(old.names) & set(new.names)]
        for i in touched:
            kept = set(pieces[i].names) - set(new.names)
            if kept:
                raise BuildError(
                    f"{', '.join(sorted(set(pieces[i].names) & set(new.names)))} is assigned "
                    f"together with {', '.join(sorted(kept))} in the file; assign them together "
                    "here too."
                )
        if touched:
            pieces[touched[0]] = replace(new, tight=pieces[touched[0]].tight)
            for i in reversed(touched[1:]):
                del pieces[i]
        else:
            # The first piece of a cell never touches the one before it.
            pieces.append(replace(new, tight=new.tight and bool(pieces)))
    imports = module.imports | cell.imports
    return Source(
        head=module.head if cell.head is None else cell.head,
        imports=imports,
        typing_imports=(module.typing_imports | cell.typing_imports) - imports,
        pieces=pieces,
    )


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
            space = 0 if piece.tight else 1
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


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there with the whole text, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
