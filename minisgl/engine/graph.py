"""Graphs for decode: record a pass once per batch size, replay it for nothing.

On a GPU with CUDA graphs. On a CPU with what the optional `minisgl.kernel.cpu.graph` makes; else
all that is left is `pad_batch`, which then pads nothing. Official counterpart: `engine/graph.py`.
The code for CUDA was written with care and has not been run by this course's tests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from minisgl.core import Batch, Req, get_global_ctx
from minisgl.layers import BaseOP
from minisgl.utils.device import NullStream, is_cuda
from minisgl.utils.registry import import_optional

if TYPE_CHECKING:
    from minisgl.attention.base import BaseAttnBackend
    from minisgl.models.base import BaseLLMModel


@dataclass
class GraphCaptureBuffer:
    """Inputs and outputs of the recorded passes, at addresses that never change.

    A graph replays the same kernels on the same addresses: a new batch is copied in before, and
    its logits are read from here after. The first `bs` entries serve batch size `bs`.
    """

    input_ids: torch.Tensor  # [max_bs], int32
    out_loc: torch.Tensor  # [max_bs], int32
    positions: torch.Tensor  # [max_bs], int32
    logits: torch.Tensor  # [max_bs, vocab_size], float32

    @classmethod
    def init(cls, bs: int, vocab_size: int, device: torch.device) -> GraphCaptureBuffer:
        """Buffers for batches of up to `bs` requests."""
        ids, out_loc, positions = torch.zeros(3, bs, dtype=torch.int32, device=device)
        logits = torch.empty(bs, vocab_size, dtype=torch.float32, device=device)
        return cls(ids, out_loc, positions, logits)

    def set_batch(self, batch: Batch) -> None:
        """Let `batch` read its inputs from here: what is recorded are these addresses."""
        bs = batch.padded_size
        batch.input_ids, batch.out_loc = self.input_ids[:bs], self.out_loc[:bs]
        batch.positions = self.positions[:bs]

    def copy_from(self, batch: Batch) -> None:
        """Copy the inputs of `batch`, padding included, to where the graphs look for them."""
        bs = batch.padded_size
        self.input_ids[:bs], self.out_loc[:bs] = batch.input_ids, batch.out_loc
        self.positions[:bs] = batch.positions


def _determine_cuda_graph_bs(
    cuda_graph_bs: list[int] | None, cuda_graph_max_bs: int | None, free_memory: int
) -> list[int]:
    """The batch sizes to record, in rising order: those asked for, or 1, 2, 4 and every eighth.

    The largest, unless `cuda_graph_max_bs` says it (0 for no graphs), follows from the GPU's free
    bytes: each size keeps its own intermediate results.
    """
    if cuda_graph_bs is not None:
        return sorted(set(cuda_graph_bs))
    largest = cuda_graph_max_bs
    if largest is None:
        largest = 256 if free_memory > 80 << 30 else 160
    return [bs for bs in (1, 2, 4, *range(8, largest + 1, 8)) if bs <= largest]


class Recording(Protocol):
    """A recorded pass, such as a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Run it again, on what now stands in the memory that it was recorded with."""


Recorder = Callable[[Callable[[], None]], Recording | None]


class CUDARecorder:
    """Records passes as CUDA graphs; what lies between input and output shares one memory pool."""

    def __init__(self, stream: torch.cuda.Stream | NullStream) -> None:
        assert not isinstance(stream, NullStream), "CUDA graphs are recorded on a GPU"
        self.stream = stream
        self.pool: Any = None

    def __call__(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        run()  # the first run may compile and allocate
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            run()
        self.pool = self.pool or graph.pool()
        return graph


def _make_recorder(device: torch.device, stream: torch.cuda.Stream | NullStream) -> Recorder | None:
    """What records on this device; None on a CPU without the optional module."""
    if is_cuda(device):
        return CUDARecorder(stream)
    on_cpu = import_optional("minisgl.kernel.cpu.graph")
    return on_cpu.CPURecorder() if on_cpu else None


class GraphRunner:
    """Pads decode batches to a recorded size and replays the recording."""

    def __init__(
        self,
        stream: torch.cuda.Stream | NullStream,
        device: torch.device,
        model: BaseLLMModel,
        attn_backend: BaseAttnBackend,
        cuda_graph_bs: list[int] | None,
        cuda_graph_max_bs: int | None,
        free_memory: int,
        max_seq_len: int,
        vocab_size: int,
        dummy_req: Req,
    ) -> None:
        self.attn_backend, self.dummy_req = attn_backend, dummy_req
        self.graphs: dict[int, Recording] = {}
        self.graph_bs_list: list[int] = []  # the recorded sizes, rising
        self.weights: list[tuple[BaseOP, str, Any]] = []  # those that the recordings read
        record = _make_recorder(device, stream) if attn_backend.supports_cuda_graph else None
        sizes = _determine_cuda_graph_bs(cuda_graph_bs, cuda_graph_max_bs, free_memory)
        if record is not None and sizes:
            self.buffer = GraphCaptureBuffer.init(sizes[-1], vocab_size, device)
            self.graphs = self._capture_graphs(max_seq_len, sizes, model, record)
            self.graph_bs_list = sorted(self.graphs)
            self.weights = list(_weights(model))

    def _capture_graphs(
        self, max_seq_len: int, sizes: list[int], model: BaseLLMModel, record: Recorder
    ) -> dict[int, Recording]:
        """Record one decode pass for each size, the largest first: the smaller reuse its memory.

        Empty if `record` says of one that it can't be recorded.
        """
        graphs: dict[int, Recording] = {}
        self.attn_backend.init_capture_graph(max_seq_len=max_seq_len, bs_list=sizes)
        for bs in reversed(sizes):
            batch = Batch(reqs=[self.dummy_req] * bs, phase="decode")
            batch.padded_reqs = batch.reqs
            self.buffer.set_batch(batch)
            self.attn_backend.prepare_for_capture(batch)
            with get_global_ctx().forward_batch(batch), torch.inference_mode():
                recording = record(partial(_forward_into, model, self.buffer.logits[:bs]))
            if recording is None:
                return {}
            graphs[bs] = recording
        return graphs

    def can_use_cuda_graph(self, batch: Batch) -> bool:
        """Whether a recording fits; never for a prefill."""
        return batch.is_decode and batch.size <= max(self.graph_bs_list, default=0)

    def pad_batch(self, batch: Batch) -> None:
        """Set `batch.padded_reqs`: the requests, and dummies up to the next recorded size."""
        padding = 0
        if self.can_use_cuda_graph(batch):
            fitting = self.graph_bs_list[bisect_left(self.graph_bs_list, batch.size)]
            padding = fitting - batch.size
        batch.padded_reqs = batch.reqs + [self.dummy_req] * padding

    def can_replay(self, batch: Batch) -> bool:
        """Whether there is a recording of this padded batch, with the weights that count now.

        If some weight was replaced since, all recordings are forgotten.
        """
        if any(vars(layer)[name] is not weight for layer, name, weight in self.weights):
            self.destroy_cuda_graphs()
        return self.can_use_cuda_graph(batch) and batch.padded_size in self.graphs

    def replay(self, batch: Batch) -> torch.Tensor:
        """The logits of a padded decode batch, `[batch.size, vocab_size]`, from its recording.

        They stand in the shared buffer: read them before the next replay.
        """
        self.buffer.copy_from(batch)
        self.attn_backend.prepare_for_replay(batch)
        self.graphs[batch.padded_size].replay()
        return self.buffer.logits[: batch.size]

    def destroy_cuda_graphs(self) -> None:
        """Forget the recordings. They must be gone before a process group that they use is."""
        self.graphs.clear()
        self.graph_bs_list, self.weights = [], []


def _forward_into(model: BaseLLMModel, logits: torch.Tensor) -> None:
    """The pass that is recorded: its result has to stand at a fixed address, too."""
    logits.copy_(model.forward())


def _weights(layer: BaseOP) -> Iterator[tuple[BaseOP, str, Any]]:
    """Each weight with the layer that holds it, and its name there."""
    for name, part in layer._parts():
        if isinstance(part, BaseOP):
            yield from _weights(part)
        else:
            yield layer, name, part
