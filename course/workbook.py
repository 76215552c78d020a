"""Workbooks: the chapters with stubs in place of the code, for readers who write it themselves.

A workbook folder is a root of its own (`.minisgl-root`): its `notebooks/` are computed from the
chapters, and its `minisgl/` begins empty and grows as the reader runs build cells. In a workbook
kernel, what is not written yet is said in a line (`Guard`), the checks judge instead of raising
(`course.exercises`), and `reveal` and `catch_up` hand out the reference, which is read from the
chapters' text and never imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import ModuleType, TracebackType
from typing import Any

import nbformat
from nbformat import NotebookNode

from course import notebooks, stubs
from course.builder import WORKBOOK_MARKER, builder, find_root
from course.notebooks import BuildCell, CourseError
from course.source import (
    PACKAGE,
    Piece,
    Source,
    directive,
    emit,
    merge,
    module_name,
    parse,
    write_whole,
)

# Functions that a chapter defines in ordinary cells, and that are its subject.
BY_HAND = {
    "00_tiny_engine": {
        "rmsnorm",
        "rope",
        "attention",
        "mlp",
        "layer",
        "forward",
        "generate",
    },
    "stage1_milestone": {"admit", "turn", "serve"},
}
META = "minisgl_course"  # where a workbook's metadata say what it was made from
GUIDE = """\
> **This is a workbook.** Where the chapter has code, you find stubs: the signature, the docstring
> and a line of hint. Replace the line that raises, run the cell, and your `minisgl` grows. A cell
> that needs something you have not written yet says so in one line, so *Run All* always works.
>
> * What stands below a cell before you run it is what the book's code printed.
> * The checks say *not started*, *wrong* or *right* for each promise of the chapter.
> * `course.reveal("{example}")` shows the book's version of one definition.
> * `course.catch_up("{chapter}")`, once the first code cell has run, writes everything from the
>   chapters before this one that you have not written. It never touches what you wrote.
> * `course.progress()` shows how far you are.
"""


def reference_root() -> Path:
    """The repository: the folder with the chapters that this package belongs to."""
    return Path(__file__).resolve().parent.parent


def is_workbook(root: Path) -> bool:
    """Whether `root` is a folder of workbooks."""
    return (root / WORKBOOK_MARKER).is_file()


def dotted(path: str) -> str:
    """`minisgl/kvcache/base.py` → `minisgl.kvcache.base`."""
    return module_name(PurePosixPath(path))


# --- Generating -----------------------------------------------------------------------------------


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
            there = _read_or_none(target)
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


def _read_or_none(path: Path) -> NotebookNode | None:
    try:
        return nbformat.read(path, as_version=4)
    except Exception:  # half saved, or no notebook: the reader's all the same
        return None


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
            text, stubbed = _code(chapter, cell.source)
            names += stubbed
            cells.append(_code_cell(cell, text, keep_outputs=not stubbed))
    example = next((n for n in names if "." in n and "__" not in n), (names or ["Req"])[0])
    guide = GUIDE.format(example=example, chapter=chapter.split("_")[0])
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


def _code(chapter: str, text: str) -> tuple[str, list[str]]:
    """A code cell of a workbook, and the functions that it leaves to the reader."""
    path = directive(text)
    if path is not None:
        hints = {n: f"Hint: {h}" for (p, n), h in HINTS.items() if p == path}
        return stubs.stub(text, hints=hints)
    own = BY_HAND.get(chapter, set())
    if own and any(re.search(rf"^def {name}\(", text, flags=re.MULTILINE) for name in own):
        return stubs.stub(text, own.__contains__)
    return text, []


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


# Where the docstring and the prose do not say enough to write the body: (file, name) → a line.
HINTS: dict[tuple[str, str], str] = {
    ("minisgl/core.py", "_require"): 'the message: f"{name} must be {wanted}, got {got!r}: {hint}"',
    ("minisgl/core.py", "SamplingParams.__post_init__"): (
        "finite temperature, top_k >= -1, 0 <= top_p <= 1, max_tokens >= 1"
    ),
    ("minisgl/core.py", "_check_req"): (
        "ids 1-D, int32, on the CPU, not empty; 0 <= cached_len < their number; others >= 0"
    ),
    ("minisgl/core.py", "Req.append_host"): "_check_append first; int32 stays; a new tensor",
    ("minisgl/core.py", "Context.forward_batch"): "`yield` once; clear also when the pass fails",
}


# --- The reference, as text -----------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A function that a workbook leaves to the reader: where the book has it."""

    chapter: str
    path: str  # the file, or "" for one that the notebook itself holds
    name: str  # dotted: `Req.complete_one`
    heading: str  # the nearest heading above its cell
    cell: BuildCell


