"""Running a check and saying how it went: right, not started, or wrong and why."""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from course.building.source import PACKAGE
from course.judging.program import chapter_of_checks, defined_in_cells
from course.workbooks.stubs import MARK
from course.workbooks.unwritten import cause

RIGHT, WRONG, OPEN = "right", "wrong", "not started"


@dataclass(frozen=True)
class Verdict:
    """How one check went: `kind` is right, wrong or not started; `lines` say why."""

    name: str
    kind: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        first, *more = self.lines or ("",)
        return "\n".join([f"{self.kind:<12} {self.name}: {first}", *(f"{'':13}{m}" for m in more)])


def verdict(check: Callable[..., object], *attempt: Any) -> Verdict:
    """Run a check and say how it went; raises nothing but what stops a program.

    A check that passes only because it swallowed the error of a stub counts as not started.
    """
    name = check.__name__
    with stubs_called() as called:
        try:
            check(*attempt)
        except AssertionError as wrong:
            failed = wrong
        except Exception as error:
            if isinstance(error, NotImplementedError) and _is_stubs(error):
                text = str(error) or "replace the line that raises"
                return Verdict(name, OPEN, (text.removeprefix(MARK) + _needed(text),))
            open_piece = _unwritten(error, called)
            if open_piece:
                return Verdict(name, OPEN, (open_piece + _needed(MARK),))
            too_early = _defined_later(error, name)
            if too_early:
                return Verdict(name, OPEN, (f"run the cell that defines `{too_early}` first",))
            lines = [f"it raised {type(error).__name__}: {error}", *_where(error), *_at(error)]
            return Verdict(name, WRONG, tuple(lines))
        else:
            if called:
                return Verdict(name, OPEN, (called[0] + _needed(MARK),))
            return Verdict(name, RIGHT, (summary(check),))
    if called:
        return Verdict(name, OPEN, (called[0] + _needed(MARK),))
    return Verdict(name, WRONG, tuple([*_what(failed), *_at(failed)]))


def _is_stubs(error: NotImplementedError) -> bool:
    """Whether a stub raised it: one of ours, or an exercise's. PyTorch raises such errors, too."""
    if str(error).startswith(MARK):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (last.line or "").startswith("raise NotImplementedError") and not in_package(last)


