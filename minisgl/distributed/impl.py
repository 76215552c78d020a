"""The two exchanges between ranks.

Official counterpart: `python/minisgl/distributed/impl.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from minisgl.distributed.info import get_tp_info


@dataclass
class DistributedImpl(ABC):
    """A way to carry out the two collective operations that the layers need."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum of every rank's `x`; `x` may be overwritten."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's `x`, stacked in rank order: `[size * x.shape[0], ...]`."""


@dataclass
class TorchDistributedImpl(DistributedImpl):
    """The collectives of `torch.distributed` (gloo on CPUs, NCCL on GPUs).

    With one rank both return `x` itself, and no process group needs to exist. With more, they
    raise when `torch.distributed.init_process_group` has not been called.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if get_tp_info().size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.SUM)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        size = get_tp_info().size
        if size == 1:
            return x
        parts = x.new_empty(size, *x.shape)
        dist.all_gather(list(parts.unbind()), x.contiguous())
        return parts.flatten(0, 1)


class DistributedCommunicator:
    """What a layer calls. The newest entry of `plugins` does the work."""

    plugins: ClassVar[list[DistributedImpl]] = [TorchDistributedImpl()]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum of every rank's `x`; `x` may be overwritten."""
        return self.plugins[-1].all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's `x`, stacked in rank order: `[size * x.shape[0], ...]`."""
        return self.plugins[-1].all_gather(x)


def destroy_distributed() -> None:
    """Drop every added plugin, leaving plain `torch.distributed`."""
    del DistributedCommunicator.plugins[1:]
