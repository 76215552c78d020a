"""What the workbooks leave to the reader, and where in the book it stands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from course.building import notebooks
from course.building.notebooks import BuildCell, CourseError
from course.building.source import PACKAGE, directive, module_name
from course.workbooks import stubs
from course.workbooks.hints import HINTS

# Functions that a chapter defines in ordinary cells, and that are its subject.
BY_HAND = {
    "00_tiny_engine": {"rmsnorm", "rope", "attention", "mlp", "layer", "forward", "generate"},
    "stage1_milestone": {"admit", "turn", "serve"},
}
# What the workbooks hold in full: there is nothing to learn from writing it, or nothing tells how.
GIVEN = {
    ("minisgl/utils/torch_utils.py", "nvtx_annotate"),
    ("minisgl/utils/device.py", "_memory_groups"),
}


def running_chapter() -> str:
    """The chapter whose notebook runs in this process, as far as Jupyter says so, or ''."""
    return Path(os.environ.get("JPY_SESSION_NAME", "")).stem


def dotted(path: str) -> str:
    """`minisgl/kvcache/base.py` → `minisgl.kvcache.base`."""
    return module_name(PurePosixPath(path))


def stubbed(chapter: str, text: str) -> tuple[str, list[str]]:
    """A code cell of a workbook, and the functions that it leaves to the reader."""
    path = directive(text)
    if path is not None:
        hints = {name: hint for (file, name), hint in HINTS.items() if file == path}
        return stubs.stub(text, lambda name: (path, name) not in GIVEN, hints)
    own = BY_HAND.get(chapter, set())
    if own and any(re.search(rf"^def {name}\(", text, flags=re.MULTILINE) for name in own):
        return stubs.stub(text, own.__contains__, {n: h for (p, n), h in HINTS.items() if not p})
    return text, []


@dataclass(frozen=True)
class Written:
    """A function that a workbook leaves to the reader: where the book has it."""

    chapter: str
    path: str  # the file, or "" for one that the notebook itself holds
    name: str  # dotted: `Req.complete_one`
    heading: str  # the nearest heading above its cell
    cell: BuildCell


def code_cells(root: Path, names: list[str] | None = None) -> Iterator[tuple[BuildCell, str]]:
    """The code cells of the chapters, in order, each with the nearest heading above it.

    The path of a cell that builds nothing is "".
    """
    for chapter in notebooks.chapters(root) if names is None else names:
        heading = chapter
        for index, cell in enumerate(notebooks.read(root, chapter).cells):
            if cell.cell_type == "markdown":
                heads = re.findall(r"^#+ +(.+)$", cell.source, flags=re.MULTILINE)
                heading = heads[-1].replace("`", "") if heads else heading
            elif cell.cell_type == "code":
                path = directive(cell.source) or ""
                yield BuildCell(chapter, index, path, cell.source), heading


def to_write(root: Path, names: list[str] | None = None) -> list[Written]:
    """Everything that the workbooks leave to the reader, in the order of the book."""
    return [
        Written(cell.chapter, cell.path, name, heading, cell)
        for cell, heading in code_cells(root, names)
        for name in stubbed(cell.chapter, cell.text)[1]
    ]


def find_written(root: Path, name: str) -> list[Written]:
    """The functions that a name stands for (a class stands for its methods)."""
    wanted = name.removeprefix(f"{PACKAGE}.")
    found = []
    for item in to_write(root):
        module = dotted(item.path).removeprefix(f"{PACKAGE}.") if item.path else item.chapter
        names = {f"{prefix}{item.name}" for prefix in ("", f"{module}.")}
        names.add(f"{module.split('.')[-1]}.{item.name}")
        names |= {n.rpartition(".")[0] for n in names if "." in item.name}
        if wanted in names:
            found.append(item)
    if not found:
        raise CourseError(f"no workbook leaves {name} to you; names are such as Req.complete_one")
    if len({item.path for item in found}) > 1:  # step zero's functions are in the way only there
        here = [item for item in found if item.chapter == running_chapter()]
        found = here or [item for item in found if item.path]
    if len({item.path for item in found}) > 1:
        places = sorted({f"{dotted(i.path).removeprefix(PACKAGE + '.')}.{i.name}" for i in found})
        raise CourseError(f"{name} is in several files; say which: {', '.join(places)}")
    return found
