"""The text side of building: take a module or a build cell apart, merge the two, write the result.

Nothing here runs any code. A module is four things in this order: its docstring (the *head*), its
imports, the imports under `if TYPE_CHECKING:`, and its *pieces*: definitions and assignments, each
with the comment lines above it. Merging a cell into a module replaces the pieces of the same names
where they stand, appends the others, and unites the imports.

A class is taken apart once more, into a *header* (all up to and with its docstring) and *members*,
since several cells may build it: `class X(X):` in a cell goes on with the class `X` of the file.
"""

from __future__ import annotations

import ast
import copy
import os
import re
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

PACKAGE = "minisgl"
WIDTH = 100
DIRECTIVE = re.compile(r"^#\|\s*build\s+(?P<path>.+?)\s*$")


class BuildError(ValueError):
    """A build cell that cannot become a part of its file; the message says why and what to do."""


class NotBegun(BuildError):
    """A cell goes on with a class that no cell has begun yet."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"`class {name}({name})` goes on with a class, and this file has no class {name}. Run "
            f"the cell that begins it (`class {name}:`) first."
        )
        self.name = name


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
    """One definition or assignment of a module or class, with the comment lines above it.

    `names` are what it binds, `nodes` its statements, `blank` how many blank lines part it from
    what stands above, `line` is its first line (1-based) where it was read. A class also has its
    `header` and its `members`; `goes_on` says that it adds to a class that another cell begins.
    """

    names: tuple[str, ...]
    text: str
    is_def: bool
    blank: int = 1
    line: int = 1
    nodes: tuple[ast.stmt, ...] = field(default=(), compare=False, repr=False)
    header: str | None = None
    members: tuple[Piece, ...] = ()
    goes_on: bool = False

    @property
    def num_lines(self) -> int:
        """Lines of source that it adds to the file, the comments above included."""
        return self.text.count("\n") + (not self.goes_on)

    @property
    def definitions(self) -> dict[str, Piece]:
        """What it defines: its names, and members of a class as `Class.member`."""
        own = {} if self.goes_on else dict.fromkeys(self.names, self)
        return own | {f"{self.names[0]}.{n}": m for m in self.members for n in m.names}

    def with_members(self, members: list[Piece], header: str | None = None) -> Piece:
        """The same class with other members (and another header)."""
        header = header or self.header or ""
        text = "".join([header, *("\n" * (m.blank + 1) + m.text for m in members)])
        return replace(self, text=text, header=header, members=tuple(members))


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
    def definitions(self) -> dict[str, Piece]:
        """What the pieces define, members of classes as `Class.member`."""
        return {name: part for piece in self.pieces for name, part in piece.definitions.items()}

    @property
    def summary(self) -> str:
        """Its definitions as a line: `Req, helper`, and `Req.extend_len, remain_len; helper`."""
        parts = [
            ", ".join(piece.names)
            if not piece.goes_on
            else f"{piece.names[0]}.{', '.join(n for m in piece.members for n in m.names)}"
            for piece in self.pieces
        ]
        return ("; " if any(piece.goes_on for piece in self.pieces) else ", ").join(parts)

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
        start, stop = _first_line(node) - 1, node.end_lineno or node.lineno
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
    end = top = _signature_end(node, lines)
    members: list[Piece] = []
    for inner in node.body if node.body[0].lineno > end else ():
        start, stop = _first_line(inner) - 1, inner.end_lineno or inner.lineno
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


def _first_line(node: ast.stmt) -> int:
    """The line (1-based) on which a statement begins, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _signature_end(node: ast.ClassDef, lines: list[str]) -> int:
    """The line (1-based) that ends in the colon of `class X(…):`."""
    inside = [*node.bases, *node.keywords, *getattr(node, "type_params", [])]
    line = max([node.lineno, *(part.end_lineno or 0 for part in inside)])
    while line < node.body[0].lineno and not lines[line - 1].split("#")[0].rstrip().endswith(":"):
        line += 1
    return line


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


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


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
