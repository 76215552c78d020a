"""The text side of building: what a module or a build cell is made of.

Nothing here runs any code. A module is four things in this order: its docstring (the *head*), its
imports, the imports under `if TYPE_CHECKING:`, and its *pieces*: definitions and assignments, each
with the comment lines above it. `parsing` takes a text apart, `merging` puts a cell into a module.

A class is taken apart once more, into a *header* (all up to and with its docstring) and *members*,
since several cells may build it: `class X(X):` in a cell goes on with the class `X` of the file.
"""

from __future__ import annotations

import ast
import os
import re
import tempfile
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
