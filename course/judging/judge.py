"""Running a chapter's checks outside its notebook, on any version of the package.

A `Judge` is a process that runs a chapter's `program` on a folder's `minisgl`, each time in a
child of its own, so that nothing of one job is left for the next.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import linecache
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from course.building.roots import RootFinder, reference_root
from course.building.source import PACKAGE
from course.building.syntax import binds
from course.judging.program import Import, Program, program
from course.judging.verdict import WRONG, Verdict, in_package, verdict
from course.workbooks.unwritten import begin

TIMEOUT = 120.0  # seconds for one job
CAN_FORK = sys.platform == "linux"  # elsewhere each job gets a process that starts anew


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


def judging_environment() -> dict[str, str]:
    """The environment of a process that judges: one thread, asserts, and where the course is."""
    path = [str(reference_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONIOENCODING": "utf-8"}
    found.setdefault("OMP_NUM_THREADS", "1")
    found.pop("PYTHONOPTIMIZE", None)  # checks are made of asserts
    return found


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
        return subprocess.Popen(
            [sys.executable, "-m", "course.judging.judge", str(self.root), self.chapter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=judging_environment(),
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
    warm_up(made)
    for line in sys.stdin:
        raw = json.loads(line)
        started = time.monotonic()
        result = _in_child(made, Job(**{**raw, "checks": tuple(raw["checks"])}))
        result.seconds = round(time.monotonic() - started, 2)
        out.write(json.dumps(asdict(result)) + "\n")
        out.flush()


def warm_up(made: Program) -> None:
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
    result: Result | None
    result, said = forked(lambda: _run_job(made, job), TIMEOUT)
    if result is None:
        result = Result([Verdict(name, WRONG, (said,)) for name in job.checks or made.checks])
    return result


def forked(work: Callable[[], Any], limit: float) -> tuple[Any, str]:
    """What `work` returns in a fork of this process; None, and why, if that dies or is too slow."""
    forking = multiprocessing.get_context("fork")
    reading, writing = forking.Pipe(duplex=False)
    child = forking.Process(target=lambda: writing.send(work()))
    child.start()
    writing.close()
    try:
        if reading.poll(limit):
            return reading.recv(), ""
        return None, f"it did not end within {limit:.0f} seconds"
    except EOFError:
        return None, "the process died"
    finally:
        child.kill()
        child.join()
        reading.close()


def _run_job(made: Program, job: Job) -> Result:
    """Make the package findable, run the chapter's statements, then each check."""
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
            set_up(made, job.text or made.text, namespace)
        except BaseException as error:
            result.verdicts = [Verdict(name, WRONG, _not_set_up(error)) for name in names]
            names = ()
        for name in names:
            if name in namespace:
                with calls(folder, job.trace) as used:
                    result.verdicts.append(verdict(namespace[name]))
                result.used[name] = used
            else:
                lost = f"{made.chapter} has no such check, or an import before it failed"
                result.verdicts.append(Verdict(name, WRONG, (lost,)))
        os.chdir("/")
    return result


def set_up(made: Program, text: str, namespace: dict[str, Any]) -> None:
    """Give the checks what the chapter's notebook gives them, as far as it is written."""
    unwritten = begin()
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
def calls(folder: Path, is_on: bool) -> Iterator[list[str]]:
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
