"""What the engine expects of an attention backend.

Official counterpart: `python/minisgl/attention/base.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from minisgl.core import Batch


@dataclass
class BaseAttnMetadata(ABC):
    """What a backend works out once per batch, and every layer of the pass then reads."""

    @abstractmethod
    def get_last_indices(self, bs: int) -> torch.Tensor:
        """The packed index of the last token of each of the first `bs` requests: `[bs]`."""


class BaseAttnBackend(ABC):
    """Computes attention over the KV pool for a packed batch."""

    @property
    def supports_cuda_graph(self) -> bool:
        """Whether the three graph hooks work, True unless a backend says otherwise.

        When False, the engine must run eagerly.
        """
        return True

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        """Store this pass's K and V in the pool, then attend over everything each request has.

        `q` is `[num_tokens, local_qo_heads, head_dim]`, `k` and `v` have `local_kv_heads` in the
        middle; the result has the shape and the dtype of `q`.
        """

    @abstractmethod
    def prepare_metadata(self, batch: Batch) -> None:
        """Fill `batch.attn_metadata` from `batch.padded_reqs` and the page table."""

    @abstractmethod
    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        """Allocate the fixed buffers for graphs of these batch sizes."""

    @abstractmethod
    def prepare_for_capture(self, batch: Batch) -> None:
        """Give a dummy batch metadata that lies in the fixed buffers."""

    @abstractmethod
    def prepare_for_replay(self, batch: Batch) -> None:
        """Copy a real batch's metadata into the fixed buffers."""


class EagerBackend(BaseAttnBackend):
    """A backend whose shapes follow the lengths of the requests, so that no graph can record it.

    Its three graph hooks raise NotImplementedError.
    """

    @property
    def supports_cuda_graph(self) -> bool:
        return False

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} cannot be recorded in a CUDA graph: run without graphs, as the "
            "engine does when supports_cuda_graph is False"
        )

    def prepare_for_capture(self, batch: Batch) -> None:
        self.init_capture_graph(0, [])

    def prepare_for_replay(self, batch: Batch) -> None:
        self.init_capture_graph(0, [])


class HybridBackend(BaseAttnBackend):
    """One backend for prefill and another for decode; graphs are only ever of decodes."""

    def __init__(self, prefill_backend: BaseAttnBackend, decode_backend: BaseAttnBackend) -> None:
        self.prefill_backend, self.decode_backend = prefill_backend, decode_backend

    def _backend_for(self, batch: Batch) -> BaseAttnBackend:
        return self.prefill_backend if batch.is_prefill else self.decode_backend

    @property
    def supports_cuda_graph(self) -> bool:
        return self.decode_backend.supports_cuda_graph

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        return self._backend_for(batch).forward(q, k, v, layer_id, batch)

    def prepare_metadata(self, batch: Batch) -> None:
        self._backend_for(batch).prepare_metadata(batch)

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        self.decode_backend.init_capture_graph(max_seq_len, bs_list)

    def prepare_for_capture(self, batch: Batch) -> None:
        self.decode_backend.prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        self.decode_backend.prepare_for_replay(batch)
