"""What must hold for each committed notebook; `course check --static` and the tests ask here.

A rule takes a chapter's name and its notebook and gives what is wrong with it, each in a line.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from course.building.notebooks import WIDGET_STATE, read
from course.building.roots import is_book
from course.building.source import directive

if TYPE_CHECKING:
    from nbformat import NotebookNode

LONGEST_BUILD_CELL = 40  # lines, see `code_lines`
PARTS = ("self-test", "exercise", "summary", "<summary>")
PARTS_OF_A_NUMBER = ("agrees with hugging face", "debugging", "how to explain it", "upstream")


def notebook_faults(root: Path, chapter: str) -> list[str]:
    """What is wrong with a chapter's notebook; [] when nothing is."""
    notebook = read(root, chapter)
    rules = [*RULES, *(RULES_OF_THE_BOOK if is_book(root) else ())]
    faults = [fault for rule in rules for fault in rule(chapter, notebook)]
    return [f"notebooks/{chapter}.ipynb: {fault}" for fault in faults]


def _has_kernel_and_widgets(chapter: str, notebook: NotebookNode) -> Iterator[str]:
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "the kernel must be named python3"
    widgets = notebook.metadata.get("widgets")
    if widgets is not None and "state" not in widgets.get(WIDGET_STATE, {}):
        yield "metadata.widgets has no state"


def _build_cells_are_short_and_parted(chapter: str, notebook: NotebookNode) -> Iterator[str]:
    above = None
    for number, cell in enumerate(notebook.cells, 1):
        path = directive(cell.source) if cell.cell_type == "code" else None
        if path and above:
            yield (
                f"cell {number} builds {path} right below a cell that builds {above}: put a word, "
                "or a call of what is new, between them"
            )
        if path and (lines := code_lines(cell.source)) > LONGEST_BUILD_CELL:
            yield (
                f"cell {number} ({path}) has {lines} lines without docstrings, and the most is "
                f"{LONGEST_BUILD_CELL}: split it (`class X(X):` goes on with a class)"
            )
        above = path


def _was_run_in_order(chapter: str, notebook: NotebookNode) -> Iterator[str]:
    expected = 0
    for number, cell in _code_cells(notebook):
        expected += bool(cell.source.strip())
        if cell.source.strip() and cell.execution_count != expected:
            yield f"cell {number} was not run in order; `python -m course run {chapter}`"
            return


def _shows_what_nbval_compares(chapter: str, notebook: NotebookNode) -> Iterator[str]:
    for number, cell in _code_cells(notebook):
        if cell.source.rstrip().endswith(";"):
            yield f"cell {number} ends in `;`, which nbval does not honor"
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {number} holds an error"
            if output.output_type == "stream" and output.name == "stderr":
                yield f"cell {number} holds text on stderr"


def _is_of_no_machine(chapter: str, notebook: NotebookNode) -> Iterator[str]:
    text = json.dumps(notebook, ensure_ascii=False)
    for found in re.findall(r"/(?:home|Users|root|work|tmp|var)/\w+", text)[:1]:
        yield f"it holds a path of a machine, {found}"
    for found in re.findall(r" at 0x[0-9a-f]{6,}", text)[:1]:
        yield f"it holds an object's address,{found}"


def _has_the_parts_of_a_chapter(chapter: str, notebook: NotebookNode) -> Iterator[str]:
    words = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    text = "\n\n".join(words).lower()
    parts = PARTS + PARTS_OF_A_NUMBER * chapter[0].isdigit()
    yield from (f"it lacks the part “{part}”" for part in parts if part not in text)


RULES: tuple[Callable[[str, NotebookNode], Iterator[str]], ...] = (
    _has_kernel_and_widgets,
    _build_cells_are_short_and_parted,
    _was_run_in_order,
    _shows_what_nbval_compares,
    _is_of_no_machine,
)
RULES_OF_THE_BOOK = (_has_the_parts_of_a_chapter,)  # not of a course that has no book


def _code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The code cells, each with its place as a person counts."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code":
            yield number, cell


def code_lines(text: str) -> int:
    """How many lines a build cell has, without docstrings, blank lines and the directive."""
    places = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    documented = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, places) and ast.get_docstring(node, clean=False) is not None
    ]
    docstrings = {n for d in documented for n in range(d.lineno, (d.end_lineno or d.lineno) + 1)}
    lines = [line for n, line in enumerate(text.split("\n"), 1) if n not in docstrings]
    return sum(bool(line.strip()) for line in lines) - (directive(text) is not None)
