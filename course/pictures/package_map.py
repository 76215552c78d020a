"""The map of the package: what each chapter builds, and where you are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from course.building import notebooks
from course.building.roots import find_root, reference_root
from course.building.source import directive
from course.pictures import canvas as draw


def package_map(chapter: str | None = None, *, root: Path | None = None) -> draw.Canvas:
    """The modules of the package, with the chapter that builds each: a "you are here".

    It is read from the build cells of all chapters in the order of `_toc.yml`: what the chapters
    before `chapter` build is drawn as there, what `chapter` builds as new, the rest as to come.
    A folder's `__init__.py` stands for the folder and has no box of its own; a file of an earlier
    chapter that this one adds to has a plus sign.

    Args:
        chapter: the notebook's name, such as "04_kvcache"; None draws the finished package.
        root: the folder with `_toc.yml` and `notebooks/`; by default the one that holds `course/`,
            so that a folder of workbooks shows the same map, else the one the notebook lies in.

    Raises:
        CourseError: for a chapter that is not in the table of contents.
    """
    if root is None:
        places = (reference_root(), find_root())
        root = next((place for place in places if (place / "_toc.yml").is_file()), places[0])
    order = notebooks.chapters(root)
    if chapter is not None and chapter not in order:
        known = ", ".join(order)
        raise notebooks.CourseError(f"there is no chapter {chapter!r}; the chapters are {known}")
    here = len(order) if chapter is None else order.index(chapter)
    builders: dict[str, list[int]] = {}  # file → the chapters that build parts of it, by number
    for number, name in enumerate(order):
        text = notebooks.notebook_path(root, name).read_text(encoding="utf-8")
        for cell in json.loads(text)["cells"]:  # (nbformat takes a second for all chapters)
            path = directive("".join(cell["source"])) if cell["cell_type"] == "code" else None
            if path is not None and number not in builders.setdefault(path, []):
                builders[path].append(number)
    lines = _map_lines(builders, here)
    return _draw_map(lines, [_short(name) for name in order], here)


@dataclass(frozen=True)
class _MapLine:
    """The files of one folder that one chapter begins: (label, whether `here` adds to it)."""

    folder: str
    chapter: int
    files: list[tuple[str, bool]]


def _map_lines(builders: Mapping[str, list[int]], here: int) -> list[_MapLine]:
    """The lines of the map: by folder in the order of their first files, then by chapter."""
    lines: dict[str, dict[int, list[tuple[str, bool]]]] = {}
    for path, chapters in builders.items():
        place = PurePosixPath(path)
        of_folder = lines.setdefault(f"{place.parent.name}/", {})
        if place.stem != "__init__":
            grown = here in chapters[1:]
            of_folder.setdefault(chapters[0], []).append((place.stem + " +" * grown, grown))
    return [
        _MapLine(folder, chapter, files)
        for folder, chapters in lines.items()
        for chapter, files in sorted(chapters.items())
    ]


def _short(chapter: str) -> str:
    """A chapter's number, or the last word of its name where it has none."""
    first, _, rest = chapter.partition("_")
    return first if first.isdigit() else (rest or first)[:4]


def _draw_map(lines: list[_MapLine], names: list[str], here: int) -> draw.Canvas:
    left, height, gap = 138.0, 22.0, 4.0
    limit: float = draw.PHONE_WIDTH - 6
    states = ("cached", "new", "todo")
    said: dict[str, list[str]] = {state: [] for state in states}
    boxes: list[tuple[float, float, float, str, str]] = []  # x, y, width, kind, text
    labels: list[tuple[float, str, str, bool]] = []  # y, folder, chapter, whether it is this one
    x, y, folder = left, 30.0, ""
    for line in lines:
        state = states[(line.chapter >= here) + (line.chapter > here)]
        begins = line.folder != folder
        y += 5 * begins
        labels.append((y, line.folder * begins, names[line.chapter], state == "new"))
        folder, x = line.folder, left
        for text, grown in line.files:
            width: float = round(draw.text_width(text, 13) + 14)
            if x + width > limit:
                x, y = left, y + height + gap
            kind = "new" if grown else state
            boxes.append((x, y, width, kind, text))
            said[kind].append(f"{folder}{text}".removeprefix("minisgl/"))
            x += width + gap
        y += height + gap
    words = {"cached": "built before", "new": "this chapter", "todo": "to come"}
    if here == len(names):
        words["cached"] = "built by the chapter on its left"
    shown = [state for state in states if said[state]]
    desc = " ".join(f"{words[state].capitalize()}: {', '.join(said[state])}." for state in shown)
    title = "The package minisgl, and the chapter that builds each file"
    if here < len(names):
        title = f"You are here: the package minisgl in chapter {names[here]}"
    c = draw.Canvas(draw.PHONE_WIDTH, y + 38, title=title, desc=desc)
    c.text(8, 16, "folder", size=13, muted=True)
    c.text(left - 12, 16, "chapter", size=13, muted=True, anchor="end")
    c.text(left, 16, "files", size=13, muted=True)
    for top, name, number, current in labels:
        cy = top + height / 2
        c.text(8, cy, name, size=13, mono=True, weight="bold")
        c.text(
            left - 12,
            cy,
            number,
            size=13,
            anchor="end",
            muted=not current,
            weight="bold" if current else "normal",
        )
    for x, top, width, kind, text in boxes:
        faint = kind == "todo"
        c.box(x, top, width, height, kind=kind, text="" if faint else text, size=13)
        if faint:
            c.text(x + width / 2, top + height / 2, text, size=13, anchor="middle", muted=True)
    c.legend(8, y + 10, [(state, words[state]) for state in shown])
    return c
