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

from minisgl.attention import create_attention_backend
from minisgl.core import Batch, Context, Req, SamplingParams, reset_global_ctx, set_global_ctx
from minisgl.distributed import destroy_distributed, reset_tp_info, set_tp_info, try_get_tp_info
from minisgl.engine.config import EngineConfig, check_ranks
from minisgl.engine.graph import GraphRunner
from minisgl.engine.sample import BatchSamplingArgs, Sampler
from minisgl.kernel import use_kernels
from minisgl.kvcache import create_kvcache_pool
from minisgl.layers import set_rope_device
from minisgl.models import create_model, load_weight
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


class Engine:
    """A model with its KV pool and its page table, on one device of one rank.

    Whatever a start changes outside the engine is undone by `shutdown()`, and at once if the start
    fails. The global context allows for one engine at a time.
    """

    def __init__(self, config: EngineConfig) -> None:
        model_config = config.model_config
        check_ranks(config.tp_info.size, model_config)
        self.config, self.dtype, self.closed = config, config.dtype, False
        with ExitStack() as self._undo:
            self._claim_process()  # step 1
            self._open_context()  # step 2
            self.tp_cpu_group = self._init_communication(config)  # step 3
            free_before = self._sync_get_memory()  # step 4
            self._load_model()
            self.num_pages = self._determine_num_pages(free_before, config)
            self.kv_cache = self.ctx.kv_cache = create_kvcache_pool(  # step 5
                model_config, self.num_pages, config.page_size, self.dtype, self.device
            )
            self.max_seq_len = min(config.max_seq_len, self.num_pages * config.page_size)  # step 6
            self.page_table = self.ctx.page_table = self._make_page_table()
            self._make_backends()  # step 7
            self.sampler = Sampler(self.device, model_config.vocab_size)  # step 8
            self.dummy_req = _make_dummy_req(config.max_running_req)
            self.graph_runner = self._make_graph_runner()  # step 9
            self._undo = self._undo.pop_all()

    def _claim_process(self) -> None:
        """Step 1: say which rank this process is, choose the device and, on a CPU, the threads."""
        tp = self.config.tp_info
        self.device = resolve_device(self.config.device, tp.rank)
        if try_get_tp_info() != tp:
            set_tp_info(rank=tp.rank, size=tp.size)
            self._undo.callback(reset_tp_info)
        if is_cuda(self.device):
            self._undo.callback(torch.cuda.set_device, torch.cuda.current_device())
            torch.cuda.set_device(self.device)
        elif "OMP_NUM_THREADS" not in os.environ:  # set, it is the user's own choice
            self._undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(max(1, physical_cores() // tp.size))

    def _open_context(self) -> None:
        """Step 2: a stream of work, and the global object that shows every layer the batch."""
        self.stream = make_stream(self.device)
        self._undo.enter_context(use_stream(self.stream))
        self.ctx = Context(self.config.page_size)
        set_global_ctx(self.ctx)
        self._undo.callback(reset_global_ctx)

    def _init_communication(self, config: EngineConfig) -> dist.ProcessGroup | None:
        """Step 3: meet the other ranks; None if there are none. The group is for CPU tensors."""
        if config.tp_info.size == 1:
            return None
        on_gpu = is_cuda(self.device)
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            rank=config.tp_info.rank,
            world_size=config.tp_info.size,
            timeout=timedelta(seconds=config.distributed_timeout),
            init_method=config.distributed_addr,
        )
        self._undo.callback(dist.destroy_process_group)
        self._undo.callback(destroy_distributed)
        return dist.new_group(backend="gloo") if on_gpu else dist.group.WORLD

    def _least(self, number: int) -> int:
        """The smallest `number` of all ranks."""
        if self.tp_cpu_group is None:
            return number
        least = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.tp_cpu_group)
        return int(least)

    def _sync_get_memory(self) -> int:
        """Bytes free for a rank, on the one that has least. Ranks on a CPU share one memory."""
        free = get_free_memory(self.device)
        return self._least(free if is_cuda(self.device) else free // self.config.tp_info.size)

    def _load_model(self) -> None:
        """Step 4: the model on meta, at no cost, then real weights in place of the empty ones."""
        self._undo.callback(set_rope_device, None)
        set_rope_device(self.device)
        self._undo.callback(use_kernels, "torch")
        use_kernels("torch" if is_cuda(self.device) else self.config.kernels)
        with torch.device("meta"), torch_dtype(self.config.dtype):
            self.model = create_model(self.config.model_config)
        self.model.load_state_dict(self._load_weight_state_dict(self.config))
        release_freed_memory()

    def _load_weight_state_dict(self, config: EngineConfig) -> dict[str, torch.Tensor]:
        """The weights by name, in the engine's dtype: from the checkpoint, or small random ones.

        The random ones are normal with a standard deviation of 0.02, and the same at each start:
        their generator has a seed of its own, so that nobody else's random numbers change.
        """
        if not config.use_dummy_weight:
            loaded = load_weight(config.model_path, self.device)
            return {name: weight.to(config.dtype) for name, weight in loaded}
        random = torch.Generator(self.device).manual_seed(0)
        return {
            name: torch.empty_like(w, device=self.device).normal_(0, 0.02, generator=random)
            for name, w in self.model.state_dict().items()
        }

    def _determine_num_pages(self, old_free_memory: int, config: EngineConfig) -> int:
        """Step 4: how many pages, as many on every rank. How it came about is `self.memory`.

        On a GPU what the model took is measured; on a CPU it is counted: what other programs did
        in the meantime would be measured too.
        """
        on_gpu = is_cuda(self.device)
        taken = old_free_memory - self._sync_get_memory() if on_gpu else self.model.nbytes
        pool_limit = None if on_gpu else config.cpu_kv_cache_bytes
        plan = plan_memory(config, old_free_memory, taken, pool_limit)
        self.memory = plan._replace(num_pages=self._least(plan.num_pages))
        require_two_pages(self.memory, config)
        return self.memory.num_pages

    def _make_page_table(self) -> torch.Tensor:
        """Step 6: a row per request and one for the dummy, `[max_running_req + 1, width]`, int32.

        Every entry starts as the first slot of the dummy page, which follows all other pages. The
        last row, the dummy's, stays so.
        """
        shape = (self.config.max_running_req + 1, align_ceil(self.max_seq_len, 32))
        dummy_slot = self.num_pages * self.config.page_size
        return torch.full(shape, dummy_slot, dtype=torch.int32, device=self.device)

    def _make_backends(self) -> None:
        """Step 7: attention, and for a mixture of experts its backend; layers ask the context."""
        config, model = self.config, self.config.model_config
        self.attn_backend = create_attention_backend(config.attention_backend, model)
        self.ctx.attn_backend = self.attn_backend
        if model.is_moe:
            self.ctx.moe_backend = create_moe_backend(config.moe_backend)

    def _make_graph_runner(self) -> GraphRunner:
        """Step 9: last, because to record a pass is to run one. On a CPU up to 16 requests."""
        config, largest = self.config, self.config.cuda_graph_max_bs
        if largest is None and not is_cuda(self.device):
            largest = min(16, config.max_running_req)
        runner = GraphRunner(
            stream=self.stream,
            device=self.device,
            model=self.model,
            attn_backend=self.attn_backend,
            cuda_graph_bs=config.cuda_graph_bs,
            cuda_graph_max_bs=largest,
            free_memory=get_free_memory(self.device),
            max_seq_len=self.max_seq_len,
            vocab_size=config.model_config.vocab_size,
            dummy_req=self.dummy_req,
        )
        self._undo.callback(runner.destroy_cuda_graphs)
        return runner

    def shutdown(self) -> None:
        """Undo what the start changed in this process and let go of the memory; once is enough."""
        if not self.closed:
            self.closed = True
            self._undo.close()
            del self.model, self.kv_cache, self.page_table, self.ctx
            del self.attn_backend, self.graph_runner

    def _check_batch(self, batch: Batch, args: BatchSamplingArgs) -> None:
        """Refuse, before anything changes, a batch that would go wrong far from its cause.

        RuntimeError if the engine was shut down. ValueError if a request has more than
        `max_seq_len` tokens; if `input_ids`, `positions` or `out_loc` doesn't hold one entry for
        each token that `padded_reqs` bring; if there are temperatures, but not one for each
        request of the batch.
        """
        if self.closed:
            raise RuntimeError("this engine was shut down; make a new one")
        longest = max(req.device_len for req in batch.reqs)
        if longest > self.max_seq_len:
            raise ValueError(
                f"a request of {longest} tokens is longer than max_seq_len={self.max_seq_len}: "
                "shorten the prompt, or stop the request earlier"
            )
        tokens = sum(req.extend_len for req in batch.padded_reqs)
        given = {name: len(getattr(batch, name)) for name in ("input_ids", "positions", "out_loc")}
        if wrong := {name: size for name, size in given.items() if size != tokens}:
            raise ValueError(
                f"the requests bring {tokens} tokens in all, but the arrays hold {wrong}"
            )
        if args.temperatures is not None and len(args.temperatures) != batch.size:
            raise ValueError(
                f"sampling arguments for {len(args.temperatures)} requests, but a batch of "
                f"{batch.size}: call engine.sampler.prepare(batch) for each batch"
            )

    def _check_logits(self, batch: Batch, logits: torch.Tensor) -> None:
        """RuntimeError, naming the requests, for a row with NaN or +inf (on a GPU nobody looks)."""
        if is_cuda(self.device):
            return
        finite = logits.amax(dim=-1).isfinite().tolist()
        if not all(finite):
            uids = [req.uid for req, fine in zip(batch.reqs, finite, strict=True) if not fine]
            raise RuntimeError(
                f"the logits of the requests {uids} are not finite, so no token can be drawn: are "
                f"all weights finite, is {self.dtype} wide enough for this model, and was every "
                "slot written before it is read?"
            )

    def forward_batch(self, batch: Batch, args: BatchSamplingArgs) -> ForwardOutput:
        """Run one pass and draw the next token of each request. Moves their lengths on.

        Raises ValueError, before anything changes, for a request longer than `max_seq_len` and for
        arrays that do not fit the requests; RuntimeError after `shutdown()`, and for logits that
        are not finite, before a length has moved.
        """
        self._check_batch(batch, args)
        with self.ctx.forward_batch(batch), torch.inference_mode():
            runner = self.graph_runner
            logits = runner.replay(batch) if runner.can_replay(batch) else self.model.forward()
        logits = logits[: batch.size]
        self._check_logits(batch, logits)
        for req in batch.reqs:
            req.complete_one()
        next_tokens = self._draw(logits, args)
        on_host = next_tokens.to("cpu", non_blocking=True)
        copy_done = make_event(self.device)
        copy_done.record()
        return ForwardOutput(next_tokens, on_host, copy_done)

    def _draw(self, logits: torch.Tensor, args: BatchSamplingArgs) -> torch.Tensor:
        """One token for each row, int32: what rank 0 has drawn, on every rank."""
        tokens = self.sampler.sample(logits, args).to(torch.int32)
        if self.tp_cpu_group is not None:
            dist.broadcast(tokens, src=0)
        return tokens


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


class ForwardOutput(NamedTuple):
    """What a pass returns: each request's next token, twice. int32 `[batch.size]`.

    `next_tokens_gpu` is on the engine's device, ready to be the next pass's input.
    `next_tokens_cpu` may be read once `copy_done_event.synchronize()` has returned.
    On a CPU they are one tensor.
    """

    next_tokens_gpu: torch.Tensor
    next_tokens_cpu: torch.Tensor
    copy_done_event: torch.cuda.Event | NullEvent