def to_write(root: Path, names: list[str] | None = None) -> list[Written]:
    """Everything that the workbooks leave to the reader, in the order of the book."""
    found = []
    for chapter in notebooks.chapters(root) if names is None else names:
        heading = chapter
        for index, cell in enumerate(notebooks.read(root, chapter).cells):
            if cell.cell_type == "markdown":
                heads = re.findall(r"^#+ +(.+)$", cell.source, flags=re.MULTILINE)
                heading = heads[-1].replace("`", "") if heads else heading
            elif cell.cell_type == "code":
                path = directive(cell.source) or ""
                for name in _code(chapter, cell.source)[1]:
                    build = BuildCell(chapter, index, path, cell.source)
                    found.append(Written(chapter, path, name, heading, build))
    return found


def _find(root: Path, name: str) -> tuple[BuildCell, str]:
    """The build cell of a definition and its dotted name in it; CourseError if there is none."""
    wanted = name.removeprefix(f"{PACKAGE}.")
    found: list[tuple[BuildCell, str]] = []
    similar: dict[str, None] = {}
    for cell in notebooks.build_cells(root):
        module = dotted(cell.path).removeprefix(PACKAGE).lstrip(".")
        known = [*cell.parse().names, *(part.name for part in stubs.parts(cell.text))]
        for inner in dict.fromkeys(known):
            if wanted in (inner, f"{module}.{inner}") or (
                module and wanted == f"{module.split('.')[-1]}.{inner}"
            ):
                found.append((cell, inner))
            elif inner.split(".")[-1] == wanted.split(".")[-1]:
                similar[f"{module}.{inner}"] = None
    if not found:
        hint = f"; did you mean {', '.join(list(similar)[:6])}?" if similar else ""
        raise CourseError(f"no chapter builds {name}{hint}")
    if len({cell.path for cell, _ in found}) > 1:
        places = ", ".join(f"{dotted(c.path).removeprefix(PACKAGE + '.')}.{n}" for c, n in found)
        raise CourseError(f"{name} is in several files; say which: {places}")
    return found[0]


def reference(root: Path, name: str) -> tuple[BuildCell, str]:
    """The book's source of one definition or method (`Req`, `core.Req.complete_one`), unindented
    as it stands in the file."""
    cell, inner = _find(root, name)
    for part in stubs.parts(cell.text):
        if part.name == inner:
            return cell, part.text(cell.text.split("\n"))
    for piece in cell.parse().pieces:
        if inner in piece.names:
            return cell, piece.text
    raise CourseError(f"no chapter builds {name}")


def reveal(name: str, *, insert: bool = False) -> Any:
    """Show the book's version of a definition or method, `Req` or `Req.complete_one`.

    With `insert` a new cell below holds it, ready to run: a build cell, in which a class keeps the
    methods that you have written. Names may be qualified (`core.Req`) when several files have one.
    """
    root = reference_root()
    cell, text = reference(root, name)
    if insert:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            raise RuntimeError("insert=True needs a notebook; without it the source is shown")
        shell.set_next_input(_build_cell_for(root, name), replace=False)
        return None
    return _Shown(f"# {cell.path}\n{text}", cell.path)


