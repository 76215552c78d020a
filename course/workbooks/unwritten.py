"""What a process lacks because nobody has written it yet."""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import Any

from course.building.roots import reference_root
from course.building.source import PACKAGE, NotBegun
from course.workbooks import stubs
from course.workbooks.pieces import Written, code_cells, dotted, running_chapter, to_write


class Unwritten:
    """What a process lacks because nobody has written it yet."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # a name that could not be made → what was not written

    def cause(self, error: BaseException | None) -> str | None:
        """What is not written, if that is why the error came; None for any other error."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            found = self._cause(error)
            if found is not None:
                return found
            error = error.__cause__ or error.__context__
        return None

    def _cause(self, error: BaseException) -> str | None:
        text = str(error)
        if isinstance(error, NotImplementedError) and text.startswith(stubs.MARK):
            return text.removeprefix(stubs.MARK)
        if isinstance(error, ModuleNotFoundError):
            is_ours = (error.name or "").split(".")[0] == PACKAGE
            return error.name if is_ours else None
        if isinstance(error, ImportError):
            found = re.match(rf"cannot import name '(\w+)' from '?{PACKAGE}[\w.]*", text)
            return found[1] if found else None
        if isinstance(error, NotBegun):
            return error.name
        if isinstance(error, NameError) and error.name:
            return self._names.get(error.name) or (error.name if error.name in homes() else None)
        if isinstance(error, AttributeError):
            found = re.match(rf"module '{PACKAGE}[\w.]*' has no attribute '(\w+)'", text)
            return found[1] if found else _unwritten_member(error)
        return None

    def forget(self, namespace: dict[str, Any], names: list[str], cause: str) -> None:
        """Drop the values of names that should have become something else and could not.

        Nothing that runs later then goes on with what an earlier cell called by the same name. A
        module or function stays: it may be right, though a file that is being built lacks it.
        """
        for name in names:
            self._names[name] = cause
            value = namespace.get(name)
            if not (isinstance(value, ModuleType) or callable(value)):
                namespace.pop(name, None)


@functools.cache
def homes() -> dict[str, Written]:
    """Where the book writes each name: in the running chapter, else in a file, else in a cell."""
    homes: dict[str, Written] = {}
    root, running = reference_root(), running_chapter()

    def in_turn(found: list[Written]) -> list[Written]:
        return sorted(found, key=lambda w: (w.chapter != running, not w.path))

    builds = [
        Written(c.chapter, c.path, name, heading, c)
        for c, heading in code_cells(root)
        if c.path
        for name in ("", *c.parse().definitions)
    ]
    written = in_turn(to_write(root))
    for item in written:
        homes.setdefault(item.name, item)
    begin = {(item.cell.where, item.name) for item in builds}
    for item in written:  # a class is where a cell begins it, though others go on with it
        if (item.cell.where, top := item.name.split(".")[0]) in begin:
            homes.setdefault(top, item)
    for item in in_turn(builds):
        homes.setdefault(item.name, item)
        module = dotted(item.path)
        while module:
            homes.setdefault(module, item)
            module = module.rpartition(".")[0]  # a folder that is not there is missed by its name
    return homes


def _unwritten_member(error: AttributeError) -> str | None:
    """The method that an object lacks, if a cell that the book has would have added it."""
    cls = error.obj if isinstance(error.obj, type) else type(error.obj)
    for base in cls.__mro__ if cls.__module__.split(".")[0] == PACKAGE else ():
        name = f"{base.__name__}.{error.name}"
        home = homes().get(name)
        if home is not None and home.cell.parse().definitions[name].is_def:
            return name
    return None


_current: Unwritten | None = None


def begin() -> Unwritten:
    """What is unwritten for this process from now on, which runs a reader's package."""
    global _current
    _current = Unwritten()
    return _current


def cause(error: BaseException) -> str | None:
    """What is not written, if that is why the error came, and this process runs such a package."""
    return _current.cause(error) if _current is not None else None
