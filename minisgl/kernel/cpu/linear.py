"""The product of a linear layer in C, for as many rows as it is faster than PyTorch's.

No official counterpart: on a GPU `F.linear` is fast for every shape.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
import torch.nn.functional as F

from minisgl.kernel.cpu.compile import COMMON_C, TYPES, WORD_C, load_jit

GEMV_C = r"""
#define FEW 8 /* rows of x up to which a row of the weight is read as vectors */
#define AHEAD 4096 /* bytes: how far before its turn the weight is fetched */

static inline __attribute__((always_inline)) void gemv_TYPE(
    const word *x, const TYPE *w, const TYPE *bias, TYPE *y, int64_t in, int64_t out, int rows) {
  vec acc[FEW];
  memset(acc, 0, sizeof acc);
  for (int64_t line = 0; line < in; line += 64 / sizeof(TYPE)) {
    prefetch((const char *)(w + line) + AHEAD, 64);
    for (int64_t k = line; k < line + 64 / (int)sizeof(TYPE); k += LANES * PER_TYPE)
      for (int r = 0; r < rows; r++)
        acc[r] = madd_TYPE(acc[r], words_TYPE(w + k), *(const vec *)(x + (r * in + k) / PER_TYPE));
  }
  for (int r = 0; r < rows; r++)
    put_TYPE(y + r * out, SUM(acc[r]) + (bias ? get_TYPE(bias) : 0.0f));
}
"""

GEMM_C = r"""
#define BLOCK (2 * LANES) /* rows of x whose words of one column lie together */
#define TILE 6 /* rows of the weight that go by at a time */