class _Shown:
    """Source that a notebook shows highlighted and a terminal as it is."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def _build_cell_for(root: Path, name: str) -> str:
    """A build cell with the book's version of `name`, and the reader's of everything around it."""
    cell, inner = _find(root, name)
    top = inner.split(".")[0]
    source = cell.parse()
    piece = next(piece for piece in source.pieces if top in piece.names)
    text = piece.text
    target = find_root() / cell.path
    if "." in inner and target.exists():
        mine = parse(target.read_text(encoding="utf-8"), str(target))
        own = next((p for p in mine.pieces if p.names == piece.names), None)
        if own is not None:
            text, _ = stubs.graft(own.text, text, lambda part, _: part == inner)
    imports = Source(None, source.imports, source.typing_imports)
    return f"#| build {cell.path}\n{emit(imports)}\n\n{text}"


def catch_up(chapter: int | str, *, overwrite: bool = False) -> list[str]:
    """Write into your `minisgl` what the chapters before `chapter` build and you have not written.

    `chapter` is a number or a name (`3`, `"03"`, `"03_models"`). What you wrote stays, method by
    method, unless `overwrite`. Returns the names taken from the book. Restart the kernel if it had
    loaded the files that changed.
    """
    root, folder = reference_root(), find_root()
    if not is_workbook(folder):
        raise CourseError(f"{folder} is not a folder of workbooks; the chapters build everything")
    before = chapters_before(root, chapter)
    texts: dict[str, str] = {}
    taken: list[str] = []
    for cell in notebooks.build_cells(root, before):
        target = folder / cell.path
        if cell.path not in texts and target.exists():
            texts[cell.path] = target.read_text(encoding="utf-8")
        mine = texts.get(cell.path, "")
        texts[cell.path], new = _caught_up(cell, mine, str(target), overwrite=overwrite)
        taken += new
    changed = []
    for path, text in texts.items():
        target = folder / path
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            write_whole(target, text)
            changed.append(path)
    _report_catch_up(before, taken, changed)
    return taken


def chapters_before(root: Path, chapter: int | str) -> list[str]:
    """The chapters before one that is named by its number or by (the beginning of) its name."""
    names = notebooks.chapters(root)
    wanted = f"{chapter:02d}" if isinstance(chapter, int) else str(chapter)
    at = [i for i, name in enumerate(names) if name == wanted or name.split("_")[0] == wanted]
    if len(at) != 1:
        raise CourseError(f"there is no chapter {chapter!r}; the chapters are {', '.join(names)}")
    return names[: at[0]]


def _caught_up(
    cell: BuildCell, mine: str, filename: str, *, overwrite: bool
) -> tuple[str, list[str]]:
    """The reader's file with what a build cell adds to it, and the names that it added."""
    try:
        module = parse(mine, filename)
    except SyntaxError as error:
        raise CourseError(f"{filename}, line {error.lineno}: {error.msg}; mend it first") from error
    source = cell.parse()
    there = {piece.names: piece for piece in module.pieces}
    pieces: list[Piece] = []
    taken: list[str] = []
    for piece in source.pieces:
        own = there.get(piece.names)
        if own is None or overwrite:
            if own is None or own.text != piece.text:
                taken += piece.names
            pieces.append(piece)
        else:
            text, grafted = stubs.graft(own.text, piece.text, lambda _, is_stub: is_stub)
            taken += grafted
            pieces.append(replace(piece, text=text))
    head = source.head if module.head is None or overwrite else module.head
    merged = merge(module, replace(source, head=head, pieces=pieces))
    return emit(merged), taken


def _report_catch_up(before: list[str], taken: list[str], changed: list[str]) -> None:
    print(f"{len(taken)} definitions from {len(before)} chapters, {len(changed)} files written")
    loaded = [path for path in changed if dotted(path) in sys.modules]
    if loaded:
        print(f"restart the kernel: it has loaded {', '.join(loaded)} as they were before")


# --- The kernel of a workbook ---------------------------------------------------------------------


