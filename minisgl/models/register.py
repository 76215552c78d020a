"""Which class runs which architecture.

Official counterpart: `python/minisgl/models/register.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.models.base import BaseLLMModel
    from minisgl.models.config import ModelConfig

# `architectures[0]` of config.json → the module and the class that run it. A module is imported
# only when its architecture is asked for.
_MODEL_REGISTRY: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("minisgl.models.decoder", "LlamaForCausalLM"),
    "MistralForCausalLM": ("minisgl.models.decoder", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("minisgl.models.decoder", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("minisgl.models.decoder", "Qwen3ForCausalLM"),
}

# The same for modules that a later chapter builds: it adds the file and changes nothing here.
_LATER_REGISTRY: dict[str, tuple[str, str]] = {
    "Qwen3MoeForCausalLM": ("minisgl.models.qwen3_moe", "Qwen3MoeForCausalLM"),
}


def assert_supported(model_architecture: str) -> None:
    """Raise ValueError for an architecture that no class runs, listing those that have one."""
    if model_architecture not in _MODEL_REGISTRY | _LATER_REGISTRY:
        raise ValueError(
            f"model architecture {model_architecture!r} is not supported; supported are "
            f"{', '.join(_MODEL_REGISTRY)}, and {', '.join(_LATER_REGISTRY)} once its chapter is "
            "built"
        )


def import_later(module: str, what: str) -> Any:
    """The module, or NotImplementedError if the chapter that builds it has not been run.

    `what` is what was asked for, in words: "WHAT comes in a later chapter, in minisgl/x/y.py". If
    the module is there and another one, which it imports, is not, that error passes through.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        path = module.replace(".", "/")
        raise NotImplementedError(f"{what} comes in a later chapter, in {path}.py") from error


def get_model_class(model_architecture: str, model_config: ModelConfig) -> BaseLLMModel:
    """A model of this architecture, without weights: an instance, despite the official name.

    Raises ValueError for an unknown architecture, NotImplementedError for one of a later chapter.
    """
    assert_supported(model_architecture)
    module, name = (_MODEL_REGISTRY | _LATER_REGISTRY)[model_architecture]
    model: BaseLLMModel = getattr(import_later(module, model_architecture), name)(model_config)
    return model
