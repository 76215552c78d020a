"""Running a chapter's checks outside its notebook, on any version of the package.

`program` cuts out of a chapter what its checks need and nothing else: the functions, and the
statements that make what these use. A worker process runs that on a folder's `minisgl`, once for
each job, in a child of its own, so that nothing of one job is left for the next.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import io
import json
import linecache
import os
import select
import shutil
import signal
import subprocess
import symtable
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course import notebooks, stubs
from course.exercises import OPEN, RIGHT, WRONG, Verdict, read_record, verdict
from course.source import PACKAGE, check_path, directive, module_name

TIMEOUT = 120.0  # seconds for one job


@dataclass(frozen=True)
class Program:
    """What a chapter's checks need, as source with the lines where they stand in the chapter."""

    chapter: str
    text: str
    checks: tuple[str, ...]  # the names that `run_checks` is given, in order
    modules: tuple[str, ...]  # whose names the notebook has by building them


# --- Cutting out ----------------------------------------------------------------------------------


@functools.cache
def program(root: Path, chapter: str) -> Program:
    """The checks of a chapter with what they need."""
    statements: list[tuple[ast.stmt, str]] = []
    checks: dict[str, None] = {}
    modules: dict[str, None] = {}
    for cell in notebooks.read(root, chapter).cells:
        if cell.cell_type != "code" or cell.source.lstrip().startswith(("%", "!")):
            continue
        path = directive(cell.source)
        if path is not None:
            modules[module_name(check_path(path))] = None
            continue
        for node in ast.parse(cell.source).body:
            call = _checks_call(node)
            if call is not None:
                checks |= dict.fromkeys(call)
            else:
                lines = cell.source.split("\n")[_first(node) - 1 : node.end_lineno]
                statements.append((node, "\n".join(lines)))
    more = _more_checks(root, chapter)
    own = [node for node in ast.parse(more).body if not _binds(node) & set(checks)]
    statements += [(node, ast.get_source_segment(more, node) or "") for node in own]
    checks |= dict.fromkeys(name for node in own for name in _binds(node) if "check_" in name)
    kept = _needed(statements, set(checks))
    return Program(chapter, "\n\n\n".join(kept) + "\n", tuple(checks), tuple(modules))


def _more_checks(root: Path, chapter: str) -> str:
    """Checks beside the chapter's own, which would clutter it: `tests/mutations/more/NN.py`."""
    path = root / "tests" / "mutations" / "more" / f"{chapter}.py"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _checks_call(node: ast.stmt) -> list[str] | None:
    """The arguments of `course.run_checks(...)`, for a statement that is such a call."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return None
    is_run = ast.unparse(node.value.func) == "course.run_checks"
    return [ast.unparse(argument) for argument in node.value.args] if is_run else None


def _needed(statements: list[tuple[ast.stmt, str]], wanted: set[str]) -> list[str]:
    """The statements that make what is wanted, and what those need, in order."""
    wanted, kept = set(wanted), []
    for node, text in reversed(statements):
        if _is_kept(node, wanted):
            if isinstance(node, ast.For):  # what it makes, and not what it proves or prints
                inner = [(n, ast.unparse(n)) for n in node.body]
                made = "\n".join(_needed(inner, wanted))
                head = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
                text = f"{head}\n{textwrap.indent(made, '    ')}"
            kept.append(text)
            reads = _reads(text)
            if not isinstance(node, ast.AugAssign | ast.If):
                wanted -= _binds(node)  # what bound the name before is of no use
            wanted |= reads
    return kept[::-1]


def _is_kept(node: ast.stmt, wanted: set[str]) -> bool:
    if isinstance(node, ast.Expr):
        # A call that changes something: of the process (`set_tp_info(…)`), or of what is wanted.
        if not isinstance(node.value, ast.Call):
            return False
        function = ast.unparse(node.value.func)
        if function.split(".")[-1].startswith(("set_", "reset_", "manual_seed")):
            return "printoptions" not in function
        libraries = {"course", "torch", "draw", "widgets"}
        return "." in function and function.split(".")[0] in wanted - libraries
    if isinstance(node, ast.If):
        return any(_is_kept(inner, wanted) for inner in node.body)
    if isinstance(node, ast.For):
        target = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        return bool((_binds(node) - target) & wanted)
    if isinstance(node, ast.Assert | ast.With | ast.While | ast.Delete):
        return False
    if isinstance(node, ast.Assign) and not any(isinstance(t, ast.Name) for t in node.targets):
        roots = {ast.unparse(t).split(".")[0].split("[")[0] for t in node.targets}
        if roots & wanted:
            return True
    return bool(_binds(node) & wanted)


def _binds(node: ast.stmt) -> set[str]:
    if isinstance(node, stubs.Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    inside = {  # a comprehension's own names
        id(name)
        for inner in ast.walk(node)
        if isinstance(inner, ast.comprehension)
        for name in ast.walk(inner.target)
    }
    return {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and _is_store(inner) and id(inner) not in inside
    }


def _is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _reads(text: str) -> set[str]:
    """The global names that a statement reads, in its functions too."""

    def visit(table: symtable.SymbolTable, top: bool) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from visit(child, False)

    names = visit(symtable.symtable(text, "<statement>", "exec"), True)
    return {name for name in names if not hasattr(builtins, name)}


# --- One job, in a child process ------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Checks of one chapter on one version of the package."""

    ident: str
    folder: str  # holds the package
    checks: tuple[str, ...] = ()  # () for all
    changes: dict[str, str] = field(default_factory=dict)  # path → text: these differ from folder
    text: str = ""  # instead of the chapter's own program
    timeout: float = TIMEOUT
    trace: bool = False  # also say which definitions each check uses


