"""The package as the notebooks have it: `python -m course build` and `check --static`."""

from __future__ import annotations

import difflib
from itertools import zip_longest
from pathlib import Path

from course.building.merging import emit, merge
from course.building.notebooks import BuildCell, CourseError, build_cells, chapters
from course.building.parsing import parse
from course.building.rules import notebook_faults
from course.building.source import PACKAGE, BuildError, Source, write_whole


def package_texts(cells: list[BuildCell]) -> dict[str, str]:
    """The files that the cells build, path → text, without running anything."""
    return {path: emit(module) for path, module in package(cells).items()}


def package(cells: list[BuildCell]) -> dict[str, Source]:
    """The modules that the cells build, path → module; errors name the cell."""
    modules: dict[str, Source] = {}
    for cell in cells:
        try:
            modules[cell.path] = merge(modules.get(cell.path, Source()), cell.parse())
        except BuildError as error:
            raise CourseError(f"{cell.where}: {error}") from error
    return dict(sorted(modules.items()))


def build(root: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Build the package from all notebooks into `folder`/minisgl.

    Returns the paths written because they changed, and the Python files there that no cell builds
    (they are left alone).
    """
    texts = package_texts(build_cells(root))
    changed = write_changed(folder, texts)
    return changed, sorted(set(python_files(folder)) - set(texts))


def write_changed(folder: Path, texts: dict[str, str]) -> list[str]:
    """Write the files of `folder` that differ from their text; returns their paths."""
    changed = []
    for path, text in texts.items():
        target = folder / path
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            write_whole(target, text)
            changed.append(path)
    return changed


def python_files(folder: Path) -> list[str]:
    """The Python files of a folder's package, as paths."""
    return sorted(p.relative_to(folder).as_posix() for p in (folder / PACKAGE).rglob("*.py"))


def check_static(root: Path) -> list[str]:
    """What is wrong with the notebooks as source, without running them; [] when nothing is."""
    faults = []
    cells = build_cells(root)
    owners: dict[tuple[str, str], BuildCell] = {}
    for cell in cells:
        for name in cell.parse().definitions:
            first = owners.setdefault((cell.path, name), cell)
            if first is not cell:
                faults.append(
                    f"{cell.path}: {name} is built twice, by {first.where} and {cell.where}"
                )
    texts = package_texts(cells)
    for path, text in texts.items():
        target = root / path
        there = target.read_text(encoding="utf-8") if target.exists() else ""
        if there != text:
            faults.append(_difference(path, there, text, owners))
    faults += [
        f"{path} is built by no notebook; write it in a build cell, or remove it"
        for path in sorted(set(python_files(root)) - set(texts))
    ]
    for chapter in chapters(root):
        faults += notebook_faults(root, chapter)
    return faults


def _difference(path: str, there: str, built: str, owners: dict[tuple[str, str], BuildCell]) -> str:
    """Where a file and what the notebooks build differ, as a message with a short diff."""
    if not there:
        return f"{path} is missing; `python -m course build` makes it"
    diff = list(
        difflib.unified_diff(
            there.splitlines(), built.splitlines(), f"{path} (file)", "notebooks", lineterm="", n=1
        )
    )
    pairs = zip_longest(there.splitlines(), built.splitlines())
    line = next((n for n, (mine, theirs) in enumerate(pairs, 1) if mine != theirs), 1)
    place = ""
    try:
        for name, part in parse(there, path).definitions.items():  # a member comes after its class
            if part.line <= line < part.line + part.num_lines:
                cell = owners.get((path, name))
                place = f" ({name}, {cell.where})" if cell else f" ({name})"
    except (SyntaxError, BuildError):
        pass
    shown = "\n".join(f"    {d}" for d in diff[:14])
    return (
        f"{path}, line {line}{place}: the file is not what the notebooks build. "
        f"`python -m course build` takes the notebooks' version, `pull` the file's.\n{shown}"
    )
