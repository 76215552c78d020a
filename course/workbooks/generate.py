"""Workbooks: the chapters with stubs in place of the code, for readers who write it themselves.

A folder of workbooks is a root of its own (`.minisgl-root`): its `notebooks/` are computed from the
chapters here, and its `minisgl/` begins empty and grows as the reader runs build cells. What a
kernel does there is in `guard`; `reference` hands out the book's code, and `course.judging` says
what is right and how far a reader is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.building import notebooks
from course.building.notebooks import CourseError, read_or_none
from course.building.roots import WORKBOOK_MARKER, is_workbook
from course.building.source import PACKAGE, directive, write_whole
from course.workbooks.pieces import BY_HAND, stubbed

META = "minisgl_course"  # where a workbook's metadata say what it was made from
GUIDE = """\
> **This is a workbook.** Where the chapter has code, you find stubs: the signature, the docstring
> and a line of hint. Replace the line that raises, run the cell, and your `minisgl` grows. A cell
> that needs something you have not written yet says so in one line, and *Run All* goes on. It stops
> at a cell that shows something to be wrong.
>
> * What stands below a cell before you run it is what the book's code printed. To compare, unfold
>   it again below.
> * The checks say *not started*, *wrong* or *right* for each promise of the chapter.
> * `course.reveal("{example}")` shows the book's version of one definition.
> * `course.catch_up("{chapter}")`, in a new cell below the first code cell, writes everything from
>   the chapters before this one that you have not written. It never touches what you wrote.
> * `course.progress()` shows how far you are.
> * Answers to the exercises are not in here. The book has them, folded, and so have the workbooks
>   that `python -m course workbook FOLDER --answers` writes.
"""


@dataclass(frozen=True)
class Generated:
    """What `generate` did: names of chapters."""

    written: list[str]
    unchanged: list[str]
    kept: list[str]  # edited by the reader, and so left alone


def generate(root: Path, folder: Path, *, answers: bool = False) -> Generated:
    """Write a workbook for each chapter into `folder`, and what belongs around them.

    A workbook whose cells the reader has edited is never touched; one that is as it was generated
    is brought up to date. Raises CourseError for a folder that is something else.
    """
    folder = folder.resolve()
    _check_folder(root, folder)
    (folder / "notebooks").mkdir(parents=True, exist_ok=True)
    (folder / PACKAGE).mkdir(exist_ok=True)
    marker = folder / WORKBOOK_MARKER
    if not marker.exists():
        text = "The minisgl that grows here is built by the workbooks in notebooks/.\n"
        write_whole(marker, text)
    _copy_pages(root, folder)
    done = Generated([], [], [])
    for chapter in notebooks.chapters(root):
        target = folder / "notebooks" / f"{chapter}.ipynb"
        fresh = workbook(root, chapter, folder, answers=answers)
        if target.exists():
            there = read_or_none(target)
            if there is None or _digest(there) != there.metadata.get(META, {}).get("cells"):
                done.kept.append(chapter)
                continue
            if _digest(there) == _digest(fresh):
                done.unchanged.append(chapter)
                continue
        write_whole(target, nbformat.writes(fresh) + "\n")
        done.written.append(chapter)
    return done


def _check_folder(root: Path, folder: Path) -> None:
    if folder == root or root / "notebooks" in (folder, *folder.parents):
        raise CourseError(f"{folder} holds the course itself; name another folder")
    if (folder / "_toc.yml").exists():
        raise CourseError(f"{folder} holds a book (_toc.yml); name another folder")
    if folder.exists() and not is_workbook(folder) and any(folder.iterdir()):
        raise CourseError(
            f"{folder} is neither empty nor a folder of workbooks, and nothing in it was touched; "
            "name a new folder"
        )


def _copy_pages(root: Path, folder: Path) -> None:
    """The pages that chapters link to, so that their relative links work in the workbook too."""
    target = folder / "book"
    target.mkdir(exist_ok=True)
    for page in sorted((root / "book").glob("*.md")):
        shutil.copyfile(page, target / page.name)


def _digest(notebook: NotebookNode) -> str:
    """A hash of what a person writes in a notebook: kinds and texts of cells."""
    cells = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(cells).encode("utf-8")).hexdigest()


def workbook(root: Path, chapter: str, folder: Path, *, answers: bool = False) -> NotebookNode:
    """The workbook of one chapter, for a `folder` of workbooks."""
    source = notebooks.read(root, chapter)
    cells: list[NotebookNode] = []
    names: list[str] = []
    in_exercises = False
    for cell in source.cells:
        if cell.cell_type == "markdown":
            text = _fix_links(root, folder, cell.source)
            sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
            for i, section in enumerate(sections):
                if section.startswith("## "):
                    in_exercises = section.startswith("## Exercise")
                if in_exercises and not answers:
                    sections[i] = re.sub(r"<details>.*?</details>\s*", "", section, flags=re.DOTALL)
            text = "".join(sections).strip()
            if text:
                cells.append(_markdown(text, cell.id))
        elif cell.cell_type == "code" and not (in_exercises and not answers and _is_answer(cell)):
            text, left = stubbed(chapter, cell.source)
            names += left
            cells.append(_code_cell(cell, text, keep_outputs=not left))
            cells += _printed(cells[-1])
    built = [n for n in names if n not in BY_HAND.get(chapter, set())] or ["Req"]  # in a file
    example = next((n for n in built if "." in n and "__" not in n), built[0])
    number = chapter.split("_")[0]
    # A number says which chapter; `stage1` does not, since several names begin with it.
    guide = GUIDE.format(example=example, chapter=number if number.isdigit() else chapter)
    cells.insert(1, _markdown(guide.strip(), "workbook-guide"))
    made = nbformat.v4.new_notebook(cells=cells, metadata={**source.metadata})
    made.metadata.pop("widgets", None)
    made.nbformat, made.nbformat_minor = 4, 5
    made.metadata[META] = {"chapter": chapter, "cells": _digest(made)}
    return made


def _is_answer(cell: NotebookNode) -> bool:
    """Whether a code cell of the exercises gives an answer away."""
    hidden = {"hide-input", "hide-cell"} & set(cell.metadata.get("tags", []))
    return bool(hidden) or "must_pass=True" in cell.source


def _markdown(text: str, ident: str) -> NotebookNode:
    cell = nbformat.v4.new_markdown_cell(text)
    cell.id = ident
    return cell


def _code_cell(old: NotebookNode, text: str, *, keep_outputs: bool) -> NotebookNode:
    """A code cell with the outputs that the book printed, as far as they show what to reach."""
    cell = nbformat.v4.new_code_cell(text)
    cell.id = old.id
    kept = {k: old.metadata[k] for k in ("tags", "jupyter") if k in old.metadata}
    cell.metadata = nbformat.from_dict(kept)
    judged = re.search(r"\bcourse\.(run_checks|judge)\(", text)
    if keep_outputs and not judged and directive(text) is None:
        cell.outputs = [_without_view(o) for o in old.outputs if o.get("name") != "stderr"]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = None
    return cell


def _printed(cell: NotebookNode) -> list[NotebookNode]:
    """What the book's cell printed, folded, to compare with when the cell has been run."""
    text = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    if not text or "nbval-ignore-output" in cell.metadata.get("tags", []):
        return []
    folded = f"```text\n{text.rstrip()}\n```"
    folded = f"<details><summary>What the book printed</summary>\n\n{folded}\n\n</details>"
    return [_markdown(folded, f"{cell.id[:50]}-printed")]


def _without_view(output: NotebookNode) -> NotebookNode:
    """An output without the live widget, which no kernel stands behind; its picture stays."""
    if notebooks.WIDGET_VIEW not in output.get("data", {}):
        return output
    data = {k: v for k, v in output.data.items() if k != notebooks.WIDGET_VIEW}
    return nbformat.from_dict({**output, "data": data})


def _fix_links(root: Path, folder: Path, text: str) -> str:
    """Relative links that lead to a file of the repository which the folder does not have."""

    def fix(found: re.Match[str]) -> str:
        link, anchor = found[2], found[3] or ""
        if "://" in link or link.startswith(("#", "mailto:")):
            return found[0]
        lies = (root / "notebooks" / link).resolve()
        pages = {root / "notebooks", root / "book"}
        is_copied = lies.parent in pages and lies.suffix in {".ipynb", ".md"}
        if is_copied or not lies.exists():
            return found[0]
        return f"{found[1]}({Path(os.path.relpath(lies, folder / 'notebooks')).as_posix()}{anchor})"

    return re.sub(r"(\])\(([^)#\s]+)(#[^)\s]*)?\)", fix, text)