@dataclass
class Result:
    """What came of a job: a verdict per check, and (if asked) what each check calls."""

    ident: str
    verdicts: list[Verdict] = field(default_factory=list)
    used: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def run_jobs(root: Path, chapter: str, jobs: list[Job]) -> Iterator[Result]:
    """Run jobs one after the other, in a worker process that has the libraries loaded."""
    command = [sys.executable, "-m", "course.judging", str(root), chapter]
    environment = {**os.environ, "PYTHONPATH": _python_path(), "PYTHONIOENCODING": "utf-8"}
    environment.pop("MINISGL_ROOT", None)
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="course-judge-") as empty:
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=empty,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        assert worker.stdin is not None and worker.stdout is not None
        try:
            for job in jobs:
                worker.stdin.write(json.dumps(vars(job)) + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                if not line:
                    raise RuntimeError(f"the process that judges {chapter} ended early")
                yield _result(line)
            worker.stdin.close()
            worker.wait(30)
        finally:
            if worker.poll() is None:
                worker.kill()
                worker.wait()


def _python_path() -> str:
    home = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])


def _result(line: str) -> Result:
    raw = json.loads(line)
    verdicts = [Verdict(v["name"], v["kind"], tuple(v["lines"])) for v in raw["verdicts"]]
    return Result(raw["ident"], verdicts, raw["used"], raw["seconds"])


