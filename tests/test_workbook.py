"""Workbooks: stubs that match the reference, a kernel without it, and checks that judge well."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from course.__main__ import main
from course.building import notebooks
from course.building.merging import emit, merge
from course.building.package import package_texts
from course.building.parsing import parse
from course.building.roots import find_root
from course.building.syntax import Function, parts, work
from course.judging import mutations, progress
from course.judging.checks import check, run_checks
from course.judging.program import checks_by_chapter, program
from course.judging.record import RECORD, read_record, record
from course.judging.verdict import OPEN, RIGHT, WRONG, Verdict, verdict
from course.workbooks import guard, reference, stubs
from course.workbooks.generate import generate, workbook
from course.workbooks.hints import HINTS
from course.workbooks.pieces import BY_HAND, GIVEN

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = notebooks.chapters(ROOT)
CELLS = notebooks.build_cells(ROOT)
TABLES = sorted(path.stem for path in (ROOT / "tests" / "mutations").glob("*.py"))


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """A folder of blank workbooks, generated once; read only."""
    folder = tmp_path_factory.mktemp("blank")
    generate(ROOT, folder)
    return folder


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """An empty folder of workbooks that is the current one."""
    folder = tmp_path / "mine"
    for name in ("notebooks", "minisgl"):
        (folder / name).mkdir(parents=True)
    (folder / ".minisgl-root").write_text("", encoding="utf-8")
    monkeypatch.chdir(folder / "notebooks")
    return folder


def cells_of(folder, chapter):
    return nbformat.read(folder / "notebooks" / f"{chapter}.ipynb", as_version=4).cells


def texts_of(folder, chapter):
    return "\n".join(cell.source for cell in cells_of(folder, chapter))


# --- Stubs ----------------------------------------------------------------------------------------


def without_bodies(text):
    """A text's syntax tree without what a stub may leave out: bodies after the docstring."""
    tree = ast.parse(text)
    for part in parts(text):
        for node in ast.walk(tree):
            if isinstance(node, Function) and node.lineno == part.node.lineno:
                node.body = node.body[: len(node.body) - len(work(node))]
    return ast.dump(tree)


@pytest.mark.parametrize("chapter", [c for c in CHAPTERS if any(b.chapter == c for b in CELLS)])
def test_stubs_have_the_signatures_and_docstrings_of_the_reference(chapter):
    for cell in (c for c in CELLS if c.chapter == chapter):
        text, names = stubs.stub(cell.text)
        assert without_bodies(text) == without_bodies(cell.text), cell.where
        left = {part.name: part.node for part in parts(text)}
        assert names == [name for name, node in left.items() if stubs.is_stub(node)], cell.where
        assert all(len(line) <= 100 for line in text.splitlines()), cell.where
        given = [p for p in parts(cell.text) if p.name not in names]
        assert all(not stubs.is_open(part.node) for part in given), cell.where


def test_the_workbooks_hold_exactly_these_stubs(books):
    for chapter in CHAPTERS:
        built = [c.source for c in cells_of(books, chapter) if c.source.startswith("#| build")]
        cells = [c for c in CELLS if c.chapter == chapter]
        assert [without_bodies(t) for t in built] == [without_bodies(c.text) for c in cells]
        for text, cell in zip(built, cells, strict=True):
            left = {part.name: part.node for part in parts(text)}
            for part in parts(cell.text):
                is_given = (cell.path, part.name) in GIVEN
                is_left = stubs.is_open(part.node) and not is_given
                assert stubs.is_stub(left[part.name]) == is_left, f"{cell.where}: {part.name}"


@pytest.mark.parametrize("table", [GIVEN, HINTS])
def test_what_is_given_or_hinted_at_exists(table):
    known = {(cell.path, part.name) for cell in CELLS for part in parts(cell.text)}
    known |= {("", name) for names in BY_HAND.values() for name in names}
    assert not set(table) - known


def test_a_stub_keeps_all_but_the_body():
    text = '''@dataclass
class A:
    x: int = 1  # how many

    def one(self) -> int:
        # why
        return math.inf

    @property
    def two(
        self,
    ) -> int:  # a comment: with a colon
        """Two."""

        return self.x

    @abstractmethod
    def three(self): ...

    def __repr__(self):
        return "A"


def four(): return helper(4)


LIMIT = 3
'''
    stub, names = stubs.stub(text)
    assert names == ["A.one", "A.two", "four"]
    assert (
        stub
        == '''@dataclass
class A:
    x: int = 1  # how many

    def one(self) -> int:
        # Hint: 1 line; uses math.inf
        raise NotImplementedError("not written yet: A.one")

    @property
    def two(
        self,
    ) -> int:  # a comment: with a colon
        """Two."""
        # Hint: 1 line
        raise NotImplementedError("not written yet: A.two")

    @abstractmethod
    def three(self): ...

    def __repr__(self):
        return "A"


def four():
    # Hint: 1 line; uses helper
    raise NotImplementedError("not written yet: four")


LIMIT = 3
'''
    )
    assert stubs.stub(stub) == (stub, ["A.one", "A.two", "four"]) or not stubs.stub(stub)[1]


