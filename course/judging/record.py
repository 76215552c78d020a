"""The last verdict of each check, kept in a folder of workbooks."""

from __future__ import annotations

import json
from pathlib import Path

from course.building.source import write_whole
from course.judging.program import chapter_of_checks
from course.judging.verdict import WRONG, Verdict

RECORD = ".progress.json"  # in a folder of workbooks: the last verdict of each check


def read_record(folder: Path) -> dict[str, dict[str, str]]:
    """Chapter → check → its last verdict, `wrong: ` with the reason."""
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def in_record(found: Verdict) -> str:
    """A verdict as the record has it: its kind, and of a wrong one the reason."""
    return f"{WRONG}: {' | '.join(found.lines)}" if found.kind == WRONG else found.kind


def record(folder: Path, verdicts: list[Verdict], chapter: str | None = None) -> None:
    """Keep the verdicts for the progress view, under the chapter that has these checks."""
    chapter = chapter or chapter_of_checks([v.name for v in verdicts])
    if chapter is None:
        return
    known = read_record(folder)
    known.setdefault(chapter, {}).update({v.name: in_record(v) for v in verdicts})
    text = json.dumps(known, indent=1, sort_keys=True) + "\n"
    write_whole(folder / RECORD, text)
