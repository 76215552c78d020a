"""The notebooks as the source of the package: the chapters, and their build cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from course.building.parsing import parse
from course.building.source import BuildError, Source, check_path, directive

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class CourseError(Exception):
    """Something about the course is not as it should be; the message says what and where."""


@dataclass(frozen=True)
class BuildCell:
    """One build cell of a chapter: where it is, which file it builds, and its text."""

    chapter: str
    index: int
    path: str
    text: str

    @property
    def where(self) -> str:
        """The place as a person would say it."""
        return f"notebooks/{self.chapter}.ipynb, cell {self.index + 1}"

    def parse(self) -> Source:
        """The cell taken apart; errors name the place."""
        try:
            check_path(self.path)
            return parse(self.text, self.where)
        except BuildError as error:
            raise CourseError(f"{self.where}: {error}") from error
        except SyntaxError as error:
            raise CourseError(f"{self.where}, line {error.lineno}: {error.msg}") from error


def chapters(root: Path) -> list[str]:
    """The chapters (notebook names without suffix) in the order of `_toc.yml`."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))

    def files(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("file"), str):
                yield node["file"]
            for value in node.values():
                yield from files(value)
        elif isinstance(node, list):
            for value in node:
                yield from files(value)

    return [
        Path(file).stem
        for file in files(toc)
        if file.startswith("notebooks/") and notebook_path(root, Path(file).stem).exists()
    ]


def notebook_path(root: Path, chapter: str) -> Path:
    """The notebook of a chapter."""
    return root / "notebooks" / f"{chapter}.ipynb"


def read(root: Path, chapter: str) -> NotebookNode:
    """A chapter's notebook."""
    path = notebook_path(root, chapter)
    if not path.exists():
        known = ", ".join(chapters(root))
        raise CourseError(f"there is no chapter {chapter!r}; the chapters are {known}")
    import nbformat  # a second, which a kernel need not spend

    try:
        return nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        where = path.relative_to(root).as_posix()
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        markers = [n for n, line in enumerate(lines, 1) if line.startswith(("<<<<<<<", ">>>>>>>"))]
        if markers:
            raise CourseError(
                f"{where}, line {markers[0]}: a merge left its markers here; resolve it first"
            ) from error
        raise CourseError(f"{where} is no notebook: {str(error).splitlines()[0]}") from error


def read_or_none(path: Path) -> NotebookNode | None:
    """A reader's notebook; None for one that cannot be read, such as one that is half saved."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except Exception:
        return None


def build_cells(root: Path, names: Iterable[str] | None = None) -> list[BuildCell]:
    """All build cells of the given chapters (all by default), in order."""
    cells = []
    for chapter in chapters(root) if names is None else names:
        for index, cell in enumerate(read(root, chapter).cells):
            if cell.cell_type == "code":
                path = directive(cell.source)
                if path is not None:
                    cells.append(BuildCell(chapter, index, path, cell.source))
    return cells