def worker(root: Path, chapter: str) -> None:
    """The worker: jobs come in on stdin, a line each, results go out on stdout."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a check prints is no result
    made = program(root, chapter)
    with contextlib.redirect_stdout(io.StringIO()):
        _warm_up(made)
    for line in sys.stdin:
        raw = json.loads(line)
        raw["checks"] = tuple(raw["checks"])
        out.write(_in_child(made, Job(**raw)) + "\n")
        out.flush()


def _warm_up(made: Program) -> None:
    """Import what the children will need, but nothing of `minisgl`."""
    from course.checkpoints import quiet, tiny

    quiet()
    for node in ast.walk(ast.parse(made.text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            for module in modules:
                if module.split(".")[0] not in {PACKAGE, "__future__"}:
                    with contextlib.suppress(ImportError):
                        __import__(module)
                        for alias in node.names if isinstance(node, ast.ImportFrom) else []:
                            getattr(sys.modules[module], alias.name, None)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "course.tiny":
            name = node.args[0] if node.args and not node.keywords else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                tiny(name.value)
    with contextlib.suppress(ImportError):
        import torch

        torch.ones(2) @ torch.ones(2)


def _in_child(made: Program, job: Job) -> str:
    """Run a job in a forked child, and give up after its time; the result as JSON."""
    started = time.monotonic()
    if not hasattr(os, "fork"):
        return json.dumps(_as_json(_run_job(made, job)))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            text = json.dumps(_as_json(_run_job(made, job)))
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                pipe.write(text)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    chunks: list[bytes] = []
    late = False
    while True:
        left = job.timeout - (time.monotonic() - started)
        ready = left > 0 and select.select([reading], [], [], left)[0]
        if not ready:
            late = True
            os.kill(child, signal.SIGKILL)
            break
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            break
        chunks.append(chunk)
    os.close(reading)
    os.waitpid(child, 0)
    text = b"".join(chunks).decode("utf-8")
    if late or not text:
        said = f"it did not end within {job.timeout:.0f} seconds" if late else "the process died"
        names = job.checks or made.checks
        result = Result(job.ident, [Verdict(name, WRONG, (said,)) for name in names])
        text = json.dumps(_as_json(result))
    raw = json.loads(text)
    raw["seconds"] = round(time.monotonic() - started, 2)
    return json.dumps(raw)


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "ident": result.ident,
        "verdicts": [{"name": v.name, "kind": v.kind, "lines": v.lines} for v in result.verdicts],
        "used": result.used,
        "seconds": result.seconds,
    }


def _run_job(made: Program, job: Job) -> Result:
    """Make the package findable, run the chapter's statements, then each check."""
    from course.builder import RootFinder

    result = Result(job.ident)
    names = job.checks or made.checks
    with tempfile.TemporaryDirectory(prefix="course-job-") as temporary:
        folder = Path(job.folder)
        if job.changes:
            folder = Path(temporary)
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(Path(job.folder) / PACKAGE, folder / PACKAGE, ignore=ignored)
            for path, text in job.changes.items():
                (folder / path).write_text(text, encoding="utf-8")
        sys.dont_write_bytecode = True
        sys.meta_path.insert(0, RootFinder(folder))
        filename = f"<checks of {made.chapter}>"
        text = job.text or made.text
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        try:
            _names_of(made.modules, namespace)
            exec(compile(text, filename, "exec", dont_inherit=True), namespace)
        except BaseException as error:
            result.verdicts = [_not_set_up(name, error) for name in names]
            return result
        for name in names:
            if name not in namespace:
                result.verdicts.append(Verdict(name, WRONG, ("the chapter has no such check",)))
                continue
            with _calls(folder, job.trace) as used:
                result.verdicts.append(verdict(namespace[name]))
            result.used[name] = used
    return result


def _names_of(modules: tuple[str, ...], namespace: dict[str, Any]) -> None:
    """The names that the chapter's notebook has because it built these modules."""
    import importlib

    for name in modules:
        module = importlib.import_module(name)
        namespace.update({k: v for k, v in vars(module).items() if not k.startswith("__")})


def _not_set_up(name: str, error: BaseException) -> Verdict:
    """The verdict for checks whose helpers could not even be made."""
    said = str(error)
    if isinstance(error, NotImplementedError) and said.startswith(stubs.MARK):
        return Verdict(name, OPEN, (f"{said.removeprefix(stubs.MARK)} is not written yet",))
    if isinstance(error, ImportError) and PACKAGE in (error.name or said):
        return Verdict(name, OPEN, (said.split(". ")[0],))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in f.filename]
    at = f" (in {frames[-1].name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    lines = (f"before any check could run, it raised {type(error).__name__}: {error}{at}",)
    return Verdict(name, WRONG, lines)


