"""The operations between the products, in C: each in one call, on a CPU.

Official counterparts: FlashInfer's fused kernels, which `python/minisgl/layers/` calls, and
`python/minisgl/kernel/store.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from minisgl.kernel.utils import EXPONENTIAL, LANES, TYPES, load_jit

ADD_RMSNORM = r"""
#define WORTH 16384 /* numbers; with fewer, starting threads takes longer than the work */

int add_rmsnorm_TYPE(const TYPE *x, const TYPE *residual, const TYPE *weight, TYPE *y,
                     TYPE *total, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > WORTH)
  for (int64_t i = 0; i < rows; i++) {
    const TYPE *a = x + i * size, *b = residual + i * size;
    TYPE *to = y + i * size, *t = total + i * size;
    lanes squares = {0};
    for (int64_t c = 0; c < size; c += LANES) {
      write_TYPE(t + c, read_TYPE(a + c) + read_TYPE(b + c));
      lanes both = read_TYPE(t + c); /* as it was rounded */
      squares += both * both;
    }
    float scale = 1.0f / sqrtf(sum(squares) / size + eps);
    for (int64_t c = 0; c < size; c += LANES)
      write_TYPE(to + c, read_TYPE(t + c) * scale * read_TYPE(weight + c));
  }
  return 1;
}
"""

SILU_AND_MUL = r"""
int silu_and_mul_TYPE(const TYPE *x, TYPE *y, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > WORTH)
  for (int64_t i = 0; i < rows; i++) {
    const TYPE *gate = x + 2 * i * size, *up = gate + size;
    TYPE *to = y + i * size;
    for (int64_t c = 0; c < size; c += LANES) {
      lanes g = read_TYPE(gate + c), one = (lanes){0} + 1.0f;
      lanes e = exponential((lanes)((bits)g | 0x80000000u)); /* with the sign bit: -|g| */
      bits below = (bits)(g < 0.0f);
      lanes over = (lanes)((below & (bits)e) | (~below & (bits)one));
      write_TYPE(to + c, g * over / (1.0f + e) * read_TYPE(up + c));
    }
  }
  return 1;
}
"""

ROPE = r"""
int rope_TYPE(const void *positions, const float *table, const TYPE *q, const TYPE *k, TYPE *to_q,
              TYPE *to_k, int64_t n, int64_t q_heads, int64_t k_heads, int64_t size, int64_t q_row,
              int64_t k_row, int64_t known, int bytes, int threads) {
  int64_t heads = q_heads + k_heads, half = size / 2;
  for (int64_t i = 0; i < n; i++)
    if (entry(positions, bytes, i) < 0 || entry(positions, bytes, i) >= known) return 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (n * heads * size > WORTH)
  for (int64_t i = 0; i < n; i++) {
    const float *cosine = table + entry(positions, bytes, i) * size, *sine = cosine + half;
    for (int64_t h = 0; h < heads; h++) {
      int64_t g = h - q_heads; /* which head of k, after those of q */
      const TYPE *x = g < 0 ? q + i * q_row + h * size : k + i * k_row + g * size;
      TYPE *y = g < 0 ? to_q + (i * q_heads + h) * size : to_k + (i * k_heads + g) * size;
      for (int64_t j = 0; j < half; j += LANES) {
        lanes first = read_TYPE(x + j), second = read_TYPE(x + j + half);
        lanes c = read_float(cosine + j), s = read_float(sine + j);
        write_TYPE(y + j, first * c - second * s);
        write_TYPE(y + j + half, second * c + first * s);
      }
    }
  }
  return 1;
}
"""

ENTRY = r"""
static inline int64_t entry(const void *list, int bytes, int64_t i) { /* of int32 or int64 */
  return bytes == 8 ? ((const int64_t *)list)[i] : ((const int32_t *)list)[i];
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
COMPUTING = "".join((ADD_RMSNORM + SILU_AND_MUL + ROPE).replace("TYPE", name) for name in TYPES)
SOURCE = LANES + EXPONENTIAL + ENTRY + COMPUTING + STORE


@cache
def _functions() -> dict[tuple[str, torch.dtype | None], Any]:
    """The C function for an operation and a dtype (None for storing); empty without a compiler."""
    operations = {"add_rmsnorm": "aaaaassfn", "silu_and_mul": "aassn", "rope": "aaaaaasssssssnn"}
    made = {(op, dtype): f"{op}_{name}" for op in operations for name, dtype in TYPES.items()}
    letters = {name: operations[op] for (op, _), name in made.items()}
    library = load_jit(SOURCE, **letters, store="aaaaasssssn")
    if library is None:
        return {}
    found: dict[Any, Any] = {key: getattr(library, name) for key, name in made.items()}
    return found | {("store", None): library.store}


def _fits(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `x` has this dtype, is on the CPU, and lies one row after the other."""
    return x.dtype == dtype and x.is_cpu and x.is_contiguous()


def native_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Any:
    """`fused_add_rmsnorm` in one call, or NotImplemented."""
    shape, dtype = x.shape, x.dtype
    function = _functions().get(("add_rmsnorm", dtype))
    if function is None or not _fits(x, dtype) or not _fits(residual, dtype):
        return NotImplemented
    if not _fits(weight, dtype) or residual.shape != shape or weight.shape != shape[-1:]:
        return NotImplemented
    if not shape[-1] or shape[-1] % 8:  # C takes whole vectors
        return NotImplemented
    y, total = torch.empty_like(x), torch.empty_like(x)
    function(
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
    function, (*outer, both) = _functions().get(("silu_and_mul", x.dtype)), x.shape
    if function is None or out is not None or not _fits(x, x.dtype) or not both or both % 16:
        return NotImplemented
    y = x.new_empty(*outer, both // 2)
    rows, threads = x.numel() // both, torch.get_num_threads()
    function(x.data_ptr(), y.data_ptr(), rows, both // 2, threads)
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
) -> Any:
    """`apply_rope_with_cos_sin_cache` in one call, or NotImplemented."""
    function, n = _functions().get(("rope", query.dtype)), positions.numel()
    q, k = _rows(query, n, query.dtype), _rows(key, n, query.dtype)
    bytes_each = _index_bytes(positions)
    if function is None or bytes_each is None or q is None or k is None:
        return NotImplemented
    if not _fits(cos_sin_cache, torch.float32) or cos_sin_cache.dim() != 2 or head_size % 16:
        return NotImplemented
    q_width, k_width, (known, width) = q.shape[1], k.shape[1], cos_sin_cache.shape
    if width != head_size or q_width % head_size or k_width % head_size:
        return NotImplemented
    turned = q.new_empty(*query.shape), k.new_empty(*key.shape)
    done = function(
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
    function, n = _functions().get(("store", None)), indices.numel()
    bytes_each = _index_bytes(indices)
    slots, dtype, size = k_cache.shape[0], k_cache.dtype, k_cache.itemsize
    keys, values = _rows(k, n, dtype), _rows(v, n, dtype)
    if function is None or bytes_each is None or keys is None or values is None:
        return NotImplemented
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and v_cache.dtype == dtype):
        return NotImplemented
    width = keys.shape[1]
    if values.shape != keys.shape or v_cache.shape != k_cache.shape:
        return NotImplemented
    if k_cache.numel() != slots * width or not k_cache.is_cpu or not v_cache.is_cpu:
        return NotImplemented
    done = function(
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
