"""Numbers that are handed out and come back: pages of the pool, rows of the page table.

The official code keeps such lists inside `scheduler/cache.py` and `scheduler/table.py`, unchecked.
"""

from __future__ import annotations

from collections.abc import Iterable


class FreeList:
    """The numbers 0 up to, not including, `size`; each is either free or taken.

    What came back last is handed out first: memory that was never needed stays untouched. Every
    error leaves the list as it was. `what` names the things in messages. Raises ValueError, with
    the size that was given, for a list without any numbers.
    """

    def __init__(self, size: int, what: str) -> None:
        if size < 1:
            raise ValueError(f"at least one {what} is needed, got {size}")
        self.size, self.what = size, what
        self._free = list(reversed(range(size)))  # a stack: the next one out is the last
        self._taken: set[int] = set()

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` numbers. Raises RuntimeError when fewer are free."""
        if not 0 <= count <= len(self._free):
            raise RuntimeError(
                f"{self.what}s needed: {count}, free: {len(self._free)} of {self.size}; "
                f"let requests finish first, or make room for more {self.what}s"
            )
        numbers = [self._free.pop() for _ in range(count)]
        self._taken.update(numbers)
        return numbers

    def give_back(self, numbers: Iterable[int]) -> None:
        """Take `numbers` back. Raises ValueError if one isn't handed out, or comes twice."""
        numbers = list(numbers)
        returned = set(numbers)
        if strangers := returned - self._taken:
            raise ValueError(f"{self.what} {sorted(strangers)} given back, but not handed out")
        if len(returned) < len(numbers):
            raise ValueError(f"a {self.what} comes twice in {numbers}")
        self._taken -= returned
        self._free.extend(reversed(numbers))

    def taken(self) -> frozenset[int]:
        """The numbers that are handed out now."""
        return frozenset(self._taken)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every number is either free or taken, exactly once."""
        if sorted([*self._free, *self._taken]) != list(range(self.size)):
            raise RuntimeError(
                f"every {self.what} must be free or taken, exactly once; "
                f"free are {self._free}, taken {sorted(self._taken)}"
            )
