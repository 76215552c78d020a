"""Attention of a decode in one pass over the pages, in C.

Official counterparts, for GPUs: the kernels of FlashInfer and FlashAttention. The work is split as
in Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from minisgl.kernel.cpu.compile import COMMON_C, EXP_C, TYPES, WORD_C, load_jit

SOFTMAX_C = r"""
#define AHEAD 12 /* tokens: how long before its turn a row of K or V is fetched */

/* exp(row - max) in place, for n numbers in whole vectors; returns their sum. */
static float softmax(float *row, int64_t n, float max) {
  vec total = {0};
  for (int64_t p = 0; p < n; p += LANES) {
    vec e = exponential(load_float(row + p) - max);
    store_float(row + p, e);
    total += e;
  }
  return SUM(total);
}
"""

PART_C = r"""
/* One part of a request: n of its tokens, all heads. Leaves in scratch for each head the largest
   score, the sum of exponentials and the output before division; the scores follow. */
static void part_TYPE(const TYPE *q, const TYPE *k, const TYPE *v, const int32_t *slots, int64_t n,
                      int64_t kv_heads, int64_t group, int64_t d, float *scratch) {
  int64_t heads = kv_heads * group, width = kv_heads * d, row = (n + LANES - 1) / LANES * LANES;
  float *max = scratch, *mass = max + heads, *out = mass + heads, *scores = out + heads * d;
  float scale = 1.0f / sqrtf((float)d);
  for (int64_t p = 0; p < n; p++) {
    const TYPE *key = k + slots[p] * width;
    if (p + AHEAD < n) prefetch(k + slots[p + AHEAD] * width, width * sizeof(TYPE));
    for (int64_t h = 0; h < heads; h++) {
      vec acc = {0};
      const TYPE *mine = key + h / group * d, *query = q + h * d;
      if (d % (LANES * PER_TYPE) == 0) /* in words; a head of 16 bfloat16 is half a vector */
        for (int64_t c = 0; c < d; c += LANES * PER_TYPE)
          acc = madd_TYPE(acc, words_TYPE(mine + c), words_TYPE(query + c));
      else
        for (int64_t c = 0; c < d; c += LANES) acc += load_TYPE(mine + c) * load_TYPE(query + c);
      scores[h * row + p] = SUM(acc) * scale;
    }
  }
  for (int64_t h = 0; h < heads; h++) {
    float *score = scores + h * row;
    max[h] = score[0];
    for (int64_t p = 1; p < n; p++) max[h] = score[p] > max[h] ? score[p] : max[h];
    for (int64_t p = n; p < row; p++) score[p] = -INFINITY;
    mass[h] = softmax(score, row, max[h]);
  }
  memset(out, 0, heads * d * sizeof(float));
  for (int64_t p = 0; p < n; p++) {
    const TYPE *value = v + slots[p] * width;
    if (p + AHEAD < n) prefetch(v + slots[p + AHEAD] * width, width * sizeof(TYPE));
    for (int64_t h = 0; h < heads; h++)
      for (int64_t c = 0; c < d; c += LANES)
        *(vec *)(out + h * d + c) += scores[h * row + p] * load_TYPE(value + h / group * d + c);
  }
}
"""

ATTEND_C = r"""
/* Part i is tokens [parts[i][1], parts[i][2]) of request parts[i][0]; those of request b are
   firsts[b] to firsts[b + 1]. A part has `size` numbers of scratch. */
