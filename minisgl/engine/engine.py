"""One model on one device: given a batch, the next token of each request.

Official counterpart: `engine/engine.py`. It knows nothing of queues, rows or pages to hand out:
who calls it decides which requests run and where their KV goes.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from minisgl.attention import BaseAttnBackend, create_attention_backend
from minisgl.core import Batch, Context, Req, SamplingParams, reset_global_ctx, set_global_ctx
from minisgl.distributed import destroy_distributed, reset_tp_info, set_tp_info, try_get_tp_info
from minisgl.engine.config import EngineConfig
from minisgl.engine.graph import GraphRunner
from minisgl.engine.sample import BatchSamplingArgs, Sampler
from minisgl.kernel import use_kernels
from minisgl.kvcache import create_kvcache_pool
from minisgl.layers import set_rope_device
from minisgl.models import BaseLLMModel, create_model, load_weight
from minisgl.moe import create_moe_backend
from minisgl.utils.device import (
    NullEvent,
    get_free_memory,
    is_cuda,
    make_event,
    make_stream,
    physical_cores,
    release_freed_memory,
    resolve_device,
    use_stream,
)
from minisgl.utils.misc import align_ceil, div_even
from minisgl.utils.torch_utils import torch_dtype


class MemoryPlan(NamedTuple):
    """How the number of pages came about; all sizes in bytes."""

    free_before: int  # before the model was loaded
    model: int
    budget: int  # what the KV pool may take
    bytes_per_page: int
    num_pages: int


def bytes_per_page(config: EngineConfig) -> int:
    """What a page takes on one rank: K and V, each layer, each of its tokens, this rank's heads.

    With more ranks than KV heads each rank holds one, a copy (`allow_replicate` of `div_even`).
    """
    model = config.model_config
    kv_heads = div_even(model.num_kv_heads, config.tp_info.size, allow_replicate=True)
    per_token = 2 * model.num_layers * kv_heads * model.head_dim * config.dtype.itemsize
    return per_token * config.page_size


def plan_memory(
    config: EngineConfig, free_before: int, model: int, pool_limit: int | None = None
) -> MemoryPlan:
    """Divide the memory: `memory_ratio` of what was free, less the model, is for the pages.

    `pool_limit` caps the pool, in bytes. `config.num_page_override` overrules the result.
    """
    budget = int(config.memory_ratio * free_before) - model
    if pool_limit is not None:
        budget = min(budget, pool_limit)
    per_page = bytes_per_page(config)
    pages = config.num_page_override or max(0, budget) // per_page
    return MemoryPlan(free_before, model, budget, per_page, pages)


def require_two_pages(plan: MemoryPlan, config: EngineConfig) -> None:
    """Raise ValueError, with what can be done about it, unless there is room for two pages."""
    if plan.num_pages < 2:
        raise ValueError(
            f"no room for two pages of KV: of {plan.free_before:,} bytes that were free, "
            f"memory_ratio={config.memory_ratio} and the model's {plan.model:,} bytes leave "
            f"{plan.budget:,}, and a page takes {plan.bytes_per_page:,}. Free some memory, raise "
            "memory_ratio (on a CPU also cpu_kv_cache_bytes), or use a smaller dtype, page_size "
            "or model"
        )


def _claim_process(config: EngineConfig, undo: ExitStack) -> torch.device:
    """Step 1: say which rank this process is, choose the device and, on a CPU, the threads."""
    device = resolve_device(config.device, config.tp_info.rank)
    if try_get_tp_info() != config.tp_info:
        set_tp_info(rank=config.tp_info.rank, size=config.tp_info.size)
        undo.callback(reset_tp_info)
    if is_cuda(device):
        undo.callback(torch.cuda.set_device, torch.cuda.current_device())
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:  # set, it is the user's own choice
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(max(1, physical_cores() // config.tp_info.size))
    return device


def _open_context(page_size: int, undo: ExitStack) -> Context:
    """Step 2: the one global object, through which every layer finds the batch."""
    ctx = Context(page_size)
    set_global_ctx(ctx)
    undo.callback(reset_global_ctx)
    return ctx


def _init_communication(
    config: EngineConfig, device: torch.device, undo: ExitStack
) -> dist.ProcessGroup | None:
    """Step 3: meet the other ranks; None if there are none. The group is for tensors on the CPU."""
    if config.tp_info.size == 1:
        return None
    dist.init_process_group(
        backend="nccl" if is_cuda(device) else "gloo",
        rank=config.tp_info.rank,
        world_size=config.tp_info.size,
        timeout=timedelta(seconds=config.distributed_timeout),
        init_method=config.distributed_addr,
    )
    undo.callback(dist.destroy_process_group)
    undo.callback(destroy_distributed)
    return dist.new_group(backend="gloo") if is_cuda(device) else dist.group.WORLD


def _min_over_ranks(number: int, group: dist.ProcessGroup | None) -> int:
    """The smallest `number` of all ranks: page tables must be the same everywhere."""
    if group is None:
        return number
    least = torch.tensor(number, dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least)


def _free_memory(config: EngineConfig, device: torch.device) -> int:
    """Step 4a: bytes free for one rank, before the model. Ranks on a CPU share one memory."""
    free = get_free_memory(device)
    return free if is_cuda(device) else free // config.tp_info.size


def _load_model(
    config: EngineConfig, device: torch.device, undo: ExitStack
) -> tuple[BaseLLMModel, int]:
    """Step 4b: the model on meta, at no cost, then real weights in place of the empty ones.

    Returns the model and the bytes of its weights.
    """
    undo.callback(set_rope_device, None)
    set_rope_device(device)
    undo.callback(use_kernels, "torch")
    use_kernels("auto")
    with torch.device("meta"), torch_dtype(config.dtype):
        model = create_model(config.model_config)
    weights = _load_weight_state_dict(config, model, device)
    weight_bytes = sum(weight.nbytes for weight in weights.values())
    model.load_state_dict(weights)
    release_freed_memory()
    return model, weight_bytes


def _load_weight_state_dict(
    config: EngineConfig, model: BaseLLMModel, device: torch.device
) -> dict[str, torch.Tensor]:
    """The weights by name, in the engine's dtype: from the checkpoint, or small random ones.

    The random ones are normal with a standard deviation of 0.02, and the same at each start: their
    generator has a seed of its own, so that nobody else's random numbers change.
    """
    if not config.use_dummy_weight:
        loaded = load_weight(config.model_path, device)
        return {name: weight.to(config.dtype) for name, weight in loaded}
    random = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty_like(w, device=device).normal_(0, 0.02, generator=random)
        for name, w in model.state_dict().items()
    }


def _plan(engine: Engine, free_before: int, weight_bytes: int) -> MemoryPlan:
    """Step 4c: what the model took, and what is left for pages; as many on every rank.

    On a GPU the difference is measured, since more than the weights was allocated. On a CPU it is
    counted: what other programs did in the meantime would be measured too.
    """
    config, on_gpu = engine.config, is_cuda(engine.device)
    taken = free_before - get_free_memory(engine.device) if on_gpu else weight_bytes
    pool_limit = None if on_gpu else config.cpu_kv_cache_bytes
    plan = plan_memory(config, free_before, taken, pool_limit)
    plan = plan._replace(num_pages=_min_over_ranks(plan.num_pages, engine.tp_cpu_group))
    require_two_pages(plan, config)
    return plan


def _make_page_table(engine: Engine) -> torch.Tensor:
    """Step 6: a row per request and one for the dummy, `[max_running_req + 1, width]`, int32.

    Every entry starts as the first slot of the dummy page, which follows all other pages. The last
    row, the dummy's, stays so.
    """
    config = engine.config
    shape = (config.max_running_req + 1, align_ceil(engine.max_seq_len, 32))
    dummy_slot = engine.num_pages * config.page_size
    return torch.full(shape, dummy_slot, dtype=torch.int32, device=engine.device)


def _make_dummy_req(row: int) -> Req:
    """A request of one token that nobody waits for; it fills a batch up to a recorded size."""
    return Req(
        input_ids=torch.zeros(1, dtype=torch.int32),
        table_idx=row,
        cached_len=0,
        output_len=1,
        uid=-1,
        sampling_params=SamplingParams(),
        cache_handle=None,  # type: ignore[arg-type]
    )


def _make_backends(engine: Engine) -> BaseAttnBackend:
    """Step 7: attention, and for a mixture of experts its backend; layers look in the context."""
    config, ctx = engine.config, engine.ctx
    ctx.attn_backend = create_attention_backend(config.attention_backend, config.model_config)
    if config.model_config.is_moe:
        ctx.moe_backend = create_moe_backend(config.moe_backend)
    return ctx.attn_backend


def _make_graph_runner(engine: Engine, undo: ExitStack) -> GraphRunner:
    """Step 9: last, because to record a pass is to run one.

    On a CPU no more than 16 requests, unless the config says so: what a replay saves is Python's
    time, which is the same for any batch, and each size costs memory and a moment of the start.
    """
    config, largest = engine.config, engine.config.cuda_graph_max_bs
    if largest is None and not is_cuda(engine.device):
        largest = min(16, config.max_running_req)
    runner = GraphRunner(
        stream=engine.stream,
        device=engine.device,
        model=engine.model,
        attn_backend=engine.attn_backend,
        cuda_graph_bs=config.cuda_graph_bs,
        cuda_graph_max_bs=largest,
        free_memory=get_free_memory(engine.device),
        max_seq_len=engine.max_seq_len,
        vocab_size=config.model_config.vocab_size,
        dummy_req=engine.dummy_req,
    )
    undo.callback(runner.destroy_cuda_graphs)
    return runner


def _check_batch(engine: Engine, batch: Batch, args: BatchSamplingArgs) -> None:
    """Refuse, before anything changes, a batch that would go wrong far from its cause.

    RuntimeError if the engine was shut down. ValueError if a request has more than `max_seq_len`
    tokens; if `input_ids`, `positions` or `out_loc` doesn't hold one entry for each token that
    `padded_reqs` bring; if there are temperatures, but not one for each request of the batch.
    """
    if not hasattr(engine, "model"):
        raise RuntimeError("this engine was shut down; make a new one")
    longest = max(req.device_len for req in batch.reqs)
    if longest > engine.max_seq_len:
        raise ValueError(
            f"a request of {longest} tokens is longer than max_seq_len={engine.max_seq_len}: "
            "shorten the prompt, or stop the request earlier"
        )
    tokens = sum(req.extend_len for req in batch.padded_reqs)
    given = {name: len(getattr(batch, name)) for name in ("input_ids", "positions", "out_loc")}
    if wrong := {name: size for name, size in given.items() if size != tokens}:
        raise ValueError(f"the requests bring {tokens} tokens in all, but the arrays hold {wrong}")
    if args.temperatures is not None and len(args.temperatures) != batch.size:
        raise ValueError(
            f"sampling arguments for {len(args.temperatures)} requests, but a batch of "
            f"{batch.size}: call engine.sampler.prepare(batch) for each batch"
        )


class ForwardOutput(NamedTuple):
    """What a pass returns: each request's next token, twice. int32 `[batch.size]`.

    `next_tokens_gpu` is on the engine's device, ready to be the next pass's input.
    `next_tokens_cpu` may be read once `copy_done_event.synchronize()` has returned.
    On a CPU they are one tensor.
    """

    next_tokens_gpu: torch.Tensor
    next_tokens_cpu: torch.Tensor
    copy_done_event: torch.cuda.Event | NullEvent


def _deliver(next_tokens: torch.Tensor, device: torch.device) -> ForwardOutput:
    """Start the copy of the tokens to the host, and mark the place in the stream after it."""
    on_host = next_tokens.to("cpu", non_blocking=True)
    copy_done = make_event(device)
    copy_done.record()
    return ForwardOutput(next_tokens, on_host, copy_done)


# What holds memory, and is let go when the engine is shut down.
_HEAVY = ("model", "kv_cache", "page_table", "ctx", "attn_backend", "graph_runner")


class Engine:
    """A model with its KV pool and its page table, on one device of one rank.

    Whatever a start changes outside the engine is undone by `shutdown()`, and at once if the start
    fails. The global context allows for one engine at a time.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        model_config, self.dtype = config.model_config, config.dtype
        with ExitStack() as undo:
            self.device = _claim_process(config, undo)
            self.stream = make_stream(self.device)
            undo.enter_context(use_stream(self.stream))
            self.ctx = _open_context(config.page_size, undo)
            self.tp_cpu_group = _init_communication(config, self.device, undo)
            free_before = _free_memory(config, self.device)
            self.model, weight_bytes = _load_model(config, self.device, undo)
            self.memory = _plan(self, free_before, weight_bytes)
            self.num_pages = self.memory.num_pages
            self.kv_cache = self.ctx.kv_cache = create_kvcache_pool(
                model_config, self.num_pages, config.page_size, self.dtype, self.device
            )
            self.max_seq_len = min(config.max_seq_len, self.num_pages * config.page_size)
            self.page_table = self.ctx.page_table = _make_page_table(self)
            self.attn_backend = _make_backends(self)
            self.sampler = Sampler(self.device, model_config.vocab_size)
            self.dummy_req = _make_dummy_req(config.max_running_req)
            self.graph_runner = _make_graph_runner(self, undo)
            self._undo = undo.pop_all()

    def forward_batch(self, batch: Batch, args: BatchSamplingArgs) -> ForwardOutput:
        """Run one pass and draw the next token of each request. Moves their lengths on.

        Raises ValueError, before anything changes, for a request longer than `max_seq_len` and for
        arrays that do not fit the requests; RuntimeError after `shutdown()`.
        """
        _check_batch(self, batch, args)
        with self.ctx.forward_batch(batch), torch.inference_mode():
            runner = self.graph_runner
            if runner.can_use_cuda_graph(batch) and batch.padded_size in runner.graphs:
                logits = runner.replay(batch)
            else:
                logits = self.model.forward()
        for req in batch.reqs:
            req.complete_one()
        next_tokens = self.sampler.sample(logits[: batch.size], args)
        return _deliver(next_tokens.to(torch.int32), self.device)

    def shutdown(self) -> None:
        """Undo what the start changed in this process and let go of the memory; once is enough."""
        self._undo.close()
        for name in _HEAVY:
            vars(self).pop(name, None)
