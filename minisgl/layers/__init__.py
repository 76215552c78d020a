"""The layers a decoder is made of.

Official counterpart: `python/minisgl/layers/__init__.py`.
"""

from __future__ import annotations

from minisgl.layers.activation import gelu_and_mul, get_activation, silu_and_mul
from minisgl.layers.attention import AttentionLayer
from minisgl.layers.base import BaseOP, OPList, StateLessOP
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import (
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearReplicated,
    LinearRowParallel,
)
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryEmbedding, get_rope, set_rope_device
