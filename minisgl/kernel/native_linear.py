"""The product of a linear layer for a few rows, in C.

No official counterpart: on a GPU, `F.linear` is fast for every shape.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from minisgl.kernel.utils import LANES, TYPES, load_jit

FEW = 4  # rows of x that are multiplied as they lie; more are turned
BLOCK = 16  # rows of x in a block that lies turned
SIZES = f"""
#define FEW {FEW}
#define BLOCK {BLOCK}
#define STRIP 6 /* rows of the weight that a block is multiplied by at a time */
"""
FEW_ROWS = r"""
static inline void ask_TYPE(const TYPE *row, int64_t k) { /* once per cache line */
  if (k % (64 / sizeof(TYPE)) == 0) __builtin_prefetch(row + k, 0, 0);
}

static inline __attribute__((always_inline)) void few_TYPE(
    const float *x, const TYPE *w, float bias, TYPE *y, int64_t in, int64_t out, int rows) {
  lanes acc[FEW];
  memset(acc, 0, sizeof acc);
  int64_t k = 0;
  for (; k + LANES <= in; k += LANES) {
    ask_TYPE(w + 2 * in, k);
    lanes weight = read_TYPE(w + k);
    for (int r = 0; r < rows; r++) acc[r] += weight * read_float(x + r * in + k);
  }
  for (int r = 0; r < rows; r++) {
    float total = sum(acc[r]);
    for (int64_t t = k; t < in; t++) total += one_TYPE(w[t]) * x[r * in + t];
    y[r * out] = round_TYPE(total + bias);
  }
}
"""

MANY_ROWS = r"""
static inline __attribute__((always_inline)) void many_TYPE(
    const float *x, const TYPE *w, const TYPE *bias, TYPE *y, int64_t n, int64_t in, int64_t out,
    int vectors, int outs) {
  lanes acc[STRIP][BLOCK / LANES];
  memset(acc, 0, sizeof acc);
  for (int64_t k = 0; k < in; k++)
    for (int j = 0; j < outs; j++) {
      ask_TYPE(w + (j + outs) * in, k);
      lanes weight = spread_TYPE(w + j * in + k);
      for (int v = 0; v < vectors; v++)
        acc[j][v] += weight * read_float(x + k * BLOCK + v * LANES);
    }
  for (int64_t r = 0; r < n; r++)
    for (int j = 0; j < outs; j++) {
      float total = acc[j][r / LANES][r % LANES];
      y[r * out + j] = round_TYPE(bias ? total + one_TYPE(bias[j]) : total);
    }
}
"""

PRODUCT = r"""
static inline __attribute__((always_inline)) void strip_TYPE(
    const float *x, const TYPE *w, const TYPE *bias, TYPE *y, int64_t n, int64_t in, int64_t out,
    int outs) {
  if (n > FEW) {
    for (int64_t r = 0; r < n; r += BLOCK) {
      const float *block = x + r * in;
      TYPE *to = y + r * out;
      if (n - r <= LANES) many_TYPE(block, w, bias, to, n - r, in, out, 1, outs);
      else many_TYPE(block, w, bias, to, n - r < BLOCK ? n - r : BLOCK, in, out, 2, outs);
    }
    return;
  }
  for (int j = 0; j < outs; j++, w += in, y++) {
    float b = bias ? one_TYPE(bias[j]) : 0.0f;
    switch (n) {
      case 1: few_TYPE(x, w, b, y, in, out, 1); break;
      case 2: few_TYPE(x, w, b, y, in, out, 2); break;
      case 3: few_TYPE(x, w, b, y, in, out, 3); break;
      case 4: few_TYPE(x, w, b, y, in, out, 4);
    }
  }
}

/* `room` takes x as floats: as it lies, or for more than FEW rows turned, in whole blocks. */
int linear_TYPE(const TYPE *x, float *room, const TYPE *w, const TYPE *bias, TYPE *y, int64_t n,
                int64_t in, int64_t out, int threads) {
  int64_t rows = (n + BLOCK - 1) / BLOCK * BLOCK;
  if (n <= FEW)
    for (int64_t k = 0; k < n * in; k++) room[k] = one_TYPE(x[k]);
#pragma omp parallel num_threads(threads)
  {
    if (n > FEW) {
#pragma omp for schedule(static)
      for (int64_t k = 0; k < in; k++)
        for (int64_t r = 0; r < rows; r++)
          room[(r / BLOCK * in + k) * BLOCK + r % BLOCK] = r < n ? one_TYPE(x[r * in + k]) : 0.0f;
    }
#pragma omp for schedule(static)
    for (int64_t o = 0; o < out; o += STRIP) {
      if (o + STRIP <= out)
        strip_TYPE(room, w + o * in, bias ? bias + o : bias, y + o, n, in, out, STRIP);
      else
        for (int64_t j = o; j < out; j++)
          strip_TYPE(room, w + j * in, bias ? bias + j : bias, y + j, n, in, out, 1);
    }
  }
  return 1;
}
"""
KERNEL = FEW_ROWS + MANY_ROWS + PRODUCT
SOURCE = LANES + SIZES + "".join(KERNEL.replace("TYPE", name) for name in TYPES)


@cache
def _functions() -> dict[torch.dtype, Any]:
    """`linear_TYPE` for each dtype of a weight; RuntimeError where C can't be compiled."""
    library = load_jit(SOURCE, linear_float="aaaaasssn", linear_bfloat16="aaaaasssn")
    if library is None:
        raise RuntimeError("no C compiler that could compile kernel/native_linear.py")
    return {dtype: getattr(library, f"linear_{name}") for name, dtype in TYPES.items()}


def native(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product, computed in float32, with `weight` read as it lies.

    `x` is `[n, in]`, `weight` `[out, in]` and `bias` `[out]`: all float32 or all bfloat16, on the
    CPU, and so is the result. Raises RuntimeError where C can't be compiled, and ValueError if
    shapes or dtypes don't fit.
    """
    function, (n, width), (out, size) = _functions()[weight.dtype], x.shape, weight.shape
    given = [x, weight] if bias is None else [x, weight, bias]
    fits = width == size and (bias is None or bias.shape == (out,))
    if not fits or any(tensor.dtype != weight.dtype for tensor in given):
        raise ValueError(
            "expected x [n, in], weight [out, in] and bias [out], of one dtype, got "
            + ", ".join(f"{list(tensor.shape)} of {tensor.dtype}" for tensor in given)
        )
    given = [tensor.contiguous() for tensor in given]
    room = torch.empty(
        -(-n // BLOCK) * BLOCK if n > FEW else n, size, dtype=torch.float32, device="cpu"
    )
    y = x.new_empty(n, out)
    function(
        given[0].data_ptr(),
        room.data_ptr(),
        given[1].data_ptr(),
        None if bias is None else given[2].data_ptr(),
        y.data_ptr(),
        n,
        size,
        out,
        torch.get_num_threads(),
    )
    return y
