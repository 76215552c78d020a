"""A class that is there takes the members of a new version, and stays the object that it was."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from course.building.source import PACKAGE, Piece
from course.building.syntax import Function

# What a class takes from its body only while it is made; and what every body sets.
_MAKING = {"__new__", "__init_subclass__", "__class_getitem__"}
_OF_A_BODY = {"__module__", "__qualname__", "__firstlineno__", "__static_attributes__"}


class Body:
    """`class X(metaclass=Body(cls)):` gives `cls`, which is there, the members of the body."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __prepare__(self, name: str, bases: tuple[type, ...]) -> dict[str, Any]:
        return dict(vars(self.cls))

    def __call__(self, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        cell = namespace.pop("__classcell__", None)
        if cell is not None:  # of `super()` and `__class__` in the functions
            cell.cell_contents = self.cls
        before = dict(vars(self.cls))
        for key, value in namespace.items():
            if key not in _OF_A_BODY and not (key in before and before[key] is value):
                setattr(self.cls, key, value)
                if hasattr(type(value), "__set_name__"):
                    type(value).__set_name__(value, self.cls, key)


def can_stay(old: Piece, new: Piece) -> bool:
    """Whether the class `old` becomes `new` by giving it functions and taking some away."""
    if new.header is None or old.header != new.header:
        return False
    texts = [{member.text for member in piece.members} for piece in (old, new)]
    other = [m for m in (*old.members, *new.members) if not all(m.text in t for t in texts)]
    same = [member for member in new.members if member not in other]
    names = {name for member in other for name in member.names}
    come_or_go = {n for n in attributes(old) ^ attributes(new) if n.endswith("__")}
    assert isinstance(new.nodes[0], ast.ClassDef)
    decorators = [ast.unparse(node).partition("(")[0] for node in new.nodes[0].decorator_list]
    return not (
        any(not isinstance(node, Function) for member in other for node in member.nodes)
        or names & _MAKING
        or come_or_go & {"__eq__", "__hash__"}
        or (come_or_go and decorators)  # a dataclass looks which there are
        or {name.split(".")[-1] for name in decorators} - {"dataclass"}  # who else has the class?
        or names & {name for member in same for node in member.nodes for name in _read(node)}
    )


def attributes(piece: Piece) -> set[str]:
    """The members of a class as its namespace has them: `__private` as `_Class__private`."""
    prefix = f"_{piece.names[0].lstrip('_')}"
    names = {name for member in piece.members for name in member.names}
    return {f"{prefix}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names}


def _read(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a class body reads while the class is made."""
    parts: list[ast.AST | None] = [node]
    if isinstance(node, Function):
        parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    for inner in (inner for part in parts if part for inner in ast.walk(part)):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            yield inner.id


@contextmanager
def classes_restored(values: Iterable[Any]) -> Iterator[None]:
    """Give classes the attributes that they had if building fails."""
    saved = {value: dict(vars(value)) for value in values if isinstance(value, type)}
    try:
        yield
    except BaseException:
        for cls, before in saved.items():
            for name in set(vars(cls)) - set(before):
                delattr(cls, name)
            for name, value in before.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
        raise


def pass_on(module: ModuleType, before: dict[str, Any], pieces: list[Piece]) -> list[str]:
    """Give a redefinition to all that hold the object it replaces; a line for each that can't.

    Names in the package and in the notebook are bound anew, and classes get the new base. Objects
    that exist already stay what they are.
    """
    lines = []
    for name in (name for piece in pieces for name in piece.names):
        old: Any = before.get(name)
        new: Any = vars(module).get(name)
        if old is None or not callable(old) or old is new:
            continue
        for other, loaded in sorted(sys.modules.items()):
            if other.split(".")[0] not in {PACKAGE, "__main__"}:
                continue
            for key, value in list(vars(loaded).items()):
                if value is old:
                    setattr(loaded, key, new)
                elif isinstance(value, type) and old in value.__bases__:
                    try:
                        value.__bases__ = tuple(new if b is old else b for b in value.__bases__)
                    except TypeError:
                        lines.append(
                            f"{other}.{key} still derives from the previous {name}: "
                            "restart the kernel to mend it"
                        )
    return lines