def in_package(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of `minisgl`, as a file or as a cell that builds a part of it."""
    is_cell = frame.filename.startswith(f"<cell of {PACKAGE}")
    return is_cell or PACKAGE in Path(frame.filename).parts


def _needed(text: str) -> str:
    return " is not written yet" if text.startswith(MARK) else ""


def _unwritten(error: BaseException, called: list[str]) -> str | None:
    """What is missing, if an error comes from something that is not built or not written."""
    if called:
        return called[0]
    return cause(error)


def _defined_later(error: Exception, check: str) -> str | None:
    """The name that is missing, if a cell of the check's chapter defines it and has not run yet."""
    if not isinstance(error, NameError) or isinstance(error, UnboundLocalError):
        return None
    if in_package(traceback.extract_tb(error.__traceback__)[-1]):  # an import is missing there
        return None
    chapter = chapter_of_checks([check])
    return error.name if chapter and error.name in defined_in_cells(chapter) else None


@contextmanager
def stubs_called() -> Iterator[list[str]]:
    """Collects the names of the stubs that are called inside, whatever becomes of their errors."""
    called: list[str] = []
    marks: dict[CodeType, str | None] = {}

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in marks:
            found = [c for c in code.co_consts if isinstance(c, str) and c.startswith(MARK)]
            marks[code] = found[0].removeprefix(MARK) if found else None
        name = marks[code]
        if name is not None and name not in called:
            called.append(name)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield called
    finally:
        sys.setprofile(before)


def summary(function: Callable[..., object]) -> str:
    """What a check promises: the first line of its docstring."""
    return (function.__doc__ or "passed").strip().splitlines()[0]


def _where(error: BaseException) -> list[str]:
    """The line of the package, or else of the notebook, that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if in_package(f)] or frames
    frame = ours[-1]
    return [f"in {frame.name}, line {frame.lineno}: {frame.line}"]


def _what(error: AssertionError) -> list[str]:
    """What a failed assert says: its message, and what came and what was expected."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return [str(error) or "a check failed"]
    found = _statement(trace.tb_frame, trace.tb_lineno, ast.Assert)
    node = found[-1] if found else None
    said = str(error)
    if not isinstance(node, ast.Assert):
        return [said or _line(trace.tb_frame, trace.tb_lineno)]
    lines = _compared(node.test, trace.tb_frame)
    if said and len(said.splitlines()) == 1 and any(_same(said, line) for line in lines):
        lines = []
    return [*(said.splitlines() or [f"this should hold: {_short(ast.unparse(node.test))}"]), *lines]


def _same(said: str, line: str) -> bool:
    """Whether a message already says what a line would say."""
    value = line.split(" = ", 1)[-1]
    return len(value) > 1 and value in said


def _compared(test: ast.expr, frame: FrameType) -> list[str]:
    """The values on both sides of the part of a condition that is false."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            ok, value = _evaluate(part, frame)
            if ok and not value:
                return _compared(part, frame) or [
                    f"this part is false: {_short(ast.unparse(part))}"
                ]
        return []
    if isinstance(test, ast.Compare) and len(test.ops) > 1:  # a == b == c: the pair that differs
        chain = [test.left, *test.comparators]
        for left, op, right in zip(chain, test.ops, chain[1:], strict=False):
            pair = ast.Compare(left, [op], [right])
            ok, value = _evaluate(pair, frame)
            if ok and not value:
                return _compared(pair, frame)
        return []
    if isinstance(test, ast.Compare) and not isinstance(test.ops[0], ast.NotEq):
        sides = test.left, test.comparators[0]
        (ok_a, a), (ok_b, b) = (_evaluate(side, frame) for side in sides)
        if not (ok_a and ok_b):
            return []
        if isinstance(test.ops[0], ast.Eq) and _equal(a, b):
            return []  # asking again gave another answer; say nothing rather than something wrong
        expected = "wanted" if isinstance(test.ops[0], ast.Eq | ast.Is) else "against"
        names = ["came", expected]
        left_is_wanted = isinstance(sides[0], ast.Name) and sides[0].id in {"want", "expected"}
        if left_is_wanted or isinstance(sides[0], ast.Constant):
            names.reverse()
        return [
            f"{name + ':':<8} {_short(ast.unparse(side))} = {_short(repr(value))}"
            if not isinstance(side, ast.Constant | ast.List | ast.Tuple)
            else f"{name + ':':<8} {_short(repr(value))}"
            for name, side, value in zip(names, sides, (a, b), strict=True)
        ]
    return []


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False


def _evaluate(node: ast.expr, frame: FrameType) -> tuple[bool, Any]:
    """Whether an expression could be worked out once more in its frame, and its value."""
    code = compile(ast.fix_missing_locations(ast.Expression(node)), "<check>", "eval")
    try:
        return True, eval(code, {**frame.f_globals, **frame.f_locals})
    except Exception:
        return False, None


def _statement(frame: FrameType, line: int, *kinds: type) -> list[ast.stmt]:
    """The statements of some kinds that enclose a line of a frame's file, outermost first."""
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        and isinstance(node, ast.stmt)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]


def _line(frame: FrameType, line: int) -> str:
    text = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
    return text or "a check failed"


def _at(error: BaseException) -> list[str]:
    """The values of the loops that the check was in, which is the smallest input that fails."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not frame.f_code.co_name.startswith("check_"):
            continue
        names: dict[str, None] = {}
        start = frame.f_code.co_firstlineno
        for loop in _statement(frame, line, ast.For):
            if isinstance(loop, ast.For) and loop.lineno > start:
                names |= {n.id: None for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        shown = []
        for name in names:
            value = frame.f_locals.get(name)
            text = repr(value)
            if isinstance(value, int | float | str | tuple | list | dict) and len(text) <= 60:
                shown.append(f"{name} = {text}")
        return [f"at {', '.join(shown)}"] if shown else []
    return []


def _short(text: str) -> str:
    return textwrap.shorten(" ".join(text.split()), 160, placeholder=" …")
