"""How good the checks are: wrong solutions that must be caught, right ones that must pass.

`tests/mutations/NN_name.py` lists them for a chapter as `Change`s of the book's source. Each is
applied to one definition, and the chapter's checks are run on the package that results.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course.building import notebooks
from course.building.notebooks import CourseError
from course.building.package import package_texts
from course.building.syntax import parts, work
from course.judging.judge import Job, Judge
from course.judging.program import program
from course.judging.verdict import RIGHT, Verdict


@dataclass(frozen=True)
class Change:
    """One other solution of a chapter: a definition in which `old` has become `new`.

    `caught_by` names the check that must fail, and `says` a part of what it then says; without
    `caught_by` the solution is right, and every check must pass. `old` must occur exactly once in
    the definition; None stands for all of its body.
    """

    what: str  # the mistake, or the other way to do it, in a few words
    path: str  # such as minisgl/core.py; "" for a function of the notebook itself
    name: str  # dotted: Req.complete_one; "" for a change anywhere in the file
    old: str | None
    new: str
    caught_by: str = ""
    says: str = ""

    @property
    def is_right(self) -> bool:
        """Whether all checks must pass."""
        return not self.caught_by


@dataclass(frozen=True)
class Outcome:
    """What the checks said to a change."""

    change: Change
    verdicts: list[Verdict]

    @property
    def fault(self) -> str:
        """'' if it is as it should be; else what is wrong with the checks."""
        failed = [v for v in self.verdicts if v.kind != RIGHT]
        if self.change.is_right:
            return "; ".join(f"{v.name} fails: {' '.join(v.lines)}" for v in failed)
        own = next((v for v in failed if v.name == self.change.caught_by), None)
        if own is None:
            others = ", ".join(v.name for v in failed)
            return f"not caught by {self.change.caught_by}" + (
                f" but by {others}" if others else ""
            )
        if self.change.says not in "\n".join(own.lines):
            return f"caught, but {self.change.says!r} is not in: {' | '.join(own.lines)}"
        return ""


def changes(root: Path, chapter: str) -> list[Change]:
    """The table of a chapter; [] if it has none."""
    path = root / "tests" / "mutations" / f"{chapter}.py"
    if not path.exists():
        return []
    return list(runpy.run_path(str(path))["CHANGES"])


def apply(text: str, change: Change) -> str:
    """The file's text with the change in it; CourseError if it does not fit any more."""
    lines = text.split("\n")
    first, last = 1, len(lines)
    if change.name:
        part = next((p for p in parts(text) if p.name == change.name), None)
        if part is None:
            raise CourseError(f"{change.path} has no {change.name} ({change.what})")
        first, last = part.first, part.last
        if change.old is None:
            first = work(part.node)[0].lineno
    own = "\n".join(lines[first - 1 : last])
    if change.old is None:
        own = change.new
    elif own.count(change.old) != 1:
        raise CourseError(
            f"{change.path}, {change.name}: {change.old!r} is there {own.count(change.old)} times, "
            f"not once ({change.what})"
        )
    else:
        own = own.replace(change.old, change.new)
    changed = "\n".join([*lines[: first - 1], own, *lines[last:]])
    compile(changed, change.path, "exec")
    return changed


def outcomes(root: Path, chapter: str, chosen: list[Change] | None = None) -> Iterator[Outcome]:
    """Run the chapter's checks on each change of its table."""
    table = changes(root, chapter) if chosen is None else chosen
    texts = package_texts(notebooks.build_cells(root))
    texts[""] = program(root, chapter).text
    with Judge(root, chapter) as judge:
        for change in table:
            changed = apply(texts[change.path], change)
            checks = (change.caught_by,) if change.caught_by else ()
            if change.path:
                job = Job(str(root), checks, {change.path: changed})
            else:
                job = Job(str(root), checks, text=changed)
            yield Outcome(change, judge.run(job).verdicts)


def table(root: Path, names: list[str]) -> Iterator[tuple[str, bool]]:
    """The lines of the table, each with whether it shows a fault of the checks."""
    caught = right = faults = 0
    for chapter in names or notebooks.chapters(root):
        for number, outcome in enumerate(outcomes(root, chapter)):
            if not number:
                yield f"\n{chapter}", False
            change, fault = outcome.change, outcome.fault
            faults += bool(fault)
            right += change.is_right and not fault
            caught += not change.is_right and not fault
            said = "passes" if change.is_right else f"caught by {change.caught_by}"
            yield f"  {change.what:<68} {'FAULT: ' + fault if fault else said}", bool(fault)
    yield f"\n{caught} wrong solutions caught, {right} right ones pass, {faults} faults", False
