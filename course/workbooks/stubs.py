"""From a definition to its stub and back, as text: what a workbook leaves for the reader to write.

A *stub* keeps the signature, annotations, decorators and docstring of a function, and has one line
of hint and one that raises in place of the body. Everything that is no body stays: class fields,
constants, imports, comments above definitions. Nothing here runs any code.
"""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Callable

from course.building.source import WIDTH, directive
from course.building.syntax import Function, header_end, is_new_field, parts, stores, work

MARK = "not written yet: "  # how the message of a stub begins
GIVEN = {"__repr__", "__str__"}  # methods that nobody learns from: the workbook keeps their bodies


def is_stub(node: Function) -> bool:
    """Whether the function is as a workbook left it."""
    body = work(node)
    if len(body) != 1 or not isinstance(body[0], ast.Raise):
        return False
    raised = body[0].exc
    return (
        isinstance(raised, ast.Call)
        and len(raised.args) == 1
        and isinstance(raised.args[0], ast.Constant)
        and str(raised.args[0].value).startswith(MARK)
    )


def is_open(node: Function) -> bool:
    """Whether there is anything to write: an abstract method, say, has no body to begin with."""
    body = work(node)
    if not body or node.name in GIVEN:
        return False
    if len(body) > 1:
        return True
    if isinstance(body[0], ast.Raise):
        return "NotImplementedError" not in ast.unparse(body[0])
    is_dots = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return not (is_dots or isinstance(body[0], ast.Pass))


def written(text: str) -> dict[str, bool]:
    """For each function in a text whether it is more than a stub; {} for a text with an error."""
    try:
        return {part.name: not is_stub(part.node) for part in parts(text)}
    except SyntaxError:
        return {}


def stub(
    text: str,
    choose: Callable[[str], bool] = lambda name: True,
    hints: dict[str, str] | None = None,
) -> tuple[str, list[str]]:
    """The text with a stub for each function that `choose` accepts, and the names of those.

    A hint is worked out from the body; `hints` holds more of them by name, which come first.
    """
    lines = text.split("\n")
    stubbed = []
    for part in reversed(parts(text)):
        if not (is_open(part.node) and choose(part.name)):
            continue
        own = (hints or {}).get(part.name)
        hint = [f"Hint: {own}"] if own else []
        hint.append(("" if own else "Hint: ") + _hint(part.node))
        first = part.node.body[0]
        indent = " " * (first.col_offset if first.lineno > part.node.lineno else 4)
        end = header_end(part.node, lines)
        if first.lineno == end:  # `def f(): return 1`
            lines[end - 1] = lines[end - 1][: first.col_offset].rstrip()
            indent = " " * (part.node.col_offset + 4)
        if ast.get_docstring(part.node, clean=False) is not None:
            end = first.end_lineno or first.lineno
        raising = f'{indent}raise NotImplementedError("{MARK}{part.name}")'
        lines[end : part.last] = [*_comments(hint, indent), raising]
        stubbed.append(part.name)
    return "\n".join(lines), stubbed[::-1]


def _comments(texts: list[str], indent: str) -> list[str]:
    """Each text as a comment of at most three lines."""
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}#     ",
            break_long_words=False,
            max_lines=3,
            placeholder=" …",
        )
    ]


def _hint(node: Function) -> str:
    """What can be said of a body: how long it is, what it raises, what it sets and calls."""
    body = work(node)
    count = (body[-1].end_lineno or 0) - body[0].lineno + 1
    said = [f"{count} line{'s' if count > 1 else ''}"]
    raised = _raises(body)
    if raised:
        said.append(f"raises {', '.join(raised)}")
    if node.name in {"__init__", "__post_init__"}:
        own = {ast.unparse(n): None for n in ast.walk(node) if is_new_field(n)}
        said += [f"sets {', '.join(own)}"] if own else []
    uses = _uses(node)
    said += [f"uses {', '.join(uses)}"] if uses else []
    return "; ".join(said)


def _raises(body: list[ast.stmt]) -> list[str]:
    """What the statements raise, with the condition where it is short."""
    inside = [inner for statement in body for inner in ast.walk(statement)]
    tests = {
        id(raised): ast.unparse(outer.test)
        for outer in inside
        if isinstance(outer, ast.If)
        for raised in outer.body
    }
    found: dict[str, bool] = {}
    for node in inside:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind, test = ast.unparse(node.exc.func), tests.get(id(node), "")
            is_short = 0 < len(test) <= 60 and ":=" not in test
            found[f"{kind} if `{test}`" if is_short else kind] = is_short
    named = {text.split(" if ")[0] for text, is_short in found.items() if is_short}
    return [text for text, is_short in found.items() if is_short or text not in named]


def _uses(node: Function) -> list[str]:
    """The names from outside that a function uses, but for builtins and what it raises."""
    bound = {name.arg for name in ast.walk(node) if isinstance(name, ast.arg)}
    bound |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and stores(n)}
    bound |= {
        n.name for n in ast.walk(node) if isinstance(n, Function | ast.ExceptHandler) and n.name
    }
    uses: dict[str, None] = {}
    skipped: set[int] = set()
    for inner in (inner for statement in work(node) for inner in ast.walk(statement)):
        if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
            skipped.add(id(inner.exc.func))
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            if inner.value.id not in bound:
                skipped.add(id(inner.value))
                uses[ast.unparse(inner)] = None
        elif isinstance(inner, ast.Name) and id(inner) not in skipped:
            is_known = inner.id in bound or hasattr(builtins, inner.id)
            uses |= {} if is_known else {inner.id: None}
    return list(uses)


def graft(text: str, donor: str, choose: Callable[[str, bool], bool]) -> tuple[str, list[str]]:
    """The text with functions of the same name out of `donor`, and the names that were taken.

    `choose(name, host_is_stub)` says which. Only the function changes hands, from its first
    decorator to its last line; what stands around it is the text's own.
    """
    lines, donor_lines = text.split("\n"), donor.split("\n")
    there = {part.name: part for part in parts(donor)}
    taken = []
    for part in reversed(parts(text)):
        other = there.get(part.name)
        if other is not None and choose(part.name, is_stub(part.node)):
            new = other.text(donor_lines)
            if new != part.text(lines):
                lines[part.first - 1 : part.last] = new.split("\n")
                taken.append(part.name)
    return "\n".join(lines), taken[::-1]


def keep_written(cell: str, file_text: str) -> tuple[str, list[str]]:
    """A build cell in which no stub replaces what the file already has in full, and those names.

    Whoever writes in the file, or catches up, and then runs the cell with the stub, loses nothing.
    """
    if directive(cell) is None or not file_text:
        return cell, []
    done = written(file_text)
    try:
        return graft(cell, file_text, lambda name, is_stub: is_stub and done.get(name, False))
    except SyntaxError:  # the builder reports it
        return cell, []
