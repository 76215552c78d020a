"""The operations between the products, in C: each in one call, on a CPU.

Official counterparts: FlashInfer's fused kernels, which `python/minisgl/layers/` calls, and
`python/minisgl/kernel/store.py`.
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
static inline int64_t entry(const void *list, int bytes, int64_t i) { /* of int32 or int64 */
  return bytes == 8 ? ((const int64_t *)list)[i] : ((const int32_t *)list)[i];
}

int rope(const void *positions, const float *table, const float *q, const float *k, float *to_q,
         float *to_k, int64_t n, int64_t q_heads, int64_t k_heads, int64_t size, int64_t q_row,
         int64_t k_row, int64_t known, int bytes, int threads) {
  int64_t heads = q_heads + k_heads, half = size / 2;
  for (int64_t i = 0; i < n; i++)
    if (entry(positions, bytes, i) < 0 || entry(positions, bytes, i) >= known) return 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (n * heads * size > WORTH)
  for (int64_t i = 0; i < n; i++) {
    const float *cosine = table + entry(positions, bytes, i) * size, *sine = cosine + half;
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

STORE = r"""
/* `size` of a slot, and how far apart the rows of k and v are, in bytes. */
int store(char *k_cache, char *v_cache, const void *slots, const char *k, const char *v, int64_t n,
          int64_t known, int64_t size, int64_t k_row, int64_t v_row, int bytes) {
  for (int64_t i = 0; i < n; i++)
    if (entry(slots, bytes, i) < 0 || entry(slots, bytes, i) >= known) return 0;
  for (int64_t i = 0; i < n; i++) {
    memcpy(k_cache + entry(slots, bytes, i) * size, k + i * k_row, size);
    memcpy(v_cache + entry(slots, bytes, i) * size, v + i * v_row, size);
  }
  return 1;
}
"""
SOURCE = LANES + EXPONENTIAL + ADD_RMSNORM + SILU_AND_MUL + ROPE + STORE


@cache
def _library() -> ctypes.CDLL | None:
    """The functions of `SOURCE`; None without a compiler."""
    operations = {"add_rmsnorm": "aaaaassfn", "silu_and_mul": "aassn", "rope": "aaaaaasssssssnn"}
    return load_jit(SOURCE, **operations, store="aaaaasssssn")


def _fits(x: torch.Tensor) -> bool:
    """Whether `x` is float32, on the CPU, and lies one row after the other."""
    return x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()


def native_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Any:
    """`fused_add_rmsnorm` in one call, or NotImplemented."""
    library, shape = _library(), x.shape
    if library is None or not (_fits(x) and _fits(residual) and _fits(weight)):
        return NotImplemented
    if residual.shape != shape or weight.shape != shape[-1:] or not shape[-1]:
        return NotImplemented
    y, total = torch.empty(shape), torch.empty(shape)
    library.add_rmsnorm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        total.data_ptr(),
        x.numel() // shape[-1],
        shape[-1],
        eps,
        torch.get_num_threads(),
    )
    return y, total


def native_silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> Any:
    """`silu_and_mul` in one call, or NotImplemented; always if there is an `out`."""
    library, (*outer, both) = _library(), x.shape
    if library is None or out is not None or not _fits(x) or not both or both % 2:
        return NotImplemented
    y = torch.empty((*outer, both // 2))
    rows, threads = x.numel() // both, torch.get_num_threads()
    library.silu_and_mul(x.data_ptr(), y.data_ptr(), rows, both // 2, threads)
    return y


def _rows(x: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor | None:
    """`x` as `[n, numbers]`, which lie together in each row; rows may be far apart. None if not."""
    if x.dtype != dtype or not x.is_cpu or x.dim() < 2:
        return None
    flat = x if x.dim() == 2 else x.flatten(1)
    return flat if flat.shape[0] == n and flat.stride(1) == 1 else None


def _index_bytes(indices: torch.Tensor) -> int:
    """4 or 8 for a list of integers that C can read, else 0."""
    size = {torch.int32: 4, torch.int64: 8}.get(indices.dtype, 0)
    return size if indices.is_cpu and indices.is_contiguous() and indices.dim() == 1 else 0


def native_rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> Any:
    """`apply_rope_with_cos_sin_cache` in one call, or NotImplemented."""
    library, n, bytes_each = _library(), positions.shape[0], _index_bytes(positions)
    q, k = _rows(query, n, torch.float32), _rows(key, n, torch.float32)
    if library is None or not bytes_each or q is None or k is None or not _fits(cos_sin_cache):
        return NotImplemented
    q_width, k_width, (known, width) = q.shape[1], k.shape[1], cos_sin_cache.shape
    if width != head_size or q_width % head_size or k_width % head_size:
        return NotImplemented
    turned = torch.empty(query.shape), torch.empty(key.shape)
    done = library.rope(
        positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        turned[0].data_ptr(),
        turned[1].data_ptr(),
        n,
        q_width // head_size,
        k_width // head_size,
        head_size,
        q.stride(0),
        k.stride(0),
        known,
        bytes_each,
        torch.get_num_threads(),
    )
    return turned if done else NotImplemented


def native_store_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> Any:
    """`store_cache` in one call, or NotImplemented. Any dtype, if all four have the same."""
    library, n, bytes_each = _library(), indices.shape[0], _index_bytes(indices)
    slots, dtype, size = k_cache.shape[0], k_cache.dtype, k_cache.itemsize
    keys, values = _rows(k, n, dtype), _rows(v, n, dtype)
    if library is None or not bytes_each or keys is None or values is None:
        return NotImplemented
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and v_cache.dtype == dtype):
        return NotImplemented
    width = keys.shape[1]
    if values.shape != keys.shape or v_cache.shape != k_cache.shape:
        return NotImplemented
    if k_cache.numel() != slots * width or not k_cache.is_cpu or not v_cache.is_cpu:
        return NotImplemented
    done = library.store(
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        indices.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        n,
        slots,
        size * width,
        size * keys.stride(0),
        size * values.stride(0),
        bytes_each,
    )
    return None if done else NotImplemented


REPLACEMENTS = {
    "fused_add_rmsnorm": native_add_rmsnorm,
    "silu_and_mul": native_silu_and_mul,
    "apply_rope_with_cos_sin_cache": native_rope,
    "store_cache": native_store_cache,
}
