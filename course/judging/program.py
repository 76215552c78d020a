"""What a chapter's checks are, and what they need: cut out of its notebook.

`program` takes the functions, and the statements that make what these use, and nothing else.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re
import symtable
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course.building import notebooks
from course.building.roots import reference_root
from course.building.source import check_path, directive, module_name
from course.building.syntax import binds, first_line, work
from course.workbooks.pieces import running_chapter

Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Program:
    """What a chapter's checks need, as source with the lines where they stand in the chapter."""

    chapter: str
    text: str
    checks: tuple[str, ...]  # the names that `run_checks` is given, in order
    modules: tuple[str, ...]  # whose names the notebook has by building them


@functools.cache
def program(root: Path, chapter: str) -> Program:
    """The checks of a chapter with what they need."""
    statements: list[tuple[ast.stmt, str]] = []
    checks: dict[str, None] = {}
    modules: dict[str, None] = {}
    for cell in notebooks.read(root, chapter).cells:
        if cell.cell_type != "code" or cell.source.lstrip().startswith(("%", "!")):
            continue
        path = directive(cell.source)
        if path is not None:
            modules[module_name(check_path(path))] = None
            continue
        try:
            body = ast.parse(cell.source).body
        except SyntaxError:  # a reader's, half written
            continue
        for node in body:
            call = _checks_call(node)
            if call is not None:
                checks |= dict.fromkeys(call)
            else:
                lines = cell.source.split("\n")[first_line(node) - 1 : node.end_lineno]
                statements.append((node, "\n".join(lines)))
    kept = _needed(statements, set(checks), _setters([node for node, _ in statements]))
    return Program(chapter, "\n\n\n".join(kept) + "\n", tuple(checks), tuple(modules))


def _checks_call(node: ast.stmt) -> list[str] | None:
    """The arguments of `course.run_checks(...)`, for a statement that is such a call."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return None
    is_run = ast.unparse(node.value.func) == "course.run_checks"
    return [ast.unparse(argument) for argument in node.value.args] if is_run else None


def _called(node: ast.stmt) -> str:
    """The function that a statement calls and does nothing else, such as `table.free`; or ''."""
    call = node.value if isinstance(node, ast.Expr) else None
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""


def _is_setter(function: str) -> bool:
    """Whether a function changes the process, such as `set_tp_info` and `torch.manual_seed`."""
    name = function.split(".")[-1]
    return name.startswith(("set_", "reset_", "manual_seed")) and name != "set_printoptions"


def _setters(nodes: list[ast.stmt]) -> set[str]:
    """The functions of a chapter that do nothing but change the process."""
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and all(_is_setter(_called(inner)) for inner in work(node))
    }


def _needed(
    statements: list[tuple[ast.stmt, str]], wanted: set[str], setters: set[str]
) -> list[str]:
    """The statements that make what is wanted, and what those need, in order."""
    wanted, kept = set(wanted), []
    imported = {n for node, _ in statements if isinstance(node, Import) for n in binds(node)}
    for node, text in reversed(statements):
        if _is_kept(node, wanted, wanted - imported, setters):
            if isinstance(node, ast.For):  # what it makes, and not what it proves or prints
                inner = [(n, ast.unparse(n)) for n in node.body]
                made = "\n".join(_needed(inner, wanted, setters))
                head = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
                text = f"{head}\n{textwrap.indent(made, '    ')}"
            kept.append(text)
            reads = _reads(text)
            if not isinstance(node, ast.AugAssign | ast.If):
                wanted -= binds(node)  # what bound the name before is of no use
            wanted |= reads
    return kept[::-1]


def _is_kept(node: ast.stmt, wanted: set[str], changeable: set[str], setters: set[str]) -> bool:
    if isinstance(node, ast.Expr):
        # A call that changes something: the process, or an object that is wanted.
        function = _called(node)
        root, _, method = function.partition(".")
        return function in setters or _is_setter(function) or bool(method and root in changeable)
    if isinstance(node, ast.If):
        return any(_is_kept(inner, wanted, changeable, setters) for inner in node.body)
    if isinstance(node, ast.For):
        target = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        return bool((binds(node) - target) & wanted)
    if isinstance(node, ast.Assert | ast.With | ast.While | ast.Delete):
        return False
    if isinstance(node, ast.Assign) and not any(isinstance(t, ast.Name) for t in node.targets):
        roots = {ast.unparse(t).split(".")[0].split("[")[0] for t in node.targets}
        if roots & wanted:
            return True
    return bool(binds(node) & wanted)


def _reads(text: str) -> set[str]:
    """The global names that a statement reads, in its functions too."""

    def visit(table: symtable.SymbolTable, top: bool) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from visit(child, False)

    names = visit(symtable.symtable(text, "<statement>", "exec"), True)
    return {name for name in names if not hasattr(builtins, name)}


@functools.cache
def checks_by_chapter() -> dict[str, tuple[str, ...]]:
    """The check functions of each chapter, exercises included, in order."""
    root = reference_root()
    found: dict[str, tuple[str, ...]] = {}
    for chapter in notebooks.chapters(root):
        text = "\n".join(
            c.source
            for c in notebooks.read(root, chapter).cells
            if c.cell_type == "code" and directive(c.source) is None  # the package has check_… too
        )
        found[chapter] = tuple(dict.fromkeys(re.findall(r"^def (check_\w+)\(", text, re.MULTILINE)))
    return found


def chapter_of_checks(names: list[str]) -> str | None:
    """The chapter that defines these checks: the running notebook if it does, else the first."""
    homes = [c for c, checks in checks_by_chapter().items() if set(names) <= set(checks)]
    running = running_chapter()
    return running if running in homes else next(iter(homes), None)


@functools.cache
def defined_in_cells(chapter: str) -> frozenset[str]:
    """The names that the ordinary cells of a chapter define at their top level."""
    names: set[str] = set()
    for cell in notebooks.read(reference_root(), chapter).cells:
        if cell.cell_type == "code" and directive(cell.source) is None:
            with contextlib.suppress(SyntaxError):  # a magic
                names.update(*map(binds, ast.parse(cell.source).body))
    return frozenset(names)
