"""Links on the book's pages: from names of `minisgl` to their cells, from words to the glossary.

Both are added while the pages are written, from what the notebooks' build cells define and from the
glossary's headings. So a chapter's text says `Req.complete_one` or *page table* and nothing more.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.domains import Domain, ObjType
from sphinx.transforms.post_transforms import SphinxPostTransform

from course.building import notebooks, source
from course.building.package import package
from course.building.syntax import is_new_field

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

GLOSSARY = "book/glossary"
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


# -- what the notebooks define ---------------------------------------------------------------------


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


# -- the glossary ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """An entry of the glossary."""

    word: str
    anchor: str
    meaning: str
    pattern: re.Pattern[str] = field(compare=False)


# Words that have an everyday meaning as well: where the glossary's is meant.
_MEANT = {
    "Event": r"(?<=CUDA )events?",
    "Kernel": r"(?<=GPU )kernels?|(?<=CUDA )kernels?",
    "Phase": r"(?!)",
    "Plan": r"(?!)",
    "Context": r"(?<=\bthe )context|(?<=\bglobal )context",
    "Page": r"(?<!this )(?<!these )(?<!web )(?<!File )pages?(?! of this book| in a browser)",
    "Position": r"positions?(?! embedding)",
    "Stream": r"(?<=CUDA )streams?|(?<=side )streams?",
}


def glossary(root: Path) -> list[Term]:
    """The glossary's entries, longest words first."""
    text = (root / f"{GLOSSARY}.md").read_text(encoding="utf-8")
    terms = []
    for word, body in re.findall(r"(?m)^### (.+)\n\n((?:.+\n?)+)", text):
        body = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", body)
        meaning = " ".join(re.sub(r"`|(?<!\w)\*|\*(?!\w| )", "", body).split())
        meaning = re.split(r"\s*\b(?:An exercise of c|C)hapters? (?:\d|milestone)", meaning)[0]
        spaced = r"[\s-]+".join(map(re.escape, re.split(r"[\s-]+", word)))
        spelled = _MEANT.get(word, rf"{spaced}(?:e?s)?")
        pattern = re.compile(rf"(?<![\w./-])(?:{spelled})(?![\w/-]|\.\w)", re.I)
        terms.append(Term(word, nodes.make_id(word), meaning, pattern))
    return sorted(terms, key=lambda term: -len(term.word))


# -- in the page -----------------------------------------------------------------------------------

_NO_LINKS_IN = (
    nodes.reference,
    nodes.title,
    nodes.caption,
    nodes.literal_block,
    nodes.figure,
    nodes.raw,
    nodes.comment,
    nodes.math,
    nodes.math_block,
)


def _linkable(node: nodes.Node) -> bool:
    """Whether a link may stand here: not in headings, code, captions and other links."""
    parent = node.parent
    while parent is not None and not isinstance(parent, nodes.document):
        if isinstance(parent, _NO_LINKS_IN):
            return False
        if isinstance(parent, nodes.Element):
            if "build-file" in parent["classes"] or parent.get("nb_element") in (
                "cell_code_output",
                "cell_code_source",
            ):
                return False
            if {"toctree-wrapper", "lead", "facts"} & set(parent["classes"]):
                return False
        parent = parent.parent
    return True


