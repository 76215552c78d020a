"""A class that cells of two chapters build: workbooks, checks, wrong solutions and the book."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from docutils import nodes
from docutils.utils import new_document
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course.book import extension as book
from course.book import names
from course.building import notebooks
from course.building.package import build
from course.building.parsing import parse
from course.judging import checks, mutations, program, progress
from course.judging.judge import Job, Judge
from course.judging.mutations import Change
from course.judging.verdict import OPEN, RIGHT, WRONG
from course.workbooks import reference, stubs, unwritten
from course.workbooks.generate import generate
from course.workbooks.pieces import find_written, to_write

ROOT = Path(__file__).resolve().parent.parent
BEGINS = '''\
#| build minisgl/core.py
from dataclasses import dataclass


@dataclass
class Req:
    """A request."""

    ids: int

    def one(self) -> int:
        """One."""
        return self.ids + 1'''
GOES_ON = '''\
#| build minisgl/core.py
class Req(Req):
    # Why two.
    def two(self) -> int:
        """Two."""
        return self.one() + 1

    @property
    def half(self) -> float:
        """Half."""
        return self.ids / 2'''
ONE = [
    "%load_ext course",
    '#| build minisgl/__init__.py\n"""The package."""',
    "print('begun')",
    BEGINS,
    "print(Req(1).one())",
    'def check_one():\n    """one"""\n    assert Req(1).one() == 2, "one more"',
    "course.run_checks(check_one)",
]
TWO = [
    "%load_ext course\nimport course",
    GOES_ON,
    "print(Req(1).two())",
    'def check_two():\n    """two"""\n    assert Req(1).two() == 3, "two more"\n\n\n'
    'def check_half():\n    """half"""\n    assert Req(3).half == 1.5',
    "course.run_checks(check_two, check_half)",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of two chapters, with a copy of `course/` that hands it out; read only."""
    folder = tmp_path_factory.mktemp("spread")
    shutil.copytree(ROOT / "course", folder / "course", ignore=shutil.ignore_patterns("__pyc*"))
    for name in ("notebooks", "book", "tests/mutations"):
        (folder / name).mkdir(parents=True)
    for name, cells in (("01_one", ONE), ("02_two", TWO)):
        parts = [new_markdown_cell(f"# {name}\n\n## The class")] + [new_code_cell(c) for c in cells]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        made = new_notebook(cells=parts, metadata=kernel)
        nbformat.write(made, notebooks.notebook_path(folder, name))
    toc = "format: jb-book\nroot: book/index\nchapters:\n- file: notebooks/01_one\n"
    (folder / "_toc.yml").write_text(toc + "- file: notebooks/02_two\n", encoding="utf-8")
    build(folder, folder)
    return folder