def prepare(root: Path, cell: str) -> tuple[str, str]:
    """A build cell as it may run in a workbook, and a line to print after its report, or ''."""
    path = directive(cell)
    if not is_workbook(root) or path is None or not (root / path).is_file():
        return cell, ""
    cell, kept = stubs.keep_written(cell, (root / path).read_text(encoding="utf-8"))
    if not kept:
        return cell, ""
    return cell, f"kept what the file has, where this cell has a stub: {', '.join(kept)}"


def to_write_in(cell: str) -> list[str]:
    """The stubs that a cell still holds."""
    return [name for name, is_written in stubs.written(cell).items() if not is_written]


class Guard:
    """Says in one line that a cell needs something unwritten, and lets *Run All* go on.

    Values that such a cell would have made are forgotten, so that no cell below goes on with what
    an earlier cell called by the same name.
    """

    def __init__(self, shell: Any, root: Path) -> None:
        self.shell, self.root = shell, root
        self.missing: dict[str, str] = {}  # a name that no cell made → what was not written
        self._homes: dict[str, Written] | None = None
        self._quiet: BaseException | None = None
        self._cell = ""
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)
        shell.set_custom_exc((Exception,), self._handle)

    def _before(self, info: Any) -> None:
        self._cell, self._quiet = info.raw_cell, None

    def _after(self, result: Any) -> None:
        if self._quiet is not None and result.error_in_exec is self._quiet:
            result.error_in_exec = None  # so that the front end goes on with the next cell

    def _handle(
        self, shell: Any, kind: type, error: Exception, trace: Any, tb_offset: int | None = None
    ) -> None:
        cause = self.cause(error)
        if cause is None:
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
            return
        self._quiet = error
        self._forget(trace, cause)
        print(f"{stubs.MARK}{cause}{self._where(cause)}")

    def cause(self, error: BaseException | None) -> str | None:
        """What is not written, if that is why the error came; None for any other error."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            text = str(error)
            if isinstance(error, NotImplementedError) and text.startswith(stubs.MARK):
                return text.removeprefix(stubs.MARK)
            if isinstance(error, ModuleNotFoundError):
                if (error.name or "").split(".")[0] == PACKAGE:
                    return error.name
            elif isinstance(error, ImportError):
                found = re.match(r"cannot import name '(\w+)' from '?(minisgl[\w.]*)", text)
                if found:
                    return found[1]
            elif isinstance(error, AttributeError):
                found = re.match(r"module '(minisgl[\w.]*)' has no attribute '(\w+)'", text)
                if found:
                    return found[2]
            elif isinstance(error, NameError) and error.name:
                if error.name in self.missing:
                    return self.missing[error.name]
                if error.name in self.homes:
                    return error.name
            error = error.__cause__ or error.__context__
        return None

    @property
    def homes(self) -> dict[str, Written]:
        """Where the book writes each name."""
        if self._homes is None:
            self._homes = {}
            for item in to_write(reference_root()):
                self._homes.setdefault(item.name, item)
                self._homes.setdefault(item.name.split(".")[0], item)
        return self._homes

    def _where(self, cause: str) -> str:
        item = self.homes.get(cause)
        if item is None:
            for name, home in self.homes.items():
                if home.path and dotted(home.path) == cause:
                    item = self.homes[name]
                    break
        return f" ({item.chapter}, “{item.heading}”)" if item else ""

    def _forget(self, trace: TracebackType | None, cause: str) -> None:
        line = 1
        while trace is not None:
            if trace.tb_frame.f_globals is self.shell.user_ns and (
                trace.tb_frame.f_code.co_name == "<module>"
            ):
                line = trace.tb_lineno
            trace = trace.tb_next
        for name in _bound_from(self._cell, line):
            value = self.shell.user_ns.get(name)
            if isinstance(value, ModuleType | type) or callable(value):
                continue
            self.shell.user_ns.pop(name, None)
            self.missing[name] = cause


def _bound_from(cell: str, line: int) -> list[str]:
    """The names that a cell's top-level statements bind, from the one at `line` on."""
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return []
    if directive(cell) is not None:
        return parse(cell).names
    names: dict[str, None] = {}
    for node in tree.body:
        if (node.end_lineno or node.lineno) < line:
            continue
        if isinstance(node, stubs.Function | ast.ClassDef):
            names[node.name] = None
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names[inner.id] = None
            elif isinstance(inner, ast.alias):
                names[(inner.asname or inner.name).split(".")[0]] = None
    return list(names)


