"""Integer arithmetic for shapes and pages. Official counterpart: `python/minisgl/utils/misc.py`."""

from __future__ import annotations


def div_even(a: int, b: int, allow_replicate: bool = False, what: str = "items") -> int:
    """Return `a / b` when `b` parts of equal size exist.

    With `allow_replicate`, fewer items than parts is fine too: every part then holds one item,
    and `b // a` parts hold the same one (key/value heads under tensor parallelism).
    `what` names the items in the error. Raises `ValueError` when nothing comes out even, naming
    the numbers of parts that would do.
    """
    if a <= 0 or b <= 0:
        raise ValueError(f"cannot divide {a} {what} into {b} parts: both must be positive")
    if allow_replicate and a < b and b % a == 0:
        return 1
    if a % b != 0:
        would_do = [str(n) for n in range(1, a + 1) if a % n == 0]
        if allow_replicate:
            would_do[-1] = f"a multiple of {a}"
        listed = " or ".join(", ".join(would_do).rsplit(", ", 1))
        if len(would_do) > 8:
            listed = f"{', '.join(would_do[:8])}, …"
        raise ValueError(f"{a} {what} cannot be divided evenly into {b} parts; {listed} would do")
    return a // b


def div_ceil(a: int, b: int) -> int:
    """Return `a / b` rounded up: how many groups of `b` it takes to hold `a`."""
    return -(-a // b)


def align_ceil(a: int, b: int) -> int:
    """Return the smallest multiple of `b` that is at least `a`."""
    return div_ceil(a, b) * b


def align_down(a: int, b: int) -> int:
    """Return the largest multiple of `b` that is at most `a`."""
    return a // b * b
