"""The two halves of a decoder layer. Official counterpart: `python/minisgl/models/utils.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.layers import (
    AttentionLayer,
    BaseOP,
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearRowParallel,
    RMSNorm,
)
from minisgl.layers.activation import get_activation
from minisgl.models.register import moe_module
from minisgl.utils import nvtx_annotate

if TYPE_CHECKING:
    import torch

    from minisgl.models.config import ModelConfig


class RopeAttn(BaseOP):
    """Attention with its projections: merged q/k/v in, output projection out.

    The keyword arguments are the switches between the families: biases on the q/k/v projections,
    RMS norms on each head's q and k, a bias on the output projection.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        has_attn_bias: bool = False,
        has_qk_norm: bool = False,
        has_o_bias: bool = False,
    ) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_qo_heads, config.num_kv_heads
        self.qkv_proj = LinearQKVMerged(hidden, dim, heads, kv_heads, has_attn_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if has_qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if has_qk_norm else None
        self.attn = AttentionLayer(
            layer_id, heads, kv_heads, dim, config.rotary_config, self.q_norm, self.k_norm
        )
        self.o_proj = LinearOProj(heads * dim, hidden, has_o_bias)

    @nvtx_annotate("MHA")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, hidden_size]` (normalized) to the same shape."""
        return self.o_proj.forward(self.attn.forward(self.qkv_proj.forward(x)))


class GatedMLP(BaseOP):
    """`down(act(gate(x)) * up(x))`, with gate and up as one product."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.act_fn = get_activation(config.hidden_act)
        self.gate_up_proj = LinearColParallelMerged(hidden, [inner, inner], has_bias=False)
        self.down_proj = LinearRowParallel(inner, hidden, has_bias=False)

    @nvtx_annotate("MLP")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape."""
        return self.down_proj.forward(self.act_fn(self.gate_up_proj.forward(x)))


def make_mlp(config: ModelConfig) -> BaseOP:
    """The MLP that the config asks for: dense, or `MoEMLP(config)` of the module for experts.

    Raises ValueError for experts where that module doesn't exist (see `moe_module`).
    """
    return moe_module().MoEMLP(config) if config.is_moe else GatedMLP(config)