# --- Generating -----------------------------------------------------------------------------------


def test_a_workbook_keeps_the_prose_and_leaves_out_the_answers(books, tmp_path):
    generate(ROOT, tmp_path / "all", answers=True)
    for chapter in CHAPTERS:
        source = notebooks.read(ROOT, chapter).cells
        blank, full = texts_of(books, chapter), texts_of(tmp_path / "all", chapter)
        assert "must_pass=True" not in blank
        assert ("must_pass=True" in full) == any("must_pass=True" in c.source for c in source)
        exercises_at = next(
            (i for i, c in enumerate(source) if c.source.startswith("## Exercise")), len(source)
        )
        for cell in source[:exercises_at]:
            if cell.cell_type == "markdown":
                assert cell.source in full or "](../" in cell.source, f"{chapter}: {cell.source}"
        assert blank.count("<details>") < full.count("<details>")
        assert "What the book printed" in blank


def test_the_calls_in_every_guide_work(books):
    for chapter in CHAPTERS:
        (guide,) = (c.source for c in cells_of(books, chapter) if c.id == "workbook-guide")
        (named,) = re.findall(r'course\.catch_up\("(.+?)"\)', guide)
        assert reference.chapter_named(ROOT, named) == chapter
        (shown,) = re.findall(r'course\.reveal\("(.+?)"\)', guide)
        assert repr(reference.reveal(shown)), f"{chapter}: {shown}"
        assert "--answers" in guide


def test_links_of_workbooks_lead_somewhere(books):
    for chapter in CHAPTERS:
        for cell in cells_of(books, chapter):
            if cell.cell_type == "markdown":
                for link in re.findall(r"\]\(([^)#\s]+)", cell.source):
                    in_book = (ROOT / "notebooks" / link).exists()
                    if "://" not in link and in_book:
                        assert (books / "notebooks" / link).exists(), f"{chapter}: {link}"


def test_an_edited_workbook_is_never_overwritten(tmp_path, capsys):
    assert main(["workbook", str(tmp_path / "w")]) == 0
    assert capsys.readouterr().out.count("written ") == len(CHAPTERS)
    edited = tmp_path / "w" / "notebooks" / f"{CHAPTERS[1]}.ipynb"
    book = nbformat.read(edited, as_version=4)
    book.cells[-1].source += "\nmine"
    nbformat.write(book, edited)
    before = edited.read_bytes()
    gone = tmp_path / "w" / "notebooks" / f"{CHAPTERS[2]}.ipynb"
    gone.unlink()
    assert main(["workbook", str(tmp_path / "w"), "--answers"]) == 0
    out = capsys.readouterr().out
    assert f"kept       {CHAPTERS[1]}: you have edited it" in out
    assert edited.read_bytes() == before and gone.exists()
    edited.write_text("half saved", encoding="utf-8")
    main(["workbook", str(tmp_path / "w")])
    assert edited.read_text(encoding="utf-8") == "half saved"


@pytest.mark.parametrize("where", [".", "notebooks", "course"])
def test_the_course_itself_and_other_folders_are_refused(where, capsys):
    assert main(["workbook", str(ROOT / where)]) == 1
    error = capsys.readouterr().err
    assert "another folder" in error or "new folder" in error


# --- The reader's package -------------------------------------------------------------------------


def test_a_folder_of_workbooks_is_a_root_whatever_the_environment_says(mine, monkeypatch):
    monkeypatch.setenv("MINISGL_ROOT", str(ROOT))
    assert find_root() == mine


def test_a_stub_never_replaces_what_is_written(mine):
    cell = next(c for c in CELLS if c.path == "minisgl/core.py" and "def extend_len" in c.text)
    stub, _ = stubs.stub(cell.text)
    (mine / "minisgl/core.py").write_text(stub.split("\n", 1)[1], encoding="utf-8")
    assert guard.prepare(mine, stub) == (stub, "")
    own = stub.replace('raise NotImplementedError("not written yet: Req.extend_len")', "return 1")
    (mine / "minisgl/core.py").write_text(own.split("\n", 1)[1], encoding="utf-8")
    merged, note = guard.prepare(mine, stub)
    assert "Req.extend_len" in note and merged == own
    assert guard.prepare(mine, own) == (own, "")
    assert guard.prepare(ROOT, stub) == (stub, ""), "the book's own package is built as ever"


