"""The operations between the products, in C: each in one call, on a CPU.

Official counterparts: FlashInfer's fused kernels, which `python/minisgl/layers/` calls, and
`python/minisgl/kernel/store.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from minisgl.kernel.activation import silu_and_mul
from minisgl.kernel.cpu.compile import COMMON_C, EXP_C, TYPES, load_jit
from minisgl.kernel.norm import fused_add_rmsnorm
from minisgl.kernel.rotary import apply_rope_with_cos_sin_cache
from minisgl.kernel.store import store_cache

ADD_RMSNORM_C = r"""
#define GRAIN 16384 /* numbers; with fewer, starting threads takes longer than the work */

int add_rmsnorm_TYPE(const TYPE *x, const TYPE *residual, const TYPE *weight, TYPE *y,
                     TYPE *total, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > GRAIN)
  for (int64_t i = 0; i < rows * size; i += size) {
    vec squares = {0};
    for (int64_t c = i; c < i + size; c += LANES) {
      store_TYPE(total + c, load_TYPE(x + c) + load_TYPE(residual + c));
      vec both = load_TYPE(total + c); /* as it was rounded */
      squares += both * both;
    }
    float scale = 1.0f / sqrtf(SUM(squares) / size + eps);
    for (int64_t c = 0; c < size; c += LANES)
      store_TYPE(y + i + c, load_TYPE(total + i + c) * scale * load_TYPE(weight + c));
  }
  return 1;
}
"""

SILU_AND_MUL_C = r"""
int silu_and_mul_TYPE(const TYPE *x, TYPE *y, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > GRAIN)
  for (int64_t i = 0; i < rows; i++) {
    const TYPE *gate = x + 2 * i * size, *up = gate + size;
    for (int64_t c = 0; c < size; c += LANES) {
      vec g = load_TYPE(gate + c), one = (vec){0} + 1.0f;
      vec e = exponential((vec)((bits)g | 0x80000000u)); /* with the sign bit: -|g| */
      bits negative = (bits)(g < 0.0f);
      vec factor = (vec)((negative & (bits)e) | (~negative & (bits)one));
      store_TYPE(y + i * size + c, g * factor / (1.0f + e) * load_TYPE(up + c));
    }
  }
  return 1;
}
"""

INDEX_C = r"""
static inline int64_t index_at(const void *list, int bytes, int64_t i) { /* int32 or int64 */
  return bytes == 8 ? ((const int64_t *)list)[i] : ((const int32_t *)list)[i];
}
static int all_below(const void *list, int bytes, int64_t n, int64_t end) {
  for (int64_t i = 0; i < n; i++)
    if (index_at(list, bytes, i) < 0 || index_at(list, bytes, i) >= end) return 0;
  return 1;
}
"""

ROPE_C = r"""
/* Rows of q and k are q_stride and k_stride numbers apart; the table has table_rows. */
int rope_TYPE(const void *positions, const float *table, const TYPE *q, const TYPE *k, TYPE *q_out,
              TYPE *k_out, int64_t n, int64_t q_heads, int64_t k_heads, int64_t size,
              int64_t q_stride, int64_t k_stride, int64_t table_rows, int bytes, int threads) {
  int64_t heads = q_heads + k_heads, half = size / 2;
  if (!all_below(positions, bytes, n, table_rows)) return 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (n * heads * size > GRAIN)
  for (int64_t i = 0; i < n; i++) {
    const float *cosine = table + index_at(positions, bytes, i) * size, *sine = cosine + half;
    for (int64_t h = 0; h < heads; h++) {
      int64_t g = h - q_heads; /* which head of k, after those of q */
      const TYPE *x = g < 0 ? q + i * q_stride + h * size : k + i * k_stride + g * size;
      TYPE *y = g < 0 ? q_out + (i * q_heads + h) * size : k_out + (i * k_heads + g) * size;
      for (int64_t j = 0; j < half; j += LANES) {
        vec first = load_TYPE(x + j), second = load_TYPE(x + j + half);
        vec c = load_float(cosine + j), s = load_float(sine + j);
        store_TYPE(y + j, first * c - second * s);
        store_TYPE(y + j + half, second * c + first * s);
      }
    }
  }
  return 1;
}
"""

STORE_C = r"""
/* size of a slot, and how far apart the rows of k and v are: in bytes. */
int store(char *k_cache, char *v_cache, const void *slots, const char *k, const char *v, int64_t n,
          int64_t num_slots, int64_t size, int64_t k_stride, int64_t v_stride, int bytes) {
  if (!all_below(slots, bytes, n, num_slots)) return 0;
  for (int64_t i = 0; i < n; i++) {
    memcpy(k_cache + index_at(slots, bytes, i) * size, k + i * k_stride, size);
    memcpy(v_cache + index_at(slots, bytes, i) * size, v + i * v_stride, size);
  }
  return 1;
}
"""


@cache
def _functions() -> dict[tuple[str, torch.dtype | None], Any]:
    """The C function for an operation and a dtype (None for storing); empty without a compiler."""
    operations = {"add_rmsnorm": "aaaaassfn", "silu_and_mul": "aassn", "rope": "aaaaaasssssssnn"}
    made = {(op, dtype): f"{op}_{name}" for op in operations for name, dtype in TYPES.items()}
    letters = {name: operations[op] for (op, _), name in made.items()}
    pieces = (COMMON_C, EXP_C, ADD_RMSNORM_C, SILU_AND_MUL_C, INDEX_C, ROPE_C, STORE_C)
    library = load_jit(*pieces, file=__file__, **letters, store="aaaaasssssn")
    if library is None:
        return {}
    found: dict[Any, Any] = {key: getattr(library, name) for key, name in made.items()}
    return found | {("store", None): library.store}


def _fits(x: torch.Tensor, dtype: torch.dtype, multiple_of: int = 16) -> bool:
    """Whether C can take `x`: this dtype, on the CPU, row after row of whole vectors."""
    whole = x.shape[-1] > 0 and x.shape[-1] % multiple_of == 0
    return whole and x.dtype == dtype and x.is_cpu and x.is_contiguous()


def native_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_add_rmsnorm` in one call."""
    dtype, size = x.dtype, x.shape[-1]
    function = _functions().get(("add_rmsnorm", dtype))
    same = residual.shape == x.shape and weight.shape == (size,)
    if function is None or not same or not all(_fits(t, dtype) for t in (x, residual, weight)):
        return fused_add_rmsnorm(x, residual, weight, eps)
    y, total = torch.empty_like(x), torch.empty_like(x)
    function(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        total.data_ptr(),
        x.numel() // size,
        size,
        eps,
        torch.get_num_threads(),
    )
    return y, total


