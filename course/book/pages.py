"""What the pages around the chapters are made of: directives for the Markdown files in `book/`.

* `{picture} NAME`: one of `PICTURES`;
* `{widget} CHAPTER NUMBER`: a widget of a chapter, as its notebook stores it;
* `{road-map}`: the chapters with what they build and how long they take;
* `{official-map}`: each definition beside the official one (`official`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from course.book import names, official, players
from course.building import notebooks
from course.pictures import canvas as draw
from course.pictures.engine import engine_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from sphinx.application import Sphinx

NO_BREAK, WORD_JOINER = "\u00a0", "\u2060"
DIFFERENCE = "difference-from-upstream"
"""The id of a chapter's box with the differences from the official code."""

PICTURES: dict[str, Callable[[], draw.Canvas]] = {"engine": engine_map}
"""Name → drawing function, for the `picture` directive."""


class Picture(SphinxDirective):
    """`{picture} NAME` in a Markdown page: one of `PICTURES`, in place."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in PICTURES:
            raise self.error(f"no picture {name!r}; there are {', '.join(PICTURES)}")
        canvas = PICTURES[name]()
        return [nodes.raw("", draw.framed(canvas.svg(with_style=False)), format="html")]


class Widget(SphinxDirective):
    """`{widget} CHAPTER NUMBER`: a chapter's widget (counted from 0) on another page.

    `variant` shows one variant only; with `autoplay` it begins to move when it is seen, unless the
    reader asked for less motion.
    """

    required_arguments = 2
    option_spec = {  # noqa: RUF012 (docutils' own form)
        "variant": directives.unchanged,
        "title": directives.unchanged,
        "autoplay": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        path = notebooks.notebook_path(Path(self.env.srcdir), self.arguments[0])
        self.env.note_dependency(str(path))
        found = players.stored(path)
        number = int(self.arguments[1])
        if number >= len(found):
            raise self.error(f"{path.name} has {len(found)} widgets, counted from 0")
        player = replace(found[number], note="", title=self.options.get("title", ""))
        variant = self.options.get("variant")
        if variant is not None:
            if variant not in player.names:
                raise self.error(f"no variant {variant!r}; there are {', '.join(player.names)}")
            frames = player.variants[player.names.index(variant)]
            player = replace(player, names=("",), variants=(frames,))
        ident = f"widget-{self.arguments[0]}-{number}"
        text = players.render(player, ident, autoplay="autoplay" in self.options)
        return [nodes.raw("", text, format="html")]


# -- road map --------------------------------------------------------------------------------------
_MINUTES = {
    "an hour and a half": 90,
    "an hour and a quarter": 75,
    "three quarters of an hour": 45,
    "half an hour": 30,
    "a quarter of an hour": 15,
    "an hour": 60,
}
_COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5}
_TENS = {"ten": 10, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50}


def minutes(text: str) -> int | None:
    """How many minutes a phrase such as `about an hour and a half` means; None if that is unclear.

    >>> minutes("about an hour and a half"), minutes("forty minutes more"), minutes("long")
    (90, 40, None)
    """
    text = " ".join(text.lower().split())
    for phrase, value in _MINUTES.items():
        if phrase in text:
            return value
    found = re.search(r"(\w+)( and a half)? hours?", text)
    if found and (found[1] in _COUNTS or found[1].isdigit()):
        whole = _COUNTS.get(found[1]) or int(found[1])
        return whole * 60 + (30 if found[2] else 0)
    found = re.search(r"(\w+)(?:-(\w+))? minutes", text)
    if found and (found[1] in _TENS or found[1].isdigit()):
        return _TENS.get(found[1]) or int(found[1])
    return None


def as_hours(total: int) -> str:
    """Minutes as one says it: `40 min`, `1 h`, `1½ h`, `2¼ h`."""
    if total < 60:
        return f"{total} min"
    whole, rest = divmod(round(total / 15), 4)
    return f"{whole}{('', '¼', '½', '¾')[rest]} h"


class Chapter:
    """What the road map says of a chapter, read from its notebook."""

    def __init__(self, root: Path, name: str, found: list[names.Definition]) -> None:
        cells = notebooks.read(root, name).cells
        text = "\n\n".join(c.source for c in cells[:8] if c.cell_type == "markdown")
        heading = re.search(r"(?m)^# (.+)$", text)
        self.title = heading[1] if heading else name
        label, _, rest = self.title.partition(" · ")
        self.label = label if label.isdigit() else "◆"
        self.short = rest if label.isdigit() else self.title
        time = re.search(r"\*\*Time:?\*\*:?\s*(.+?)(?:\n\n|\Z)", text, re.DOTALL)
        first, _, more = (time[1] if time else "").partition(",")
        self.minutes = minutes(first)
        self.exercises = minutes(more) if "exercise" in more else None
        parts = dict.fromkeys(
            f"{'/'.join(p[1:2])}/" if len(p) > 2 else p[1]
            for d in found
            if name in d.chapters and not d.path.endswith("minisgl/__init__.py")
            for p in [d.path.split("/")]
        )
        self.files = list(parts)


class RoadMap(SphinxDirective):
    """`{road-map}`: a line for each chapter; the body says in a sentence what each is about.

    The body has lines `CHAPTER: sentence` in any order, then lines `+ Title: sentence` for what is
    to come.
    """

    has_content = True

    def run(self) -> list[nodes.Node]:
        root = Path(self.env.srcdir)
        said = dict(re.findall(r"(?m)^(\S[^:]*?):\s*(.+)$", "\n".join(self.content)))
        found = names.definitions(root)
        chapters = notebooks.chapters(root)
        known = {Path(page).name for page in self.env.found_docs}
        line: nodes.bullet_list = nodes.bullet_list(classes=["road-map"])
        total = extra = 0
        for name in chapters:
            self.env.note_dependency(str(notebooks.notebook_path(root, name)))
            if name not in known:
                continue
            chapter = Chapter(root, name, found)
            total += chapter.minutes or 0
            extra += chapter.exercises or 0
            line += self._chapter(name, chapter, said.pop(name, ""))
        for title, sentence in said.items():
            if not title.startswith("+"):
                continue  # a chapter that isn't there yet
            line += self._later(title.lstrip("+ "), sentence)
        hours, all_hours = round(total / 60), round((total + extra) / 60)
        summary = nodes.paragraph(
            "",
            f"Part one takes about {hours} hours, {all_hours} with all exercises. Each chapter "
            "begins with what you should know first, and has a self-test that tells you whether "
            "you may skip it.",
        )
        return [line, summary]

    def _chapter(self, name: str, chapter: Chapter, sentence: str) -> nodes.list_item:
        item = nodes.list_item()
        up = "../" * self.env.docname.count("/")
        head = nodes.paragraph("", "", classes=["road-head"])
        head += nodes.inline("", chapter.label, classes=["road-number"])
        head += nodes.Text(" ")
        head += nodes.reference(
            "", chapter.short, internal=True, refuri=f"{up}notebooks/{name}.html"
        )
        if chapter.minutes:
            head += nodes.Text(" ")
            more = f" + {as_hours(chapter.exercises)}" if chapter.exercises else ""
            head += nodes.inline("", f"{as_hours(chapter.minutes)}{more}", classes=["road-time"])
        item += head
        item += nodes.paragraph("", "", *_spoken(sentence))
        if chapter.files:
            files = nodes.paragraph("", "builds ", classes=["road-files"])
            for i, file in enumerate(chapter.files):
                files += [nodes.Text(" ")] if i else []
                files += nodes.literal("", file)
            item += files
        return item

    def _later(self, title: str, sentence: str) -> nodes.list_item:
        item = nodes.list_item(classes=["road-later"])
        head = nodes.paragraph("", "", classes=["road-head"])
        head += nodes.inline("", title)
        head += nodes.Text(" ")
        head += nodes.inline("", "to come", classes=["road-time"])
        item += head
        item += nodes.paragraph("", "", *_spoken(sentence))
        return item


def _spoken(text: str) -> list[nodes.Node]:
    """Plain text with `code` in back quotes, as nodes."""
    parts = re.split(r"`([^`]+)`", text)
    return [nodes.literal("", p) if i % 2 else nodes.Text(p) for i, p in enumerate(parts) if p]


def _to(page: str, target: str, text: str, here: str) -> nodes.reference:
    """A link to an anchor of another page of the book."""
    up = "../" * here.count("/")
    return nodes.reference("", text, internal=True, refuri=f"{up}{page}.html#{target}")


def _table(heads: list[str], rows: list[list[list[nodes.Node]]], widths: list[int]) -> nodes.table:
    """A table of inline nodes."""
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=width) for width in widths]
    body = [[[nodes.Text(head)] for head in heads], *rows]
    made = []
    for cells in body:
        row = nodes.row()
        for cell in cells:
            row += nodes.entry("", nodes.paragraph("", "", *cell))
        made.append(row)
    group += nodes.thead("", made[0])
    group += nodes.tbody("", *made[1:])
    return nodes.table("", group, classes=["map"])


class OfficialMap(SphinxDirective):
    """`{official-map}`: each definition beside the official one (`official`)."""

    def run(self) -> list[nodes.Node]:
        for file in ("book/official.yml", *(f"notebooks/{c}.ipynb" for c in self._chapters())):
            self.env.note_dependency(str(Path(self.env.srcdir, file)))
        self.map = official.Map(Path(self.env.srcdir))
        rows = self.map.rows()
        twins = [row for row in rows if row.official]
        same = sum(not row.interface for row in twins)
        made: list[nodes.Node] = [
            nodes.paragraph(
                "",
                f"At present {len(rows)} definitions: {len(twins)} have an official counterpart, "
                f"{same} of these with the same interface (names and parameters), and "
                f"{len(rows) - len(twins)} are ours alone.",
            )
        ]
        files: dict[str, list[official.Row]] = {}
        for row in rows:
            files.setdefault(row.ours.file, []).append(row)
        folders: dict[str, nodes.section] = {}
        for file in sorted(files, key=lambda f: ("/" in f, f)):
            folder = file.partition("/")[0]
            if folder not in folders:
                ident = names.folder_anchor(folder.removesuffix(".py"))
                title = file if "/" not in file else f"{folder}/"
                folders[folder] = self._section(ident, title)
                made.append(folders[folder])
            parent = folders[folder]
            if "/" in file:
                # (`anchor` gives a package's own file the id of its folder)
                ident = names.anchor(f"map/{file}".replace("__init__", "init"))
                section = self._section(ident, file.partition("/")[2])
                parent += section
                parent = section
            parent += self._file(file, files[file])
        made.append(self._missing())
        return made

    def _chapters(self) -> list[str]:
        return notebooks.chapters(Path(self.env.srcdir))

    def _section(self, ident: str, title: str) -> nodes.section:
        section = nodes.section(ids=[ident], names=[])
        section += nodes.title("", "", nodes.literal("", title))
        return section

    def _file(self, file: str, rows: list[official.Row]) -> list[nodes.Node]:
        """What is said about a file, and the table of its definitions."""
        chapters = list(dict.fromkeys(c for row in rows for c in row.ours.chapters))
        line = nodes.paragraph("", "Built in chapter ")
        for i, chapter in enumerate(chapters):
            line += [nodes.Text(", ")] if i else []
            anchor_ = names.anchor(f"minisgl/{file}")
            line += _to(f"notebooks/{chapter}", anchor_, names.number(chapter), self.env.docname)
        line += nodes.Text("; ")
        line += _to(
            f"notebooks/{chapters[-1]}", DIFFERENCE, "the chapter's differences", self.env.docname
        )
        if file in self.map.lengths:
            line += nodes.Text("; official file ")
            line += self._there(file, file)
            line += nodes.Text(f", {self.map.lengths[file]} lines")
        line += nodes.Text(". ")
        about = self.map.files.get(file, {}).get("about", "")
        shared = next((row.shared for row in rows if row.shared), "")
        line += _spoken(about + (" " if about and shared else ""))
        if shared:
            line += [nodes.emphasis("", "Ours:"), nodes.Text(" "), *_spoken(shared)]
        heads = ["here", "there", "interface", "what differs, and why"]
        return [line, _table(heads, [self._row(row, file) for row in rows], [22, 22, 20, 36])]

    def _there(self, target: official.Official | str, text: str) -> nodes.reference:
        return nodes.reference("", text, internal=False, refuri=self.map.url(target))

    def _row(self, row: official.Row, file: str) -> list[list[nodes.Node]]:
        ours = row.ours
        here = _to(
            f"notebooks/{ours.chapter}", names.anchor(ours.path, ours.name), "", self.env.docname
        )
        here += nodes.literal("", ours.name)
        there: list[nodes.Node] = [nodes.Text("ours")]
        if row.official:
            found = row.official
            place = f"L{found.lines.replace('-', WORD_JOINER + '–' + WORD_JOINER)}"
            if found.file != file or found.name != ours.name:
                place = f"{found.file}, {found.name}, {place}"
            there = [self._there(found, place)]
        interface: list[nodes.Node] = [nodes.Text("the same" if row.official else "")]
        if row.official and row.interface:
            interface = []
            for i, change in enumerate(row.interface):
                interface += [nodes.Text(", ")] if i else []
                interface.append(nodes.literal("", change.replace(" ", NO_BREAK)))
        summary = "" if row.official else ours.summary
        why = " ".join(filter(None, [summary, row.why]))
        return [[here], there, interface, _spoken(why)]

    def _missing(self) -> nodes.section:
        """What upstream has and part one hasn't."""
        section = nodes.section(ids=["not-here"], names=[])
        section += nodes.title("", "What is not here")
        section += nodes.paragraph("", "Official files and definitions without a counterpart.")
        rows: list[list[list[nodes.Node]]] = []
        for file in self.map.lengths:
            reason = self.map.why_later(file)
            if reason:
                rows.append([[self._there(file, file)], [nodes.Text("")], _spoken(reason)])
        for key, reason in self.map.absent.items():
            file, _, name = key.partition("#")
            found = self.map.official[file, name]
            rows.append([[self._there(file, file)], [self._there(found, name)], _spoken(reason)])
        rows.sort(key=lambda row: (row[0][0].astext(), row[1][0].astext()))
        section += _table(["file", "definition", "when, or why not"], rows, [30, 30, 40])
        return section


def setup(app: Sphinx) -> None:
    """Register the directives."""
    app.add_directive("picture", Picture)
    app.add_directive("widget", Widget)
    app.add_directive("road-map", RoadMap)
    app.add_directive("official-map", OfficialMap)
