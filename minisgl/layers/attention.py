"""From the merged q/k/v product to the attention output.

Official counterpart: `python/minisgl/layers/attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from minisgl.core import get_global_ctx
from minisgl.distributed.info import get_tp_info
from minisgl.layers.base import StateLessOP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import get_rope
from minisgl.utils.misc import div_even

if TYPE_CHECKING:
    from minisgl.models.config import RotaryConfig


def _as_key(scaling: dict[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    """Return a config's RoPE dict as a hashable tuple, lists in it as tuples."""
    if not scaling:
        return None
    return tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in scaling.items())


class AttentionLayer(StateLessOP):
    """Splits q, k and v, normalizes and rotates q and k, and hands over to the backend.

    Head counts are those of the whole model; each rank works on its share. `q_norm` and
    `k_norm` belong to the caller, who also names their weights.
    """

    def __init__(
        self,
        layer_id: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_config: RotaryConfig,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        tp_size = get_tp_info().size
        div_even(num_qo_heads, num_kv_heads, what="query heads")  # grouped evenly, or an error
        self.layer_id, self.head_dim = layer_id, head_dim
        self.num_qo_heads = div_even(num_qo_heads, tp_size, what="query heads")
        self.num_kv_heads = div_even(num_kv_heads, tp_size, True, what="key/value heads")
        self.q_norm, self.k_norm = q_norm, k_norm
        rope, scaling = rotary_config, _as_key(rotary_config.scaling)
        self.rotary = get_rope(
            rope.head_dim, rope.rotary_dim, rope.max_position, rope.base, scaling
        )

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, (q + 2 * kv heads) * head_dim]` to `[num_tokens, q heads * head_dim]`.

        Positions and the backend come from the global context; q and k in `qkv` are normalized
        in place.
        """
        ctx = get_global_ctx()
        q_size, kv_size = self.num_qo_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
        if self.q_norm is not None:
            self.q_norm.forward_inplace(q.view(-1, self.num_qo_heads, self.head_dim))
        if self.k_norm is not None:
            self.k_norm.forward_inplace(k.view(-1, self.num_kv_heads, self.head_dim))
        q, k = self.rotary.forward(ctx.batch.positions, q, k)
        q, k, v = (x.view(x.shape[0], -1, self.head_dim) for x in (q, k, v))
        return ctx.attn_backend.forward(q, k, v, self.layer_id, ctx.batch).view(-1, q_size)
