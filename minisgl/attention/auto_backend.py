"""Attention of a decode in one pass over the pages, in C; all else as the torch backend does it.

Official counterparts, for GPUs: `python/minisgl/attention/fa.py`, `fi.py` and `trtllm.py`. The work
is split as in Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from minisgl.attention.torch_backend import TorchBackend, TorchMetadata
from minisgl.attention.torch_plans import AttentionPlan, make_plan
from minisgl.kernel.utils import EXPONENTIAL, LANES, TYPES, as_floats, load_jit

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.models.config import ModelConfig

TOOLS = r"""
#define AHEAD 12 /* tokens: how long before its turn a row is asked for */

static inline void fetch(const void *row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i);
}

static float softmax(float *row, int64_t n, float most) { /* n: whole vectors; returns the sum */
  lanes total = {0};
  for (int64_t p = 0; p < n; p += LANES) {
    lanes e = exponential(read_float(row + p) - most);
    *(lanes *)(row + p) = e;
    total += e;
  }
  return sum(total);
}
"""

PART = r"""
/* One part of a request: n of its tokens, all heads. Leaves in `found` for each head the largest
   score, the sum of exponentials and the unfinished output; behind them is room for the scores. */
static void part_TYPE(const float *q, const TYPE *k, const TYPE *v, const int32_t *slots, int64_t n,
                      int64_t kv_heads, int64_t group, int64_t d, float *found) {
  int64_t heads = kv_heads * group, width = kv_heads * d, room = (n + LANES - 1) / LANES * LANES;
  float *top = found, *mass = top + heads, *out = mass + heads, *scores = out + heads * d;
  for (int64_t p = 0; p < n; p++) {
    const TYPE *key = k + slots[p] * width;
    if (p + AHEAD < n) fetch(k + slots[p + AHEAD] * width, width * sizeof(TYPE));
    for (int64_t h = 0; h < heads; h++) {
      lanes acc = {0};
      for (int64_t c = 0; c < d; c += LANES)
        acc += read_TYPE(key + h / group * d + c) * read_float(q + h * d + c);
      scores[h * room + p] = sum(acc) / sqrtf((float)d);
    }
  }
  for (int64_t h = 0; h < heads; h++) {
    float *row = scores + h * room;
    top[h] = row[0];
    for (int64_t p = 1; p < n; p++) top[h] = row[p] > top[h] ? row[p] : top[h];
    for (int64_t p = n; p < room; p++) row[p] = -INFINITY;
    mass[h] = softmax(row, room, top[h]);
  }
  memset(out, 0, heads * d * sizeof(float));
  for (int64_t p = 0; p < n; p++) {
    const TYPE *value = v + slots[p] * width;
    if (p + AHEAD < n) fetch(v + slots[p + AHEAD] * width, width * sizeof(TYPE));
    for (int64_t h = 0; h < heads; h++)
      for (int64_t c = 0; c < d; c += LANES)
        *(lanes *)(out + h * d + c) += scores[h * room + p] * read_TYPE(value + h / group * d + c);
  }
}
"""

ATTEND = r"""
/* Part i is tokens [parts[i][1], parts[i][2]) of request parts[i][0]; those of request b are
   firsts[b] to firsts[b + 1]. A part has `size` numbers of scratch. */
int attend_TYPE(const float *q, const TYPE *k, const TYPE *v, float *out, const int32_t *table,
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
      float most = -INFINITY, mass = 0.0f, *o = out + row * d;
      for (int64_t i = firsts[b]; i < firsts[b + 1]; i++)
        most = fmaxf(most, scratch[i * size + h]);
      memset(o, 0, d * sizeof(float));
      for (int64_t i = firsts[b]; i < firsts[b + 1]; i++) {
        const float *found = scratch + i * size, share = expf(found[h] - most);
        mass += share * found[heads + h];
        for (int64_t c = 0; c < d; c++) o[c] += share * found[2 * heads + h * d + c];
      }
      for (int64_t c = 0; c < d; c++) o[c] /= mass;
    }
  }
  return 1;
}
"""
SOURCE = LANES + EXPONENTIAL + TOOLS + "".join((PART + ATTEND).replace("TYPE", t) for t in TYPES)

SMALLEST_PART, LARGEST_PART = 32, 256  # tokens of one request that a thread takes at a time


@cache
def _functions() -> dict[torch.dtype, Any]:
    """`attend_TYPE` for each dtype of the pool; empty where C can't be compiled."""
    parameters = "aaaaaaaassssssn"
    library = load_jit(SOURCE, attend_float=parameters, attend_bfloat16=parameters)
    if library is None:
        return {}
    return {dtype: getattr(library, f"attend_{name}") for name, dtype in TYPES.items()}


