"""Token ids to vectors, and vectors to logits.

Official counterpart: `python/minisgl/layers/embedding.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl.core import get_global_ctx
from minisgl.distributed.impl import DistributedCommunicator
from minisgl.distributed.info import get_tp_info
from minisgl.kernel.index import indexing
from minisgl.kernel.table import get_kernels
from minisgl.layers.base import BaseOP, _concat_prefix
from minisgl.utils.misc import div_ceil
from minisgl.utils.torch_utils import nvtx_annotate


class VocabParallelEmbedding(BaseOP):
    """The embedding table; each rank holds a range of rows.

    `weight` is `[ceil(num_embeddings / ranks), embedding_dim]` on every rank. Where the
    vocabulary does not divide, the last ranks' tables end in rows that no token has.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        tp = get_tp_info()
        self.num_embeddings = num_embeddings
        self.num_embeddings_tp = div_ceil(num_embeddings, tp.size)
        start = min(self.num_embeddings_tp * tp.rank, num_embeddings)
        stop = min(start + self.num_embeddings_tp, num_embeddings)
        self.vocab_range = (start, stop - start)
        self.weight = torch.empty(self.num_embeddings_tp, embedding_dim)
        self._tp_size = tp.size
        self._comm = DistributedCommunicator()

    @nvtx_annotate("Embedding")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map token ids `[num_tokens]` to `[num_tokens, embedding_dim]`."""
        if self._tp_size == 1:
            return indexing(self.weight, x)
        return self._comm.all_reduce(indexing(self.weight, x, vocab_range=self.vocab_range))


class ParallelLMHead(VocabParallelEmbedding):
    """Scores every token of the vocabulary; each rank scores its own range.

    Tied to an embedding, it has no `weight` of its own and multiplies by the embedding's. A `bias`
    has a number for each row of this rank's weight: `[num_embeddings_tp]`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        tie_word_embeddings: bool = False,
        tied_embedding: VocabParallelEmbedding | None = None,
    ) -> None:
        if tie_word_embeddings != (tied_embedding is not None):
            raise ValueError("give tied_embedding exactly when tie_word_embeddings is set")
        super().__init__(num_embeddings, embedding_dim)
        self.bias = torch.empty(self.num_embeddings_tp) if bias else None
        self._tied_embedding = tied_embedding
        self._kernels = get_kernels()
        self._packed: Any = None  # of a tied table: what `pack` made of it, unless it is the table
        if tied_embedding is not None:
            del self.weight

    def post_load(self, prefix: str = "") -> None:
        """Pack the weight; of a tied table, which stays as it is, keep what was made of it."""
        name = _concat_prefix(prefix, "weight")
        if self._tied_embedding is None:
            self.weight = self._kernels.pack(self.weight, name, False)
        else:
            table = self._tied_embedding.weight
            packed = self._kernels.pack(table, name, True)
            self._packed = None if packed is table else packed

    @property
    def nbytes(self) -> int:
        """As in every layer; of a tied head what was made of the table, and not the table."""
        return super().nbytes + (0 if self._packed is None else self._packed.nbytes)

    @nvtx_annotate("LMHead")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states `[num_tokens, embedding_dim]` to logits `[rows, num_embeddings]`.

        In prefill there is one row per request, from its last token; in decode one per token.
        """
        batch = get_global_ctx().batch
        if batch.is_prefill:
            x = x[batch.attn_metadata.get_last_indices(batch.size)]
        weight = (self._tied_embedding or self).weight if self._packed is None else self._packed
        return self._gather(self._kernels.linear(x, weight, self.bias))

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Join the ranks' columns, and drop those of padding rows."""
        if self._tp_size == 1:
            return logits
        parts = self._comm.all_gather(logits).chunk(self._tp_size, dim=0)
        return torch.cat(parts, dim=-1)[:, : self.num_embeddings]
