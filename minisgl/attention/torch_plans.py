"""Three ways to compute attention over the pool in plain PyTorch: one for prefill, two for decode.

A plan is made once per batch from the page table, and then attends once per layer. Everything
that doesn't depend on the layer (which slots, which mask) is worked out when it is made.

No official counterpart: there, GPU kernels (FlashAttention, FlashInfer) do this.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from minisgl.attention.utils import causal_mask

if TYPE_CHECKING:
    from collections.abc import Sequence


class AttentionPlan(Protocol):
    """Attention of one batch; `attend` is called by every layer with that layer's tensors."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q` is `[num_tokens, qo_heads, head_dim]`, packed; the result is like `q`.

        `k` and `v` are the whole pool of the layer: `[num_slots, kv_heads, head_dim]`.
        """
        ...


def as_slice(slots: torch.Tensor) -> slice | torch.Tensor:
    """Consecutive slots as a slice, any others as they are.

    A slice of the pool is a view: nothing is copied. Looking costs a GPU a synchronization, so
    there the slots stay as they are.
    """
    if slots.device.type != "cpu":
        return slots
    first = int(slots[0])
    run = torch.arange(first, first + len(slots), dtype=slots.dtype)
    return slice(first, first + len(slots)) if torch.equal(slots, run) else slots


def take(pool: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
    """The K or V in these slots, in this order: a view for a slice, else a copy."""
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)


def as_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask as numbers to add to scores: 0 where True, minus infinity where False."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))


class Segment(NamedTuple):
    """One request's share of a packed batch."""

    queries: slice  # its rows of the packed q
    slots: slice | torch.Tensor  # where its K and V lie, oldest token first
    bias: torch.Tensor | None  # [q_len, kv_len], or None if the kernel needs none


class PerRequestPlan:
    """One request after the other, each as ordinary attention. For prefill."""

    def __init__(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_table: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.segments: list[Segment] = []
        start = 0
        for q_len, kv_len, row in zip(q_lens, kv_lens, page_table, strict=True):
            bias = None
            if q_len not in (1, kv_len):  # one query sees all keys; for a square see `attend`
                bias = as_bias(causal_mask(q_len, kv_len, row.device), dtype)
            queries = slice(start, start + q_len)
            self.segments.append(Segment(queries, as_slice(row[:kv_len]), bias))
            start += q_len

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs = []
        for queries, slots, bias in self.segments:
            q_heads, k_heads, v_heads = (
                x.transpose(0, 1)[None] for x in (q[queries], take(k, slots), take(v, slots))
            )
            # `is_causal` aligns the diagonal top left: right for as many queries as keys only.
            square = q_heads.shape[2] == k_heads.shape[2]
            seen = F.scaled_dot_product_attention(
                q_heads, k_heads, v_heads, attn_mask=bias, is_causal=square, enable_gqa=True
            )
            outputs.append(seen[0].transpose(0, 1))
        return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)


