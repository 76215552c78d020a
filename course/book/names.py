"""What the notebooks define: names of `minisgl`, where they are built, and what is in them."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from course.building import notebooks, source
from course.building.package import package
from course.building.syntax import is_new_field

MAP = "book/official_map"
HOMES = {"cached_len": "Req", "out_loc": "Batch", "page_table": "Context"}
"""Fields that several classes have, and whose they are first of all."""
ELSEWHERE = {"model_type", "state_dict", "num_pages"}
"""Members of ours that a chapter's text rather means of something else."""


def anchor(path: str, name: str = "") -> str:
    """The id on a chapter's page of the place where `name` of `path` is built.

    >>> anchor("minisgl/core.py", "Req")
    'minisgl-core-Req'
    """
    stem = path.removesuffix(".py").removesuffix("/__init__")
    return re.sub(r"[^A-Za-z0-9_]+", "-", f"{stem}-{name}" if name else stem)


@dataclass(frozen=True)
class Definition:
    """A top-level name of the package: where it is built, what it is, and what it holds."""

    path: str
    name: str
    chapter: str
    kind: str
    summary: str = ""
    members: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    later: tuple[tuple[str, str], ...] = ()
    """Members that cells build which go on with the class, each with its chapter."""
    node: ast.stmt | None = field(default=None, compare=False, repr=False)

    @property
    def module(self) -> str:
        return ".".join(self.path.removesuffix(".py").removesuffix("/__init__").split("/"))

    @property
    def file(self) -> str:
        """The path within the package, as upstream's files are named."""
        return self.path.removeprefix(f"{source.PACKAGE}/")

    @property
    def chapters(self) -> list[str]:
        """The chapters that build it, in order."""
        return list(dict.fromkeys([self.chapter, *(chapter for _, chapter in self.later)]))

    def place(self, member: str = "") -> tuple[str, str]:
        """The page, and the id on it, of what is built there: the definition, or a member."""
        chapter = dict(self.later).get(member)
        name = self.name if chapter is None else f"{self.name}.{member}"
        return f"notebooks/{chapter or self.chapter}", anchor(self.path, name)

    @property
    def public(self) -> bool:
        return not self.name.startswith("_")


@dataclass(frozen=True)
class Target:
    """Where a link leads, and what it says when pointed at."""

    page: str
    anchor: str
    tip: str


def definitions(root: Path) -> list[Definition]:
    """All names that the chapters build, in the order in which they build them."""
    cells = notebooks.build_cells(root)
    modules = package(cells)
    chapters: dict[tuple[str, str], str] = {}  # of the cell that begins a definition
    later: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for cell in cells:
        for piece in cell.parse().pieces:
            for name in piece.names:
                chapters.setdefault((cell.path, name), cell.chapter)
            if piece.goes_on:
                members = [name for member in piece.members for name in member.names]
                later[cell.path, piece.names[0]] += [(name, cell.chapter) for name in members]
    found = []
    for (path, name), chapter in chapters.items():
        node = modules[path].definitions[name].nodes[-1]
        definition = _definition(path, name, chapter, node)
        found.append(replace(definition, later=tuple(later[path, name])))
    return found


def _definition(path: str, name: str, chapter: str, node: ast.stmt) -> Definition:
    if isinstance(node, ast.ClassDef):
        return Definition(
            path,
            name,
            chapter,
            "class",
            _summary(node),
            tuple(_members(node)),
            tuple(ast.unparse(base).split("[")[0] for base in node.bases),
            node=node,
        )
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return Definition(path, name, chapter, "function", _summary(node), node=node)
    return Definition(path, name, chapter, "data", node=node)


def _summary(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first line of a docstring, without its marks."""
    text = (ast.get_docstring(node) or "").split("\n\n")[0]
    return " ".join(re.sub(r"`+|:\w+:", "", text).split())


def _members(node: ast.ClassDef) -> dict[str, None]:
    """Methods, properties and annotated fields of a class, in order."""
    found: dict[str, None] = {}
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found[inner.name] = None
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            found[inner.target.id] = None
    return found


def _self_assigned(node: ast.ClassDef) -> set[str]:
    """What a class's methods assign to `self`."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute) and is_new_field(target)
    }


