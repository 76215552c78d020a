"""The product of a linear layer in C, for as many rows as it is faster than PyTorch's.

No official counterpart: on a GPU `F.linear` is fast for every shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl.kernel.cpu.compile import COMMON_C, load_jit

WORD_C = r"""
/* A lane multiplies a word of 32 bits at a time: one float or, where the processor has an
   instruction for it, two bfloat16; x is put down as such words. */
typedef uint32_t word;
#define PER_float 1
static inline word word_float(const float *p) { return (union { float x; word w; }){*p}.w; }
static inline vec words_float(const float *p) { return load_float(p); }
static inline vec madd_float(vec acc, vec w, vec x) { return acc + w * x; }

#ifdef __AVX512BF16__
#define PER_bfloat16 2
static inline word word_bfloat16(const bfloat16 *p) { return p[0] | (word)p[1] << 16; }
static inline vec words_bfloat16(const bfloat16 *p) { return *(const vec *)p; }
static inline vec madd_bfloat16(vec acc, vec w, vec x) {
  return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
}
#else
#define PER_bfloat16 1
static inline word word_bfloat16(const bfloat16 *p) { return (word)*p << 16; }
static inline vec words_bfloat16(const bfloat16 *p) { return load_bfloat16(p); }
static inline vec madd_bfloat16(vec acc, vec w, vec x) { return acc + w * x; }
#endif

static inline void prefetch(const void *p, int64_t bytes) { /* into the second-level cache */
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}
"""

GEMV_C = r"""
#define FEW 4 /* rows of x up to which a row of the weight is read as vectors */
#define AHEAD 8192 /* bytes: how far before its turn the weight is fetched */

static inline __attribute__((always_inline)) void gemv_TYPE(
    const word *x, const TYPE *w, const TYPE *bias, TYPE *y, int64_t in, int64_t out, int rows,
    int outs) {
  vec acc[2][FEW];
  memset(acc, 0, sizeof acc);
  const int64_t step = LANES * PER_TYPE, bytes = outs * step * sizeof(TYPE);
  for (int64_t k = 0; k < in; k += step) {
    prefetch((const char *)w + AHEAD + k / step * bytes, bytes);
    for (int j = 0; j < outs; j++)
      for (int r = 0; r < rows; r++)
        acc[j][r] = madd_TYPE(acc[j][r], words_TYPE(w + j * in + k),
                              *(const vec *)(x + (r * in + k) / PER_TYPE));
  }
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < outs; j++)
      put_TYPE(y + r * out + j, SUM(acc[j][r]) + (bias ? get_TYPE(bias + j) : 0.0f));
}
"""

GEMM_C = r"""
#define BLOCK (2 * LANES) /* rows of x whose words of one column lie together */
#define TILE (LANES == 16 ? 4 : 6) /* rows of the weight that go by at a time */

static inline __attribute__((always_inline)) void gemm_TYPE(
    const word *x, const TYPE *w, const TYPE *bias, TYPE *y, int64_t n, int64_t in, int64_t out,
    int vectors, int outs) {
  vec acc[TILE][2];
  memset(acc, 0, sizeof acc);
  const int64_t line = 64 / sizeof(TYPE);
  for (int64_t k = 0; k < in; k += PER_TYPE) {
    if (k % line == 0) prefetch(w + outs * (in + k), outs * 64);
    for (int j = 0; j < outs; j++) {
      vec weight = (vec)(word_TYPE(w + j * in + k) - (bits){0});
      for (int v = 0; v < vectors; v++)
        acc[j][v] = madd_TYPE(acc[j][v], weight,
                              *(const vec *)(x + k / PER_TYPE * BLOCK + v * LANES));
    }
  }
  for (int64_t r = 0; r < n; r++)
    for (int j = 0; j < outs; j++)
      put_TYPE(y + r * out + j,
               acc[j][r / LANES][r % LANES] + (bias ? get_TYPE(bias + j) : 0.0f));
}
"""

LINEAR_C = r"""
/* x as words: row after row, or in blocks in which the words of one column lie together. */
static void pack_TYPE(const TYPE *x, word *to, int64_t n, int64_t in, int blocks) {
  int64_t words = in / PER_TYPE, rows = (n + LANES - 1) / LANES * LANES;
#pragma omp for schedule(static)
  for (int64_t k = 0; k < words; k++)
    if (!blocks)
      for (int64_t r = 0; r < n; r++) to[r * words + k] = word_TYPE(x + r * in + k * PER_TYPE);
    else
      for (int64_t r = 0; r < rows; r++)
        to[(r / BLOCK * words + k) * BLOCK + r % BLOCK] =
            r < n ? word_TYPE(x + r * in + k * PER_TYPE) : 0;
}

