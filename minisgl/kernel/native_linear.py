"""The product of a linear layer for a few rows, in C.

No official counterpart: on a GPU, `F.linear` is fast for every shape.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from minisgl.kernel.utils import LANES, TYPES, load_jit

SIZES = r"""
#define ROWS 4 /* of x at a time */
#define OUTS 4 /* rows of the weight at a time; ROWS * OUTS sums stay in registers */
"""
TILE = r"""
static inline __attribute__((always_inline)) void tile_TYPE(
    const float *x, const TYPE *w, const float *bias, float *y, int64_t in, int64_t out,
    int rows, int outs) {
  lanes acc[OUTS][ROWS];
  memset(acc, 0, sizeof acc);
  int64_t k = 0;
  for (; k + LANES <= in; k += LANES) {
    lanes from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = read_float(x + r * in + k);
    for (int j = 0; j < outs; j++) {
      lanes weight = read_TYPE(w + j * in + k);
      for (int r = 0; r < rows; r++) acc[j][r] += weight * from[r];
    }
  }
  for (int j = 0; j < outs; j++)
    for (int r = 0; r < rows; r++) {
      float total = sum(acc[j][r]);
      for (int64_t t = k; t < in; t++) total += one_TYPE(w[j * in + t]) * x[r * in + t];
      y[r * out + j] = bias ? total + bias[j] : total;
    }
}
"""

PRODUCT = r"""
void linear_TYPE(const float *x, const TYPE *w, const float *bias, float *y, int64_t n,
                 int64_t in, int64_t out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t o = 0; o < out; o += OUTS) {
    const TYPE *weight = w + o * in;
    const float *b = bias ? bias + o : bias;
    int64_t r = 0;
    if (o + OUTS > out) { /* fewer are left: one number at a time */
      for (; r < n; r++)
        for (int64_t j = 0; j < out - o; j++)
          tile_TYPE(x + r * in, weight + j * in, b ? b + j : b, y + r * out + o + j, in, out, 1, 1);
      continue;
    }
    for (; r + 4 <= n; r += 4)
      tile_TYPE(x + r * in, weight, b, y + r * out + o, in, out, 4, OUTS);
    const float *rest = x + r * in;
    float *to = y + r * out + o;
    if (n - r == 3) tile_TYPE(rest, weight, b, to, in, out, 3, OUTS);
    if (n - r == 2) tile_TYPE(rest, weight, b, to, in, out, 2, OUTS);
    if (n - r == 1) tile_TYPE(rest, weight, b, to, in, out, 1, OUTS);
  }
}
"""
SOURCE = LANES + SIZES + "".join((TILE + PRODUCT).replace("TYPE", name) for name in TYPES)


@cache
def _functions() -> dict[torch.dtype, Any]:
    """`linear_TYPE` for each dtype of a weight; RuntimeError where C can't be compiled."""
    library = load_jit(SOURCE)
    if library is None:
        raise RuntimeError("no C compiler that could compile kernel/native_linear.py")
    found = {torch.float32: library.linear_float, torch.bfloat16: library.linear_bfloat16}
    for function in found.values():
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]
        function.restype = None
    return found


def native(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float32, whatever the dtype of `weight`, which is read as it lies.

    `x` is `[n, in]` and `weight` `[out, in]`, both float32 or both bfloat16, on the CPU. The result
    is in the dtype of `x`. Raises RuntimeError where C can't be compiled.
    """
    function = _functions()[weight.dtype]
    rows, weight = x.float().contiguous(), weight.contiguous()
    added = None if bias is None else bias.float().contiguous()
    y = torch.empty(len(x), len(weight))
    function(
        rows.data_ptr(),
        weight.data_ptr(),
        None if added is None else added.data_ptr(),
        y.data_ptr(),
        len(rows),
        *reversed(weight.shape),
        torch.get_num_threads(),
    )
    return y.to(x.dtype)
