"""Rotary position embedding: one table per model, shared by its layers.

Official counterpart: `python/minisgl/layers/rotary.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from minisgl.kernel.table import Kernels, get_kernels
from minisgl.layers.base import StateLessOP


def _rope_periods(rotary_dim: int, base: float) -> torch.Tensor:
    """Return `base ** (2i / rotary_dim)` for each pair `i`: positions per radian of its angle."""
    return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


class RotaryEmbedding(StateLessOP):
    """Rotates queries and keys by their positions, with a table of cosines and sines.

    `post_process` maps the inverse frequencies (radians per position, `[rotary_dim / 2]`) to
    scaled ones; `attention_factor` multiplies both halves of the table.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        post_process: Callable[[torch.Tensor], torch.Tensor] | None = None,
        attention_factor: float = 1.0,
    ) -> None:
        if head_size != rotary_dim or rotary_dim % 2 != 0:
            raise ValueError(
                f"RoPE here turns whole heads of even size, got head_dim {head_size} and "
                f"rotary_dim {rotary_dim}"
            )
        self.head_size = head_size
        inv_freq = 1.0 / _rope_periods(rotary_dim, base)
        if post_process is not None:
            inv_freq = post_process(inv_freq)
        positions = torch.arange(max_position_embeddings, dtype=torch.float32)
        angles = positions[:, None] * inv_freq
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
        self._cos_sin_cache = table  # [max_position_embeddings, rotary_dim], float32
        self._rope = get_kernels().rope

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `query` and `key` (`[num_tokens, heads * head_size]`) rotated."""
        return self._rope(positions, query, key, self.head_size, self._cos_sin_cache)


def _llama3_inv_freq(
    inv_freq: torch.Tensor, scaling: dict[str, Any], max_position: int
) -> torch.Tensor:
    """Slow down the pairs that turn seldom within the original context, as Llama 3.1 does.

    Counted in turns over the original context: at least `high_freq_factor` turns, unchanged; at
    most `low_freq_factor`, divided by `factor`; in between, a linear blend of the two,
    `(1 - share) * f / factor + share * f` of a speed f, multiplied and divided from left to right.
    Source: Llama 3.1's reference code, and `modeling_rope_utils.py` of `transformers`.
    """
    factor, original = scaling["factor"], scaling.get("original_max_position_embeddings")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = original or max_position
    wavelength = 2 * math.pi / inv_freq
    share = (original / wavelength - low) / (high - low)
    blend = (1 - share) * inv_freq / factor + share * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, blend)
    return torch.where(wavelength < original / high, inv_freq, scaled)


def _yarn_context(scaling: dict[str, Any], max_position: int) -> tuple[int, float]:
    """Return the original context length and the factor by which it is stretched."""
    original = scaling.get("original_max_position_embeddings") or max_position
    factor = scaling.get("factor")
    return original, max_position / original if factor is None else factor


def _yarn_inv_freq(
    rotary_dim: int, base: float, scaling: dict[str, Any], max_position: int
) -> torch.Tensor:
    """Blend unscaled and scaled frequencies by a ramp over the pairs ("NTK by parts").

    A pair that makes `beta_fast` turns or more in the original context keeps its frequency, one
    that makes `beta_slow` or fewer is divided by `factor`; the ramp between is linear in the
    number of the pair: `1 / (factor * period) * (1 - keep) + 1 / period * keep`, in this order of
    operations. Source: Peng et al., "YaRN", 2023, section 3.2, with the ramp of the
    authors' code and of `transformers` (the paper's is linear in the turns).
    """
    original, factor = _yarn_context(scaling, max_position)

    def pair_with_turns(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = pair_with_turns(scaling.get("beta_fast") or 32)
    high = pair_with_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    periods = _rope_periods(rotary_dim, base)
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_attention_factor(scaling: dict[str, Any], max_position: int) -> float:
    """Return the number that multiplies cosines and sines: `0.1 ln(factor) + 1` if not given.

    An `attention_factor` in `scaling` is taken as it is. Else, with a `mscale` *and* a
    `mscale_all_dim` that are not 0, it is m(mscale) / m(mscale_all_dim), and m(1) otherwise. Here
    m(w) is `0.1 * w * ln(factor) + 1`, or 1 where the factor is at most 1.
    Source: YaRN, section 3.4; `mscale` and `mscale_all_dim` as in `transformers`.
    """
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = _yarn_context(scaling, max_position)[1]

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


SUPPORTED_ROPE_TYPES = ("default", "llama3", "yarn")


def _get_rope(
    head_dim: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    rope_scaling: dict[str, Any] | None = None,
) -> RotaryEmbedding:
    """Build the embedding that `rope_scaling` asks for, on the current default device."""
    scaling = rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    make = functools.partial(RotaryEmbedding, head_dim, rotary_dim, max_position, base)
    try:
        if kind == "default":
            return make()
        if kind == "llama3":
            return make(lambda inv_freq: _llama3_inv_freq(inv_freq, scaling, max_position))
        if kind == "yarn":
            inv_freq = _yarn_inv_freq(rotary_dim, base, scaling, max_position)
            return make(lambda _: inv_freq, _yarn_attention_factor(scaling, max_position))
    except KeyError as error:
        raise ValueError(f"RoPE scaling of type {kind!r} needs the key {error}") from error
    known = ", ".join(SUPPORTED_ROPE_TYPES)
    raise ValueError(f"unknown RoPE type {kind!r}; supported: {known}")


_ROPE_DEVICE: torch.device | None = None


def set_rope_device(device: torch.device | None) -> None:
    """Choose where tables are made, also for models built on the meta device. None forgets it.

    The tables that were made before are forgotten.
    """
    global _ROPE_DEVICE
    _ROPE_DEVICE = None if device is None else torch.device(device)
    _cached_rope.cache_clear()


@functools.cache
def _cached_rope(
    kernels: Kernels,  # those that `RotaryEmbedding` takes; here so that each has its own
    device: torch.device,
    head_dim: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    rope_scaling: tuple[tuple[str, Any], ...] | None,
) -> RotaryEmbedding:
    scaling = None if rope_scaling is None else dict(rope_scaling)
    with torch.device(device):
        return _get_rope(head_dim, rotary_dim, max_position, base, scaling)


def get_rope(
    head_dim: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    rope_scaling: tuple[tuple[str, Any], ...] | None = None,
) -> RotaryEmbedding:
    """Return the shared embedding for these settings, made on first use.

    `rope_scaling` holds the items of the config's dict, as a tuple so that it can be a key.
    Raises `ValueError` for an unknown type, and `RuntimeError` on the meta device when
    `set_rope_device` was not called: a table without numbers would be of no use.
    """
    device = _ROPE_DEVICE or torch.get_default_device()
    if device.type == "meta":
        raise RuntimeError("a RoPE table needs real memory: call set_rope_device(device) first")
    settings = (head_dim, rotary_dim, max_position, base, rope_scaling)
    return _cached_rope(get_kernels(), device, *settings)
