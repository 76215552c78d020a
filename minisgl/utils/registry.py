"""Things made by name. Official counterpart: `python/minisgl/utils/registry.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from a name to what makes the thing of that name.

    `type` says what kind of thing the names stand for; error messages use it.
    """

    def __init__(self, type: str) -> None:
        self.type = type
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

    def __getitem__(self, name: str) -> T:
        """What is registered as `name`; ValueError with the list of names if nothing is."""
        self.assert_supported(name)
        return self._table[name]

    def supported_names(self) -> list[str]:
        """Every registered name, in the order of registration."""
        return list(self._table)

    def assert_supported(self, names: str | Iterable[str]) -> None:
        """Raise ValueError, with the list, for the first of `names` that is not registered."""
        for name in [names] if isinstance(names, str) else names:
            if name not in self._table:
                known = ", ".join(self.supported_names()) or "none yet"
                raise ValueError(f"unknown {self.type} {name!r}; supported: {known}")


def _home(item: object) -> tuple[object, object]:
    """Where a definition stands, which is how a repeated one is recognized."""
    return getattr(item, "__module__", None), getattr(item, "__qualname__", id(item))
