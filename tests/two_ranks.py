"""A small block, or an engine, on one or two ranks: processes that import or run this file."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minisgl.core import Context, get_global_ctx, reset_global_ctx, set_global_ctx
from minisgl.distributed.info import reset_tp_info, set_tp_info
from minisgl.kernel.activation import silu_and_mul
from minisgl.layers.attention import AttentionLayer
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import (
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearRowParallel,
)

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 97, 32, 48, 4, 1, 8


class Backend:
    """Causal attention over one request's own tokens, without a cache."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: object
    ) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def run_batch(fn: object, *, phase: str, positions: torch.Tensor, last: list[int]) -> torch.Tensor:
    """Call `fn()` inside a pass over a batch of the given positions."""
    reset_global_ctx()
    set_global_ctx(Context(page_size=1))
    get_global_ctx().attn_backend = Backend()  # type: ignore[assignment]
    batch = SimpleNamespace(
        is_prefill=phase == "prefill",
        is_decode=phase == "decode",
        size=len(last),
        positions=positions,
        attn_metadata=SimpleNamespace(get_last_indices=lambda bs: torch.tensor(last[:bs])),
    )
    with get_global_ctx().forward_batch(batch):  # type: ignore[arg-type]
        return fn()  # type: ignore[operator]


def whole_model() -> dict[str, torch.Tensor]:
    """The weights of a small block, uncut, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "embed": (VOCAB, HIDDEN),
        "q": (HEADS * DIM, HIDDEN),
        "k": (KV_HEADS * DIM, HIDDEN),
        "v": (KV_HEADS * DIM, HIDDEN),
        "o": (HIDDEN, HEADS * DIM),
        "o_bias": (HIDDEN,),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    return {k: torch.randn(s, generator=generator) / s[-1] ** 0.5 for k, s in shapes.items()}


def block_logits(rank: int, size: int) -> torch.Tensor:
    """Logits of the block for twelve tokens, with this rank's slices of its weights."""
    reset_tp_info()
    set_tp_info(rank, size)
    w = whole_model()

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(size)[rank] if x.shape[0] >= size * DIM else x  # one KV head: replicated

    embedding = VocabParallelEmbedding(VOCAB, HIDDEN)
    mine = w["embed"][slice(rank * len(embedding.weight), (rank + 1) * len(embedding.weight))]
    padding = torch.full((len(embedding.weight) - len(mine), HIDDEN), 1e9)
    embedding.load_state_dict({"weight": torch.cat([mine, padding])})
    qkv = LinearQKVMerged(HIDDEN, DIM, HEADS, KV_HEADS, False)
    kv = [w[name] if size > KV_HEADS else rows(w[name]) for name in "kv"]
    qkv.load_state_dict({"weight": torch.cat([rows(w["q"]), *kv])})
    out = LinearOProj(HEADS * DIM, HIDDEN, True)
    out.load_state_dict({"weight": w["o"].chunk(size, 1)[rank], "bias": w["o_bias"]})
    gate_up = LinearColParallelMerged(HIDDEN, [INNER, INNER], False)
    gate_up.load_state_dict({"weight": torch.cat([rows(w["gate"]), rows(w["up"])])})
    down = LinearRowParallel(INNER, HIDDEN, False)
    down.load_state_dict({"weight": w["down"].chunk(size, 1)[rank]})
    head = ParallelLMHead(VOCAB, HIDDEN, tie_word_embeddings=True, tied_embedding=embedding)
    rotary = SimpleNamespace(head_dim=DIM, rotary_dim=DIM, max_position=64, base=1e4, scaling=None)
    attention = AttentionLayer(0, HEADS, KV_HEADS, DIM, rotary)  # type: ignore[arg-type]
    ids = torch.tensor([0, 1, 48, 49, 50, 95, 96, 3, 48, 96, 7, 0], dtype=torch.int32)

    def forward() -> torch.Tensor:
        x = embedding.forward(ids)
        x = x + out.forward(attention.forward(qkv.forward(x)))
        x = x + down.forward(silu_and_mul(gate_up.forward(x)))
        return head.forward(x)

    return run_batch(forward, phase="prefill", positions=torch.arange(12), last=[3, 11])


def rank_main(rank: int, size: int, port: int, expected: torch.Tensor) -> None:
    """One rank's process: agree with the whole model, or die."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    try:
        torch.testing.assert_close(block_logits(rank, size), expected, atol=1e-5, rtol=1e-5)
    finally:
        dist.destroy_process_group()


def serve(rank: int, port: int, path: str, prompts: list[list[int]], hot: bool) -> dict[str, Any]:
    """The tokens of each prompt on this rank of two. `hot`: all but the second are drawn."""
    from hand_driven import started

    from minisgl.core import SamplingParams
    from minisgl.distributed import DistributedInfo

    wish = SamplingParams(temperature=1.5)
    params = [wish if hot and i != 1 else SamplingParams() for i in range(len(prompts))]
    torch.manual_seed(rank)  # ranks are processes of their own, and so are their random numbers
    settings = {"tp_info": DistributedInfo(rank, 2), "distributed_port": port}
    # Other pages on each rank: the fewest count.
    with started(path, num_page_override=64 + 8 * rank, **settings) as driver:
        alone = torch.rand(4).tolist()
        tokens = driver.run(prompts, 12 if hot else 6, params)
        return {"tokens": tokens, "alone": alone, "pages": driver.engine.num_pages}


if __name__ == "__main__":
    rank, port, path, prompts, hot = json.loads(sys.argv[1])
    print(json.dumps(serve(rank, port, path, prompts, hot)))
