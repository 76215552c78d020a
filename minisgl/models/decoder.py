"""One decoder for four families, with three switches: q/k/v bias, q/k norm, dense or MoE MLP.

Official counterparts: `python/minisgl/models/llama.py`, `mistral.py`, `qwen2.py`, `qwen3.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.core import get_global_ctx
from minisgl.layers import BaseOP, OPList, ParallelLMHead, RMSNormFused, VocabParallelEmbedding
from minisgl.models.base import BaseLLMModel
from minisgl.models.utils import RopeAttn, make_mlp
from minisgl.utils import nvtx_annotate

if TYPE_CHECKING:
    import torch

    from minisgl.models.config import ModelConfig


class DecoderLayer(BaseOP):
    """Attention, then the MLP, each behind a norm that also adds to the residual stream."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        self.self_attn = RopeAttn(
            config,
            layer_id,
            has_attn_bias=config.has_qkv_bias,
            has_qk_norm=config.has_qk_norm,
            has_o_bias=config.has_o_bias,
        )
        self.mlp = make_mlp(config)
        self.input_layernorm = RMSNormFused(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNormFused(config.hidden_size, config.rms_norm_eps)
        self._layer_id = layer_id

    @nvtx_annotate("Layer_{}", layer_id_field="_layer_id")
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the MLP adds, and the stream that it is still to be added to.

        Both are `[num_tokens, hidden_size]`, as are `x` and `residual`, which are the same two of
        the layer before; the first layer gets the embeddings and no residual.
        """
        x, residual = self.input_layernorm.forward(x, residual)
        x = self.self_attn.forward(x)
        x, residual = self.post_attention_layernorm.forward(x, residual)
        return self.mlp.forward(x), residual


class DecoderModel(BaseOP):
    """Token ids to final hidden states: embedding, layers, last norm."""

    def __init__(self, config: ModelConfig) -> None:
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = OPList([DecoderLayer(config, i) for i in range(config.num_layers)])
        self.norm = RMSNormFused(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens]` to `[num_tokens, hidden_size]`."""
        x, residual = self.embed_tokens.forward(input_ids), None
        for layer in self.layers.op_list:
            x, residual = layer.forward(x, residual)
        return self.norm.forward(x, residual)[0]


class LlamaForCausalLM(BaseLLMModel):
    """Llama and Mistral, and with the switches of `ModelConfig` the Qwen models too."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = DecoderModel(config)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tie_word_embeddings=config.tie_word_embeddings,
            tied_embedding=self.model.embed_tokens if config.tie_word_embeddings else None,
        )

    def forward(self) -> torch.Tensor:
        """Logits `[batch size, vocab_size]` for the batch of the global context."""
        return self.lm_head.forward(self.model.forward(get_global_ctx().batch.input_ids))
