"""What the engine needs to know about a model.

Official counterpart: `python/minisgl/models/config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minisgl.models.register import SUPPORTED_MODELS
from minisgl.utils.logger import init_logger

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class RotaryConfig:
    """The settings of rotary position embedding.

    `max_position` is the longest sequence in tokens, `base` the RoPE theta. `scaling` is None for
    plain RoPE, else the parameters of the scaling with its kind under "rope_type".
    """

    head_dim: int
    rotary_dim: int
    max_position: int
    base: float
    scaling: dict[str, Any] | None


def _required(config: PretrainedConfig, name: str) -> Any:
    """A setting without which there is no model; ValueError when it is missing or null."""
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"the model's config has no {name!r}")
    return value


def _head_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """`(query heads, KV heads, head_dim)`. An explicit head_dim wins over hidden size / heads."""
    num_heads = _required(config, "num_attention_heads")
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if num_heads % num_kv_heads != 0:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly: "
            "num_attention_heads must be a multiple of num_key_value_heads"
        )
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        hidden_size = _required(config, "hidden_size")
        if hidden_size % num_heads != 0:
            raise ValueError(
                f"no head_dim is given, and hidden_size {hidden_size} is not a multiple of "
                f"num_attention_heads {num_heads}"
            )
        head_dim = hidden_size // num_heads
    return num_heads, num_kv_heads, head_dim


def _rope(config: PretrainedConfig) -> tuple[float, dict[str, Any] | None]:
    """`(theta, scaling)` from either generation of config.

    Version 5 of `transformers` has one dict, `rope_parameters`; version 4 has `rope_theta` beside
    `rope_scaling`, which may be null or missing; `rope_parameters` counts if it is there, and so
    does `rope_type` beside `type`. A theta that nobody gives is 10 000, as there. The scaling has
    its kind first, then its parameters by name, and original_max_position_embeddings always: where
    it is not given it is max_position_embeddings. ValueError for a setting per kind of layer (a
    dict in the dict) and for a partial_rotary_factor other than 1.
    """
    found = getattr(config, "rope_parameters", None)
    if not found:
        scaling = getattr(config, "rope_scaling", None) or {}
        found = {"rope_theta": getattr(config, "rope_theta", None), **scaling}
    given = {key: value for key, value in found.items() if value is not None}
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"one RoPE setting per kind of layer is not supported: {found}")
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("RoPE on a part of each head (partial_rotary_factor) is not supported")
    old_kind = given.pop("type", "default")
    kind = given.pop("rope_type", old_kind)
    theta = float(given.pop("rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    length = _required(config, "max_position_embeddings")
    given.setdefault("original_max_position_embeddings", length)
    return theta, {"rope_type": kind, **dict(sorted(given.items()))}


logger = init_logger(__name__)


def _max_position(config: PretrainedConfig) -> int:
    """The longest sequence in tokens for which full attention is what the model computes.

    A model with a sliding window attends to the last `sliding_window` tokens only. Up to that
    length this is full attention, and beyond it this engine would compute something else: so the
    window, where there is one, is the limit, with a warning.

    Any of these means that no layer has a window: `use_sliding_window` is false (missing: true), a
    `layer_types` without "sliding_attention" (missing: all slide), `max_window_layers`, the number
    of first layers that never slide (missing: 0), is not below the number of layers. A window that
    is not below max_position_embeddings limits nothing.
    """
    longest: int = _required(config, "max_position_embeddings")
    window: int | None = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):  # Qwen's switch; Mistral has none
        window = None
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    full_layers = getattr(config, "max_window_layers", 0) or 0  # Qwen: the first ones never slide
    num_layers = _required(config, "num_hidden_layers")
    if "sliding_attention" not in layer_types or full_layers >= num_layers:
        window = None
    if window is None or window >= longest:
        return longest
    logger.warning_rank0(
        f"sliding-window attention is not implemented: the context ends at {window} tokens instead "
        f"of {longest}, up to where the window changes nothing"
    )
    return window


def _attention_switches(config: PretrainedConfig) -> dict[str, bool]:
    """What the attention of a family has, part of which its config.json never mentions.

    Qwen2 always has biases on q, k and v, and none on o. Mistral has none. The others say
    `attention_bias`, which means all four. Qwen3 normalizes q and k.
    """
    family = next(iter(getattr(config, "architectures", None) or [config.model_type])).lower()
    named = bool(getattr(config, "attention_bias", False)) and not family.startswith("mistral")
    is_qwen2 = family.startswith("qwen2")
    return {
        "has_qkv_bias": is_qwen2 or named,
        "has_o_bias": named and not is_qwen2,
        "has_qk_norm": family.startswith("qwen3"),
    }


def _refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise ValueError for what would load and then compute something else.

    That is `architectures[0]`, where it is given, if it is not registered; and auto_map (code of
    the model's own, which is never run), quantization_config, mlp_bias, mlp_only_layers and
    decoder_sparse_step (missing: 1) if they ask for anything.
    """
    architectures = getattr(config, "architectures", None) or []
    if architectures:
        SUPPORTED_MODELS.assert_supported(architectures[0])
    if getattr(config, "auto_map", None):
        raise ValueError("the model needs code of its own (auto_map), which is never run")
    if getattr(config, "quantization_config", None):
        raise ValueError("quantized checkpoints are not supported; take the unquantized model")
    if getattr(config, "mlp_bias", False):
        raise ValueError("biases in the MLP (mlp_bias) are not supported")
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        raise ValueError("a mixture of experts in only some of the layers is not supported")


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that shape a model, with everything settled that a config.json leaves open.

    Sizes are those of the whole model, not of one rank; a KV head counts once however many ranks
    hold it. `has_qkv_bias`, `has_o_bias` and `has_qk_norm` are ours: what differs between families.
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    rms_norm_eps: float
    rotary_config: RotaryConfig
    hidden_act: str
    tie_word_embeddings: bool
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    model_type: str
    architectures: list[str]
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_qk_norm: bool = False

    @property
    def is_moe(self) -> bool:
        """Whether the MLPs are mixtures of experts."""
        return self.num_experts > 0

    @classmethod
    def from_hf(cls, config: PretrainedConfig) -> ModelConfig:
        """Read a config of `transformers`, written by its version 4 or 5.

        Raises ValueError for an architecture or a setting that this engine does not compute.
        """
        return cls(**_settings_from_hf(config))


