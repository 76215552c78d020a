"""The rooms of `course/`: who may import whom, and that no import goes round in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import course

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "course"
ALLOWED: dict[str, set[str]] = {
    "building": set(),
    "checkpoints": set(),
    "workbooks": {"building"},
    "pictures": {"building"},
    "judging": {"workbooks", "building", "checkpoints", "pictures"},
    "book": {"pictures", "building", "launch"},
    "kernel": {"building", "workbooks", "checkpoints"},
    "launch": {"building"},
    "__main__": {"building", "workbooks", "judging", "checkpoints"},
    "__init__": set(),  # the front doors open on first use
}
LATE = {"checkpoints", "pictures"}  # heavy, and so imported where they are used
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in COURSE.rglob("*.py")
}


def imports(module: str) -> list[tuple[str, bool]]:
    """The modules of the course that a module imports, and whether it does inside a function."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: import from course.… by its whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names if id(node) not in typed else ():
            if name.split(".")[0] == "course":
                while name not in MODULES and f"{name}.__init__" not in MODULES:
                    name = name.rpartition(".")[0]
                found.append((name if name in MODULES else f"{name}.__init__", node.col_offset > 0))
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def test_each_room_is_known_and_imports_only_what_it_may() -> None:
    assert {room(module) for module in MODULES} == set(ALLOWED)
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other, _ in imports(module)
        if room(other) not in ALLOWED[room(module)] | {room(module)}
    ]
    assert not wrong


def test_no_import_goes_round_in_a_circle() -> None:
    tuple(TopologicalSorter(ALLOWED).static_order())  # CycleError names the rooms
    modules = {module: [other for other, _ in imports(module)] for module in MODULES}
    tuple(TopologicalSorter(modules).static_order())


def test_an_import_stands_at_the_top_but_for_what_is_heavy() -> None:
    late = [
        f"{module} imports {other} in a function"
        for module in MODULES
        if room(module) != "launch"  # it begins where nothing is installed
        for other, is_inside in imports(module)
        if is_inside and room(other) not in LATE
    ]
    assert not late


def test_the_front_doors_open() -> None:
    assert all(getattr(course, name) for name in course.__all__)


def test_a_kernel_that_builds_and_checks_loads_nothing_heavy() -> None:
    code = (
        "import sys, course\nfor n in ('load_ipython_extension', 'run_checks', 'judge', 'draw'):\n"
    )
    code += "    getattr(course, n)\nprint(*{'nbformat', 'torch', 'ipywidgets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done