int attend_TYPE(const TYPE *q, const TYPE *k, const TYPE *v, TYPE *out, const int32_t *table,
                const int32_t *parts, const int32_t *firsts, float *scratch, int64_t bs,
                int64_t width, int64_t kv_heads, int64_t group, int64_t d, int64_t size,
                int threads) {
  int64_t heads = kv_heads * group;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < firsts[bs]; i++) {
      int64_t b = parts[3 * i], begin = parts[3 * i + 1], n = parts[3 * i + 2] - begin;
      part_TYPE(q + b * heads * d, k, v, table + b * width + begin, n, kv_heads, group, d,
                scratch + i * size);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < bs * heads; row++) { /* join the parts of one request and head */
      int64_t b = row / heads, h = row % heads;
      float max = -INFINITY, mass = 0.0f;
      for (int64_t i = firsts[b]; i < firsts[b + 1]; i++) max = fmaxf(max, scratch[i * size + h]);
      for (int64_t i = firsts[b]; i < firsts[b + 1]; i++) {
        float *part = scratch + i * size;
        part[h] = expf(part[h] - max); /* from here on the part's share */
        mass += part[h] * part[heads + h];
      }
      for (int64_t c = 0; c < d; c += LANES) {
        vec o = {0};
        for (int64_t i = firsts[b]; i < firsts[b + 1]; i++) {
          const float *part = scratch + i * size;
          o += part[h] * load_float(part + 2 * heads + h * d + c);
        }
        store_TYPE(out + row * d + c, o / mass);
      }
    }
  }
  return 1;
}
"""

SMALLEST_PART, LARGEST_PART = 32, 256  # tokens of one request that a thread takes at a time


@cache
def attend_functions() -> dict[torch.dtype, Any]:
    """`attend_TYPE` for each dtype of the pool; empty where C can't be compiled."""
    pieces = (*COMMON_C, WORD_C, EXP_C, SOFTMAX_C, PART_C, ATTEND_C)
    letters = {f"attend_{name}": "aaaaaaaassssssn" for name in TYPES}
    library = load_jit(*pieces, file=__file__, **letters)
    if library is None:
        return {}
    return {dtype: getattr(library, f"attend_{name}") for name, dtype in TYPES.items()}


def scratch_size(num_qo_heads: int, head_dim: int, tokens: int) -> int:
    """How many numbers a part of so many tokens computes in."""
    return num_qo_heads * (2 + head_dim + -(-tokens // 16) * 16)  # scores in whole vectors


class PagedDecodePlan:
    """One query per request, all requests at once; K and V are read once, where they lie.

    Float32 arithmetic for a pool of either dtype. `head_dim` has to be a multiple of 16. `threads`:
    for how many the tokens are shared out.
    """

    def __init__(
        self,
        kv_lens: Sequence[int],
        page_table: torch.Tensor,
        num_qo_heads: int,
        head_dim: int,
        threads: int,
    ) -> None:
        share = -(-sum(kv_lens) // threads)
        size = max(SMALLEST_PART, min(share, LARGEST_PART))
        parts, firsts = [], [0]
        for request, length in enumerate(kv_lens):
            for start in range(0, length, size):
                parts.append((request, start, min(start + size, length)))
            firsts.append(len(parts))
        self.hold(
            page_table.int().contiguous(),
            torch.tensor(parts, dtype=torch.int32, device="cpu"),
            torch.tensor(firsts, dtype=torch.int32, device="cpu"),
            scratch_size(num_qo_heads, head_dim, max(end - start for _, start, end in parts)),
        )

    def hold(
        self, table: torch.Tensor, parts: torch.Tensor, firsts: torch.Tensor, scratch: int
    ) -> None:
        """Keep what C is called with; `scratch`: how many numbers a part computes in."""
        self.table, self.parts, self.firsts = table, parts, firsts
        self.scratch = torch.empty(len(parts), scratch, dtype=torch.float32, device="cpu")
        own = (self.table, self.parts, self.firsts, self.scratch)
        self.addresses = [t.data_ptr() for t in own]  # asked for once; valid while these are held
        self.table_shape = self.table.shape

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        _, kv_heads, head_dim = k.shape
        queries = q.to(k.dtype).contiguous()
        out = torch.empty_like(queries)
        attend_functions()[k.dtype](
            queries.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            *self.addresses,
            *self.table_shape,
            kv_heads,
            q.shape[1] // kv_heads,
            head_dim,
            self.scratch.shape[1],
            torch.get_num_threads(),
        )
        return out.to(q.dtype)


class FixedDecodePlan(PagedDecodePlan):
    """A plan at addresses that don't change, for `bs` requests of up to `width` tokens each."""

    def __init__(self, bs: int, width: int, num_qo_heads: int, head_dim: int, threads: int) -> None:
        most = bs + max(threads, bs * -(-width // LARGEST_PART))  # parts of any plan, or more
        self.hold(
            torch.zeros(bs, width, dtype=torch.int32, device="cpu"),
            torch.zeros(most, 3, dtype=torch.int32, device="cpu"),
            torch.zeros(bs + 1, dtype=torch.int32, device="cpu"),
            scratch_size(num_qo_heads, head_dim, LARGEST_PART),
        )

    def take(self, plan: PagedDecodePlan) -> None:
        """Copy what another plan says, of as many requests and for as many threads."""
        self.table[:, : plan.table.shape[1]] = plan.table
        self.parts[: len(plan.parts)], self.firsts[:] = plan.parts, plan.firsts
