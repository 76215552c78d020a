"""Passes recorded on a CPU: their calls, to be made again without the Python between them.

No official counterpart: on a GPU `torch.cuda.CUDAGraph` does this. `engine/graph.py` uses either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.kernel.cpu.compile import Call, Function


class Pool:
    """Memory for tensors that come and go while passes are recorded, and for nothing else after."""

    def __init__(self) -> None:
        # Each with its size in bytes, and who has it now.
        self.blocks: list[tuple[int, torch.Tensor, StorageWeakRef]] = []

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor like `x` (shape, strides, dtype), with undefined contents."""
        size = x.untyped_storage().nbytes()
        if size == 0:
            return torch.empty_like(x)
        free = [i for i, (n, _, user) in enumerate(self.blocks) if n == size and user.expired()]
        if free:
            _, block, _ = self.blocks.pop(free[-1])
        else:
            block = torch.empty(size, dtype=torch.uint8, device="cpu")
        made = torch.frombuffer(block.numpy(), dtype=x.dtype)
        self.blocks.append((size, block, StorageWeakRef(made.untyped_storage())))
        return made.as_strided(x.shape, x.stride(), x.storage_offset())


class CPUGraph:
    """A recorded pass. Its inputs are read, and its results left, where they were recorded."""

    def __init__(self, pool: Pool) -> None:
        self.calls: list[Call] = []
        self.pool = pool  # held, since calls know only addresses

    def replay(self) -> None:
        """Make all calls again. IndexError if a position or a slot is not one that exists."""
        for function, args in self.calls:
            if not function(*args):
                raise IndexError(
                    "a recorded pass met a position that RoPE's table, or a slot that the KV pool, "
                    "doesn't have: look at the batch's positions and out_loc"
                )


ATEN = torch.ops.aten
ALLOCATING = {
    ATEN.empty.memory_format,
    ATEN.empty_like.default,
    ATEN.empty_strided.default,
    ATEN.new_empty.default,
    ATEN.new_empty_strided.default,
}
COPYING = {ATEN.clone.default, ATEN.to.dtype, ATEN._to_copy.default}


def memory(x: Any) -> int | None:
    """Where the memory that `x` is a part of begins; None for what is no plain tensor."""
    plain = type(x) is torch.Tensor and x.is_cpu and x.layout == torch.strided
    return x.untyped_storage().data_ptr() if plain else None


class NotRecordable(RuntimeError):
    """A pass does something that a list of calls can't do again."""


class Recording(TorchDispatchMode):
    """While it is entered, adds to `graph` what each operation of PyTorch comes down to."""

    def __init__(self, graph: CPUGraph) -> None:
        super().__init__()
        self.graph = graph

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes a second

    def again(self, operation: Any, *args: Any, **kwargs: Any) -> None:
        """Add a call; what it returns, a tensor, is no answer to whether it could."""
        self.graph.calls.append((lambda: operation(*args, **kwargs) is not None, ()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in ALLOCATING:
            return self.graph.pool.like(result)
        results = result if isinstance(result, (list, tuple)) else [result]
        if None in map(memory, results):
            raise NotRecordable(f"{func} returns something else than tensors of the CPU")
        if func._schema.is_mutable:
            self.again(func, *args, **kwargs)
            return result
        if set(map(memory, results)) <= set(map(memory, args)):
            return result  # a view; whether `to` and `reshape` make one shows only here
        if isinstance(result, (list, tuple)):
            raise NotRecordable(f"{func} computes several tensors")
        kept = self.graph.pool.like(result).copy_(result)
        if func in COPYING:
            self.again(kept.copy_, args[0])
        else:
            self.again(lambda: kept.copy_(func(*args, **kwargs)))
        return kept


class CPURecorder:
    """Records passes: call it with a function that makes one. None if that one can't be recorded.

    What is recorded are addresses, sizes and the number of threads as they are now. A number that
    Python takes out of a tensor without an operation of PyTorch (`tolist`, `numpy`) goes unnoticed.
    """

    def __init__(self) -> None:
        self.pool = Pool()

    def __call__(self, run: Callable[[], None]) -> CPUGraph | None:
        graph = CPUGraph(self.pool)
        Function.listening = graph.calls
        try:
            with Recording(graph):
                run()
        except NotRecordable:
            return None
        finally:
            Function.listening = None
        return graph
