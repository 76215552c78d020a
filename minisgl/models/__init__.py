"""Models and their weights. Official counterpart: `python/minisgl/models/__init__.py`."""

from __future__ import annotations

from minisgl.models.base import BaseLLMModel
from minisgl.models.config import ModelConfig, RotaryConfig
from minisgl.models.register import get_model_class
from minisgl.models.weight import load_weight


def create_model(model_config: ModelConfig) -> BaseLLMModel:
    """The model that `architectures[0]` of the config names, without weights.

    Build it under `torch.device("meta")` (after `set_rope_device`) and it takes no memory until
    `load_state_dict` puts real tensors in. Raises ValueError for an unknown architecture.
    """
    if not model_config.architectures:
        raise ValueError("config.json names no architecture: it needs an `architectures` list")
    return get_model_class(model_config.architectures[0], model_config)