class PagedDecodePlan:
    """One query per request, all requests at once; K and V are read once, where they lie.

    Float32 arithmetic for a pool of either dtype. `head_dim` has to be a multiple of 8.
    """

    def __init__(
        self, kv_lens: Sequence[int], page_table: torch.Tensor, num_qo_heads: int, head_dim: int
    ) -> None:
        share = -(-sum(kv_lens) // torch.get_num_threads())
        size = max(SMALLEST_PART, min(share, LARGEST_PART))
        parts, firsts = [], [0]
        for request, length in enumerate(kv_lens):
            for start in range(0, length, size):
                parts.append((request, start, min(start + size, length)))
            firsts.append(len(parts))
        longest = max(end - start for _, start, end in parts)
        self.hold(
            page_table.int().contiguous(),
            torch.tensor(parts, dtype=torch.int32, device="cpu"),
            torch.tensor(firsts, dtype=torch.int32, device="cpu"),
            num_qo_heads * (2 + head_dim + -(-longest // 8) * 8),  # scores come in vectors of eight
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
        queries = as_floats(q)
        out = torch.empty_like(queries)
        _functions()[k.dtype](
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
        return out if q.dtype == torch.float32 else out.to(q.dtype)


class AutoBackend(TorchBackend):
    """The torch backend, but decodes by `PagedDecodePlan` where it can run."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.head_dim = self.kv_cache.k_cache(0).shape[-1]

    @property
    def supports_cuda_graph(self) -> bool:
        """Whether decodes are planned in C, at addresses that can be kept."""
        cache = self.kv_cache.k_cache(0)
        return cache.is_cpu and self.head_dim % 8 == 0 and cache.dtype in _functions()

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        sizes = (max_seq_len, self.num_qo_heads, self.head_dim)
        self.fixed = {bs: FixedDecodePlan(bs, *sizes) for bs in bs_list}

    def prepare_for_capture(self, batch: Batch) -> None:
        self.prepare_metadata(batch)
        self.prepare_for_replay(batch)
        cast("TorchMetadata", batch.attn_metadata).plan = self.fixed[batch.padded_size]

    def prepare_for_replay(self, batch: Batch) -> None:
        plan = cast("TorchMetadata", batch.attn_metadata).plan
        self.fixed[batch.padded_size].take(cast("PagedDecodePlan", plan))

    def make_plan(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_table: torch.Tensor,
        num_slots: int,
        num_qo_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
    ) -> AttentionPlan:
        """`PagedDecodePlan` for a decode on a CPU, if C can be compiled; else as `make_plan`."""
        fits = page_table.is_cpu and self.head_dim % 8 == 0
        if fits and max(q_lens) == 1 and dtype in _functions():
            return PagedDecodePlan(kv_lens, page_table, num_qo_heads, self.head_dim)
        heads = (num_qo_heads, num_kv_heads)
        return make_plan(q_lens, kv_lens, page_table, num_slots, *heads, dtype)


def create_auto_backend(config: ModelConfig) -> AutoBackend:
    """What "auto" stands for in `create_attention_backend`, once this file is there."""
    return AutoBackend(config)


class FixedDecodePlan(PagedDecodePlan):
    """A plan at addresses that don't change, for `bs` requests of up to `width` tokens each."""

    def __init__(self, bs: int, width: int, num_qo_heads: int, head_dim: int) -> None:
        threads = torch.get_num_threads()
        most = max(bs * -(-width // LARGEST_PART), bs + threads)  # parts, of LARGEST_PART or less
        self.hold(
            torch.zeros(bs, width, dtype=torch.int32, device="cpu"),
            torch.zeros(most, 3, dtype=torch.int32, device="cpu"),
            torch.zeros(bs + 1, dtype=torch.int32, device="cpu"),
            num_qo_heads * (2 + head_dim + LARGEST_PART),
        )

    def take(self, plan: PagedDecodePlan) -> None:
        """Copy what another plan, of as many requests, says."""
        self.table[:, : plan.table.shape[1]] = plan.table
        self.parts[: len(plan.parts)], self.firsts[:] = plan.parts, plan.firsts
