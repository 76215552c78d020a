"""The operations between the products, in C: each in one call, for float32 on a CPU.

Official counterpart: FlashInfer's fused kernels, which `python/minisgl/layers/` calls.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from minisgl.kernel.utils import EXPONENTIAL, LANES, load_jit

ADD_RMSNORM = r"""
#define WORTH 16384 /* numbers; with fewer, starting threads takes longer than the work */

void add_rmsnorm(const float *x, const float *residual, const float *weight, float *y,
                 float *total, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > WORTH)
  for (int64_t i = 0; i < rows; i++) {
    const float *a = x + i * size, *b = residual + i * size;
    float *to = y + i * size, *t = total + i * size, square = 0.0f;
    lanes squares = {0};
    int64_t c = 0;
    for (; c + LANES <= size; c += LANES) {
      lanes both = read_float(a + c) + read_float(b + c);
      *(lanes *)(t + c) = both;
      squares += both * both;
    }
    for (; c < size; c++) {
      t[c] = a[c] + b[c];
      square += t[c] * t[c];
    }
    float scale = 1.0f / sqrtf((sum(squares) + square) / size + eps);
    for (c = 0; c < size; c++) to[c] = t[c] * scale * weight[c];
  }
}
"""

SILU_AND_MUL = r"""
void silu_and_mul(const float *x, float *y, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > WORTH)
  for (int64_t i = 0; i < rows; i++) {
    const float *gate = x + 2 * i * size, *up = gate + size;
    float *to = y + i * size;
    int64_t c = 0;
    for (; c + LANES <= size; c += LANES) {
      lanes g = read_float(gate + c), one = (lanes){0} + 1.0f;
      lanes e = exponential((lanes)((bits)g | 0x80000000u)); /* with the sign bit: -|g| */
      bits below = (bits)(g < 0.0f);
      lanes over = (lanes)((below & (bits)e) | (~below & (bits)one));
      *(lanes *)(to + c) = g * over / (1.0f + e) * read_float(up + c);
    }
    for (; c < size; c++) to[c] = gate[c] / (1.0f + expf(-gate[c])) * up[c];
  }
}
"""

ROPE = r"""
static inline int64_t position(const void *positions, int wide, int64_t i) {
  return wide ? ((const int64_t *)positions)[i] : ((const int32_t *)positions)[i];
}

int rope(const void *positions, const float *table, const float *q, const float *k, float *to_q,
         float *to_k, int64_t n, int64_t q_heads, int64_t k_heads, int64_t size, int64_t q_row,
         int64_t k_row, int64_t known, int wide, int threads) {
  int64_t heads = q_heads + k_heads, half = size / 2;
  for (int64_t i = 0; i < n; i++)
    if (position(positions, wide, i) < 0 || position(positions, wide, i) >= known) return 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (n * heads * size > WORTH)
  for (int64_t i = 0; i < n; i++) {
    const float *cosine = table + position(positions, wide, i) * size, *sine = cosine + half;
    for (int64_t h = 0; h < heads; h++) {
      int64_t g = h - q_heads; /* which head of k, after those of q */
      const float *x = g < 0 ? q + i * q_row + h * size : k + i * k_row + g * size;
      float *y = g < 0 ? to_q + (i * q_heads + h) * size : to_k + (i * k_heads + g) * size;
      for (int64_t j = 0; j < half; j++) {
        y[j] = x[j] * cosine[j] - x[j + half] * sine[j];
        y[j + half] = x[j + half] * cosine[j] + x[j] * sine[j];
      }
    }
  }
  return 1;
}
"""
SOURCE = LANES + EXPONENTIAL + ADD_RMSNORM + SILU_AND_MUL + ROPE


@cache
def _library() -> ctypes.CDLL | None:
    """The functions of `SOURCE` with the types of their parameters; None without a compiler."""
    library = load_jit(SOURCE)
    if library is not None:
        address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        library.add_rmsnorm.argtypes = [address] * 5 + [size] * 2 + [ctypes.c_float, number]
        library.silu_and_mul.argtypes = [address] * 2 + [size] * 2 + [number]
        library.rope.argtypes = [address] * 6 + [size] * 7 + [number] * 2
        library.add_rmsnorm.restype = library.silu_and_mul.restype = None
    return library


def _fits(*tensors: torch.Tensor) -> bool:
    """Whether all are float32, on the CPU, and lie one row after the other."""
    return all(t.dtype == torch.float32 and t.is_cpu and t.is_contiguous() for t in tensors)


def native_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Any:
    """`fused_add_rmsnorm` in one call, or NotImplemented."""
    library, size = _library(), x.shape[-1]
    if library is None or not _fits(x, residual, weight):
        return NotImplemented
    if x.shape != residual.shape or weight.shape != (size,) or not size:
        return NotImplemented
    y, total = torch.empty_like(x), torch.empty_like(x)
    addresses = (t.data_ptr() for t in (x, residual, weight, y, total))
    library.add_rmsnorm(*addresses, x.numel() // size, size, eps, torch.get_num_threads())
    return y, total


def native_silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> Any:
    """`silu_and_mul` in one call, or NotImplemented; always if there is an `out`."""
    library, size = _library(), x.shape[-1] // 2
    if library is None or out is not None or not _fits(x) or not size or x.shape[-1] % 2:
        return NotImplemented
    y = torch.empty(*x.shape[:-1], size)
    rows = x.numel() // (2 * size)
    library.silu_and_mul(x.data_ptr(), y.data_ptr(), rows, size, torch.get_num_threads())
    return y


def native_rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> Any:
    """`apply_rope_with_cos_sin_cache` in one call, or NotImplemented."""
    library, table, n = _library(), cos_sin_cache, len(positions)
    wide, q, k = positions.dtype == torch.int64, query.flatten(1), key.flatten(1)
    if library is None or not _fits(table) or table.shape[1] != head_size:
        return NotImplemented
    if not (wide or positions.dtype == torch.int32) or not positions.is_contiguous():
        return NotImplemented
    for x in (q, k):  # rows may be far apart, but each lies in one piece
        if x.dtype != torch.float32 or not x.is_cpu or x.stride(1) != 1:
            return NotImplemented
        if x.shape[0] != n or x.shape[1] % head_size or not positions.is_cpu:
            return NotImplemented
    turned = torch.empty(query.shape), torch.empty(key.shape)
    addresses = (t.data_ptr() for t in (positions, table, q, k, *turned))
    heads = (q.shape[1] // head_size, k.shape[1] // head_size)
    sizes = (n, *heads, head_size, q.stride(0), k.stride(0), len(table))
    done = library.rope(*addresses, *sizes, wide, torch.get_num_threads())
    return turned if done else NotImplemented


REPLACEMENTS = {
    "fused_add_rmsnorm": native_add_rmsnorm,
    "silu_and_mul": native_silu_and_mul,
    "apply_rope_with_cos_sin_cache": native_rope,
}
