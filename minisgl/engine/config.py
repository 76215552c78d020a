"""Everything an engine is told before it starts. Official counterpart: `engine/config.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from minisgl.kernel import SUPPORTED_KERNELS
from minisgl.models.config import ModelConfig
from minisgl.utils.hf import cached_load_hf_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from minisgl.distributed import DistributedInfo


def check_engine_config(config: EngineConfig) -> None:
    """Refuse, with ValueError, settings that can be wrong without looking at the model.

    `max_running_req`, `page_size` and `max_seq_len_override` are at least 1 (the last may be None),
    `num_page_override` is None or at least 2, `memory_ratio` lies above 0 and is at most 1, `dtype`
    is a floating-point type, `kernels` is "auto" or a registered name. The message names the field
    and the value that came.
    """
    at_least_one = ("max_running_req", "page_size", "max_seq_len_override")
    for name in at_least_one:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 < config.memory_ratio <= 1:
        raise ValueError(
            f"memory_ratio is a share of the free memory, above 0 and at most 1, "
            f"got {config.memory_ratio}"
        )
    if not config.dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {config.dtype}")
    if config.num_page_override is not None and config.num_page_override < 2:
        raise ValueError(
            f"num_page_override must be at least 2, got {config.num_page_override}; "
            "None lets the engine work the number out"
        )
    if config.kernels != "auto":
        SUPPORTED_KERNELS.assert_supported(config.kernels)


def limit_seq_len(override: int | None, model_config: ModelConfig) -> int:
    """`override` if given, else as many positions as the model was trained for.

    Raises ValueError if the model has fewer: RoPE has no angles past its last position.
    """
    positions = model_config.rotary_config.max_position
    if override is not None and override > positions:
        raise ValueError(
            f"max_seq_len_override={override}, but this model has {positions} positions; "
            "give at most that many, or none to use them all"
        )
    return positions if override is None else override


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; frozen, so that nothing can change under a running one."""

    model_path: str
    tp_info: DistributedInfo
    dtype: torch.dtype
    device: str = "auto"
    max_running_req: int = 256
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    kernels: str = "auto"
    cuda_graph_bs: list[int] | None = None
    cuda_graph_max_bs: int | None = None
    page_size: int = 1
    memory_ratio: float = 0.9
    cpu_kv_cache_bytes: int = 2 << 30
    distributed_timeout: float = 60.0
    distributed_port: int = 2333
    use_dummy_weight: bool = False
    max_seq_len_override: int | None = None
    num_page_override: int | None = None

    def __post_init__(self) -> None:
        check_engine_config(self)

    @cached_property
    def hf_config(self) -> PretrainedConfig:
        """The checkpoint's config.json, read once."""
        return cached_load_hf_config(self.model_path)

    @cached_property
    def model_config(self) -> ModelConfig:
        """What the model's shape is, whatever family it is of."""
        return ModelConfig.from_hf(self.hf_config)

    @property
    def max_seq_len(self) -> int:
        """The most tokens a request may have; the pool may be smaller still."""
        return limit_seq_len(self.max_seq_len_override, self.model_config)

    @property
    def max_forward_len(self) -> int:
        """The most tokens that one request may bring into a pass: a whole prompt of any length."""
        return self.max_seq_len

    @property
    def distributed_addr(self) -> str:
        """Where the ranks of one engine find each other."""
        return f"tcp://127.0.0.1:{self.distributed_port}"


def check_ranks(size: int, model: ModelConfig) -> None:
    """Refuse, with ValueError, a number of ranks that can't share the model; say which can.

    Query heads and the MLPs' inner size are divided evenly, and so are KV heads, unless there are
    fewer than ranks: then an equal number of ranks holds each of them (`div_even`).
    """
    inner = model.moe_intermediate_size if model.is_moe else model.intermediate_size

    def would_do(n: int) -> bool:
        kv = model.num_kv_heads
        return model.num_qo_heads % n == inner % n == 0 and (kv % n == 0 or n % kv == 0)

    if not would_do(size):
        sizes = ", ".join(str(n) for n in range(1, model.num_qo_heads + 1) if would_do(n))
        raise ValueError(
            f"{size} ranks can't share {model.num_qo_heads} query heads, {model.num_kv_heads} KV "
            f"heads and an intermediate size of {inner}; numbers of ranks that would do: {sizes}"
        )
