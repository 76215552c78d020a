"""CPU or CUDA: the few places where the engine must know which of the two it runs on.

A stream, an event and a pinned buffer exist only on a GPU. Here each of them has a stand-in that
does nothing, so that the engine is written once. (The official code is CUDA only and calls
`torch.cuda` where it needs it; there is no counterpart file.)
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

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


def _cgroup_folders(controller: str) -> list[Path]:
    """The control-group folders that bind this process: its own and all above it (Linux only).

    Version 2 has one tree, version 1 a tree for each controller ("cpu", "memory").
    """
    table = Path("/proc/self/cgroup")
    folders: list[Path] = []
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = Path("/sys/fs/cgroup", controller if controllers else "")
            own = root / path.lstrip("/")
            folders += [own, *(above for above in own.parents if above.is_relative_to(root))]
    return folders


def _numbers(path: Path) -> list[int]:
    """The whole numbers in a small file; none if it cannot be read. "max" counts as no number."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [int(word) for word in words if word.lstrip("-").isdigit()]


def _cpu_quota() -> float:
    """How many CPUs' worth of time the container may use; infinity without a quota.

    A quota is microseconds of time per period: the two numbers of `cpu.max` (version 2), or those
    of `cpu.cfs_quota_us` and `cpu.cfs_period_us` (version 1, where -1 stands for none). It binds
    all folders below its own, so the smallest counts.
    """
    quotas = [float("inf")]
    for folder in _cgroup_folders("cpu"):
        v2 = _numbers(folder / "cpu.max")  # "200000 100000" or "max 100000"
        v1 = _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        quotas += [q[0] / q[1] for q in (v2, v1) if len(q) == 2 and q[0] > 0]
    return min(quotas)


def physical_cores() -> int:
    """The cores this process may use, at least 1: hyperthreads count once; a quota rounds down.

    On Linux the CPUs are those of `os.sched_getaffinity(0)`; two are threads of one core if the
    same text stands in their `/sys/devices/system/cpu/cpuN/topology/thread_siblings_list` (without
    such a file a CPU counts as a core). Elsewhere psutil knows how many cores there are.
    """
    if hasattr(os, "sched_getaffinity"):
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        files = {cpu: Path(topology.format(cpu)) for cpu in os.sched_getaffinity(0)}
        cores = len({f.read_text("utf-8") if f.exists() else str(c) for c, f in files.items()})
    else:
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, int(min(cores, _cpu_quota())))


def get_free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now.

    On a CPU: what the machine can give without swapping, or what is left of the container's limit,
    whichever is less. File pages that the container could drop do not count as used.
    """
    if is_cuda(device):
        return torch.cuda.mem_get_info(device)[0]
    free = [psutil.virtual_memory().available]
    for folder in _cgroup_folders("memory"):
        limit = _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") + _numbers(folder / "memory.usage_in_bytes")
        if limit and used:
            free.append(limit[0] - used[0] + _droppable(folder / "memory.stat"))
    return max(0, min(free))


def release_freed_memory() -> None:
    """Give memory that was freed, and that the C library keeps for later, back to the system.

    After a model was loaded that is what was read, merged and tried out on the way. Only the C
    library of most Linux systems (glibc) can be asked; elsewhere nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _droppable(stat: Path) -> int:
    """Bytes of the file cache that the kernel gives back first, from a cgroup's memory.stat."""
    try:
        rows = dict(row.split() for row in stat.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
