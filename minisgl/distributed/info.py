"""Which slice of the model this process holds.

Official counterpart: `python/minisgl/distributed/info.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistributedInfo:
    """This process's place among the tensor-parallel ranks: `0 <= rank < size`."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank must lie in [0, size), got rank {self.rank} of size {self.size}"
            )

    def is_primary(self) -> bool:
        """True on rank 0, which speaks for all ranks."""
        return self.rank == 0


_TP_INFO: DistributedInfo | None = None


def set_tp_info(rank: int, size: int) -> None:
    """Fix this process's rank before any layer is built. Raises `RuntimeError` if it is set."""
    global _TP_INFO
    if _TP_INFO is not None:
        raise RuntimeError(f"already set to {_TP_INFO}; call reset_tp_info() first")
    _TP_INFO = DistributedInfo(rank, size)


def get_tp_info() -> DistributedInfo:
    """Return this process's rank and size. Raises `RuntimeError` before `set_tp_info`."""
    if _TP_INFO is None:
        raise RuntimeError("no tensor-parallel rank yet: call set_tp_info(rank=0, size=1) first")
    return _TP_INFO


def try_get_tp_info() -> DistributedInfo | None:
    """Return this process's rank and size, or None before `set_tp_info`."""
    return _TP_INFO


def reset_tp_info() -> None:
    """Forget the rank, so that the next engine in this process can set its own."""
    global _TP_INFO
    _TP_INFO = None
