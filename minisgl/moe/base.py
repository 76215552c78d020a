"""What a mixture-of-experts layer asks of its backend. Official counterpart: `moe/base.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class BaseMoeBackend(ABC):
    """Routes each token to its experts and sums what they return."""

    @abstractmethod
    def forward(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        gating_output: torch.Tensor,
        topk: int,
        renormalize: bool,
        activation: str,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """The experts' output, `[num_tokens, hidden_size]`.

        `gating_output` is `[num_tokens, num_experts]`; `w1` holds the experts' gate and up
        projections, `w2` their down projections, with the number of the expert first.
        """
