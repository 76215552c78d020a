"""`python -m course`: a two-chapter course in a temporary folder, run by real kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course.__main__ import main
from course.building import notebooks
from course.building.rules import code_lines
from course.building.run import _first_difference, execute, run

ONE = [
    "%load_ext course",
    '#| build minisgl/__init__.py\n"""The package."""',
    "print('begun')",
    '#| build minisgl/core.py\n"""Core."""\n\nfrom __future__ import annotations\n\n\n'
    "def one() -> int:\n    return 1",
    "print(one())",
]
TWO = [
    "%load_ext course",
    "#| build minisgl/core.py\nimport math\n\n\n"
    "def two() -> int:\n    return math.ceil(one() + 0.5)",
    "import ipywidgets\n\nslider = ipywidgets.IntSlider(description='é')\n"
    "ipywidgets.jslink((slider, 'value'), (ipywidgets.IntText(), 'value'))\nslider",
    "print(two())\nprint('x' * 3, flush=True)",
    "import time\n\nprint(f'{time.perf_counter():.9f} s')",
]


def write(root: Path, name: str, cells: list[str]) -> None:
    book = new_notebook(
        cells=[new_markdown_cell(f"# {name}"), *(new_code_cell(source) for source in cells)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    book.cells[-1].metadata["tags"] = ["nbval-ignore-output"]
    nbformat.write(book, notebooks.notebook_path(root, name))


def make_course(root: Path) -> None:
    (root / "notebooks").mkdir()
    write(root, "01_one", ONE)
    write(root, "02_two", TWO)
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nparts:\n- chapters:\n  - file: notebooks/01_one\n"
        "  - file: notebooks/02_two\n    sections:\n    - file: notebooks/03_not_there_yet\n",
        encoding="utf-8",
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The course as written, not run yet."""
    make_course(tmp_path)
    monkeypatch.setenv("MINISGL_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The course after `python -m course run`; copied for each test that needs it."""
    folder = tmp_path_factory.mktemp("template")
    make_course(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISGL_ROOT", str(folder))
        assert main(["run"]) == 0
    return folder


@pytest.fixture
def executed(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the executed course."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("MINISGL_ROOT", str(tmp_path))
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*.*") if p.is_file()}


def test_running_builds_the_package_and_running_again_gives_no_diff(executed, capfd):
    built = (executed / "minisgl/core.py").read_text(encoding="utf-8")
    assert "def one" in built and "def two" in built
    before = tree(executed)
    assert main(["run"]) == 0
    assert "01_one: unchanged\n02_two: unchanged" in capfd.readouterr().out
    after = tree(executed)
    assert {k: v for k, v in after.items() if "pyc" not in k} == {
        k: v for k, v in before.items() if "pyc" not in k
    }


def test_run_stores_widget_state_with_its_links_and_stable_ids(executed):
    book = notebooks.read(executed, "02_two")
    state = book.metadata.widgets[notebooks.WIDGET_STATE]["state"]
    names = {model["model_name"] for model in state.values()}
    assert {"IntSliderModel", "LinkModel", "IntTextModel"} <= names
    view = next(o for c in book.cells if c.cell_type == "code" for o in c.outputs if "data" in o)
    assert view.data[notebooks.WIDGET_VIEW]["model_id"] in state


def test_run_leaves_a_failing_chapter_as_it_was(root, capfd):
    write(root, "01_one", [*ONE, "raise ValueError('on purpose')"])
    before = notebooks.notebook_path(root, "01_one").read_bytes()
    assert main(["run", "01_one"]) == 1
    assert "on purpose" in capfd.readouterr().err
    assert notebooks.notebook_path(root, "01_one").read_bytes() == before


def test_fresh_takes_new_timings(executed):
    def timing() -> str:
        return notebooks.read(executed, "02_two").cells[-1].outputs[0].text

    before = timing()
    assert main(["run", "02_two", "--fresh"]) == 0
    assert timing() != before


def test_build_needs_no_kernel_and_gives_what_running_gives(executed, tmp_path_factory, capfd):
    folder = tmp_path_factory.mktemp("built")
    assert main(["build", str(folder)]) == 0
    for name in ("__init__", "core"):
        path = f"minisgl/{name}.py"
        assert (folder / path).read_bytes() == (executed / path).read_bytes()
    (folder / "minisgl/extra.py").write_text("X = 1\n", encoding="utf-8")
    assert main(["build", str(folder)]) == 0
    assert "extra  minisgl/extra.py" in capfd.readouterr().out


def test_check_proves_the_tree_from_nothing(executed, capfd):
    assert main(["check"]) == 0
    out = capfd.readouterr().out
    assert "ok  01_one: 2 files built, 2 in the package" in out
    assert "ok  02_two: 1 files built, 2 in the package" in out


def test_check_says_where_one_character_differs_in_the_package(executed, capfd):
    edit(executed / "minisgl/core.py", "0.5", "0.6")
    assert main(["check", "--static"]) == 1
    out = capfd.readouterr().out
    assert "minisgl/core.py, line 13 (two, notebooks/02_two.ipynb, cell 3)" in out
    assert "-    return math.ceil(one() + 0.6)" in out


def test_check_says_where_one_character_differs_in_a_cell(executed, capfd):
    edit(notebooks.notebook_path(executed, "01_one"), "    return 1", "    return 2")
    assert main(["check", "--static"]) == 1
    assert "minisgl/core.py, line 9 (one, notebooks/01_one.ipynb, cell 5)" in capfd.readouterr().out


def test_check_finds_what_no_cell_builds_and_what_two_build(executed, capfd):
    (executed / "minisgl/extra.py").write_text("X = 1\n", encoding="utf-8")
    write(executed, "02_two", [*TWO, "#| build minisgl/core.py\ndef one() -> int:\n    return 1"])
    assert main(["check", "--static"]) == 1
    out = capfd.readouterr().out
    assert "minisgl/extra.py is built by no notebook" in out
    assert "one is built twice, by notebooks/01_one.ipynb, cell 5 and notebooks/02_two" in out


def test_check_catches_a_chapter_that_needs_a_later_one(executed, capfd):
    cells = notebooks.read(executed, "01_one")
    cells.cells[-1].source = "import minisgl.core\n\nprint(minisgl.core.two())"
    nbformat.write(cells, notebooks.notebook_path(executed, "01_one"))
    assert main(["check"]) == 1
    assert "has no attribute 'two'" in capfd.readouterr().err


def test_pull_writes_an_edit_back_into_its_cell(executed, capfd):
    core = executed / "minisgl/core.py"
    edit(core, "import math", "import math\nimport os")
    edit(core, "return 1", "# why\n    return 1 + len(os.sep) - 1")
    assert main(["pull"]) == 0
    assert "pulled  notebooks/01_one.ipynb, cell 5" in capfd.readouterr().out
    assert main(["check", "--static"]) == 0 or "not run in order" in capfd.readouterr().out
    pulled = core.read_bytes()
    assert main(["build"]) == 0
    assert core.read_bytes() == pulled
    assert main(["pull"]) == 0
    assert "0 cells changed" in capfd.readouterr().out


def test_pull_refuses_what_has_no_cell_and_writes_nothing(executed, capfd):
    edit(executed / "minisgl/core.py", "def two", "def three() -> int:\n    return 3\n\n\ndef two")
    edit(executed / "minisgl/core.py", "return 1", "return 7")
    before = tree(executed / "notebooks")
    assert main(["pull"]) == 1
    assert "three is in the file but in no build cell" in capfd.readouterr().err
    assert tree(executed / "notebooks") == before


def test_an_unknown_chapter_is_named(root, capfd):
    assert main(["run", "99_none"]) == 1
    assert (
        "there is no chapter '99_none'; the chapters are 01_one, 02_two" in capfd.readouterr().err
    )


def nbval(root: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", *names],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=root / "notebooks",
        env={**os.environ, "MINISGL_ROOT": str(root)},
    )


def test_nbval_passes_on_a_complete_and_on_an_empty_tree_and_does_compare(executed):
    names = ("01_one.ipynb", "02_two.ipynb")
    for _ in range(2):
        result = nbval(executed, *names)
        assert result.returncode == 0 and "passed" in result.stdout, result.stdout
        shutil.rmtree(executed / "minisgl")
    assert main(["build"]) == 0
    edit(executed / "notebooks/02_two.ipynb", "xxx", "xyx")
    assert "1 failed" in nbval(executed, names[1]).stdout


def test_errors_in_a_notebook_begin_at_the_readers_line(root):
    cells = [
        *ONE,
        "#| build minisgl/core.py\nimport math\n\nLIMIT = math.sqrt(-1)",
        "#| build minisgl/core.py\ndef broken(:\n    pass",
        "#| build ../x.py\nX = 1",
        "import sys\n\nprint(one(), hasattr(sys.modules['minisgl.core'], 'LIMIT'))",
    ]
    write(root, "01_one", cells)
    book = notebooks.read(root, "01_one")
    for cell in book.cells[-4:-1]:
        cell.metadata["tags"] = ["raises-exception"]
    execute(book, "01_one", root)
    failed, syntax, path, after = (cell.outputs[0] for cell in book.cells[-4:])
    shown, shown_syntax = (
        re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback)) for output in (failed, syntax)
    )
    assert failed.ename == "ValueError" and "LIMIT = math.sqrt(-1)" in shown
    assert "run_cell" not in shown and "plan.py" not in shown
    assert shown.endswith("\nminisgl/core.py is unchanged")
    first, code, caret, said, kept = shown_syntax.strip().splitlines()
    assert re.search(r"<cell of minisgl.core \w+>:2", first) and code.strip() == "def broken(:"
    assert caret.strip() == "^" and said.startswith("SyntaxError: ")
    assert kept == "minisgl/core.py is unchanged"
    assert path.ename == "BuildError" and "inside minisgl/ only" in path.evalue
    assert len(path.traceback) == 1
    assert after.text == "1 False\n"
    assert not (root.parent / "x.py").exists()


# --- A class over several cells, of two chapters --------------------------------------------------

BEGINS = '''\
#| build minisgl/core.py
from dataclasses import dataclass


@dataclass
class Req:
    """A request."""

    ids: int
    max: int = 4

    def one(self) -> int:
        return 1

    def two(self) -> int:
        return 2'''
GOES_ON = """\
#| build minisgl/core.py
class Req(Req):
    # Why three.
    def three(self) -> int:
        return 3

    @property
    def four(self) -> int:
        return 4"""


@pytest.fixture
def spread(root: Path) -> Path:
    """The course with a class that two chapters build, and its package."""
    write(root, "01_one", [*ONE, BEGINS, "print(Req(1).one())"])
    write(root, "02_two", [*TWO[:-1], GOES_ON, "print(Req(1).three())", TWO[-1]])
    assert main(["build"]) == 0
    return root


def faults(capfd: pytest.CaptureFixture[str]) -> str:
    """What `check --static` finds in a course that has not run."""
    capfd.readouterr()
    assert main(["check", "--static"]) == 1
    lines = capfd.readouterr().out.splitlines()
    return "\n".join(line for line in lines if "was not run in order" not in line)


def test_two_chapters_build_one_class(spread, capfd):
    core = (spread / "minisgl/core.py").read_text(encoding="utf-8")
    assert core.count("class Req") == 1
    assert core.index("def two(self)") < core.index("# Why three.") < core.index("def four")
    assert not faults(capfd)
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length=100", "--check"]
    assert subprocess.run([*ruff, spread / "minisgl"]).returncode == 0
    for name in ("01_one", "02_two"):
        run(spread, name)
    assert (spread / "minisgl/core.py").read_text(encoding="utf-8") == core
    assert main(["check"]) == 0, capfd.readouterr()


def test_an_edit_of_one_method_goes_into_its_cell(spread, capfd):
    core = spread / "minisgl/core.py"
    edit(core, "return 3", "return 3 + 0  # edited")
    assert "(Req.three, notebooks/02_two.ipynb, cell 6)" in faults(capfd)
    assert main(["pull"]) == 0
    assert capfd.readouterr().out.startswith("pulled  notebooks/02_two.ipynb, cell 6\n1 cells")
    edit(core, "return 2\n", "return 2 + 0\n")
    edit(core, "max: int = 4", "max: int = 5")
    edit(core, "# Why three.\n", "# Why not.\n\n")
    assert main(["pull"]) == 0
    cells = {c.where: c.text for c in notebooks.build_cells(spread)}
    first, second = cells["notebooks/01_one.ipynb, cell 7"], cells["notebooks/02_two.ipynb, cell 6"]
    assert first == BEGINS.replace("return 2", "return 2 + 0").replace("= 4", "= 5")
    three = GOES_ON.replace("return 3", "return 3 + 0  # edited")
    assert second == three.replace("# Why three.\n", "# Why not.\n\n")
    assert not faults(capfd)
    assert main(["pull"]) == 0 and "0 cells changed" in capfd.readouterr().out


def test_a_member_in_no_cell_or_in_no_file_is_a_fault(spread, capfd):
    core = spread / "minisgl/core.py"
    edit(core, "    def two", "    def new(self):\n        return 0\n\n    def two")
    edit(core, "def three", "def drei")
    before = tree(spread / "notebooks")
    assert main(["pull"]) == 1
    error = capfd.readouterr().err
    assert "Req.new is in the file but in no build cell" in error
    assert "Req.three is in a build cell but not in the file" in error
    assert tree(spread / "notebooks") == before
    assert "(Req.new)" in faults(capfd)


def test_a_member_of_a_class_in_one_cell_may_come_and_go(root):
    write(root, "01_one", [*ONE, BEGINS, "print(Req(1).one())"])
    assert main(["build"]) == 0
    edit(root / "minisgl/core.py", "def two(self) -> int:\n", "def zwei(self) -> int:\n")
    assert main(["pull"]) == 0
    assert "def zwei" in notebooks.build_cells(root)[2].text


def test_a_member_built_by_two_cells_and_a_class_that_none_begins(spread, capfd):
    again = "#| build minisgl/core.py\nclass Req(Req):\n    def one(self) -> int:\n        return 1"
    write(spread, "02_two", [*TWO, GOES_ON, "print()", again])
    assert (
        "minisgl/core.py: Req.one is built twice, by notebooks/01_one.ipynb, cell 7 and "
        "notebooks/02_two.ipynb, cell 9"
    ) in faults(capfd)
    write(spread, "01_one", [*ONE])
    assert main(["check", "--static"]) == 1
    assert "02_two.ipynb, cell 7: `class Req(Req)` goes on with a cl" in capfd.readouterr().err


# --- What a page must keep to ---------------------------------------------------------------------


def test_build_cells_are_short_and_parted(root, capfd):
    long = '#| build minisgl/core.py\ndef f():\n    """A docstring\n\n    of lines."""\n'
    long += "    x = 1\n\n" * 39
    write(root, "01_one", [*ONE, long, ONE[1], "f()"])
    main(["build"])
    assert code_lines(long) == 40
    out = faults(capfd)
    assert "without docstrings" not in out
    assert "cell 8 builds minisgl/__init__.py right below a cell that builds minisgl/core.py" in out
    write(root, "01_one", [*ONE, long + "    x = 2", "f()"])
    assert "cell 7 (minisgl/core.py) has 41 lines without docstrings" in faults(capfd)


def test_a_notebook_holds_nothing_of_a_machine_and_all_parts_of_a_chapter(root, capfd):
    (root / "_config.yml").write_text("# of course.book", encoding="utf-8")
    write(root, "01_one", [*ONE, "'/home/me and <X at 0x7f00aa11>'"])
    main(["build"])
    out = faults(capfd)
    assert "01_one.ipynb: it holds a path of a machine, /home/me\n" in out
    assert "01_one.ipynb: it holds an object's address, at 0x7f00aa11\n" in out
    assert "01_one.ipynb: it lacks the part “debugging”" in out


def test_check_compares_what_each_cell_shows(executed, capfd):
    path = notebooks.notebook_path(executed, "02_two")
    book = notebooks.read(executed, "02_two")
    shown = next(o for c in book.cells if c.cell_type == "code" for o in c.outputs if "data" in o)
    shown.data["image/png"] = "not compared"
    book.cells[-1].outputs[0].text = "1.0 s\n"
    next(c for c in book.cells if "'x' * 3" in c.source).outputs[0].text = "2\nxyx\n"
    nbformat.write(book, path)
    assert main(["check"]) == 1
    out, error = capfd.readouterr()
    assert "ok  01_one" in out
    assert "NOT 02_two: 1 files built, 2 in the package, 1 cells show something else" in out
    assert "02_two, cell 5: stdout" in error and "-xyx\n    +xxx" in error


def test_of_a_long_line_the_place_that_differs_is_shown():
    text = "<svg>" + "x" * 500 + "</svg>"
    was, now = _first_difference(text, text.replace("</svg>", "y</svg>"))
    assert was == "-…" + "x" * 40 + "</svg>" and now == "+…" + "x" * 40 + "y</svg>"
