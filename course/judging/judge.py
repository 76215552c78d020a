"""Running a chapter's checks outside its notebook, on any version of the package.

`program` cuts out of a chapter what its checks need and nothing else: the functions, and the
statements that make what these use. A `Judge` is a process that runs that on a folder's `minisgl`,
each time in a child of its own, so that nothing of one job is left for the next.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import json
import linecache
import multiprocessing
import os
import shutil
import subprocess
import symtable
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from course.building import notebooks
from course.building.roots import reference_root
from course.building.source import PACKAGE, check_path, directive, module_name
from course.judging.verdict import WRONG, Verdict, in_package, verdict
from course.workbooks import guard, stubs

TIMEOUT = 120.0  # seconds for one job
Import = ast.Import | ast.ImportFrom
CAN_FORK = sys.platform == "linux"  # elsewhere each job gets a process that starts anew


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
        try:
            body = ast.parse(cell.source).body
        except SyntaxError:  # a reader's, half written
            continue
        for node in body:
            call = _checks_call(node)
            if call is not None:
                checks |= dict.fromkeys(call)
            else:
                lines = cell.source.split("\n")[stubs.first_line(node) - 1 : node.end_lineno]
                statements.append((node, "\n".join(lines)))
    kept = _needed(statements, set(checks), _setters([node for node, _ in statements]))
    return Program(chapter, "\n\n\n".join(kept) + "\n", tuple(checks), tuple(modules))


def _checks_call(node: ast.stmt) -> list[str] | None:
    """The arguments of `course.run_checks(...)`, for a statement that is such a call."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return None
    is_run = ast.unparse(node.value.func) == "course.run_checks"
    return [ast.unparse(argument) for argument in node.value.args] if is_run else None


def _called(node: ast.stmt) -> str:
    """The function that a statement calls and does nothing else, such as `table.free`; or ''."""
    call = node.value if isinstance(node, ast.Expr) else None
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""


def _is_setter(function: str) -> bool:
    """Whether a function changes the process, such as `set_tp_info` and `torch.manual_seed`."""
    name = function.split(".")[-1]
    return name.startswith(("set_", "reset_", "manual_seed")) and name != "set_printoptions"


def _setters(nodes: list[ast.stmt]) -> set[str]:
    """The functions of a chapter that do nothing but change the process."""
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and all(_is_setter(_called(inner)) for inner in stubs.work(node))
    }


def _needed(
    statements: list[tuple[ast.stmt, str]], wanted: set[str], setters: set[str]
) -> list[str]:
    """The statements that make what is wanted, and what those need, in order."""
    wanted, kept = set(wanted), []
    imported = {n for node, _ in statements if isinstance(node, Import) for n in binds(node)}
    for node, text in reversed(statements):
        if _is_kept(node, wanted, wanted - imported, setters):
            if isinstance(node, ast.For):  # what it makes, and not what it proves or prints
                inner = [(n, ast.unparse(n)) for n in node.body]
                made = "\n".join(_needed(inner, wanted, setters))
                head = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
                text = f"{head}\n{textwrap.indent(made, '    ')}"
            kept.append(text)
            reads = _reads(text)
            if not isinstance(node, ast.AugAssign | ast.If):
                wanted -= binds(node)  # what bound the name before is of no use
            wanted |= reads
    return kept[::-1]


def _is_kept(node: ast.stmt, wanted: set[str], changeable: set[str], setters: set[str]) -> bool:
    if isinstance(node, ast.Expr):
        # A call that changes something: the process, or an object that is wanted.
        function = _called(node)
        root, _, method = function.partition(".")
        return function in setters or _is_setter(function) or bool(method and root in changeable)
    if isinstance(node, ast.If):
        return any(_is_kept(inner, wanted, changeable, setters) for inner in node.body)
    if isinstance(node, ast.For):
        target = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        return bool((binds(node) - target) & wanted)
    if isinstance(node, ast.Assert | ast.With | ast.While | ast.Delete):
        return False
    if isinstance(node, ast.Assign) and not any(isinstance(t, ast.Name) for t in node.targets):
        roots = {ast.unparse(t).split(".")[0].split("[")[0] for t in node.targets}
        if roots & wanted:
            return True
    return bool(binds(node) & wanted)


def binds(node: ast.stmt) -> set[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, stubs.Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, Import):
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
        if isinstance(inner, ast.Name) and stubs.stores(inner) and id(inner) not in inside
    }


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


# --- One job after the other ----------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Checks of one chapter on one version of the package."""

    folder: str  # holds the package
    checks: tuple[str, ...] = ()  # () for all
    changes: dict[str, str] = field(default_factory=dict)  # path → text: these differ from folder
    text: str = ""  # instead of the chapter's own program
    trace: bool = False  # also say which definitions each check uses


@dataclass
class Result:
    """What came of a job: a verdict per check, and (if asked) what each check calls."""

    verdicts: list[Verdict] = field(default_factory=list)
    used: dict[str, list[str]] = field(default_factory=dict)  # check → `path:Qualified.name`
    seconds: float = 0.0


