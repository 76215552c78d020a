"""Notebooks on machines that have nothing of the course yet, such as Colab's.

There, a notebook is opened alone. So once `_config.yml` says where the repository is, the first
cell of each chapter fetches the rest and runs this file, which installs what is missing, no more::

    python -m course.launch          writes those first cells, from _config.yml (or takes them back)
    %run course/launch.py install    is what they run

Only the standard library is used here: nothing else is installed yet.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "torch",
    "transformers",
    "safetensors",
    "gguf",
    "ipywidgets",
    "matplotlib",
    "filelock",
    "psutil",
    "platformdirs",
)
"""What running a chapter takes; the rest of requirements.txt is for tests and the book."""

MARK = "#| launch"
PLAIN = "%load_ext course"
FIRST_CELL = """\
#| launch
import importlib.util
import pathlib

if importlib.util.find_spec("course") is None:  # as on Colab, which opens this notebook alone
    _course = pathlib.Path("../course/launch.py")
    if not _course.exists():
        !git clone --quiet --depth 1 {url} course-files
        _course = pathlib.Path("course-files/course/launch.py")
    %run {{_course}} install

%load_ext course"""


# -- on the machine where a notebook was opened ----------------------------------------------------


def missing(requirements: str) -> list[str]:
    """The lines of a requirements file to install: what a chapter needs and isn't here as it asks.

    PyTorch is taken as it is: another one would take gigabytes and fit the machine's GPU less well.
    """
    found = []
    for line in requirements.splitlines():
        wanted = line.split("#")[0].strip()
        named = re.match(r"[A-Za-z0-9._-]+", wanted)
        if not named or named[0].lower() not in NEEDED:
            continue
        try:
            have = importlib.metadata.version(named[0])
        except importlib.metadata.PackageNotFoundError:
            found.append(wanted)
            continue
        if named[0].lower() != "torch" and not fits(have, wanted[len(named[0]) :]):
            found.append(wanted)
    return found


def fits(version: str, ranges: str) -> bool:
    """Whether a version is within ranges such as `>=5.24,<6`."""
    have = _numbers(version)
    for part in filter(None, ranges.split(",")):
        sign, bound = re.match(r"\s*(==|>=|<=|<|>)\s*([\d.]+)", part.strip()).groups()  # type: ignore[union-attr]
        want = _numbers(bound)
        size = max(len(have), len(want))
        a, b = (n + (0,) * (size - len(n)) for n in (have, want))
        if not {"==": a == b, ">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b}[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in found[0].split(".")) if found else (0,)


def install(root: Path = ROOT) -> None:
    """Make the course importable in this process, with what it needs, and go to its notebooks."""
    wanted = missing((root / "requirements.txt").read_text(encoding="utf-8"))
    if wanted:
        print("installing", ", ".join(wanted))
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted])
        if done.returncode:
            raise RuntimeError("pip could not install what the course needs; see its message above")
        stale = [n for w in wanted if (n := re.split(r"[<>=~!]", w)[0].strip()) in sys.modules]
        if stale:
            print(f"{', '.join(stale)} was in use: restart the session, then run this cell again")
    importlib.invalidate_caches()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    os.chdir(root / "notebooks")
    with contextlib.suppress(ImportError):
        from google.colab import output  # type: ignore[import-not-found, unused-ignore]

        output.enable_custom_widget_manager()


# -- where the repository is -----------------------------------------------------------------------


def repository(root: Path = ROOT) -> str:
    """The repository's address, `repository: url` in `_config.yml`; "" while there is none."""
    import yaml

    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    return str((config.get("repository") or {}).get("url") or "").rstrip("/")


def first_cell(url: str) -> str:
    """The source of a chapter's first code cell."""
    return FIRST_CELL.format(url=url) if url else PLAIN


def shown(source: str) -> str:
    """What the book shows of a first cell: the line that a reader has to know."""
    return PLAIN if source.startswith(MARK) else source


def write_cells(root: Path = ROOT) -> list[str]:
    """Give each chapter the first cell that fits `_config.yml`; returns the chapters changed."""
    import nbformat

    from course.building import notebooks
    from course.building.source import write_whole

    wanted = first_cell(repository(root))
    changed = []
    for chapter in notebooks.chapters(root):
        notebook = notebooks.read(root, chapter)
        cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
        if shown(cell.source) != PLAIN:
            raise notebooks.CourseError(f"{chapter}: the first code cell is not {PLAIN!r}")
        if cell.source != wanted:
            cell.source = wanted
            path = notebooks.notebook_path(root, chapter)
            write_whole(path, nbformat.writes(notebook) + "\n")
            changed.append(chapter)
    return changed


if __name__ == "__main__":
    if sys.argv[1:] == ["install"]:
        install()
    else:
        for name in write_cells():
            print(f"{name}: first cell written")