class GatheredDecodePlan:
    """One query per request, all requests at once, over a padded copy of their K and V.

    Works for any dtype and device. Shorter requests are padded by repeating their own last slot,
    never with a slot of somebody else: a masked weight is 0, but 0 times NaN is NaN. `copies`
    holds the copy of K and that of V: made in the first layer, and overwritten in each later one,
    so that a pass allocates them once and not once per layer.
    """

    def __init__(
        self, kv_lens: Sequence[int], page_table: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self.bs, self.max_len = len(kv_lens), max(kv_lens)
        position = torch.arange(self.max_len, device=page_table.device)
        last = torch.tensor(kv_lens, device=page_table.device)[:, None] - 1
        self.slots = page_table.gather(1, torch.minimum(position, last)).flatten()
        visible = (position <= last)[:, None, None, :]  # [bs, heads = 1, queries = 1, max_len]
        self.bias = None if min(kv_lens) == self.max_len else as_bias(visible, dtype)
        self.copies: torch.Tensor | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = k.shape[1:]  # kv_heads, head_dim
        if self.copies is None:  # one allocation for all layers
            self.copies = k.new_empty(2, len(self.slots), *heads)
        for pool, copy in zip((k, v), self.copies, strict=True):
            torch.index_select(pool, 0, self.slots, out=copy)
        k, v = self.copies.view(2, self.bs, self.max_len, *heads).transpose(2, 3)
        q_groups = q.reshape(self.bs, heads[0], -1, heads[1])
        return F.scaled_dot_product_attention(q_groups, k, v, attn_mask=self.bias).reshape(q.shape)


def pool_columns(page_table: torch.Tensor, num_qo_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Where each query head's keys lie when the pool is seen as `[slots * kv_heads, head_dim]`.

    Returns `[bs * num_qo_heads, positions]`, int32: a row of the table for each query head.
    """
    kv_head = torch.arange(num_qo_heads, dtype=torch.int32) // (num_qo_heads // num_kv_heads)
    return (page_table[:, None] * num_kv_heads + kv_head[:, None]).flatten(0, 1)


def sparse_pattern(
    row_ends: torch.Tensor, columns: torch.Tensor, size: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """A matrix in compressed-row form with zeros at the given places."""
    zeros = torch.zeros(len(columns), dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once per process: CSR tensors are "in beta state"
        return torch.sparse_csr_tensor(row_ends, columns, zeros, size, check_invariants=False)


class RaggedRows:
    """Rows of different lengths that lie end to end, and the way to a padded rectangle and back."""

    def __init__(self, lengths: torch.Tensor, max_len: int, dtype: torch.dtype) -> None:
        self.shape = (len(lengths), max_len)
        self.ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))  # [rows + 1]
        self.places: torch.Tensor | None = None  # of the entries in the rectangle; None: all
        if int(lengths.min()) < max_len:
            inside = torch.arange(max_len) < lengths[:, None]
            self.places = inside.flatten().nonzero().flatten()
            self.padded = torch.full(self.shape, float("-inf"), dtype=dtype)

    def pack(self, rectangle: torch.Tensor) -> torch.Tensor:
        """The entries of `[rows, max_len]` that lie inside the rows: `[num_entries]`."""
        flat = rectangle.flatten()
        return flat if self.places is None else flat.index_select(0, self.places)

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """The softmax of each row; scores and result are `[num_entries]`."""
        if self.places is None:
            return scores.view(self.shape).softmax(-1).flatten()
        self.padded.view(-1).index_copy_(0, self.places, scores)  # elsewhere it stays -inf
        return self.pack(self.padded.softmax(-1))


class SparseDecodePlan:
    """One query per request, all requests at once, reading K and V where they lie.

    The scores form a sparse matrix: a row per (request, query head), a column per (slot, KV
    head), an entry only where the request owns the slot. Nothing of K and V is copied or padded.
    """

    def __init__(
        self,
        kv_lens: Sequence[int],
        page_table: torch.Tensor,
        num_slots: int,
        num_qo_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
    ) -> None:
        page_table = page_table[:, : max(kv_lens)]
        lengths = torch.tensor(kv_lens).repeat_interleave(num_qo_heads)
        self.rows = RaggedRows(lengths, max(kv_lens), dtype)
        self.columns = self.rows.pack(pool_columns(page_table, num_qo_heads, num_kv_heads))
        size = (len(lengths), num_slots * num_kv_heads)
        self.pattern = sparse_pattern(self.rows.ends, self.columns, size, dtype)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        d = q.shape[-1]
        q_rows, k_rows, v_rows = q.reshape(-1, d), k.view(-1, d), v.view(-1, d)
        products = torch.sparse.sampled_addmm(
            self.pattern, q_rows, k_rows.t(), beta=0.0, alpha=d**-0.5
        )
        out = F.embedding_bag(
            self.columns,
            v_rows,
            offsets=self.rows.ends,
            per_sample_weights=self.rows.softmax(products.values()),
            mode="sum",
            include_last_offset=True,
        )
        return out.view(q.shape)


@cache
def sparse_products_work(dtype: torch.dtype, device_type: str) -> bool:
    """Whether `SparseDecodePlan` runs: on a CPU, if this PyTorch has the products for `dtype`."""
    if device_type != "cpu":
        return False
    qkv = torch.ones(1, 1, 8, dtype=dtype)
    try:
        plan = SparseDecodePlan([1], torch.zeros(1, 1, dtype=torch.int32), 1, 1, 1, dtype)
        return torch.equal(plan.attend(qkv, qkv, qkv), qkv)
    except RuntimeError:
        return False