static inline __attribute__((always_inline)) void strip_TYPE(
    const word *x, const TYPE *w, const TYPE *bias, TYPE *y, int64_t n, int64_t in, int64_t out,
    int whole) {
  switch (n) {
    case 1: gemv_TYPE(x, w, bias, y, in, out, 1, whole ? 2 : 1); return;
    case 2: gemv_TYPE(x, w, bias, y, in, out, 2, whole ? 2 : 1); return;
    case 3: gemv_TYPE(x, w, bias, y, in, out, 3, whole ? 2 : 1); return;
    case 4: gemv_TYPE(x, w, bias, y, in, out, 4, whole ? 2 : 1); return;
  }
  for (int64_t r = 0; r < n; r += BLOCK) {
    const word *block = x + r * in / PER_TYPE;
    if (n - r > LANES)
      gemm_TYPE(block, w, bias, y + r * out, n - r < BLOCK ? n - r : BLOCK, in, out, 2,
                whole ? TILE : 1);
    else
      gemm_TYPE(block, w, bias, y + r * out, n - r, in, out, 1, whole ? TILE : 1);
  }
}

int linear_TYPE(const TYPE *x, word *scratch, const TYPE *w, const TYPE *bias, TYPE *y, int64_t n,
                int64_t in, int64_t out, int threads) {
  int64_t outs = n <= FEW ? 2 : TILE;
#pragma omp parallel num_threads(threads)
  {
    pack_TYPE(x, scratch, n, in, n > FEW);
#pragma omp for schedule(static)
    for (int64_t o = 0; o < out; o += outs)
      if (o + outs <= out)
        strip_TYPE(scratch, w + o * in, bias ? bias + o : bias, y + o, n, in, out, 1);
      else
        for (int64_t j = o; j < out; j++)
          strip_TYPE(scratch, w + j * in, bias ? bias + j : bias, y + j, n, in, out, 0);
  }
  return 1;
}
"""

TILES_C = r"""
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

int has_tiles(void) { /* Linux lets a process use them once it has asked */
  static int answer = -1;
  if (answer < 0) answer = syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* ARCH_REQ_XCOMP_PERM */
  return answer;
}
static void use_tiles(void) { /* eight tiles of sixteen rows of 64 bytes */
  struct __attribute__((packed)) {
    uint8_t palette, start, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {1};
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
}
static void put_tile(float (*c)[16], const bfloat16 *bias, bfloat16 *y, int64_t n, int64_t out) {
  for (int64_t r = 0; r < n; r++) {
    vec v;
    for (int j = 0; j < 16; j++) v[j] = c[j][r];
    store_bfloat16(y + r * out, bias ? v + load_bfloat16(bias) : v);
  }
}
static inline __attribute__((always_inline)) void tiles_bfloat16(
    const word *x, const bfloat16 *w, const bfloat16 *bias, bfloat16 *y, int64_t n, int64_t in,
    int64_t out, int vectors) {
  float c[4][16][16];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < in; k += 32) {
    prefetch(w + 32 * (in + k), 32 * 64);
    _tile_loadd(4, w + k, 2 * in);
    _tile_loadd(5, w + 16 * in + k, 2 * in);
    _tile_loadd(6, x + k / 2 * BLOCK, 4 * BLOCK);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (vectors == 1) continue;
    _tile_loadd(7, x + k / 2 * BLOCK + 16, 4 * BLOCK);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[1], 64);
  _tile_stored(2, c[2], 64);
  _tile_stored(3, c[3], 64);
  for (int i = 0; i < 2 * vectors; i++)
    put_tile(c[i], bias ? bias + i % 2 * 16 : bias, y + i / 2 * 16 * out + i % 2 * 16,
             n - i / 2 * 16 < 16 ? n - i / 2 * 16 : 16, out);
}

