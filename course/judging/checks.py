"""What the notebooks call: run the chapter's checks, judge a reader's attempt.

In the book a failing check raises. In a workbook it is judged instead, as exercises always are: not
started, wrong (what came, what was expected, on which input), or right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from course.building.package import build
from course.building.roots import find_root, is_workbook, reference_root
from course.judging.judge import Job, Judge
from course.judging.progress import written_in
from course.judging.record import record
from course.judging.verdict import OPEN, RIGHT, WRONG, Verdict, summary, verdict
from course.workbooks.pieces import Written, find_written


def run_checks(*checks: Callable[[], object]) -> None:
    """Run each check and print its name with the first line of its docstring.

    A check is a function without arguments that asserts; the first failure is raised. In a
    workbook all are run and judged, and none raises.
    """
    folder = _workbooks()
    if folder is not None:
        verdicts = [verdict(check) for check in checks]
        for found in verdicts:
            print(found)
        counts = {kind: sum(v.kind == kind for v in verdicts) for kind in (RIGHT, WRONG, OPEN)}
        print(", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
        record(folder, verdicts)
        return
    for check in checks:
        check()
        print(f"ok  {check.__name__}: {summary(check)}")


def judge(attempt: Any, check: Callable[[Any], object], *, must_pass: bool = False) -> None:
    """Say how far an attempt at an exercise is: not started, not yet (and why), or right.

    `check(attempt)` asserts what a right answer does, with messages for the reader; an attempt
    that still raises NotImplementedError counts as not started. Never raises, so that an open
    exercise does not stop the notebook, unless `must_pass` (for the answers that come with the
    book).
    """
    name = getattr(attempt, "__name__", type(attempt).__name__)
    folder = _workbooks()
    found = verdict(check, attempt)
    if found.kind == RIGHT:
        print(f"{name} · right: {summary(check)}")
    else:
        said = "not started" if found.kind == OPEN else "not yet"
        print(f"{name} · {said}: " + "\n    ".join(found.lines))
    if folder is not None:
        if not must_pass:
            record(folder, [Verdict(check.__name__, found.kind, found.lines)])
    elif must_pass and found.kind != RIGHT:
        raise AssertionError(f"{name} should be right; the line above says what it is not")


def check(name: str) -> None:
    """Run the chapter's checks that use one definition, and say how far each is.

    `name` is a definition or a method, `Req` or `Req.complete_one`. The checks are those of the
    book, in a process of their own, on what is in your `minisgl` now.
    """
    for line in check_lines(name):
        print(line)


def _workbooks() -> Path | None:
    """The folder of workbooks that this process runs in, if it does."""
    root = find_root()
    return root if is_workbook(root) else None


def check_lines(name: str) -> Iterator[str]:
    """The verdicts of the checks that use a definition, on the package of the current folder."""
    root, folder = reference_root(), find_root()
    found = find_written(root, name)
    for chapter in dict.fromkeys(piece.chapter for piece in found):  # several may build a class
        pieces = [piece for piece in found if piece.chapter == chapter]
        yield f"{chapter}, “{pieces[0].heading}”"
        if not pieces[0].path:
            yield (
                f"{name} lives in the notebook and in no file: run the cell with the chapter's "
                "checks"
            )
            return
        done = written_in(folder)
        missing = [piece.name for piece in pieces if not done.get((piece.path, piece.name), False)]
        for piece in missing:
            yield f"{OPEN:<12} {piece}"
        if len(missing) < len(pieces):
            yield from _verdicts_of(root, folder, chapter, name, pieces)


def _verdicts_of(
    root: Path, folder: Path, chapter: str, name: str, pieces: list[Written]
) -> Iterator[str]:
    """What the checks of a chapter that use some definitions say."""
    keys = {f"{piece.path}:{piece.name}" for piece in pieces}
    with Judge(root, chapter) as judge:
        checks = tuple(c for c, names in uses(judge).items() if keys & set(names))
        if checks:
            yield from map(str, judge.run(Job(str(folder), checks)).verdicts)
        else:
            yield f"no check of {chapter} uses {name}; the cells below it show what it should do"


def uses(judge: Judge) -> dict[str, list[str]]:
    """Which definitions each check of a chapter calls, found by running it on the book's code."""
    with tempfile.TemporaryDirectory(prefix="course-uses-") as name:
        build(judge.root, Path(name))
        return judge.run(Job(name, trace=True)).used
