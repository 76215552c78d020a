"""Build cells: what `design.md` promises of them, on a package that grows in a temporary folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from course.building.builder import Builder
from course.building.roots import RootFinder
from course.building.source import BuildError, write_whole

CORE = '''\
#| build minisgl/core.py
"""Core."""

from __future__ import annotations

import torch
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.later import Handle

# Identity, not equality.
@dataclass(eq=False)
class Req:
    handle: Handle
'''


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """An empty root; whatever `minisgl` is loaded meanwhile is put back afterwards."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "minisgl"]

    saved = {name: sys.modules.pop(name) for name in ours()}
    finder = RootFinder(tmp_path)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    yield tmp_path
    sys.meta_path.remove(finder)  # type: ignore[arg-type]
    for name in ours():
        del sys.modules[name]
    sys.modules.update(saved)


@pytest.fixture
def build(package: Path) -> Callable[[str], dict[str, Any]]:
    builder = Builder(package)
    builder.run('#| build minisgl/__init__.py\n"""The package."""\n')

    def run(cell: str) -> dict[str, Any]:
        report, names = builder.run(cell)
        return {"report": report, **names}

    return run


def text(package: Path, name: str = "core") -> str:
    return (package / "minisgl" / f"{name}.py").read_text(encoding="utf-8")


def test_builds_from_nothing_and_then_changes_nothing(package, build):
    build(CORE)
    batch = "#| build minisgl/core.py\n@dataclass\nclass Batch:\n    reqs: list[Req]\n"
    build(batch)
    file = package / "minisgl/core.py"
    before, stamp = file.read_text(encoding="utf-8"), file.stat().st_mtime_ns
    for cell in (CORE, batch, CORE, batch, batch):  # any number of times, in any order
        build(cell)
    assert file.read_text(encoding="utf-8") == before
    assert file.stat().st_mtime_ns == stamp
    assert before.count("class Req") == before.count("class Batch") == 1


def test_a_second_kernel_finds_the_tree_complete(package, build):
    build(CORE)
    stamp = (package / "minisgl/core.py").stat().st_mtime_ns
    for name in [n for n in sys.modules if n.startswith("minisgl")]:
        del sys.modules[name]
    _, names = Builder(package).run(CORE)
    assert names["Req"] is sys.modules["minisgl.core"].Req
    assert (package / "minisgl/core.py").stat().st_mtime_ns == stamp


def test_layout_is_what_ruff_would_write(package, build):
    build(CORE)
    assert text(package) == (
        '"""Core."""\n\nfrom __future__ import annotations\n\n'
        "from dataclasses import dataclass\nfrom typing import TYPE_CHECKING\n\nimport torch\n\n"
        "if TYPE_CHECKING:\n    from minisgl.later import Handle\n\n\n"
        "# Identity, not equality.\n@dataclass(eq=False)\nclass Req:\n    handle: Handle\n"
    )


def test_an_edit_changes_just_that_definition_in_file_and_notebook(package, build):
    build(CORE + "\n\ndef tail():\n    return 0\n")
    build("#| build minisgl/core.py\nLIMIT = 1\nWIDTH = 2\n")
    old = sys.modules["minisgl.core"]
    tail = old.tail
    given = build("#| build minisgl/core.py\ndef Req():\n    return 'edited'\n")
    assert given["Req"] is sys.modules["minisgl.core"].Req
    assert given["Req"]() == "edited"
    assert sys.modules["minisgl.core"] is old and old.tail is tail
    after = text(package)
    assert "Identity" not in after and "class Req" not in after
    assert after.index("def Req") < after.index("def tail") < after.index("LIMIT = 1\nWIDTH = 2\n")
    build("#| build minisgl/core.py\nWIDTH = 3\n")
    assert "LIMIT = 1\nWIDTH = 3\n" in text(package)


def test_growing_a_module_keeps_existing_instances_valid(build):
    req = build(CORE)["Req"](None)
    build("#| build minisgl/core.py\nclass Batch:\n    pass\n")
    assert isinstance(req, sys.modules["minisgl.core"].Req)


