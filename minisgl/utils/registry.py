"""Things made by name. Official counterpart: `python/minisgl/utils/registry.py`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Generic, TypeVar


def import_optional(module: str) -> ModuleType | None:
    """The module, or None if there is none of that name; errors from inside it pass through.

    There is none of that name, either, if a package that it would lie in is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise


T = TypeVar("T")


class Registry(Generic[T]):
    """A table from a name to what makes the thing of that name.

    `type` says what kind of thing the names stand for; error messages use it. `optional` are
    modules that may register more names: those of them that exist are imported before a name is
    given up, and before the names are listed.
    """

    def __init__(self, type: str, optional: Sequence[str] = ()) -> None:
        self.type = type
        self._optional = tuple(optional)
        self._table: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that enters a function or class under `name`, and returns it as it is.

        The same definition may come again (a cell that runs twice) and replaces the old one.
        Raises ValueError when the name already stands for something else.
        """

        def enter(item: T) -> T:
            if name in self._table and _home(self._table[name]) != _home(item):
                raise ValueError(f"{self.type} {name!r} is already {self._table[name]!r}")
            self._table[name] = item
            return item

        return enter

    def __contains__(self, name: str) -> bool:
        return name in self._table or name in self.supported_names()

    def __getitem__(self, name: str) -> T:
        """What is registered as `name`; ValueError with the list of names if nothing is."""
        self.assert_supported(name)
        return self._table[name]

    def supported_names(self) -> list[str]:
        """Every registered name, in the order of registration."""
        for module in self._optional:
            import_optional(module)
        return list(self._table)

    def assert_supported(self, names: str | Iterable[str]) -> None:
        """Raise ValueError, with the list, for the first of `names` that is not registered."""
        for name in [names] if isinstance(names, str) else names:
            if name not in self:
                known = ", ".join(self.supported_names()) or "none yet"
                raise ValueError(f"unknown {self.type} {name!r}; supported: {known}")


def _home(item: object) -> tuple[object, object]:
    """Where a definition stands, which is how a repeated one is recognized."""
    return getattr(item, "__module__", None), getattr(item, "__qualname__", id(item))
