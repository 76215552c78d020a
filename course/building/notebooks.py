"""The notebooks as the source of the package: build, check, run and pull.

`python -m course build | check | run | pull` are thin over the functions here.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import yaml
from nbformat import NotebookNode

from course.building.source import (
    PACKAGE,
    BuildError,
    Piece,
    Source,
    check_path,
    directive,
    emit,
    merge,
    parse,
    write_whole,
)

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
IGNORE_OUTPUT = "nbval-ignore-output"
CELL_TIMEOUT = 600  # seconds
LONGEST_BUILD_CELL = 40  # lines, see `code_lines`


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


# --- build ----------------------------------------------------------------------------------------


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
    return changed, sorted(set(_python_files(folder)) - set(texts))


def write_changed(folder: Path, texts: dict[str, str]) -> list[str]:
    """Write the files of `folder` that differ from their text; returns their paths."""
    changed = []
    for path, text in texts.items():
        target = folder / path
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            write_whole(target, text)
            changed.append(path)
    return changed


def _python_files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in (folder / PACKAGE).rglob("*.py"))


# --- check ----------------------------------------------------------------------------------------


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
        for path in sorted(set(_python_files(root)) - set(texts))
    ]
    for chapter in chapters(root):
        faults += _notebook_faults(root, chapter)
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


def _notebook_faults(root: Path, chapter: str) -> list[str]:
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
            built = {p: (folder / p).read_text(encoding="utf-8") for p in _python_files(folder)}
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


# --- run ------------------------------------------------------------------------------------------


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


# --- pull -----------------------------------------------------------------------------------------


def pull(root: Path) -> list[str]:
    """Write what was edited in `minisgl/` back into the cells that it belongs to.

    Returns the cells changed. Raises CourseError, with nothing written, for a definition that no
    cell builds, or one that a cell builds and the file has no more.
    """
    notebooks = {chapter: read(root, chapter) for chapter in chapters(root)}
    cells = build_cells(root)
    faults: list[str] = []
    changed: dict[tuple[str, int], str] = {}
    for path in sorted({cell.path for cell in cells} | set(_python_files(root))):
        own = [cell for cell in cells if cell.path == path]
        target = root / path
        if not own:
            faults.append(f"{path}: no build cell writes this file; add one to a chapter")
            continue
        if not target.exists():
            continue
        try:
            module = parse(target.read_text(encoding="utf-8"), path)
        except (BuildError, SyntaxError) as error:
            faults.append(f"{path}: {error}")
            continue
        parsed = [cell.parse() for cell in own]
        spread = {p.names[0] for source in parsed for p in source.pieces if p.goes_on}
        in_file = _to_match(module, spread)
        in_cells = {name for source in parsed for name in _to_match(source, spread)}
        for name in sorted(in_file - in_cells):
            faults.append(f"{path}: {name} is in the file but in no build cell")
        for name in sorted(in_cells - in_file):
            faults.append(f"{path}: {name} is in a build cell but not in the file")
        for number, (cell, source) in enumerate(zip(own, parsed, strict=True)):
            text = _pulled(cell, source, module, spread, parsed, is_first=number == 0)
            if text != cell.text:
                changed[cell.chapter, cell.index] = text
    if faults:
        raise CourseError("nothing was pulled:\n" + "\n".join(f"  {fault}" for fault in faults))
    for (chapter, index), text in changed.items():
        notebooks[chapter].cells[index].source = text
    for chapter in {chapter for chapter, _ in changed}:
        text = nbformat.writes(notebooks[chapter]) + "\n"
        write_whole(notebook_path(root, chapter), text)
    return [f"notebooks/{chapter}.ipynb, cell {index + 1}" for chapter, index in changed]


def _to_match(source: Source, spread: set[str]) -> set[str]:
    """What must be in a file and in its cells: definitions, and members of classes in `spread`."""
    return {n for n in source.definitions if "." not in n or n.partition(".")[0] in spread}


def _pulled(
    cell: BuildCell,
    source: Source,
    module: Source,
    spread: set[str],
    parsed: list[Source],
    *,
    is_first: bool,
) -> str:
    """The cell's text with the file's version of its parts; the same text if nothing differs.

    `spread` are the classes that several cells build: of these a cell gets only its own members.
    """
    in_file = {piece.names: piece for piece in module.pieces}
    pieces = []
    for piece in source.pieces:
        there = in_file.get(piece.names, piece)
        if there.header is not None and there.names[0] in spread:
            there = _own_members(piece, there)
        pieces.append(replace(there, blank=piece.blank))
    imports = {item for item in source.imports if item in module.imports}
    typing_imports = {item for item in source.typing_imports if item in module.typing_imports}
    if is_first:  # imports new in the file, which no cell has
        imports |= module.imports - {item for other in parsed for item in other.imports}
        known = {item for other in parsed for item in other.typing_imports}
        typing_imports |= module.typing_imports - known
    head = source.head if source.head is None else module.head
    same = (
        [p.text for p in pieces] == [p.text for p in source.pieces]
        and imports == source.imports
        and typing_imports == source.typing_imports
        and head == source.head
    )
    if same:
        return cell.text
    body = emit(Source(head, imports, typing_imports, pieces))
    return f"{cell.text.splitlines()[0]}\n{body}".rstrip("\n")


def _own_members(piece: Piece, there: Piece) -> Piece:
    """A cell's part of a class as the file has it: its members, in the file's order."""
    own = {member.names: member for member in piece.members}
    members: list[Piece] = []
    for above, member in zip([None, *there.members], there.members, strict=False):
        if member.names in own:
            is_below = (members[-1].names if members else None) == (above.names if above else None)
            blank = member.blank if is_below else own[member.names].blank
            members.append(replace(member, blank=blank))
    return piece.with_members(members, None if piece.goes_on else there.header)