static inline __attribute__((always_inline)) void gemm_TYPE(
    const word *x, const TYPE *w, const TYPE *bias, TYPE *y, int64_t n, int64_t in, int64_t out,
    int vectors, int outs) {
  vec acc[TILE][2];
  memset(acc, 0, sizeof acc);
  for (int64_t line = 0; line < in; line += 64 / sizeof(TYPE)) {
    for (int j = 0; j < outs; j++) prefetch(w + (j + outs) * in + line, 64);
    for (int64_t k = line; k < line + 64 / (int)sizeof(TYPE); k += PER_TYPE)
      for (int j = 0; j < outs; j++) {
        vec weight = (vec)(word_TYPE(w + j * in + k) - (bits){0}); /* in all lanes */
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

PACK_C = r"""
/* x as words: row after row, or in blocks in which the words of one column lie together. */
static void pack_TYPE(const TYPE *x, word *to, int64_t n, int64_t in) {
  int64_t words = in / PER_TYPE, rows = (n + LANES - 1) / LANES * LANES;
#pragma omp for schedule(static)
  for (int64_t k = 0; k < words; k++)
    if (n <= FEW)
      for (int64_t r = 0; r < n; r++) to[r * words + k] = word_TYPE(x + r * in + k * PER_TYPE);
    else
      for (int64_t r = 0; r < rows; r++)
        to[(r / BLOCK * words + k) * BLOCK + r % BLOCK] =
            r < n ? word_TYPE(x + r * in + k * PER_TYPE) : 0;
}
"""

LINEAR_C = r"""
/* All of x with one strip of the weight: a whole tile of its rows, or a single one. */
static inline __attribute__((always_inline)) void strip_TYPE(
    const word *x, const TYPE *w, const TYPE *bias, TYPE *y, int64_t n, int64_t in, int64_t out,
    int whole) {
#define CASE(rows) case rows: gemv_TYPE(x, w, bias, y, in, out, rows); return;
  switch (n) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
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
  int64_t outs = n <= FEW ? 1 : TILE;
#pragma omp parallel num_threads(threads)
  {
    pack_TYPE(x, scratch, n, in);
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

AMX_C = r"""
#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1

static int allowed_tiles(void) { /* Linux lets a process use them once it has asked */
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* ARCH_REQ_XCOMP_PERM, for tile data */
}
static void configure_tiles(void) { /* eight tiles of sixteen rows of 64 bytes */
  struct __attribute__((packed)) {
    uint8_t palette, start, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {1};
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
}
/* Columns of c are rows of y. */
static void put_tile(float (*c)[16], const bfloat16 *bias, bfloat16 *y, int64_t n, int64_t out) {
  for (int64_t r = 0; r < n && r < 16; r++) {
    vec v;
    for (int j = 0; j < 16; j++) v[j] = c[j][r];
    store_bfloat16(y + r * out, bias ? v + load_bfloat16(bias) : v);
  }
}
#else
#define TILES 0
static int allowed_tiles(void) { return 0; }
#endif
int has_tiles(void) { return allowed_tiles(); }
int has_bfloat16(void) { return PER_bfloat16 == 2; }
"""

TILES_C = r"""
#if TILES
/* 32 rows of the weight, and one or two sixteens of rows of x. */
static inline __attribute__((always_inline)) void tiles_bfloat16(
    const word *x, const bfloat16 *w, const bfloat16 *bias, bfloat16 *y, int64_t n, int64_t in,
    int64_t out, int vectors) {
  float c[4][16][16];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < in; k += 32) {
    for (int j = 0; j < 32; j++) prefetch(w + (32 + j) * in + k, 64);
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
  for (int i = 0; i < 2 * vectors; i++) {
    int64_t r = i / 2 * 16, o = i % 2 * 16;
    put_tile(c[i], bias ? bias + o : bias, y + r * out + o, n - r, out);
  }
}
#endif
"""

LINEAR_TILES_C = r"""
#if TILES
int linear_tiles(const bfloat16 *x, word *scratch, const bfloat16 *w, const bfloat16 *bias,
                 bfloat16 *y, int64_t n, int64_t in, int64_t out, int threads) {
#pragma omp parallel num_threads(threads)
  {
    pack_bfloat16(x, scratch, n, in);
    configure_tiles();
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
int linear_tiles(void) { return 0; }
#endif
"""


@cache
def _library() -> ctypes.CDLL | None:
    """The three functions, and two that tell what there is; None where C can't be compiled."""
    letters = dict.fromkeys(("linear_float", "linear_bfloat16", "linear_tiles"), "aaaaasssn")
    pieces = (*COMMON_C, WORD_C, GEMV_C, GEMM_C, PACK_C, LINEAR_C, AMX_C, TILES_C, LINEAR_TILES_C)
    return load_jit(*pieces, file=__file__, **letters, has_bfloat16="", has_tiles="")


@cache
def has(feature: str) -> bool:
    """Whether C was compiled, and this processor has "bfloat16" arithmetic, or "tiles"."""
    library = _library()
    return library is not None and bool(getattr(library, f"has_{feature}").function())


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether C can take these: one dtype of two, on the CPU, row after row of whole vectors."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if x.dim() != 2 or x.shape[1] != weight.shape[1] or not x.numel() or x.shape[1] % 32:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    same = all(t.dtype == x.dtype and t.is_cpu and t.is_contiguous() for t in given)
    return same and x.dtype in TYPES.values()


def _in_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear`, but in float32 where it would multiply bfloat16 without instructions for it."""
    if x.dtype == weight.dtype == torch.bfloat16 and _library() is not None and not has("bfloat16"):
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)
    return F.linear(x, weight, bias)


FEW = 8  # as in C
MOST_ROWS = 64  # for more, `F.linear` was as fast or faster on every processor that was measured


def native_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear`; for few rows in C, computed in float32, with `weight` read once, as it lies.

    `x` is `[n, in]`, `weight` `[out, in]` and `bias` `[out]`. C was written for float32 and
    bfloat16 in whole vectors; anything else is left to PyTorch.
    """
    library = _library()
    if library is None or len(x) > MOST_ROWS or not _fits(x, weight, bias):
        return _in_torch(x, weight, bias)
    n, (out, size) = len(x), weight.shape
    function = library.linear_float if x.dtype == torch.float32 else library.linear_bfloat16
    if x.dtype == torch.bfloat16 and n > FEW and out % 32 == 0 and has("tiles"):
        function = library.linear_tiles
    scratch = torch.empty(-(-n // 32) * 32, size, dtype=torch.float32, device="cpu")
    y = x.new_empty(n, out)
    function(
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
