"""What must hold for each committed notebook; `course check --static` and the tests ask here."""

from __future__ import annotations

import ast
from pathlib import Path

from course.building.notebooks import WIDGET_STATE, read
from course.building.source import directive

LONGEST_BUILD_CELL = 40  # lines, see `code_lines`


def notebook_faults(root: Path, chapter: str) -> list[str]:
    """What must hold for each committed notebook."""
    notebook = read(root, chapter)
    faults = []
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        faults.append("the kernel must be named python3")
    widgets = notebook.metadata.get("widgets")
    if widgets is not None and "state" not in widgets.get(WIDGET_STATE, {}):
        faults.append("metadata.widgets has no state")
    expected, out_of_order, above = 0, "", None
    for index, cell in enumerate(notebook.cells):
        path = directive(cell.source) if cell.cell_type == "code" else None
        at = f"cell {index + 1}"
        if path and above:
            faults.append(
                f"{at} builds {path} right below a cell that builds {above}: put a word, or a call "
                "of what is new, between them"
            )
        if path and (lines := code_lines(cell.source)) > LONGEST_BUILD_CELL:
            faults.append(
                f"{at} ({path}) has {lines} lines without docstrings, and the most is "
                f"{LONGEST_BUILD_CELL}: split it (`class X(X):` goes on with a class)"
            )
        above = path
        if cell.cell_type != "code":
            continue
        if cell.source.strip():
            expected += 1
            if cell.execution_count != expected and not out_of_order:
                out_of_order = f"{at} was not run in order; `python -m course run {chapter}`"
                faults.append(out_of_order)
        if cell.source.rstrip().endswith(";"):
            faults.append(f"{at} ends in `;`, which nbval does not honor")
        for output in cell.outputs:
            if output.output_type == "error":
                faults.append(f"{at} holds an error")
            if output.output_type == "stream" and output.name == "stderr":
                faults.append(f"{at} holds text on stderr")
    return [f"notebooks/{chapter}.ipynb: {fault}" for fault in faults]


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