class Links(SphinxPostTransform):
    """Link names to where they are built, and the first mention of a term to the glossary."""

    default_priority = 600
    formats = ("html",)

    def run(self, **_: Any) -> None:
        page = self.env.docname
        links: _Links = self.env.app.minisgl_links  # type: ignore[attr-defined]
        self._names(page, links)
        if page not in (GLOSSARY, MAP):
            self._terms(page, links.terms)

    def _uri(self, page: str, target: str) -> str:
        here = self.env.docname
        return f"#{target}" if page == here else self._relative(page) + f"#{target}"

    def _relative(self, page: str) -> str:
        return self.env.app.builder.get_relative_uri(self.env.docname, page)

    def _names(self, page: str, links: _Links) -> None:
        own = links.own(page)
        terms = {term.word: term for term in links.terms}
        seen: set[tuple[int, str]] = set()
        for literal in list(self.document.findall(nodes.literal)):
            if "goes_on" in literal:
                link = self._link(links.names.begun(*literal["goes_on"]), "built")
                literal.replace_self(link)
                link += literal
            if not _linkable(literal):
                continue
            text = literal.astext()
            if re.split(r"[.(]", text)[0] in own:
                continue
            target = links.names.find(text, page.removeprefix("notebooks/"))
            kind = "built"
            if target is None and text in terms and page != GLOSSARY:
                term = terms[text]
                target, kind = _entry(term), "term"
            if target is None or target.page not in self.env.all_docs:
                continue
            # Once in a paragraph is enough.
            key = (id(_block(literal)), target.anchor + text)
            if key in seen:
                continue
            seen.add(key)
            link = self._link(target, kind)
            literal.replace_self(link)
            link += literal

    def _link(self, target: Target, kind: str) -> nodes.reference:
        return nodes.reference(
            "",
            "",
            internal=True,
            refuri=self._uri(target.page, target.anchor),
            reftitle=target.tip,
            classes=[kind],
        )

    def _terms(self, page: str, terms: list[Term]) -> None:
        """Link the first mention of each term that the page doesn't link by itself."""
        linked = {
            str(ref.get("refuri", "")).partition("#")[2]
            for ref in self.document.findall(nodes.reference)
            if "glossary" in str(ref.get("refuri", ""))
        }
        for text in list(self.document.findall(nodes.Text)):
            if isinstance(text.parent, nodes.literal) or not _linkable(text):
                continue
            parts = self._split(text.astext(), terms, linked)
            if len(parts) > 1:
                text.parent.replace(text, parts)

    def _split(self, text: str, terms: list[Term], linked: set[str]) -> list[nodes.Node]:
        """A text as texts and links; `linked` has the terms that need none, and grows."""
        taken: list[tuple[int, int, Term | None]] = []
        for term in terms:  # longest first: the page of `page table` is no page
            for found in term.pattern.finditer(text):
                if all(found.end() <= a or found.start() >= b for a, b, _ in taken):
                    first = term.anchor not in linked
                    taken.append((found.start(), found.end(), term if first else None))
                    linked.add(term.anchor)
        parts: list[nodes.Node] = []
        end = 0
        for start, stop, wanted in sorted(taken, key=lambda item: item[0]):
            if wanted is None:
                continue
            link = self._link(_entry(wanted), "term")
            link += nodes.Text(text[start:stop])
            parts += [nodes.Text(text[end:start]), link] if start > end else [link]
            end = stop
        if end < len(text):
            parts.append(nodes.Text(text[end:]))
        return parts


def _entry(term: Term) -> Target:
    return Target(GLOSSARY, term.anchor, f"{term.word}: {term.meaning}")


def _block(node: nodes.Node) -> nodes.Node:
    """The paragraph or other block around a node."""
    while node.parent is not None and isinstance(node, nodes.Inline | nodes.Text):
        node = node.parent
    return node


class _Links:
    """What all pages need, read once for a build."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names = Names(definitions(root))
        self.terms = glossary(root)

    def own(self, page: str) -> set[str]:
        chapter = page.removeprefix("notebooks/")
        if chapter == page or chapter not in notebooks.chapters(self.root):
            return set()
        return names_of_notebook(self.root, chapter)

    def digest(self) -> str:
        return self.names.digest() + hashlib.sha256(repr(self.terms).encode()).hexdigest()


# -- search ----------------------------------------------------------------------------------------


class Package(Domain):
    """The package's names as Sphinx knows them: search finds them, and leads to where they are."""

    name = "minisgl"
    label = "minisgl"
    object_types = {  # noqa: RUF012 (Sphinx's own form)
        "class": ObjType("class"),
        "function": ObjType("function"),
        "data": ObjType("constant"),
        "method": ObjType("member"),
    }
    initial_data: dict[str, Any] = {}  # noqa: RUF012

    def get_objects(self) -> Iterator[tuple[str, str, str, str, str, int]]:
        links: _Links | None = getattr(self.env.app, "minisgl_links", None)
        for item in links.names.all if links else ():
            page, place = item.place()
            if page not in self.env.all_docs or item.name in ("__all__", "T"):
                continue
            full = f"{item.module}.{item.name}"
            yield full, full, item.kind, page, place, 1 if item.public else 2
            for member in item.members:
                page, place = item.place(member)
                if not member.startswith("__") and page in self.env.all_docs:
                    yield f"{full}.{member}", f"{full}.{member}", "method", page, place, 2

    def merge_domaindata(self, docnames: Any, otherdata: Any) -> None:
        """Nothing is stored per page."""


def load(app: Sphinx) -> None:
    """Read the definitions and the glossary before pages are made."""
    app.minisgl_links = _Links(Path(app.srcdir))  # type: ignore[attr-defined]


def rewrite_if_moved(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """All pages, if a link could lead elsewhere than in the build before."""
    digest = app.minisgl_links.digest()  # type: ignore[attr-defined]
    if getattr(env, "minisgl_digest", None) == digest:
        return []
    env.minisgl_digest = digest  # type: ignore[attr-defined]
    return list(env.all_docs)