def test_catch_up_writes_the_chapters_before_and_keeps_what_is_written(mine, capsys):
    assert reference.catch_up(2) is None, "the last line of a cell shows its value"
    built = package_texts(notebooks.build_cells(ROOT, CHAPTERS[:2]))
    for path, text in built.items():
        assert (mine / path).read_text(encoding="utf-8") == text
    assert " definitions from 2 chapters" in capsys.readouterr().out
    reference.catch_up("02")
    assert "0 definitions from 2 chapters, 0 files written" in capsys.readouterr().out
    core = mine / "minisgl/core.py"
    stub, _ = stubs.stub(built["minisgl/core.py"])
    stub = stub.replace('raise NotImplementedError("not written yet: Req.extend_len")', "return 7")
    core.write_text(stub, encoding="utf-8")
    reference.catch_up(2)
    text = core.read_text(encoding="utf-8")
    assert "return 7" in text and "def remain_len" in text and stubs.MARK not in text
    assert text.replace("return 7", "") != built["minisgl/core.py"]
    reference.catch_up(2, overwrite=True)
    assert core.read_text(encoding="utf-8") == built["minisgl/core.py"]
    with pytest.raises(notebooks.CourseError, match="no chapter 99"):
        reference.catch_up(99)


def test_reveal_shows_the_reference_and_is_never_vague(mine):
    shown = repr(reference.reveal("Req.complete_one"))
    assert "# minisgl/core.py" in shown and "self.device_len += 1" in shown
    assert repr(reference.reveal("minisgl.core.Batch")).count("def ") > 4
    with pytest.raises(notebooks.CourseError, match=r"did you mean core\.Req\.complete_one"):
        reference.reveal("complete_one")
    with pytest.raises(notebooks.CourseError, match="several files"):
        reference.reveal("logger")


def test_reveal_inserts_a_cell_that_changes_one_method_only(mine):
    text = package_texts(CELLS)["minisgl/core.py"]
    stub, _ = stubs.stub(text)
    own = stub.replace('raise NotImplementedError("not written yet: Req.extend_len")', "return 7")
    cell = reference._build_cell_for(ROOT, "Req.complete_one")
    assert cell.startswith("#| build minisgl/core.py\n") and "class Req(Req):\n" in cell
    assert "self.device_len += 1" in cell and "extend_len" not in cell
    merged = emit(merge(parse(own), parse(cell)))
    assert "return 7" in merged and "self.device_len += 1" in merged
    assert "not written yet: Req.remain_len" in merged