def _settings_from_hf(config: PretrainedConfig) -> dict[str, Any]:
    """Every field of `ModelConfig` by name.

    Required: num_hidden_layers, hidden_size, vocab_size, intermediate_size, rms_norm_eps and
    hidden_act. The rest may be missing or null, and is then 0, false or empty. Experts are called
    `num_experts` or, in other families, `num_local_experts`; the other names are those of the
    fields. The rotation turns the whole head: rotary_dim is head_dim.
    """
    _refuse_unsupported(config)
    num_qo_heads, num_kv_heads, head_dim = _head_shape(config)
    base, scaling = _rope(config)
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
    return {
        "num_layers": _required(config, "num_hidden_layers"),
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": _required(config, "hidden_size"),
        "vocab_size": _required(config, "vocab_size"),
        "intermediate_size": _required(config, "intermediate_size"),
        "rms_norm_eps": _required(config, "rms_norm_eps"),
        "rotary_config": RotaryConfig(head_dim, head_dim, _max_position(config), base, scaling),
        "hidden_act": _required(config, "hidden_act"),
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "num_experts": num_experts or 0,
        "num_experts_per_tok": getattr(config, "num_experts_per_tok", 0) or 0,
        "moe_intermediate_size": getattr(config, "moe_intermediate_size", 0) or 0,
        "norm_topk_prob": bool(getattr(config, "norm_topk_prob", False)),
        "model_type": config.model_type,
        "architectures": list(getattr(config, "architectures", None) or []),
        **_attention_switches(config),
    }