class Judge:
    """A process that has the libraries loaded and runs jobs on one chapter; used in a `with`."""

    def __init__(self, root: Path, chapter: str) -> None:
        self.root, self.chapter = root, chapter
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, job: Job) -> Result:
        """Run one job; RuntimeError if the process itself fails, which no solution can cause."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asdict(job)) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that judges {self.chapter} ended early")
        if not CAN_FORK:
            self._end()
        raw = json.loads(line)
        verdicts = [Verdict(v["name"], v["kind"], tuple(v["lines"])) for v in raw["verdicts"]]
        return Result(verdicts, raw["used"], raw["seconds"])

    def _start(self) -> subprocess.Popen[str]:
        home = str(reference_root())
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.pop("PYTHONOPTIMIZE", None)  # checks are made of asserts
        return subprocess.Popen(
            [sys.executable, "-m", "course.judging.judge", str(self.root), self.chapter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            encoding="utf-8",
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def serve(root: Path, chapter: str) -> None:
    """What the process does: jobs come in on stdin, a line each, results go out on stdout."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a check prints is no result
    made = program(root, chapter)
    _warm_up(made)
    for line in sys.stdin:
        raw = json.loads(line)
        started = time.monotonic()
        result = _in_child(made, Job(**{**raw, "checks": tuple(raw["checks"])}))
        result.seconds = round(time.monotonic() - started, 2)
        out.write(json.dumps(asdict(result)) + "\n")
        out.flush()


def _warm_up(made: Program) -> None:
    """Import and make what the children will need, but nothing of `minisgl`."""
    from course.checkpoints import TINY_NAMES, quiet, tiny

    quiet()
    for node in ast.walk(ast.parse(made.text)):
        if isinstance(node, Import):
            single = ast.unparse(node)
            if PACKAGE not in single and "__future__" not in single:
                with contextlib.suppress(ImportError):
                    exec(single, {})
    if "course.tiny(" in made.text:
        for name in TINY_NAMES:
            tiny(name)


def _in_child(made: Program, job: Job) -> Result:
    """Run a job in a forked child, and give up after its time."""
    if not CAN_FORK:
        return _run_job(made, job)
    forking = multiprocessing.get_context("fork")
    reading, writing = forking.Pipe(duplex=False)
    child = forking.Process(target=lambda: writing.send(_run_job(made, job)))
    child.start()
    writing.close()
    said = f"it did not end within {TIMEOUT:.0f} seconds"
    try:
        if reading.poll(TIMEOUT):
            result: Result = reading.recv()
            return result
    except EOFError:
        said = "the process died"
    finally:
        child.kill()
        child.join()
        reading.close()
    return Result([Verdict(name, WRONG, (said,)) for name in job.checks or made.checks])


def _run_job(made: Program, job: Job) -> Result:
    """Make the package findable, run the chapter's statements, then each check."""
    from course.building.roots import RootFinder

    result = Result()
    names = job.checks or made.checks
    with tempfile.TemporaryDirectory(prefix="course-job-") as temporary:
        folder = Path(job.folder)
        if job.changes:
            folder = Path(temporary)
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(Path(job.folder) / PACKAGE, folder / PACKAGE, ignore=ignored)
            for path, text in job.changes.items():
                (folder / path).write_text(text, encoding="utf-8")
        os.chdir(temporary)
        sys.dont_write_bytecode = True
        sys.meta_path.insert(0, RootFinder(folder))
        namespace: dict[str, Any] = {"__name__": "__main__"}
        try:
            _set_up(made, job.text or made.text, namespace)
        except BaseException as error:
            result.verdicts = [Verdict(name, WRONG, _not_set_up(error)) for name in names]
            names = ()
        for name in names:
            if name in namespace:
                with _calls(folder, job.trace) as used:
                    result.verdicts.append(verdict(namespace[name]))
                result.used[name] = used
            else:
                lost = f"{made.chapter} has no such check, or an import before it failed"
                result.verdicts.append(Verdict(name, WRONG, (lost,)))
        os.chdir("/")
    return result


def _set_up(made: Program, text: str, namespace: dict[str, Any]) -> None:
    """Give the checks what the chapter's notebook gives them, as far as it is written."""
    guard.unwritten = unwritten = guard.Unwritten()
    for name in made.modules:  # the notebook has their names because it built them
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if unwritten.cause(error) is None:
                raise
        else:
            namespace.update({k: v for k, v in vars(module).items() if not k.startswith("__")})
    filename = f"<checks of {made.chapter}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    for node in ast.parse(text).body:
        code = compile(ast.Module([node], []), filename, "exec", dont_inherit=True)
        try:
            exec(code, namespace)
        except Exception as error:
            cause = unwritten.cause(error)
            if cause is None:
                raise
            unwritten.forget(namespace, sorted(binds(node)), cause)


def _not_set_up(error: BaseException) -> tuple[str, ...]:
    """What to say of checks whose helpers could not even be made."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if in_package(f)]
    at = f" (in {frames[-1].name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return (f"before any check could run, it raised {type(error).__name__}: {error}{at}",)


@contextlib.contextmanager
def _calls(folder: Path, is_on: bool) -> Iterator[list[str]]:
    """Collects `path:Qualified.name` of the package's functions that are called inside."""
    used: dict[str, None] = {}
    found: list[str] = []
    inside = str(folder / PACKAGE) + os.sep

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(inside):
            path = Path(frame.f_code.co_filename).relative_to(folder).as_posix()
            used[f"{path}:{frame.f_code.co_qualname.split('.<locals>')[0]}"] = None

    if is_on:
        threading.settrace(watch)
        sys.settrace(watch)
    try:
        yield found
    finally:
        if is_on:
            sys.settrace(None)
            threading.settrace(None)
        found += used


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