def test_names_are_the_packages_and_imports_come_along(build):
    given = build(CORE)
    import torch

    import minisgl.core

    assert given["Req"] is minisgl.core.Req
    assert given["torch"] is torch
    assert "Handle" not in given


def test_a_redefinition_reaches_all_that_hold_the_old_object(build):
    build(CORE)
    user = (
        "#| build minisgl/user.py\nfrom minisgl.core import Req\n\ndef make():\n    return Req()\n"
    )
    build(user + "\n\nclass Special(Req):\n    pass\n")
    special = sys.modules["minisgl.user"].Special
    found = build(
        "#| build minisgl/core.py\nclass Req:\n    kind = 'new'\n\n\nclass Own(Req):\n    pass\n"
    )
    assert sys.modules["minisgl.user"].make().kind == special.kind == "new"
    newer = build("#| build minisgl/core.py\nclass Req:\n    kind = 'newer'\n")
    assert found["Own"].kind == special.kind == "newer" and issubclass(found["Own"], newer["Req"])
    assert "restart" not in newer["report"]


def test_a_class_that_cannot_get_the_new_base_is_named(build):
    base, own = "class Base:\n    __slots__ = ()\n", "class Own(Base):\n    __slots__ = ()\n"
    build(f"#| build minisgl/core.py\n{base}\n\n{own}")
    report = build("#| build minisgl/core.py\nclass Base:\n    __slots__ = ('a',)\n")["report"]
    assert "minisgl.core.Own still derives from the previous Base: restart the kernel" in report


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("def broken(:\n    pass", SyntaxError),
        ("X = 1 / 0", ZeroDivisionError),
        ("import minisgl.does_not_exist", ModuleNotFoundError),
        ("def f(x=undefined_name):\n    pass", NameError),
        ("class Req(Missing):\n    pass", NameError),
        ("print('now')", BuildError),
        ("for i in range(3):\n    pass", BuildError),
        ("Req.x = 1", BuildError),
        ("from minisgl.core import *", BuildError),
        ("from .core import Req", BuildError),
        ("import os  # a comment", BuildError),
        ("a = 1; b = 2", BuildError),
        ("a = 1\ndef g():\n    pass\na = 2", BuildError),
        ("def g():\n    pass\n\n# nothing follows", BuildError),
    ],
)
def test_nothing_is_lost_by_a_bad_cell(package, build, cell, error):
    req = build(CORE)["Req"]
    before = text(package)
    names = set(vars(sys.modules["minisgl.core"]))
    with pytest.raises(error):
        build(f"#| build minisgl/core.py\n{cell}\n")
    with pytest.raises(error):
        build(f"#| build minisgl/fresh.py\nfrom minisgl.core import Req\n{cell}\n")
    assert text(package) == before
    assert not (package / "minisgl/fresh.py").exists()
    assert sys.modules["minisgl.core"].Req is req
    assert set(vars(sys.modules["minisgl.core"])) == names
    assert "minisgl.fresh" not in sys.modules
    build("#| build minisgl/fresh.py\nFINE = 1\n")
    assert not list(package.rglob("*.tmp"))


def test_a_redefinition_that_breaks_the_rest_of_the_file_is_refused(package, build):
    build("#| build minisgl/core.py\ndef size():\n    return 4\n\n\nLIMIT = 8 // size()\n")
    before = text(package)
    with pytest.raises(ZeroDivisionError):
        build("#| build minisgl/core.py\ndef size():\n    return 0\n")
    assert text(package) == before
    assert sys.modules["minisgl.core"].size() == 4


def test_a_syntax_error_names_the_line_of_the_cell(build):
    with pytest.raises(SyntaxError) as caught:
        build("#| build minisgl/core.py\n\ndef fine():\n    pass\n\ndef broken(:\n    pass\n")
    assert caught.value.lineno == 6


def test_a_file_broken_by_hand_is_left_alone_until_its_cell_mends_it(package, build):
    build(CORE)
    file = package / "minisgl/core.py"
    file.write_text("def broken(:\n", encoding="utf-8")
    with pytest.raises(SyntaxError):
        build("#| build minisgl/core.py\nX = 1\n")
    assert text(package) == "def broken(:\n"


