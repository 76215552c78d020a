"""How far a reader is, with a chapter and with all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.building import notebooks
from course.building.notebooks import read_or_none
from course.building.roots import find_root, reference_root
from course.building.source import PACKAGE, directive
from course.judging.judge import Job, Judge
from course.judging.program import checks_by_chapter, program
from course.judging.record import in_record, read_record, record
from course.judging.verdict import OPEN, RIGHT, WRONG, Verdict
from course.workbooks import stubs
from course.workbooks.pieces import BY_HAND, to_write


def hand_written(folder: Path, chapter: str) -> set[str]:
    """The functions of an ordinary cell (`BY_HAND`) that a workbook has more than a stub of."""
    notebook = read_or_none(folder / "notebooks" / f"{chapter}.ipynb")
    cells = [c.source for c in notebook.cells if c.cell_type == "code"] if notebook else []
    found = {}
    for text in cells:
        if text.lstrip().startswith(("%", "!")) or directive(text) is not None:
            continue
        found.update(stubs.written(text))
    return {n for n in BY_HAND.get(chapter, set()) if found.get(n, False)}


def written_in(folder: Path) -> dict[tuple[str, str], bool]:
    """For each function of a folder's package whether it is more than a stub."""
    return {
        (path.relative_to(folder).as_posix(), name): is_written
        for path in sorted((folder / PACKAGE).rglob("*.py"))
        for name, is_written in stubs.written(path.read_text(encoding="utf-8")).items()
    }


RAN = """\
The checks ran now, on your minisgl and on the notebooks as they are saved. An exercise is judged by
its own cell: what counts here is the verdict of the last time that you ran it."""


@dataclass(frozen=True)
class Progress:
    """How far a chapter of a folder of workbooks is."""

    chapter: str
    written: int  # functions that are no stubs any more
    to_write: int
    verdicts: dict[str, str]  # check → its last verdict
    said: dict[str, str]  # check → why it is wrong

    def count(self, kind: str) -> int:
        """How many checks have this verdict."""
        return sum(found == kind for found in self.verdicts.values())


def chapters_so_far(
    root: Path, folder: Path, *, run: bool = False, chapters: Sequence[str] = ()
) -> Iterator[Progress]:
    """The progress of the chapters, with the last verdicts, or with new ones (`run`).

    What lives in a notebook is judged as it is saved there. Of exercises there are only the last
    verdicts: their cells give them.
    """
    done, known = written_in(folder), read_record(folder)
    for chapter in chapters or notebooks.chapters(root):
        pieces = to_write(root, [chapter])
        in_notebook = hand_written(folder, chapter)
        count = sum(
            done.get((p.path, p.name), False) if p.path else p.name in in_notebook for p in pieces
        )
        last = dict.fromkeys(checks_by_chapter()[chapter], OPEN) | known.get(chapter, {})
        if run and pieces:
            found = _judged(root, folder, chapter, count, in_notebook=bool(in_notebook))
            record(folder, found, chapter)
            last |= {v.name: in_record(v) for v in found}
        parts = {name: text.partition(": ") for name, text in last.items()}
        verdicts = {name: kind for name, (kind, _, _) in parts.items()}
        said = {name: why for name, (_, _, why) in parts.items() if why}
        yield Progress(chapter, count, len(pieces), verdicts, said)


def _judged(
    root: Path, folder: Path, chapter: str, written: int, *, in_notebook: bool
) -> list[Verdict]:
    """New verdicts of a chapter's checks, on what the reader's package and notebook hold."""
    checks = program(root, chapter).checks
    if not written:  # nothing to run, and no verdict of another day counts
        return [Verdict(name, OPEN, ("nothing of the chapter is written",)) for name in checks]
    with Judge(folder if in_notebook else root, chapter) as judge:
        return judge.run(Job(str(folder), checks)).verdicts


def status_lines(
    root: Path, folder: Path, *, run: bool = True, chapters: Sequence[str] = ()
) -> Iterator[str]:
    """The progress over the chapters as a table; below a chapter, what is wrong or still open."""
    yield f"{'chapter':<20} {'written':>9}  {'right':>5} {'wrong':>5} {'not started':>11}"
    for p in chapters_so_far(root, folder, run=run, chapters=chapters):
        written = f"{p.written}/{p.to_write}" if p.to_write else "–"
        kinds = f"{p.count(RIGHT):>5} {p.count(WRONG):>5} {p.count(OPEN):>11}"
        yield f"{p.chapter:<20} {written:>9}  {kinds}"
        for name in (n for n, kind in p.verdicts.items() if kind == WRONG):
            yield f"{'':<20} wrong: {name}{': ' * (name in p.said)}{p.said.get(name, '')}"
        still_open = [n for n, kind in p.verdicts.items() if kind == OPEN]
        if still_open and len(still_open) < len(p.verdicts):  # a chapter that is begun
            yield f"{'':<20} {OPEN}: {', '.join(still_open)}"
    yield RAN if run else "Nothing was run: these are the verdicts of the last time."


def progress() -> Any:
    """A picture of how far each chapter is: what is written, and the last verdict of each check."""
    from course.pictures import canvas as draw

    folder = find_root()
    found = list(chapters_so_far(reference_root(), folder))
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
