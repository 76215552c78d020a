"""Small random checkpoints, one for each architecture."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from course.checkpoints.progress import quiet

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

# name → config class of transformers, and what differs from _TINY
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True}),
    "llama-untied": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "yarn": ("Qwen3Config", {"head_dim": 32, "rope_parameters": _YARN}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}
_TINY = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}

TINY_NAMES = tuple(_ARCHITECTURES)
"""What `tiny` can make."""


def tiny(name: str, shards: int = 1, seed: int = 0, **config_overrides: Any) -> str:
    """The folder of a small random checkpoint that transformers wrote, without a tokenizer.

    About 0.15 M parameters in float32: hidden size 64, 3 layers, 4 query heads and 2 KV heads,
    vocabulary 200, 512 positions, embeddings tied, no end-of-text id. The same arguments give
    the same weights everywhere. The folder is made once per process and removed when it ends;
    copy it before you change it.

    Args:
        name: "llama", "llama-bias" (biases in attention), "llama-untied", "llama3-rope" (small
            numbers, so that all three frequency bands occur), "yarn" (a Qwen3), "mistral",
            "qwen2" (q/k/v biases that the config doesn't mention), or "qwen3" (q/k norm, and
            4 heads of 32 although the hidden size is 64).
        shards: number of safetensors files; more than one comes with an index file.
        seed: of the weights.
        **config_overrides: fields of the config, such as `num_key_value_heads=1`.

    Raises:
        ValueError: an unknown name or field, or more shards than tensors.
    """
    if name not in _ARCHITECTURES:
        raise ValueError(f"no tiny model {name!r}; there are {', '.join(_ARCHITECTURES)}")
    return _tiny(name, shards, seed, json.dumps(config_overrides, sort_keys=True))


@functools.cache
def _tiny(name: str, shards: int, seed: int, overrides: str) -> str:
    quiet()
    import torch
    import transformers

    class_name, differences = _ARCHITECTURES[name]
    given = json.loads(overrides)
    config_class = getattr(transformers, class_name)
    known = config_class()
    if unknown := [key for key in given if not hasattr(known, key)]:
        raise ValueError(f"{class_name} has no field {', '.join(unknown)}")
    config = config_class(**{**_TINY, **differences, **given})
    with torch.device("cpu"):  # whatever the caller is about to build elsewhere
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomize(network, seed)

    folder = _tiny_root() / f"{name}-{len(list(_tiny_root().iterdir()))}"
    network.save_pretrained(folder, max_shard_size=_shard_bytes(network, shards))
    return str(folder)


def _randomize(network: Any, seed: int) -> None:
    """Fill in weights large enough that the greedy token depends on all of the network."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(network.named_parameters()):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if "q_norm" in name or "k_norm" in name:
                parameter += 2  # around 1 attention would be nearly uniform
            elif "norm" in name:
                parameter += 1


def _shard_bytes(network: Any, shards: int) -> int:
    """The size limit of a file with which transformers writes exactly `shards` files."""
    from huggingface_hub import split_torch_state_dict_into_shards

    state = network.state_dict()
    low, high = 1, sum(tensor.nbytes for tensor in state.values())
    while low < high:  # the smallest limit that needs at most `shards` files
        middle = (low + high) // 2
        plan = split_torch_state_dict_into_shards(state, max_shard_size=middle)
        low, high = (middle + 1, high) if len(plan.filename_to_tensors) > shards else (low, middle)
    plan = split_torch_state_dict_into_shards(state, max_shard_size=low)
    if len(plan.filename_to_tensors) != shards:
        raise ValueError(f"the {len(state)} tensors of this model can't be cut into {shards} files")
    return low


@functools.cache
def _tiny_root() -> Path:
    root = tempfile.mkdtemp(prefix="minisgl-tiny-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)