@pytest.mark.parametrize(
    "path",
    ["../x.py", "minisgl/../x.py", "/tmp/x.py", "other/x.py", "minisgl.py", "minisgl/x.txt"]
    + ["minisgl\\x.py", "minisgl/a b.py", "minisgl/./../../x.py", "C:/minisgl/x.py", "course/x.py"],
)
def test_only_paths_inside_the_package(package, build, path):
    with pytest.raises(BuildError, match="inside minisgl/ only"):
        build(f"#| build {path}\nX = 1\n")
    assert not (package / "x.py").exists() and not (package.parent / "x.py").exists()


def test_links_out_are_refused(package, build, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "there.py").write_text("KEPT = 1\n", encoding="utf-8")
    (package / "minisgl/linked").symlink_to(outside)
    (package / "minisgl/there.py").symlink_to(outside / "there.py")
    for path in ("minisgl/linked/x.py", "minisgl/there.py"):
        with pytest.raises(BuildError, match="link out"):
            build(f"#| build {path}\nX = 1\n")
    assert (outside / "there.py").read_text(encoding="utf-8") == "KEPT = 1\n"
    assert not (outside / "x.py").exists()


def test_several_files_and_packages_in_any_order(package, build):
    build("#| build minisgl/kv/base.py\nclass Handle:\n    pass\n")
    given = build("#| build minisgl/kv/__init__.py\nfrom minisgl.kv.base import Handle\n")
    import minisgl.kv

    assert minisgl.kv.Handle is given["Handle"] is minisgl.kv.base.Handle
    assert minisgl.kv.__file__ == str(package / "minisgl/kv/__init__.py")


def test_a_missing_module_is_named_with_its_chapter(package, build):
    folder = package / "notebooks"
    folder.mkdir()
    (folder / "07_later.ipynb").write_text('"#| build minisgl/later.py"', encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match=r"minisgl.later is not built yet.*07_later"):
        build("#| build minisgl/core.py\nimport minisgl.later\n")


def test_an_installed_minisgl_is_never_used_instead(package):
    with pytest.raises(ModuleNotFoundError, match="not built yet"):
        __import__("minisgl.core")


def test_decorators_overloads_constants_and_guarded_imports(package, build):
    build(
        "#| build minisgl/core.py\n"
        "from functools import cache\nfrom typing import overload\n\n"
        "try:\n    import flashinfer\nexcept ImportError:\n    flashinfer = None\n\n"
        "A, B = 1, 2\nC: int = 3\n\n"
        "@overload\ndef f(x: int) -> int: ...\n@overload\ndef f(x: str) -> str: ...\n"
        "def f(x):\n    return x\n\n\n@cache\n# between\ndef g():\n    return 'é→ü'\n"
    )
    first = text(package)
    build("#| build minisgl/core.py\n@cache\ndef g():\n    return 'ñ'\n")
    assert text(package) == first.replace("# between\n", "").replace("é→ü", "ñ")
    with pytest.raises(BuildError, match="assigned together with B"):
        build("#| build minisgl/core.py\nA = 5\n")


def test_a_definition_moved_between_cells_stays_single(package, build):
    build(CORE)
    build("#| build minisgl/core.py\ndef helper():\n    pass\n")
    moved = "#| build minisgl/core.py\ndef helper():\n    pass\n\n\nclass Req:\n    pass\n"
    build(moved)
    assert text(package).count("class Req") == text(package).count("def helper") == 1


def test_windows_line_ends(package, build):
    build(CORE.replace("\n", "\r\n"))
    assert b"\r" not in (package / "minisgl/core.py").read_bytes()
    same = text(package)
    (package / "minisgl/core.py").write_bytes(same.replace("\n", "\r\n").encode())
    build(CORE)
    assert text(package) == same


def test_type_checking_blocks_merge_and_yield_to_real_imports(package, build):
    build(CORE)
    build(
        "#| build minisgl/core.py\nif TYPE_CHECKING:\n    from minisgl.other import Other\n\n"
        "def f(x: Other) -> Other:\n    return x\n"
    )
    imports = "    from minisgl.later import Handle\n    from minisgl.other import Other"
    assert f"if TYPE_CHECKING:\n{imports}\n" in text(package)
    build("#| build minisgl/other.py\nclass Other:\n    pass\n")
    build(
        "#| build minisgl/core.py\nfrom minisgl.other import Other\n\ndef g():\n    return Other\n"
    )
    assert text(package).count("import Other") == 1