int linear_tiles(const bfloat16 *x, word *scratch, const bfloat16 *w, const bfloat16 *bias,
                 bfloat16 *y, int64_t n, int64_t in, int64_t out, int threads) {
#pragma omp parallel num_threads(threads)
  {
    pack_bfloat16(x, scratch, n, in, 1);
    use_tiles();
#pragma omp for schedule(static)
    for (int64_t o = 0; o < out; o += 32)
      for (int64_t r = 0; r < n; r += BLOCK) {
        const word *block = scratch + r * in / 2;
        const bfloat16 *b = bias ? bias + o : bias;
        if (n - r > 16) tiles_bfloat16(block, w + o * in, b, y + r * out + o, n - r, in, out, 2);
        else tiles_bfloat16(block, w + o * in, b, y + r * out + o, n - r, in, out, 1);
      }
    _tile_release();
  }
  return 1;
}
#else
int has_tiles(void) { return 0; }
int linear_tiles(void) { return 0; }
#endif
"""


class Product(NamedTuple):
    """A C function, and the numbers of rows for which it is the fastest way."""

    function: Callable[..., int]
    rows: range
    multiple_of: int = 1  # what the number of the weight's rows has to be


@cache
def products() -> dict[torch.dtype, list[Product]]:
    """What can be had here for each dtype; nothing where C can't be compiled.

    For more rows `F.linear` is faster, as measured.
    """
    letters = "aaaaasssn"
    pieces = (COMMON_C, WORD_C, GEMV_C, GEMM_C, LINEAR_C, TILES_C)
    names = ("linear_float", "linear_bfloat16", "linear_tiles")
    library = load_jit(*pieces, file=__file__, has_tiles="", **dict.fromkeys(names, letters))
    if library is None:
        return {}
    floats, halves, tiles = (getattr(library, name) for name in names)
    few = [Product(halves, range(1, 65))]
    if library.has_tiles():
        few = [Product(tiles, range(3, 65), 32), *few]
    return {torch.float32: [Product(floats, range(1, 65))], torch.bfloat16: few}


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether C can take these: one dtype, on the CPU, row after row, whole vectors."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if x.dim() != 2 or weight.shape[1] != x.shape[1] or x.shape[1] % 32:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    return all(t.dtype == x.dtype and t.is_cpu and t.is_contiguous() for t in given)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear`, in C for few rows: computed in float32, with `weight` read once, as it lies.

    `x` is `[n, in]`, `weight` `[out, in]` and `bias` `[out]`, float32 or bfloat16. What C was not
    written for, `F.linear` does.
    """
    n, out, size = len(x), weight.shape[0], weight.shape[1]
    fitting = (p for p in products().get(x.dtype, ()) if n in p.rows and out % p.multiple_of == 0)
    product = next(fitting, None)
    if product is None or not _fits(x, weight, bias):
        return F.linear(x, weight, bias)
    scratch = torch.empty(-(-n // 32) * 32, size, dtype=torch.float32, device="cpu")
    y = x.new_empty(n, out)
    product.function(
        x.data_ptr(),
        scratch.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        n,
        size,
        out,
        torch.get_num_threads(),
    )
    return y
