"""Where things are: the folder that holds `minisgl/`, the course itself, and imports from there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from course.building.source import PACKAGE

ROOT_VARIABLE = "MINISGL_ROOT"
WORKBOOK_MARKER = ".minisgl-root"


def find_root() -> Path:
    """The folder that holds (or will hold) `minisgl/`.

    The nearest folder from the current one upwards that has a `.minisgl-root` file (workbooks) or
    is a copy of this course (`is_book`), else the folder of `course/`. The environment variable
    MINISGL_ROOT overrides all but workbooks, whose stubs must never land in a package that is
    complete.
    """
    named = os.environ.get(ROOT_VARIABLE)
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if is_workbook(folder):
            return folder
        if is_book(folder):
            return Path(named).resolve() if named else folder
    return Path(named).resolve() if named else reference_root()


def reference_root() -> Path:
    """The repository: the folder with the chapters that this package belongs to."""
    return Path(__file__).resolve().parents[2]


def is_book(root: Path) -> bool:
    """Whether `root` is a copy of this course, and not some other Jupyter Book."""
    config = root / "_config.yml"
    if not (root / "_toc.yml").is_file() or not config.is_file():
        return False
    return "course.book" in config.read_text(encoding="utf-8", errors="replace")


def is_workbook(root: Path) -> bool:
    """Whether `root` is a folder of workbooks."""
    return (root / WORKBOOK_MARKER).is_file()


class RootFinder:
    """An import hook that finds `minisgl` in one folder only.

    Without it an installed copy of the package would answer for chapters that the reader has not
    built yet. What is missing raises with the chapter to run.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """`importlib`'s hook: a spec for modules of `minisgl`, None for all others."""
        if name.split(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(name, [str(self.root)] if name == PACKAGE else path, target)
        if spec is None:
            raise ModuleNotFoundError(
                f"{name} is not built yet in {self.root}. Run the chapter that builds it"
                f"{_built_by(self.root, name)}, or `python -m course build` for the whole package.",
                name=name,
            )
        return spec


def _built_by(root: Path, module: str) -> str:
    """Which chapter has a build cell for `module`, as ' (notebooks/…)', or ''."""
    path = module.replace(".", "/")
    for notebook in sorted((root / "notebooks").glob("*.ipynb")):
        text = notebook.read_text(encoding="utf-8")
        if f"#| build {path}.py" in text or f"#| build {path}/__init__.py" in text:
            return f" (notebooks/{notebook.name})"
    return ""