@contextlib.contextmanager
def _calls(folder: Path, is_on: bool) -> Iterator[list[str]]:
    """Collects `path:Qualified.name` of the package's functions that are called inside."""
    if not is_on:
        yield []
        return
    import threading

    used: dict[str, None] = {}
    inside = str(folder / PACKAGE) + os.sep

    def watch(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(inside):
            path = Path(frame.f_code.co_filename).relative_to(folder).as_posix()
            used[f"{path}:{frame.f_code.co_qualname.split('.<locals>')[0]}"] = None

    found: list[str] = []
    threading.settrace(watch)
    sys.settrace(watch)
    try:
        yield found
    finally:
        sys.settrace(None)
        threading.settrace(None)
        found += used


# --- What a reader asks for -----------------------------------------------------------------------


def check(name: str) -> Iterator[str]:
    """The verdicts of the checks that use a definition, on the package of the current folder."""
    from course.builder import find_root
    from course.workbook import find_written, reference_root

    root, folder = reference_root(), find_root()
    pieces = find_written(root, name)
    chapter = pieces[0].chapter
    yield f"{chapter}, “{pieces[0].heading}”"
    keys = {f"{piece.path}:{piece.name}" for piece in pieces}
    done = written_in(folder)
    missing = [piece.name for piece in pieces if not done.get((piece.path, piece.name), False)]
    for piece in missing:
        yield f"{OPEN:<12} {piece}"
    if len(missing) == len(pieces):
        return
    used = uses(root, chapter)
    checks = tuple(c for c, names in used.items() if keys & set(names))
    if not checks:
        yield f"no check of {chapter} uses {name}; the cells below it show what it should do"
        return
    for result in run_jobs(root, chapter, [Job(name, str(folder), checks)]):
        yield from map(str, result.verdicts)


def uses(root: Path, chapter: str) -> dict[str, list[str]]:
    """Which definitions each check of a chapter calls, found by running it on the book's code."""
    with tempfile.TemporaryDirectory(prefix="course-uses-") as name:
        notebooks.build(root, Path(name))
        results = list(run_jobs(root, chapter, [Job("book", name, trace=True)]))
    return results[0].used


def written_in(folder: Path) -> dict[tuple[str, str], bool]:
    """For each function of a folder's package whether it is more than a stub."""
    return {
        (path.relative_to(folder).as_posix(), name): is_written
        for path in sorted((folder / PACKAGE).rglob("*.py"))
        for name, is_written in stubs.written(path.read_text(encoding="utf-8")).items()
    }


@dataclass(frozen=True)
class Progress:
    """How far a chapter of a folder of workbooks is."""

    chapter: str
    written: int  # functions that are no stubs any more
    to_write: int
    verdicts: dict[str, str]  # check → its last verdict

    def count(self, kind: str) -> int:
        """How many checks have this verdict."""
        return sum(found == kind for found in self.verdicts.values())


def progress(root: Path, folder: Path, *, run: bool = False) -> Iterator[Progress]:
    """The progress of each chapter, with the last verdicts, or with new ones (`run`)."""
    from course.workbook import checks_by_chapter, hand_written, to_write

    done, record = written_in(folder), read_record(folder)
    for chapter in notebooks.chapters(root):
        pieces = to_write(root, [chapter])
        in_notebook = hand_written(folder, chapter)
        count = sum(
            done.get((p.path, p.name), False) if p.path else p.name in in_notebook for p in pieces
        )
        verdicts = dict.fromkeys(checks_by_chapter()[chapter], OPEN) | record.get(chapter, {})
        if run and count and any(piece.path for piece in pieces):
            for result in run_jobs(root, chapter, [Job(chapter, str(folder))]):
                verdicts |= {v.name: v.kind for v in result.verdicts}
        yield Progress(chapter, count, len(pieces), verdicts)


def status_lines(root: Path, folder: Path, *, run: bool = True) -> Iterator[str]:
    """The progress over all chapters as a table."""
    yield f"{'chapter':<20} {'written':>9}  {'right':>5} {'wrong':>5} {'not started':>11}"
    for p in progress(root, folder, run=run):
        written = f"{p.written}/{p.to_write}" if p.to_write else "–"
        kinds = f"{p.count(RIGHT):>5} {p.count(WRONG):>5} {p.count(OPEN):>11}"
        yield f"{p.chapter:<20} {written:>9}  {kinds}"
        for name in (n for n, kind in p.verdicts.items() if kind == WRONG):
            yield f"{'':<20} wrong: {name}"


if __name__ == "__main__":
    worker(Path(sys.argv[1]), sys.argv[2])
