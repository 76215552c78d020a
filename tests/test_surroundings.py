"""What can go wrong around the course: other books, other kernels, profiles, merges, disks."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from course.__main__ import main
from course.building import notebooks, roots

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run some code in a process of its own that finds the course."""
    kept = {k: v for k, v in os.environ.items() if k != "MINISGL_ROOT"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


def test_another_jupyter_book_is_not_built_into(tmp_path: Path) -> None:
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: intro\n", encoding="utf-8")
    (tmp_path / "_config.yml").write_text("title: another book\n", encoding="utf-8")
    (tmp_path / "notebooks").mkdir()
    found = python(
        "from course.building.roots import find_root; print(find_root())", tmp_path / "notebooks"
    )
    assert found.stdout.strip() == str(ROOT), found.stderr
    assert roots.is_book(ROOT) and not roots.is_book(tmp_path)


BUILD_THIRTY = """
import sys
from pathlib import Path
from course.building.builder import Builder
from course.building.roots import RootFinder

build = Builder(Path("."))
sys.meta_path.insert(0, RootFinder(build.root))
for i in range(30):
    build.run(f"#| build minisgl/both.py\\ndef {NAME}_{i}():\\n    return {i}")
"""


def test_two_kernels_that_build_one_file_lose_nothing(tmp_path: Path) -> None:
    kernels = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD_THIRTY.replace("{NAME}", name)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for name in ("left", "right")
    ]
    assert [kernel.wait(120) for kernel in kernels] == [0, 0]
    text = (tmp_path / "minisgl" / "both.py").read_text(encoding="utf-8")
    assert text.count("def left_") == text.count("def right_") == 30


def test_a_notebook_with_merge_markers_is_named_in_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "notebooks").mkdir()
    toc = "format: jb-book\nroot: i\nchapters:\n- file: notebooks/01_one\n"
    (tmp_path / "_toc.yml").write_text(toc, encoding="utf-8")
    text = '{\n "cells": [\n<<<<<<< HEAD\n ],\n=======\n >>>>>>> other\n}'
    (tmp_path / "notebooks/01_one.ipynb").write_text(text, encoding="utf-8")
    with pytest.raises(notebooks.CourseError, match=r"^notebooks/01_one.ipynb, line 3: a merge"):
        notebooks.build_cells(tmp_path)
    (tmp_path / "notebooks/01_one.ipynb").write_text("{} trailing", encoding="utf-8")
    with pytest.raises(notebooks.CourseError, match=r"^notebooks/01_one.ipynb is no notebook"):
        notebooks.build_cells(tmp_path)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder that nobody can write to: Linux")
def test_a_folder_that_cannot_be_written_is_one_line(capsys) -> None:
    assert main(["workbook", "/proc/workbooks"]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("/proc/workbooks") and "\n" not in said


def test_a_printed_command_can_be_pasted(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "a b"
    assert main(["workbook", str(folder)]) == 0
    command = capsys.readouterr().out.split("`")[1]
    assert shlex.split(command) == ["jupyter", "lab", str(folder)]


LOAD = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in {cells!r}:
    if not shell.run_cell(cell).success:
        raise SystemExit(cell)
"""


def test_without_asserts_the_course_refuses_to_start(tmp_path: Path) -> None:
    done = python(LOAD.format(cells=["%load_ext course"]), ROOT / "notebooks", PYTHONOPTIMIZE="1")
    assert "leaves out every assert" in done.stdout + done.stderr


def test_checks_are_judged_with_asserts_whatever_the_environment_says() -> None:
    code = (
        "from pathlib import Path; from course.judging.judge import *; import tempfile\n"
        f"root = Path({str(ROOT)!r})\n"
        "text = (root / 'minisgl/core.py').read_text().replace('device_len - self.cached_len', "
        "'device_len + self.cached_len')\n"
        "with Judge(root, '01_core') as judge:\n"
        "    found = judge.run(Job(str(root), changes={'minisgl/core.py': text})).verdicts\n"
        "print([v.kind for v in found])\n"
    )
    done = python(code, ROOT, PYTHONOPTIMIZE="1")
    assert "wrong" in done.stdout, done.stdout + done.stderr


def test_autoreload_is_turned_off_with_a_line(tmp_path: Path) -> None:
    cells = [
        "%load_ext autoreload",
        "%autoreload 2",
        "%load_ext course",
        "#| build minisgl/core.py\nclass Req:\n    a = 1",
        "made = Req()",
        "#| build minisgl/core.py\ndef other():\n    return Req",
        "assert isinstance(made, Req) and other() is Req",
        "%autoreload 2",
        "import minisgl.core\nassert minisgl.core.Req is Req is type(made)",
    ]
    done = python(LOAD.format(cells=cells), tmp_path, MINISGL_ROOT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("autoreload is off now") == 2, done.stdout


def test_a_missing_compiler_is_said_once_in_a_program_and_not_in_a_notebook(tmp_path: Path) -> None:
    ask = "from minisgl.kernel import use_kernels\nuse_kernels('auto')\nuse_kernels('auto')"
    program = python(ask, ROOT, CC="/nonexistent", MINISGL_JIT="1")
    said = program.stdout + program.stderr
    assert program.returncode == 0 and said.count("no C compiler") == 1, said
    notebook = python(
        LOAD.format(cells=["%load_ext course", ask]), ROOT, CC="/nonexistent", MINISGL_JIT="1"
    )
    assert notebook.returncode == 0 and notebook.stdout + notebook.stderr == ""
