"""Questions about Python's syntax trees that several rooms ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Part:
    """A function or method in a text: its dotted name, and its first and last line (1-based)."""

    name: str
    first: int  # decorators included
    last: int
    node: Function

    def text(self, lines: list[str]) -> str:
        """Its source out of the text's lines."""
        return "\n".join(lines[self.first - 1 : self.last])


def parts(text: str) -> list[Part]:
    """The functions at the top level of a text and those in its classes, in order."""
    return list(_parts(ast.parse(text).body, ""))


def _parts(body: list[ast.stmt], prefix: str) -> Iterator[Part]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _parts(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, Function):
            yield Part(prefix + node.name, first_line(node), node.end_lineno or node.lineno, node)


def first_line(node: ast.stmt) -> int:
    """The line (1-based) on which a statement begins, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def work(node: Function) -> list[ast.stmt]:
    """The statements of a function after its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def is_new_field(node: ast.AST) -> bool:
    """Whether it is `self.x` on the left of an assignment."""
    if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def stores(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def header_end(node: Definition, lines: list[str]) -> int:
    """The line (1-based) that ends in the colon of `def f(…):` or `class X(…):`."""
    inside: list[ast.AST | None] = [*getattr(node, "type_params", [])]
    if isinstance(node, ast.ClassDef):
        inside += [*node.bases, *node.keywords]
    else:
        a = node.args
        inside += [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        inside += [*a.defaults, *a.kw_defaults, node.returns]
    line = max([node.lineno, *(getattr(part, "end_lineno", None) or 0 for part in inside)])
    while line < node.body[0].lineno and not lines[line - 1].split("#")[0].rstrip().endswith(":"):
        line += 1
    return line


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_type_checking(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        and not node.orelse
    )


def binds(node: ast.stmt) -> set[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    inside = {  # a comprehension's own names
        id(name)
        for inner in ast.walk(node)
        if isinstance(inner, ast.comprehension)
        for name in ast.walk(inner.target)
    }
    return {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and stores(inner) and id(inner) not in inside
    }