_guard: Guard | None = None


def guard(shell: Any) -> None:
    """Make a workbook's kernel friendly; once per kernel."""
    global _guard
    if _guard is None:
        _guard = Guard(shell, builder().root)


# --- Progress -------------------------------------------------------------------------------------


@functools.cache
def checks_by_chapter() -> dict[str, tuple[str, ...]]:
    """The check functions of each chapter, exercises included, in order."""
    root = reference_root()
    found: dict[str, tuple[str, ...]] = {}
    for chapter in notebooks.chapters(root):
        text = "\n".join(
            c.source for c in notebooks.read(root, chapter).cells if c.cell_type == "code"
        )
        found[chapter] = tuple(dict.fromkeys(re.findall(r"^def (check_\w+)\(", text, re.MULTILINE)))
    return found


def chapter_of_checks(names: list[str]) -> str | None:
    """The chapter that defines these checks: the running notebook if it does, else the first."""
    homes = [c for c, checks in checks_by_chapter().items() if set(names) <= set(checks)]
    running = Path(os.environ.get("JPY_SESSION_NAME", "")).stem
    return running if running in homes else next(iter(homes), None)


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
    if len({item.path for item in found}) > 1:
        places = sorted({f"{dotted(i.path).removeprefix(PACKAGE + '.')}.{i.name}" for i in found})
        raise CourseError(f"{name} is in several files; say which: {', '.join(places)}")
    return found


def hand_written(folder: Path, chapter: str) -> set[str]:
    """The functions of an ordinary cell (`BY_HAND`) that a workbook has more than a stub of."""
    notebook = _read_or_none(folder / "notebooks" / f"{chapter}.ipynb")
    cells = [c.source for c in notebook.cells if c.cell_type == "code"] if notebook else []
    found = {}
    for text in cells:
        if text.lstrip().startswith(("%", "!")) or directive(text) is not None:
            continue
        found.update(stubs.written(text))
    return {n for n in BY_HAND.get(chapter, set()) if found.get(n, False)}


def progress() -> Any:
    """A picture of how far each chapter is: what is written, and the last verdict of each check."""
    from course import draw, judging

    folder = find_root()
    found = list(judging.progress(reference_root(), folder))
    said = ", ".join(
        f"{p.chapter}: {p.written} of {p.to_write} written, {p.count('right')} of "
        f"{len(p.verdicts)} checks right"
        for p in found
    )
    height = 60 + 34 * len(found)
    c = draw.Canvas(draw.PHONE_WIDTH, height, title="Your minisgl so far", desc=said)
    for row, p in enumerate(found):
        y = 12 + 34 * row
        c.text(12, y + 12, p.chapter, size=13)
        columns = [("new", p.written, p.to_write), ("cached", p.count("right"), len(p.verdicts))]
        for x, (kind, done, of) in zip((134, 296), columns, strict=True):
            _bar(c, x, y, 90, done, of, kind)
            c.text(x + 96, y + 12, f"{done}/{of}" if of else "–", size=13, muted=True)
    c.legend(12, height - 28, [("new", "written"), ("cached", "checks right"), ("todo", "to do")])
    return c


def _bar(c: Any, x: float, y: float, width: float, done: int, of: int, kind: str) -> None:
    share = done / of if of else 0.0
    if share:
        c.box(x, y, width * share, 22, kind=kind)
    if share < 1 and of:
        c.box(x + width * share, y, width * (1 - share), 22, kind="todo")
