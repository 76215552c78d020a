"""Running chapters in a kernel, and what of that is stored: `python -m course run` and `check`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
from nbformat import NotebookNode

from course.building.notebooks import (
    WIDGET_STATE,
    WIDGET_VIEW,
    CourseError,
    build_cells,
    chapters,
    notebook_path,
    read,
)
from course.building.package import package_texts, python_files
from course.building.source import write_whole

IGNORE_OUTPUT = "nbval-ignore-output"
CELL_TIMEOUT = 600  # seconds

# What nbval does not compare; its own tuple exists only inside a run of pytest.
_NOT_COMPARED = (
    *("metadata", "traceback", "prompt_number", "output_type", "name", "execution_count"),
    *(WIDGET_VIEW, "image/png", "image/jpeg"),
)


def other_outputs(stored: NotebookNode, ran: NotebookNode) -> list[str]:
    """The cells whose outputs nbval would not take for the stored ones, each with what differs."""
    from nbval import plugin

    faults = []
    for index, (old, new) in enumerate(zip(stored.cells, ran.cells, strict=True)):
        if old.cell_type != "code":
            continue
        options = dict(plugin.find_metadata_tags(old.metadata))
        options |= dict(plugin.find_comment_markers(old.source))
        if options.get("skip") or not options.get("check", True):
            continue
        found: list[tuple[str, Any, Any]] = []
        judge = SimpleNamespace(
            colors=plugin.nocolors,
            sanitize=lambda value: value,
            format_output_compare=lambda *difference, to=found: to.append(difference),
        )
        outputs = [plugin.coalesce_streams(cell.outputs) for cell in (new, old)]
        if not plugin.IPyNbCell.compare_outputs(judge, *outputs, skip_compare=_NOT_COMPARED):
            lines = judge.comparison_traceback
            if found:
                key, was, now = found[0]
                lines = [key, *_first_difference(str(was), str(now))]
            faults.append(f"cell {index + 1}: " + "\n    ".join(lines))
    return faults


def _first_difference(was: str, now: str, most: int = 3) -> list[str]:
    """The first lines that differ, of long ones the place where they do."""
    shown = []
    pairs = zip_longest(was.splitlines(), now.splitlines(), fillvalue="")
    for mine, theirs in [pair for pair in pairs if pair[0] != pair[1]][:most]:
        same = next(i for i, two in enumerate(zip_longest(mine, theirs)) if two[0] != two[1])
        start = max(0, same - 40)
        for sign, line in (("-", mine), ("+", theirs)):
            cut = line[start : start + 120]
            shown.append(f"{sign}{'…' * (start > 0)}{cut}{'…' * (len(line) > start + 120)}")
    return shown


def execute(
    notebook: NotebookNode, chapter: str, root: Path, *, package_root: Path | None = None
) -> NotebookNode:
    """Run all cells in a fresh kernel, in the notebooks' folder; CourseError at the first failure.

    `package_root` is the folder whose `minisgl/` the notebook builds; `root` by default.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    environment = {**os.environ, "MINISGL_ROOT": str(package_root or root)}
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(root / "notebooks")}},
        store_widget_state=True,
    )
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise CourseError(f"{chapter}: {error}") from error
    return notebook


def run(root: Path, chapter: str, *, fresh: bool = False) -> bool:
    """Re-execute a chapter in place; True if the file changed.

    What differs between two runs of the same cells is evened out, so that an unchanged chapter
    gives an unchanged file. Outputs that nbval ignores (timings) are kept if nothing but numbers
    changed in them, unless `fresh`. A failing cell leaves the notebook as it was.
    """
    path = notebook_path(root, chapter)
    before = read(root, chapter)
    after = execute(nbformat.from_dict(json.loads(json.dumps(before))), chapter, root)
    normalize(after, chapter)
    if not fresh:
        _keep_ignored_outputs(before, after)
    text = nbformat.writes(after) + "\n"
    if path.read_text(encoding="utf-8") == text:
        return False
    write_whole(path, text)
    return True


def normalize(notebook: NotebookNode, chapter: str) -> None:
    """Take out of an executed notebook what differs from run to run."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
                "name": "python3",
            },
            "language_info": {
                "name": "python",
                "file_extension": ".py",
                "mimetype": "text/x-python",
            },
            **({"widgets": notebook.metadata.widgets} if "widgets" in notebook.metadata else {}),
        }
    )
    count = 0
    for index, cell in enumerate(notebook.cells):
        if not cell.get("id"):
            cell.id = hashlib.sha256(f"{chapter}:{index}:{cell.source}".encode()).hexdigest()[:8]
        if cell.cell_type != "code":
            if not cell.get("attachments"):
                cell.pop("attachments", None)
            continue
        cell.metadata.pop("execution", None)
        count += bool(cell.source.strip())
        cell.execution_count = count if cell.source.strip() else None
        cell.outputs = _merge_streams(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = cell.execution_count
    _stable_widget_ids(notebook, chapter)


def _merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighboring outputs of one stream, which arrive in pieces that depend on timing."""
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and output.output_type == last.output_type == "stream"
            and output.name == last.name
        ):
            last.text += output.text
        else:
            merged.append(output)
    return merged


