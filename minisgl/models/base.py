"""What every model is. Official counterpart: `python/minisgl/models/base.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from minisgl.layers import BaseOP

if TYPE_CHECKING:
    import torch


class BaseLLMModel(ABC, BaseOP):
    """A language model: a tree of layers that scores the next token of every request."""

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Logits `[batch size, vocab_size]` for the batch of the global context.

        There are no arguments: token ids and positions come from the batch, K and V from the pool.
        """