def test_the_report_is_the_same_on_an_empty_and_on_a_complete_tree(build):
    assert build(CORE)["report"] == build(CORE)["report"] == "minisgl/core.py: Req (4 lines)"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file.ipynb"
    write_whole(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new, up to \udc80 which UTF-8 cannot hold\n")
    assert path.read_bytes() == b"old\n"
    assert [p.name for p in path.parent.iterdir()] == ["file.ipynb"]


# --- A class over several cells -------------------------------------------------------------------

CACHE = '''\
#| build minisgl/cache.py
"""Cache."""

from dataclasses import dataclass

class Base:
    def size(self):
        return 1

# Pages.
@dataclass
class Cache(Base):
    """A cache."""

    pages: int
    LIMIT = 3

    def size(self):
        return super().size() + 1

    def free(self):
        return self.pages
'''
MATCH = """\
#| build minisgl/cache.py
from functools import cached_property

class Cache(Cache):
    # The longest prefix.
    def match(self, most=LIMIT):
        return __class__, super().size(), self.__own(), most

    def __own(self):
        return 7

    @property
    def half(self):
        return self.pages / 2

    @half.setter
    def half(self, value):
        self.pages = 2 * value

    @cached_property
    def once(self):
        return [self.pages]

    @classmethod
    def make(cls):
        return cls(4)

    KIND = "pages"
"""


def live(module: str = "cache") -> Any:
    return sys.modules[f"minisgl.{module}"]


def test_a_cell_goes_on_with_a_class_and_instances_see_it(package, build):
    given = build(CACHE)
    cache, cls = given["Cache"](6), given["Cache"]
    methods = MATCH.partition("    KIND")[0]
    given = build(methods)
    assert given["report"] == "minisgl/cache.py: Cache.match, __own, half, once, make (22 lines)"
    assert given["Cache"] is live().Cache is cls
    assert cache.match() == (cls, 1, 7, 3) and cls.match.__qualname__ == "Cache.match"
    assert cls.match.__module__ == "minisgl.cache"
    assert cache.half == 3 and cache.once is cache.once and isinstance(cls.make(), cls)
    cache.half = 1
    assert cache.pages == 2
    code = text(package, "cache")
    assert code.count("class Cache") == 1 and "class Cache(Base):" in code
    free = "    def free(self):\n        return self.pages\n"
    assert f"{free}\n    # The longest prefix.\n    def match(self, most=LIMIT):\n" in code
    for name in [n for n in sys.modules if n.startswith("minisgl")]:
        del sys.modules[name]
    import minisgl.cache

    assert minisgl.cache.Cache.make().match() == (minisgl.cache.Cache, 1, 7, 3)


def test_cells_of_one_class_in_any_order_leave_one_copy(package, build):
    tail = "#| build minisgl/cache.py\nclass Cache(Cache):\n    def last(self):\n        return 1\n"
    for cell in (CACHE, MATCH, tail):
        build(cell)
    file = package / "minisgl/cache.py"
    before, stamp = text(package, "cache"), file.stat().st_mtime_ns
    cls = live().Cache
    for cell in (tail, CACHE, MATCH, MATCH, CACHE, tail):
        build(cell)
    assert text(package, "cache") == before and file.stat().st_mtime_ns == stamp
    assert live().Cache is cls
    file.unlink()
    del sys.modules["minisgl.cache"]
    fresh = Builder(package)
    for cell in (CACHE, tail, MATCH):
        fresh.run(cell)
    once = text(package, "cache")
    assert sorted(once.splitlines()) == sorted(before.splitlines())
    assert once.index("def last") < once.index("def match")


def test_another_kernel_goes_on_and_nothing_moves(package, build):
    build(CACHE)
    build(MATCH)
    file = package / "minisgl/cache.py"
    stamp, before = file.stat().st_mtime_ns, file.read_bytes()
    for name in [n for n in sys.modules if n.startswith("minisgl")]:
        del sys.modules[name]
    later = Builder(package)
    assert later.run(MATCH)[1]["Cache"] is live().Cache
    cls = live().Cache
    later.run(CACHE)
    later.run(MATCH)
    assert (live().Cache, file.stat().st_mtime_ns, file.read_bytes()) == (cls, stamp, before)


def test_editing_a_member_changes_only_that_member(package, build):
    cls = build(CACHE)["Cache"]
    cache = cls(6)
    build(MATCH)
    cache, cls, before = live().Cache(6), live().Cache, dict(vars(live().Cache))
    was = text(package, "cache")
    build(CACHE.replace("return self.pages", "return -self.pages"))
    assert text(package, "cache") == was.replace("return self.pages\n", "return -self.pages\n")
    assert live().Cache is cls and cache.free() == -6
    assert {n for n, v in vars(cls).items() if before.get(n) is not v} <= {"free"}
    build(MATCH.replace("return 7", "return 8"))
    assert cache.match()[2] == 8 and live().Cache is cls


def test_members_that_a_beginning_cell_had_and_has_no_more_go(package, build):
    cls = build(CACHE)["Cache"]
    build(MATCH.partition("    KIND")[0])
    build(CACHE.replace("def free", "def give_back"))
    assert "def free" not in text(package, "cache") and "def match" in text(package, "cache")
    assert live().Cache is cls and not hasattr(cls, "free") and cls(2).give_back() == 2
    build(CACHE)
    build("#| build minisgl/cache.py\nclass Cache(Cache):\n    def free(self):\n        return 0\n")
    moved = CACHE.partition("\n    def free")[0]
    build(moved)
    assert cls(2).free() == 0 and text(package, "cache").count("def free") == 1


def test_a_new_member_stands_after_the_one_before_it_in_its_cell(package, build):
    build(CACHE)
    build(MATCH)
    build(CACHE.replace("LIMIT = 3\n", "LIMIT = 3\n    MORE = 4\n"))
    code = text(package, "cache")
    assert (
        code.index("LIMIT = 3") < code.index("MORE = 4") < code.index("return super().size() + 1")
    )
    build(MATCH.replace("    @property", "    def new(self):\n        return 0\n\n    @property"))
    code = text(package, "cache")
    assert code.index("def __own") < code.index("def new") < code.index("def half")
    first = CACHE.replace("    pages: int", "    first: int = 0\n    pages: int = 0")
    build(first)
    assert '"""A cache."""\n\n    first: int = 0\n    pages: int = 0\n' in text(package, "cache")


def test_a_class_with_another_header_or_field_is_made_anew_with_all_its_members(build):
    cls = build(CACHE)["Cache"]
    build(MATCH.partition("    KIND")[0])
    given = build(CACHE.replace("pages: int", "pages: int = 9"))
    assert given["Cache"] is not cls and given["Cache"]().match()[1:] == (1, 7, 3)
    assert given["Cache"]().free() == 9
    cls = given["Cache"]
    assert build(MATCH)["Cache"].KIND == "pages" and live().Cache is not cls


@pytest.mark.parametrize(
    "member",
    [
        "def __post_init__(self):\n        self.pages = 11",
        "__len__ = free",
        "class In:\n        x = 1",
    ],
)
def test_what_a_class_needs_when_it_is_made_makes_it_anew(build, member):
    cls = build(CACHE)["Cache"]
    given = build(f"#| build minisgl/cache.py\nclass Cache(Cache):\n    {member}\n")
    assert given["Cache"] is not cls
    assert "__post_init__" not in member or given["Cache"](1).pages == 11
    if "__len__" in member:  # a name that another member reads
        build(CACHE.replace("return self.pages", "return 5"))
        assert len(live().Cache(1)) == 5


def test_a_registry_has_the_class_that_the_module_has(build):
    enter = "def enter(cls):\n    TABLE[0] = cls\n    return cls\n"
    build(f"#| build minisgl/table.py\nTABLE = {{}}\n\n\n{enter}")
    begins = "from minisgl.table import enter\n\n@enter\nclass Own:\n    a = 1\n"
    build(f"#| build minisgl/cache.py\n{begins}")
    build("#| build minisgl/cache.py\nclass Own(Own):\n    def f(self):\n        return 1\n")
    assert live("table").TABLE[0] is live().Own and live().Own().f() == 1


def test_an_abstract_method_is_filled_in_by_a_later_cell(build):
    build(
        "#| build minisgl/cache.py\nfrom abc import ABC, abstractmethod\n\nclass Base(ABC):\n"
        "    @abstractmethod\n    def f(self): ...\n\n\nclass Own(Base):\n    pass\n"
    )
    with pytest.raises(TypeError):
        live().Own()
    build("#| build minisgl/cache.py\nclass Own(Own):\n    def f(self):\n        return 1\n")
    assert live().Own().f() == 1


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (
            "class Nobody(Nobody):\n    def f(self): ...",
            "no class Nobody. Run the cell that begins",
        ),
        (
            "class Cache(Cache):\n    lent: int = 0",
            r"Fields \(`lent: …`\) are made when the class is",
        ),
        ("class Cache(Cache, Base):\n    def f(self): ...", "other bases, keywords and decorators"),
        ("@dataclass\nclass Cache(Cache):\n    def f(self): ...", "other bases, keywords and dec"),
        ('class Cache(Cache):\n    """Again."""', "docstring belongs in the cell that begins it"),
        ("# why\nclass Cache(Cache):\n    def f(self): ...", "comment beside `class Cache"),
        ("class helper(helper):\n    def f(self): ...", "helper is none here"),
        ("class dataclass(dataclass):\n    def f(self): ...", "imported from dataclasses"),
        ("class Cache(Cache):\n  def f(self): ...", "indented alike in each cell"),
        ("class Line(Line):\n    def f(self): ...", "on lines of its own"),
        (
            "class Cache(Cache):\n    a = 1\n    def f(self): ...\n    a = 2",
            "Cache.a is defined twice",
        ),
        (
            "class Cache(Cache):\n    def f(self): ...\nclass Cache(Cache):\n    def g(self): ...",
            "Cache is defined twice",
        ),
    ],
)
def test_wrong_uses_say_what_to_do(package, build, cell, says):
    build(CACHE + "\n\ndef helper(): ...\nclass Line: pass\n")
    before, attributes = text(package, "cache"), dict(vars(live().Cache))
    with pytest.raises(BuildError, match=says):
        build(f"#| build minisgl/cache.py\n{cell}\n")
    assert text(package, "cache") == before and dict(vars(live().Cache)) == attributes


