"""A blank workbook in a real JupyterLab: untouched, then with the first pieces written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab import ERRORS, forget_outputs, jupyter_lab, opened, run_all, takes_minutes

from course.building import notebooks
from course.workbooks import stubs
from course.workbooks.generate import generate

ROOT = Path(__file__).resolve().parent.parent
CHAPTER = "01_core"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    takes_minutes()
    folder = tmp_path_factory.mktemp("books")
    generate(ROOT, folder)
    for path in (folder / "notebooks").glob("*.ipynb"):
        forget_outputs(path)
    return folder


@pytest.fixture(scope="module")
def lab(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    home = tmp_path_factory.mktemp("jupyter")
    with jupyter_lab(books / "notebooks", home, ROOT) as found:
        yield found


@pytest.fixture(scope="module")
def page(lab: tuple[str, str]) -> Iterator[Any]:
    with opened(lab, CHAPTER) as page:
        yield page


@pytest.mark.parametrize("chapter", [name for name in notebooks.chapters(ROOT) if name != CHAPTER])
def test_every_untouched_workbook_runs_through(chapter: str, lab: tuple[str, str]) -> None:
    """Before the shared page is opened: only one browser can be open at a time."""
    with opened(lab, chapter) as page:
        page.locator("blockquote", has_text="This is a workbook").first.wait_for()
        run_all(page)
        assert page.locator(".jp-OutputArea-output", has_text=stubs.MARK).count()


def code_cell(page: Any, text: str) -> Any:
    return page.locator(".jp-CodeCell", has_text=text).first


def test_an_untouched_workbook_runs_through_and_says_what_is_missing(page: Any) -> None:
    run_all(page)
    said = [text for text in page.locator(".jp-OutputArea-output").all_inner_texts() if text]
    missing = [text for text in said if stubs.MARK in text]
    assert len(missing) > 20
    assert not [text for text in said if "Traceback" in text or "ipykernel" in text]
    assert max(len(text.strip().splitlines()) for text in missing) < 8, max(missing, key=len)
    checks = code_cell(page, "course.run_checks(")
    *verdicts, last = checks.locator(".jp-OutputArea-output").inner_text().strip().splitlines()
    assert all(re.fullmatch(r"not started  check_\w+: .+ is not written yet", v) for v in verdicts)
    assert last == f"{len(verdicts)} not started"


def test_what_is_written_is_judged_at_once(page: Any, books: Path) -> None:
    """Two cells are written as a reader would, the checks are run again, and one is right."""
    chapter = nbformat.read(ROOT / "notebooks" / f"{CHAPTER}.ipynb", as_version=4)
    for first in ("def _check_int", "class SamplingParams"):
        solution = next(c.source for c in chapter.cells if first in c.source)
        write_and_run(page, code_cell(page, first), solution)
        assert first.split()[-1] in (books / "minisgl/core.py").read_text(encoding="utf-8")
    checks = code_cell(page, "course.run_checks(")
    checks.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    checks.locator(".jp-OutputArea-output", has_text="right        check_greedy").wait_for()
    assert page.locator(ERRORS).count() == 0


def write_and_run(page: Any, cell: Any, text: str) -> None:
    """Replace a cell's text by keyboard and run it, until it has reported what it built."""
    before = cell.locator(".jp-InputPrompt").inner_text()
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(text)
    page.keyboard.press("Control+Enter")
    page.wait_for_function(
        "([cell, before]) => /^\\[\\d+\\]:$/.test(cell.textContent) && cell.textContent != before",
        arg=[cell.locator(".jp-InputPrompt").element_handle(), before],
    )


def test_the_workbook_asks_no_other_host(page: Any) -> None:
    assert not page.course_watch.outside, page.course_watch.outside
