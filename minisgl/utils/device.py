"""CPU or CUDA: the few places where the engine must know which of the two it runs on.

A stream, an event and a pinned buffer exist only on a GPU. Here each of them has a stand-in that
does nothing, so that the engine is written once. (The official code is CUDA only and calls
`torch.cuda` where it needs it; there is no counterpart file.)
"""

from __future__ import annotations

import ctypes
import io
import math
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from pathlib import Path

import loky
import psutil
import torch


def resolve_device(device: str, rank: int = 0) -> torch.device:
    """The device that `device` names for tensor-parallel rank `rank`.

    "auto" is CUDA where there is one, else the CPU; "cuda" is the GPU number `rank`; anything else
    is a name that `torch.device` knows, such as "cpu" or "cuda:1".

    Raises:
        ValueError: the name is not a CPU or CUDA device, or this machine has no such GPU.
    """
    cuda = torch.cuda.is_available()
    name = ("cuda" if cuda else "cpu") if device == "auto" else device
    try:
        found = torch.device(f"cuda:{rank}" if name == "cuda" else name)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; use auto, cpu or cuda") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not supported; use auto, cpu or cuda")
    if is_cuda(found) and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r} for rank {rank}, but PyTorch sees {torch.cuda.device_count()} "
            "CUDA devices here; use device='cpu', or fewer ranks"
        )
    return found


def is_cuda(device: torch.device) -> bool:
    """Whether `device` is a GPU: whether streams, events and pinned memory mean anything."""
    return device.type == "cuda"


class NullStream:
    """A stream on a CPU: work is done when the call returns, so there is nothing to wait for."""

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, stream: NullStream) -> None:
        """Return at once."""


class NullEvent:
    """An event on a CPU: recorded and reached at the same moment."""

    def record(self, stream: NullStream | None = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """True: whatever came before the event is done."""
        return True


def make_stream(device: torch.device) -> torch.cuda.Stream | NullStream:
    """A new stream of work on `device`."""
    return torch.cuda.Stream(device) if is_cuda(device) else NullStream()


def use_stream(stream: torch.cuda.Stream | NullStream) -> AbstractContextManager:
    """A `with` block whose GPU work goes to `stream`; for a NullStream, one that does nothing."""
    return nullcontext() if isinstance(stream, NullStream) else torch.cuda.stream(stream)


def make_event(device: torch.device) -> torch.cuda.Event | NullEvent:
    """A new event; `record()` marks a place in the current stream, `synchronize()` waits for it."""
    return torch.cuda.Event() if is_cuda(device) else NullEvent()


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` in page-locked host memory if `device` is a GPU, else `tensor` itself.

    A copy from ordinary memory to a GPU makes the CPU wait; one from page-locked memory does not.
    """
    return tensor.pin_memory() if is_cuda(device) and not tensor.is_cuda else tensor


def make_device_tensor(data: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 1-D tensor of `data` on `device`, copied without waiting where that is possible."""
    return pin(torch.tensor(data, dtype=dtype), device).to(device, non_blocking=True)


def physical_cores() -> int:
    """The cores this process may use, at least 1: hyperthreads count once, a quota rounds up.

    Affinity and the container's quota count; `LOKY_MAX_CPU_COUNT` is a further limit. Where a
    machine doesn't say which CPUs share a core, each counts, and nothing is printed about it.
    """
    with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
        return loky.cpu_count(only_physical_cores=True)


def _memory_groups() -> list[Path]:
    """The folders of the control groups that limit this process: its own and all above it."""
    table = Path("/proc/self/cgroup")  # Linux only
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    folders: list[Path] = []
    for _, controller, path in (line.split(":", 2) for line in lines):
        if controller in ("", "memory"):  # version 2 has one tree, version 1 one per controller
            own = Path("/sys/fs/cgroup", controller, path.lstrip("/"))
            folders += [own, *own.parents]
    return folders


def _left(group: Path) -> float:
    """Bytes left of a control group's limit, where the file cache is free; infinity without one."""
    for limit, used in ("max", "current"), ("limit_in_bytes", "usage_in_bytes"):  # version 2, 1
        try:
            files = [group / f"memory.{name}" for name in (limit, used, "stat")]
            *sizes, stat = (file.read_text(encoding="utf-8") for file in files)
            cache = dict(line.split() for line in stat.splitlines())
            droppable = int(cache.get("total_inactive_file", cache.get("inactive_file", 0)))
            return int(sizes[0]) - int(sizes[1]) + droppable
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return math.inf


def get_free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now.

    On a CPU: what the machine can give without swapping, or what is left of the container's limit,
    whichever is less. File pages that the container could drop do not count as used.
    """
    if is_cuda(device):
        return torch.cuda.mem_get_info(device)[0]
    free = [psutil.virtual_memory().available, *map(_left, _memory_groups())]
    return max(0, int(min(free)))


def release_freed_memory() -> None:
    """Give memory that was freed, and that the C library keeps for later, back to the system.

    After a model was loaded that is what was read, merged and tried out on the way. Only the C
    library of most Linux systems (glibc) can be asked; elsewhere nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