@pytest.mark.parametrize(("default", "last"), [("undefined", "1"), ("1 / 0", "1"), ("1", "once()")])
def test_a_failing_cell_leaves_file_and_class_as_they_were(package, build, default, last):
    build(
        CACHE + "\n\nCALLS = []\n\n\ndef once():\n    CALLS.append(1)\n    assert len(CALLS) < 2\n"
    )
    live().once()  # so that it fails after the try-out, in the live module only
    cls = live().Cache
    before, attributes = text(package, "cache"), dict(vars(cls))
    cell = (
        "#| build minisgl/cache.py\nclass Cache(Cache):\n    def free(self):\n        return 0\n\n"
        f"    def f(self, x={default}):\n        return 1\n\n\nY = {last}\n"
    )
    with pytest.raises((AssertionError, NameError, ZeroDivisionError)) as caught:
        build(cell)
    lines = [entry.lineno + 1 for entry in caught.traceback if "<cell of" in str(entry.path)]
    assert lines == [2, 6] if default != "1" else lines[0] == 10
    assert text(package, "cache") == before and live().Cache is cls
    assert dict(vars(cls)) == attributes and not hasattr(live(), "Y")


def test_a_traceback_has_the_lines_of_cell_and_file(build):
    import traceback

    build(CACHE)
    build(MATCH.replace("return 7", "return 7 / 0"))
    for edited in ("pages: int", "pages: int = 1"):
        build(CACHE.replace("pages: int", edited))
        with pytest.raises(ZeroDivisionError) as caught:
            live().Cache(1).match()
        frames = traceback.extract_tb(caught.value.__traceback__)[1:]
        assert [frame.line for frame in frames] == [
            "return __class__, super().size(), self.__own(), most",
            "return 7 / 0",
        ]
