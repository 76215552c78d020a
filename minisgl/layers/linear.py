"""Matrix products, whole or one slice per rank.

Official counterpart: `python/minisgl/layers/linear.py`.
"""

from __future__ import annotations

import torch

from minisgl.distributed.impl import DistributedCommunicator
from minisgl.distributed.info import get_tp_info
from minisgl.kernel.table import get_kernels
from minisgl.layers.base import BaseOP, _concat_prefix
from minisgl.utils.misc import div_even


class _LinearTPImpl(BaseOP):
    """`y = x @ weight.T + bias`, with this rank's slice of the weight.

    `full_*` are the sizes of the whole layer, kept as `full_shape`; `local_*` are those on this
    rank: `weight` is `[local_osize, local_isize]`, `bias` is `[local_osize]` or None.
    """

    def __init__(
        self, full_isize: int, full_osize: int, local_isize: int, local_osize: int, has_bias: bool
    ) -> None:
        self.full_shape = (full_osize, full_isize)
        self.weight = torch.empty(local_osize, local_isize)
        self.bias = torch.empty(local_osize) if has_bias else None
        self._kernels = get_kernels()

    def post_load(self, prefix: str = "") -> None:
        name = _concat_prefix(prefix, "weight")
        self.weight = self._kernels.pack(self.weight, name, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, local_isize]` to `[num_tokens, local_osize]`."""
        return self._kernels.linear(x, self.weight, self.bias)


class LinearReplicated(_LinearTPImpl):
    """The whole layer on every rank."""

    def __init__(self, input_size: int, output_size: int, has_bias: bool) -> None:
        super().__init__(input_size, output_size, input_size, output_size, has_bias)


class LinearColParallelMerged(_LinearTPImpl):
    """Several layers on the same input as one product, such as gate and up; outputs cut per rank.

    The rows of the weight are this rank's part of the first output, then of the second, and so on.
    """

    def __init__(self, input_size: int, output_sizes: list[int], has_bias: bool) -> None:
        tp_size = get_tp_info().size
        local = [div_even(size, tp_size, what="outputs of a linear layer") for size in output_sizes]
        super().__init__(input_size, sum(output_sizes), input_size, sum(local), has_bias)


class LinearQKVMerged(_LinearTPImpl):
    """The projections to queries, keys and values as one product; heads cut per rank.

    The rows of the weight are this rank's query heads, then its key heads, then its value heads.
    Where there are fewer key/value heads than ranks, each is held by several ranks.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_qo_heads: int, num_kv_heads: int, has_bias: bool
    ) -> None:
        tp_size = get_tp_info().size
        div_even(num_qo_heads, num_kv_heads, what="query heads")  # grouped evenly, or an error
        local_qo = div_even(num_qo_heads, tp_size, what="query heads")
        local_kv = div_even(num_kv_heads, tp_size, allow_replicate=True, what="key/value heads")
        full_osize = (num_qo_heads + 2 * num_kv_heads) * head_dim
        local_osize = (local_qo + 2 * local_kv) * head_dim
        super().__init__(hidden_size, full_osize, hidden_size, local_osize, has_bias)


class LinearRowParallel(_LinearTPImpl):
    """A layer whose *input* is cut per rank: each rank computes a summand of the whole output."""

    def __init__(self, input_size: int, output_size: int, has_bias: bool) -> None:
        self._tp_size = get_tp_info().size
        self._comm = DistributedCommunicator()
        local_isize = div_even(input_size, self._tp_size, what="inputs of a linear layer")
        super().__init__(input_size, output_size, local_isize, output_size, has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, local_isize]` to the whole `[num_tokens, full_osize]`."""
        if self._tp_size == 1:
            return super().forward(x)
        y = self._comm.all_reduce(self._kernels.linear(x, self.weight, None))
        return y if self.bias is None else y + self.bias  # once, not once per rank


class LinearOProj(LinearRowParallel):
    """The projection after attention: its inputs are this rank's query heads."""