@pytest.fixture
def mine(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its blank workbooks, as the current folder; this process hands out that course."""
    for module in (reference, progress, unwritten, checks, program):
        monkeypatch.setattr(module, "reference_root", lambda: root)
    generate(root, tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine" / "notebooks")
    return tmp_path / "mine"


def core(folder: Path) -> str:
    return (folder / "minisgl/core.py").read_text(encoding="utf-8")


def test_stubs_of_a_class_that_goes_on():
    text, left = stubs.stub(GOES_ON)
    assert left == ["Req.two", "Req.half"] and text.startswith(
        "#| build minisgl/core.py\nclass Req(Req)"
    )
    assert stubs.written(text) == {"Req.two": False, "Req.half": False}
    file = "class Req:\n    def two(self) -> int:\n        return 5\n"
    kept, taken = stubs.keep_written(text, file)
    assert taken == ["Req.two"] and "return 5" in kept and "not written yet: Req.half" in kept
    assert parse(kept).pieces[0].goes_on


def test_what_is_left_to_write_stands_in_its_chapter(root):
    written = [(w.chapter, w.name) for w in to_write(root)]
    assert written == [("01_one", "Req.one"), ("02_two", "Req.two"), ("02_two", "Req.half")]
    assert len(find_written(root, "Req")) == 3


def test_reveal_shows_a_member_or_the_whole_class(root, mine):
    shown = repr(reference.reveal("Req.two"))
    assert "return self.one() + 1" in shown and "class" not in shown
    assert (
        repr(reference.reveal("core.Req"))
        == f"# minisgl/core.py\n{parse(core(root)).pieces[0].text}"
    )
    inserted = reference._build_cell_for(root, "Req.half")
    goes_on, rest = GOES_ON.partition("    # Why two.")[0], GOES_ON.partition("    @property")[2]
    assert "".join(inserted.split()) == "".join(f"{goes_on}    @property{rest}".split())
    whole = reference._build_cell_for(root, "Req")
    assert [*parse(whole).definitions] == ["Req", "Req.ids", "Req.one", "Req.two", "Req.half"]
    assert "import dataclass" in whole


def test_catching_up_goes_member_by_member(root, mine, capsys):
    own = core(root).replace("return self.ids + 1", "return 7").partition("    # Why two.")[0]
    stub = stubs.stub(GOES_ON)[0].partition("(Req):\n")[2].partition("    @property")[0]
    (mine / "minisgl/core.py").write_text(own + stub, encoding="utf-8")
    cells = notebooks.build_cells(root)[1:]
    text, taken = own + stub, []
    for cell in cells:
        text, new = reference._caught_up(cell, text, "core.py", overwrite=False)
        taken += new
    assert taken == ["Req.two", "Req.half"]
    assert text == core(root).replace("return self.ids + 1", "return 7")
    for cell in cells:
        text, _ = reference._caught_up(cell, text, "core.py", overwrite=True)
    assert text == core(root)
    reference.catch_up("02")
    assert "return 7" in core(mine) and "not written yet: Req.two" in core(mine)
    assert "0 definitions from 1 chapters" in capsys.readouterr().out


def test_a_member_is_judged_alone_and_a_class_in_each_chapter(root, mine):
    build(root, mine)
    text = core(mine).replace("self.one() + 1", "self.one() + 2")
    (mine / "minisgl/core.py").write_text(text, encoding="utf-8")
    assert [line.split(":")[0].split()[0] for line in checks.check_lines("Req.half")][1:] == [RIGHT]
    (said,) = [*checks.check_lines("Req.two")][1:]
    assert said.startswith(WRONG) and "check_two: two more" in said
    lines = [*checks.check_lines("Req")]
    assert lines[0].startswith("01_one") and any(line.startswith("02_two") for line in lines)
    assert sum(line.startswith((RIGHT, WRONG)) for line in lines) == 3
    (mine / "minisgl/core.py").write_text(stubs.stub(core(root))[0], encoding="utf-8")
    assert [*checks.check_lines("Req.two")][1:] == [f"{OPEN:<12} Req.two"]


def test_wrong_solutions_of_a_member(root):
    wrong = Change("not two", "minisgl/core.py", "Req.two", "+ 1", "+ 2", "check_two", "two more")
    right = Change(
        "another way", "minisgl/core.py", "Req.half", None, "        return self.ids * 0.5"
    )
    assert not [o.fault for o in mutations.outcomes(root, "02_two", [wrong, right]) if o.fault]
    with Judge(root, "02_two") as judge:
        used = judge.run(Job(str(root), trace=True)).used
    assert "minisgl/core.py:Req.two" in used["check_two"]


RUN = """
import os, sys, nbformat
from nbclient import NotebookClient
for path in sys.argv[1:]:
    book = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": os.path.dirname(path)}}
    NotebookClient(book, kernel_name="python3", resources=where).execute()
    print("---", *("".join(o.get("text", "") for o in c.get("outputs", ())) for c in book.cells))
"""


@pytest.mark.parametrize("chapters", [["01_one", "02_two"], ["02_two"]])
def test_blank_workbooks_run_through(root, tmp_path, chapters):
    folder = tmp_path / "blank"
    generate(root, folder)
    paths = [str(folder / "notebooks" / f"{chapter}.ipynb") for chapter in chapters]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *paths], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if len(chapters) == 2:
        assert "not written yet: Req.one (01_one, “The class”)" in done.stdout
        assert "minisgl/core.py: Req.two, half (" in done.stdout
        assert core(folder).count("class Req") == 1 and core(folder).count(stubs.MARK) == 3
    else:
        assert done.stdout.count("not written yet: Req (01_one, “The class”)") >= 2, done.stdout
        assert not (folder / "minisgl/core.py").exists()


def test_an_ordinary_cell_that_goes_on_with_nothing_is_named(root, mine):
    unwritten.homes.cache_clear()
    lacking = unwritten.Unwritten()
    try:
        exec("class Req(Req):\n    pass", {})
    except NameError as error:
        assert lacking.cause(error) == "Req" and unwritten.homes()["Req"].chapter == "01_one"
    Lacking = type("Req", (), {"__module__": "minisgl.core"})
    for name, cause in (("two", "Req.two"), ("ids", None), ("other", None)):
        try:
            getattr(Lacking(), name)
        except AttributeError as error:
            assert lacking.cause(error) == cause
    unwritten.homes.cache_clear()


def test_a_member_is_found_where_it_is_built(root):
    found = names.definitions(root)
    (req,) = [d for d in found if d.name == "Req"]
    assert req.chapter == "01_one" and req.chapters == ["01_one", "02_two"]
    assert req.members == ("ids", "one", "two", "half")
    places = names.Names(found)
    assert places.find("Req").page == places.find("Req.one").page == "notebooks/01_one"
    target = places.find("req.two()")
    assert (target.page, target.anchor) == ("notebooks/02_two", "minisgl-core-Req-two")
    assert target.tip == "Req.two (minisgl/core.py, built in chapter 02)"
    assert places.begun("minisgl/core.py", "Req").anchor == "minisgl-core-Req"


def test_the_box_above_a_cell_says_which_class_goes_on():
    document = new_document("chapter")
    block = nodes.literal_block(GOES_ON, GOES_ON)
    cell = nodes.container("", nodes.container("", block), nb_element="cell_code")
    document += cell
    book.BuildCaptions(document).apply()
    (caption,) = [n for n in document.findall(nodes.container) if "build-file" in n["classes"]]
    assert (
        "".join(n.astext() for n in caption.children)
        == "builds minisgl/core.py · Req goes on: two, half"
    )
    assert caption["ids"] == ["minisgl-core", "minisgl-core-Req-two", "minisgl-core-Req-half"]
    assert [n["goes_on"] for n in caption.findall(nodes.literal) if "goes_on" in n] == [
        ("minisgl/core.py", "Req")
    ]
    assert block.astext().startswith("class Req(Req):")


def test_the_box_leads_to_the_cell_that_begins_the_class(root, tmp_path):
    shutil.copytree(root / "notebooks", tmp_path / "notebooks")
    shutil.copy(root / "_toc.yml", tmp_path)
    (tmp_path / "book").mkdir()
    contents = "```{toctree}\n/notebooks/01_one\n/notebooks/02_two\n```\n"
    glossary = f"# Words\n\n### Page\n\nA page.\n\n{contents}"
    (tmp_path / "book/glossary.md").write_text(glossary, encoding="utf-8")
    settings = "extensions = ['myst_nb', 'course.book.extension']\nnb_execution_mode = 'off'\n"
    settings += "root_doc = 'book/glossary'\nhtml_theme = 'basic'\n"
    (tmp_path / "conf.py").write_text(settings, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-b",
        "html",
        str(tmp_path),
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out/notebooks/02_two.html").read_text(encoding="utf-8")
    assert 'href="01_one.html#minisgl-core-Req"' in page and 'id="minisgl-core-Req-half"' in page