class Names:
    """Finds what a piece of inline code names, if that is clear."""

    def __init__(self, found: Iterable[Definition]) -> None:
        self.all = list(found)
        self.by_name: dict[str, list[Definition]] = defaultdict(list)
        self.by_path: dict[str, Definition] = {}
        self.classes: dict[str, Definition] = {}
        self.owners: dict[str, list[Definition]] = defaultdict(list)
        for definition in self.all:
            self.by_name[definition.name].append(definition)
            self.by_path.setdefault(definition.path, definition)
            if definition.kind == "class":
                self.classes.setdefault(definition.name, definition)
                assert isinstance(definition.node, ast.ClassDef)
                for member in {*definition.members, *_self_assigned(definition.node)}:
                    self.owners[member].append(definition)

    def digest(self) -> str:
        """Changes when a link could lead elsewhere."""
        return hashlib.sha256(repr(self.all).encode()).hexdigest()

    def begun(self, path: str, name: str) -> Target:
        """The place where a class begins."""
        return _target(next(d for d in self.by_name[name] if d.path == path))

    def find(self, code: str, chapter: str = "") -> Target | None:
        """The place that inline code names; None if it names nothing of ours, or several things.

        In a chapter, a name that it builds itself goes before the same one elsewhere.
        """
        text = code.strip().rstrip(":")
        folder = re.fullmatch(r"(?:minisgl/)?(\w+)/", text)
        if folder:
            return self._folder(folder[1])
        if re.fullmatch(r"[\w/]+\.py", text):
            return self._file(text, chapter)
        called = re.fullmatch(r"([A-Za-z_][\w.]*)\(.*\)", text)
        name = called[1] if called else text
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
            return None
        parts = name.split(".")
        if len(parts) == 1:
            return self._top(name, chapter) or self._member_alone(name, chapter)
        if parts[0] == source.PACKAGE:
            return self._dotted(parts)
        if len(parts) == 2:
            return self._member(*parts)
        return None

    def _folder(self, name: str) -> Target | None:
        """`layers/`: the part of the map that lists its files."""
        if not any(path.startswith(f"{source.PACKAGE}/{name}/") for path in self.by_path):
            return None
        return Target(MAP, folder_anchor(name), f"What is in {source.PACKAGE}/{name}/")

    def _file(self, text: str, chapter: str = "") -> Target | None:
        """`minisgl/core.py` or, if there is one such file, `core.py`."""
        found = [d for p, d in self.by_path.items() if p == text or p.endswith(f"/{text}")]
        first = _only(found, chapter)
        if first is None:
            return None
        tip = f"{first.path}, begun in chapter {number(first.chapter)}"
        return Target(f"notebooks/{first.chapter}", anchor(first.path), tip)

    def _top(self, name: str, chapter: str) -> Target | None:
        if len(name) < 2 or name.startswith("__"):
            return None
        found = _only(self.by_name.get(name, []), chapter)
        return _target(found) if found else None

    def _dotted(self, parts: list[str]) -> Target | None:
        """`minisgl.core`, `minisgl.core.Req`, `minisgl.core.Req.complete_one`."""
        for cut in range(len(parts), 0, -1):
            module, rest = ".".join(parts[:cut]), parts[cut:]
            inside = [d for d in self.all if d.module == module]
            if not inside:
                continue
            if not rest:
                return self._file(inside[0].path)
            for definition in inside:
                if definition.name == rest[0]:
                    return _target(definition, ".".join(rest[1:]))
        return None

    def _member(self, owner: str, name: str) -> Target | None:
        """`Req.complete_one`, and `req.complete_one` as one would write it in code."""
        for definition in self.classes.values():
            if owner in (definition.name, definition.name.lower()):
                holder = self._holder(definition, name)
                return _target(holder, name) if holder else None
        return None

    def _holder(self, definition: Definition, name: str) -> Definition | None:
        """The class that gives `definition` its member `name`: itself or one it derives from."""
        if definition in self.owners.get(name, ()):
            return definition
        for base in definition.bases:
            if base in self.classes and (found := self._holder(self.classes[base], name)):
                return found
        return None

    def _member_alone(self, name: str, chapter: str) -> Target | None:
        """`complete_one`: a member of one class (and of those derived from it).

        A single word could be anything, so only names of two or more words count.
        """
        if "_" not in name.strip("_") or name.startswith("__") or name in ELSEWHERE:
            return None
        if HOMES.get(name) in self.classes:
            return _target(self.classes[HOMES[name]], name)
        owners = self.owners.get(name, [])
        roots = [d for d in owners if not any(b in {o.name for o in owners} for b in d.bases)]
        found = _only(roots, chapter)
        return _target(found, name) if found else None


def _only(found: list[Definition], chapter: str) -> Definition | None:
    """The only one, or the only one that the chapter builds."""
    if len(found) != 1:
        found = [d for d in found if d.chapter == chapter]
    return found[0] if len(found) == 1 else None


def folder_anchor(name: str) -> str:
    """The id of a folder's part of the map."""
    return f"map-{name}"


def _target(definition: Definition, member: str = "") -> Target:
    shown = f"{definition.name}.{member}" if member else definition.name
    what = f": {definition.summary}" if definition.summary and not member else ""
    page, place = definition.place(member)
    where = f"{definition.path}, built in chapter {number(page.removeprefix('notebooks/'))}"
    return Target(page, place, f"{shown}{what} ({where})")


def number(chapter: str) -> str:
    """How a chapter is called: `01` for `01_core`, `milestone` for `stage1_milestone`."""
    head, _, rest = chapter.partition("_")
    return head if head.isdigit() else rest


def names_of_notebook(root: Path, chapter: str) -> set[str]:
    """What a chapter's other cells define: there, such a name is the chapter's own."""
    found: set[str] = set()
    for cell in notebooks.read(root, chapter).cells:
        if cell.cell_type != "code" or source.directive(cell.source) is not None:
            continue
        try:
            tree = ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", cell.source))
        except SyntaxError:
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found