def native_silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu_and_mul` in one call; an `out` is left to the reference."""
    function = _functions().get(("silu_and_mul", x.dtype))
    if function is None or out is not None or not _fits(x, x.dtype, 32):
        return silu_and_mul(x, out)
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    size, threads = y.shape[-1], torch.get_num_threads()
    function(x.data_ptr(), y.data_ptr(), y.numel() // size, size, threads)
    return y


def _rows(x: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor | None:
    """`x` as `[n, numbers]`, which lie together in each row; rows may be far apart. None if not."""
    if x.dtype != dtype or not x.is_cpu or x.dim() < 2:
        return None
    flat = x if x.dim() == 2 else x.flatten(1)
    return flat if flat.shape[0] == n and flat.stride(1) == 1 else None


def _index_bytes(indices: torch.Tensor) -> int | None:
    """The bytes of each, of a list of int32 or int64, one after the other on the CPU; else None."""
    size = {torch.int32: 4, torch.int64: 8}.get(indices.dtype)
    return size if indices.is_cpu and indices.is_contiguous() and indices.dim() == 1 else None


def native_rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope_with_cos_sin_cache` in one call."""
    function, n = _functions().get(("rope", query.dtype)), positions.numel()
    q, k = _rows(query, n, query.dtype), _rows(key, n, query.dtype)
    bytes_each, table = _index_bytes(positions), cos_sin_cache
    done = 0
    if (
        not (function is None or bytes_each is None or q is None or k is None)
        and _fits(table, torch.float32, 32)
        and table.shape[1:] == (head_size,)
        and q.shape[1] % head_size == k.shape[1] % head_size == 0
    ):
        q_out, k_out = q.new_empty(*query.shape), k.new_empty(*key.shape)
        done = function(
            positions.data_ptr(),
            table.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            q_out.data_ptr(),
            k_out.data_ptr(),
            n,
            q.shape[1] // head_size,
            k.shape[1] // head_size,
            head_size,
            q.stride(0),
            k.stride(0),
            len(table),
            bytes_each,
            torch.get_num_threads(),
        )
    if not done:  # also for a position that the table doesn't have: the reference says so
        return apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache)
    return q_out, k_out


def native_store_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """`store_cache` in one call. Any dtype, if all four have the same."""
    function, n, dtype = _functions().get(("store", None)), indices.numel(), k_cache.dtype
    keys, values, bytes_each = _rows(k, n, dtype), _rows(v, n, dtype), _index_bytes(indices)
    done = 0
    if (
        not (function is None or bytes_each is None or keys is None or values is None)
        and all(t.dtype == dtype and t.is_cpu and t.is_contiguous() for t in (k_cache, v_cache))
        and values.shape == keys.shape
        and v_cache.shape == k_cache.shape
        and k_cache.numel() == len(k_cache) * keys.shape[1]
    ):
        done = function(
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            indices.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            n,
            len(k_cache),
            dtype.itemsize * keys.shape[1],
            dtype.itemsize * keys.stride(0),
            dtype.itemsize * values.stride(0),
            bytes_each,
        )
    if not done:  # also for a slot that the pool doesn't have: the reference says so
        store_cache(k_cache, v_cache, indices, k, v)