def _stable_widget_ids(notebook: NotebookNode, chapter: str) -> None:
    """Number the widgets' models by the order in which they appear, and drop unreachable ones."""
    state = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    order: dict[str, None] = {}

    def visit(model: str) -> None:
        if model in order or model not in state:
            return
        order[model] = None
        for found in re.findall(r"IPY_MODEL_([0-9a-f]{32})", json.dumps(state[model])):
            visit(found)

    for model in _view_ids(notebook):
        visit(model)
    # Links and other models without a view that point at visible ones.
    for model in list(state):
        pointed = re.findall(r"IPY_MODEL_([0-9a-f]{32})", json.dumps(state[model]))
        if "Link" in state[model].get("model_name", "") and set(pointed) & set(order):
            visit(model)
    if not order:
        notebook.metadata.pop("widgets", None)
        return
    names = {
        model: hashlib.sha256(f"{chapter}:{number}".encode()).hexdigest()[:32]
        for number, model in enumerate(order)
    }
    pattern = re.compile("|".join(names))

    def rename(value: Any) -> Any:
        return json.loads(pattern.sub(lambda found: names[found[0]], json.dumps(value)))

    notebook.metadata.widgets = nbformat.from_dict(
        {
            WIDGET_STATE: {
                "state": {names[model]: rename(state[model]) for model in order},
                "version_major": 2,
                "version_minor": 0,
            }
        }
    )
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(rename(output)) for output in cell.outputs]


def _view_ids(notebook: NotebookNode) -> list[str]:
    """The models that the outputs show, in order."""
    return [
        output.data[WIDGET_VIEW]["model_id"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if WIDGET_VIEW in output.get("data", {})
    ]


def _keep_ignored_outputs(before: NotebookNode, after: NotebookNode) -> None:
    """Keep the stored output of an ignored cell if only numbers or pixels changed in it."""
    stored = {(c.get("id"), c.source): c for c in before.cells if c.cell_type == "code"}
    for cell in after.cells:
        old = stored.get((cell.get("id"), cell.source))
        if old is None or IGNORE_OUTPUT not in cell.metadata.get("tags", []):
            continue
        if _without_numbers(old.outputs) == _without_numbers(cell.outputs):
            cell.outputs = old.outputs
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count


def _without_numbers(outputs: list[NotebookNode]) -> str:
    kept = []
    for output in outputs:
        data = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
        kept.append([output.output_type, output.get("text"), data])
    return re.sub(r"[\s#]+", " ", re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", json.dumps(kept)))


def check_from_nothing(root: Path) -> Iterator[str]:
    """Build the package chapter by chapter in an empty folder by running each notebook there.

    Each chapter runs on what the chapters before it have built and nothing else, and must show what
    is stored. Yields a line for each chapter that did; raises CourseError for the first that does
    not run or builds something else, and in the end for those that showed something else.
    """
    unlike: list[str] = []
    with tempfile.TemporaryDirectory(prefix="course-check-") as name:
        folder = Path(name)
        done: list[str] = []
        for chapter in chapters(root):
            done.append(chapter)
            ran = execute(read(root, chapter), chapter, root, package_root=folder)
            texts = package_texts(build_cells(root, done))
            built = {p: (folder / p).read_text(encoding="utf-8") for p in python_files(folder)}
            if built != texts:
                wrong = sorted(p for p in {*built, *texts} if built.get(p) != texts.get(p))
                raise CourseError(
                    f"{chapter}: running it built {', '.join(wrong)} otherwise than its text says"
                )
            grown = {cell.path for cell in build_cells(root, [chapter])}
            faults = other_outputs(read(root, chapter), ran)
            unlike += [f"{chapter}, {fault}" for fault in faults]
            built_here = f"{len(grown)} files built, {len(texts)} in the package"
            if faults:
                yield f"NOT {chapter}: {built_here}, {len(faults)} cells show something else"
            else:
                yield f"ok  {chapter}: {built_here}"
    if unlike:
        raise CourseError(
            "where a chapter is the last that was built, these show something else than what is "
            "stored:\n" + "\n".join(unlike)
        )
