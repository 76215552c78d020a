"""Which architecture is run by what.

Official counterpart: `python/minisgl/models/register.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minisgl.utils.registry import Registry, import_optional

if TYPE_CHECKING:
    from minisgl.models.base import BaseLLMModel
    from minisgl.models.config import ModelConfig

MOE_MODULE = "minisgl.models.qwen3_moe"  # registers more architectures, where it exists

# `architectures[0]` of config.json → what makes a model of it, without weights.
SUPPORTED_MODELS = Registry[Callable[["ModelConfig"], "BaseLLMModel"]](
    "model architecture", optional=(MOE_MODULE,)
)


@SUPPORTED_MODELS.register("Qwen3ForCausalLM")
@SUPPORTED_MODELS.register("Qwen2ForCausalLM")
@SUPPORTED_MODELS.register("MistralForCausalLM")
@SUPPORTED_MODELS.register("LlamaForCausalLM")
def create_decoder(config: ModelConfig) -> BaseLLMModel:
    """Four families, one class: what differs between them stands in the config."""
    from minisgl.models.decoder import LlamaForCausalLM

    return LlamaForCausalLM(config)


def moe_module() -> Any:
    """The optional module, which runs mixtures of experts; ValueError where it doesn't exist."""
    module = import_optional(MOE_MODULE)
    if module is None:
        raise ValueError(f"mixtures of experts are not supported: there is no {MOE_MODULE}")
    return module


def get_model_class(model_architecture: str, model_config: ModelConfig) -> BaseLLMModel:
    """A model of this architecture, without weights: an instance, despite the official name.

    Raises ValueError, with the list of names, for an architecture that is not registered.
    """
    return SUPPORTED_MODELS[model_architecture](model_config)
