"""Links on the book's pages: from names of `minisgl` to their cells, from words to the glossary.

Both are added while the pages are written, from what the notebooks' build cells define and from the
glossary's headings. So a chapter's text says `Req.complete_one` or *page table* and nothing more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.domains import Domain, ObjType
from sphinx.transforms.post_transforms import SphinxPostTransform

from course.book.names import MAP, Names, Target, definitions, names_of_notebook
from course.building import notebooks

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

GLOSSARY = "book/glossary"


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