def run_book(folder, chapter, before=(), after=()):
    """Execute a workbook as Run All does, with cells of ours in front and behind; its outputs."""
    from nbclient import NotebookClient

    book = nbformat.read(folder / "notebooks" / f"{chapter}.ipynb", as_version=4)
    cells = [nbformat.v4.new_code_cell(text) for text in (*before, "%load_ext course")]
    ends = [nbformat.v4.new_code_cell(text) for text in after]
    book.cells = [*cells, *(c for c in book.cells if c.source != "%load_ext course"), *ends]
    where = {"metadata": {"path": str(folder / "notebooks")}}
    NotebookClient(book, timeout=300, kernel_name="python3", resources=where).execute()
    return [
        "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]


WHERE = "import minisgl.core; print(minisgl.core.__file__)"


def test_an_untouched_workbook_runs_through_and_never_sees_the_reference(books, tmp_path):
    folder = tmp_path / "w"
    generate(ROOT, folder)
    out = run_book(
        folder,
        "01_core",
        before=[
            f"import os; os.environ['MINISGL_ROOT'] = {str(ROOT)!r}",
            "%load_ext course",
            "course.catch_up('01')",
        ],
        after=[
            WHERE,
            "import subprocess, sys\n"
            f"print(subprocess.run([sys.executable, '-c', {WHERE!r}], capture_output=True).stdout)",
            "import minisgl.engine",
            "req.anything",
            "print('before', end=' '); req.anything",
            "course.progress()",
            "1 / 1",
        ],
    )
    text = "\n".join(out)
    assert "not written yet: SamplingParams.__post_init__ (01_core, “What a user asks for" in text
    assert "Traceback" not in text and "not started  check_worked_example" in text
    core = str(folder / "minisgl" / "core.py")
    assert out[2].startswith("0 definitions from 1 chapters"), "the extension brings `course`"
    assert out[-7].strip() == core, "the package is the reader's"
    assert core in out[-6], "and a process that a cell starts has the same"
    assert "not written yet: minisgl.engine" in out[-5]
    assert "not written yet" in out[-4], "a value that no cell could make"
    assert out[-3].startswith("before \nnot written yet: "), "on a line of its own"
    assert "Your minisgl so far" in out[-2]
    assert out[-1] == "1.0"
    record = json.loads((folder / ".progress.json").read_text(encoding="utf-8"))
    assert set(record["01_core"].values()) == {OPEN}


RUN_BUILD_CELLS = """
import multiprocessing, os, sys
import nbformat, torch
from IPython.core.interactiveshell import InteractiveShell
from course.building.source import directive

def run(path):
    os.chdir(os.path.dirname(path))
    shell = InteractiveShell.instance()
    shell.run_cell("%load_ext course")
    for cell in nbformat.read(path, as_version=4).cells:
        if directive(cell.source) and not shell.run_cell(cell.source).success:
            sys.exit(f"{path} stopped at:\\n{cell.source}")

ends = []
for path in sys.argv[1:]:  # a process each, in which PyTorch is imported already
    process = multiprocessing.get_context("fork").Process(target=run, args=[path])
    process.start()
    process.join()
    ends.append(process.exitcode)
sys.exit(any(ends))
"""


def test_the_build_cells_of_any_chapter_run_through_on_nothing(books, tmp_path):
    """Each may be the first that is opened: what it lacks is said by chapter, and no cell stops."""
    paths = []
    for chapter in CHAPTERS:
        shutil.copytree(books, tmp_path / chapter)
        paths.append(str(tmp_path / chapter / "notebooks" / f"{chapter}.ipynb"))
    command = [sys.executable, "-c", RUN_BUILD_CELLS, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    missing = [line for line in done.stdout.splitlines() if line.startswith(stubs.MARK)]
    assert len(missing) > 20
    assert not [line for line in missing if "(" not in line]


# --- Judging --------------------------------------------------------------------------------------


def check_squares(square):
    """squares"""
    for n in (0, 3):
        assert square(n) == n * n, "look at the sign"


def stub_square(n):
    raise NotImplementedError("not written yet: square")


def meta_square(n):
    return torch.ones(n, device="meta").cpu()


def swallowing(square):
    try:
        square(2)
    except RuntimeError:
        return


@pytest.mark.parametrize(
    ("check", "attempt", "kind", "said"),
    [
        (check_squares, lambda n: n**2, RIGHT, "squares"),
        (check_squares, meta_square, WRONG, "it raised NotImplementedError|in meta_square"),
        (check_squares, stub_square, OPEN, "square is not written yet"),
        (swallowing, stub_square, OPEN, "square is not written yet"),
        (check_squares, lambda n: -n * n, WRONG, "look at the sign|came:    square(n) = -9"),
        (check_squares, lambda n: -n * n, WRONG, "wanted:  n * n = 9|at n = 3"),
        (check_squares, lambda n: 1 // n, WRONG, "it raised ZeroDivisionError|at n = 0"),
    ],
)
def test_a_verdict_says_what_came_what_was_wanted_and_where(check, attempt, kind, said):
    found = verdict(check, attempt)
    assert found.kind == kind
    for part in said.split("|"):
        assert part in "\n".join(found.lines)


def test_in_a_workbook_checks_are_judged_and_none_raises(mine, capsys):
    def check_worked_example():
        """fine"""

    def check_batch():
        """wrong"""
        assert [1] == [2]

    run_checks(check_batch, check_worked_example)
    out = capsys.readouterr().out
    assert "wrong        check_batch" in out and "right        check_worked_example: fine" in out
    assert out.strip().endswith("1 right, 1 wrong")
    record = json.loads((mine / ".progress.json").read_text(encoding="utf-8"))
    assert record["01_core"].pop("check_batch").startswith(f"{WRONG}: ")
    assert record == {"01_core": {"check_worked_example": RIGHT}}
    lines = list(progress.status_lines(ROOT, mine, run=False))
    assert any(line.startswith("01_core") and " 0/" in line for line in lines)
    assert any("wrong: check_batch: " in line and "[1]" in line for line in lines)


def test_a_check_that_comes_before_what_it_uses_says_which_cell_to_run():
    def check_batched_decode(attempt):
        attempt()
        return make_batch  # noqa: F821

    found = verdict(check_batched_decode, lambda: 1)
    assert found.kind == OPEN
    assert found.lines == ("run the cell that defines `make_batch` first",)
    found = verdict(check_batched_decode, lambda: of_no_cell)  # noqa: F821
    assert found.kind == WRONG and "NameError" in found.lines[0]


def test_in_the_book_a_failing_check_raises():
    def check_it():
        assert False, "no"  # noqa: B011

    with pytest.raises(AssertionError, match="no"):
        run_checks(check_it)


def test_check_runs_what_uses_a_definition_on_the_readers_package(mine, capsys):
    text = package_texts(notebooks.build_cells(ROOT, CHAPTERS[:2]))
    for path, source in text.items():
        target = mine / path
        source = source.replace("return self.device_len - self.cached_len", "return 1")
        target.write_text(source, encoding="utf-8")
    check("Req.extend_len")
    out = capsys.readouterr().out
    assert "wrong        check_worked_example" in out and "(2, 6, 1, 3, True)" in out
    assert main(["status", str(mine)]) == 0
    out = capsys.readouterr().out
    assert "01_core" in out and "wrong: check_worked_example" in out


def test_status_judges_what_a_notebook_holds_and_not_what_was_right_once(mine):
    chapter, name = "00_tiny_engine", "check_rmsnorm"
    book = notebooks.read(ROOT, chapter)
    cell = next(c for c in book.cells if "def rmsnorm(" in c.source)
    wrong = cell.source.replace("rsqrt", "sqrt")
    assert wrong != cell.source
    cell.source = wrong
    book.cells.append(nbformat.v4.new_code_cell("half a cell ("))
    nbformat.write(book, mine / "notebooks" / f"{chapter}.ipynb")
    once = dict.fromkeys(checks_by_chapter()[chapter], RIGHT)
    (mine / RECORD).write_text(json.dumps({chapter: once}), encoding="utf-8")

    (found,) = progress.chapters_so_far(ROOT, mine, chapters=[chapter])
    assert found.count(WRONG) == 0, "without a run there are only the last verdicts"
    lines = list(progress.status_lines(ROOT, mine, run=False, chapters=[chapter]))
    assert lines[-1].startswith("Nothing was run")

    lines = list(progress.status_lines(ROOT, mine, chapters=[chapter]))
    assert any(f"wrong: {name}: " in line for line in lines), lines
    assert lines[-1].startswith("The checks ran now") and "exercise" in lines[-1]
    assert read_record(mine)[chapter][name].startswith(f"{WRONG}: ")

    nbformat.write(workbook(ROOT, chapter, mine), mine / "notebooks" / f"{chapter}.ipynb")
    (found,) = progress.chapters_so_far(ROOT, mine, run=True, chapters=[chapter])
    assert found.verdicts[name] == OPEN and not found.written, "nothing is written any more"


def test_every_check_that_is_counted_can_be_run_and_what_is_open_has_a_name(mine):
    for chapter, counted in checks_by_chapter().items():
        cells = notebooks.read(ROOT, chapter).cells
        code = "\n".join(c.source for c in cells if c.cell_type == "code")
        judged = re.findall(r"^course\.judge\(\w+, (check_\w+)", code, re.MULTILINE)
        runnable = {*program(ROOT, chapter).checks, *judged}
        assert set(counted) <= runnable, f"{chapter}: these can never become right"
    chapter = "01_core"
    first, *others = checks_by_chapter()[chapter]
    record(mine, [Verdict(first, RIGHT)], chapter)
    lines = list(progress.status_lines(ROOT, mine, run=False))
    assert sum("not started: " in line for line in lines) == 1, "only of a chapter that is begun"
    assert any(line.strip() == f"not started: {', '.join(others)}" for line in lines)


LONG = [  # chapter 01's table is run always; the others take some minutes in all
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (os.environ.get("CI") or os.environ.get("MINISGL_SLOW")),
        reason="a minute or two; CI runs it, and so does `python -m course mutations`",
    ),
]


@pytest.mark.parametrize(
    "chapter", [t if t == "01_core" else pytest.param(t, marks=LONG) for t in TABLES]
)
def test_the_checks_catch_wrong_solutions_and_pass_right_ones(chapter):
    table = mutations.changes(ROOT, chapter)
    assert sum(not change.is_right for change in table) >= 10
    assert any(change.is_right for change in table)
    faults = [f"{o.change.what}: {o.fault}" for o in mutations.outcomes(ROOT, chapter) if o.fault]
    assert not faults, "\n".join(faults)


def test_the_commands_work_from_the_command_line(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "course", "workbook", str(tmp_path / "w")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "open them with" in done.stdout and not done.stderr
