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
    gelu_and_mul,
    silu_and_mul,
)
from minisgl.models.register import import_later
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


ACTIVATIONS = {"silu": silu_and_mul, "gelu": gelu_and_mul}


class GatedMLP(BaseOP):
    """`down(act(gate(x)) * up(x))`, with gate and up as one product."""

    def __init__(self, config: ModelConfig) -> None:
        if config.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"unknown activation {config.hidden_act!r}; supported: {known}")
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(hidden, [inner, inner], has_bias=False)
        self.act_fn = ACTIVATIONS[config.hidden_act]
        self.down_proj = LinearRowParallel(inner, hidden, has_bias=False)

    @nvtx_annotate("MLP")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape."""
        return self.down_proj.forward(self.act_fn(self.gate_up_proj.forward(x)))


def make_mlp(config: ModelConfig) -> BaseOP:
    """The MLP that the config asks for: dense, or the mixture of experts of a later chapter.

    The latter is `MoEMLP(config)` of minisgl.models.qwen3_moe. Raises NotImplementedError for it
    until that file is there.
    """
    if not config.is_moe:
        return GatedMLP(config)
    module = import_later("minisgl.models.qwen3_moe", f"an MLP of {config.num_experts} experts")
    mlp: BaseOP = module.MoEMLP(config)
    return mlp
