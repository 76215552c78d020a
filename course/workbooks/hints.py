"""What a stub says beyond what its body tells."""

from __future__ import annotations

from course.building.source import PACKAGE

# Where the docstring and the prose do not say enough to write the body: file → name → a line.
_HINTS = {
    "core.py": {
        "_check_int": 'f"{name} must be an integer >= {least}, got {value!r}: {hint}"',
        "SamplingParams.__post_init__": (
            "finite temperature, top_k >= -1, 0 <= top_p <= 1, max_tokens >= 1"
        ),
        "Req.__post_init__": (
            "ids 1-D, int32, on the CPU, not empty; 0 <= cached_len < their number; table_idx and "
            "output_len >= 0; then device_len and max_device_len"
        ),
        "Req.append_host": "first: is it one token id, and is there a place? int32; a new tensor",
        "Context.forward_batch": "`yield` once; clear also when the pass fails",
    },
    "layers/base.py": {
        "_concat_prefix": "joined by a dot; an empty prefix adds nothing",
        "BaseOP.load_state_dict": "a parent that has checked everything calls with `_internal`",
    },
    "utils/registry.py": {
        "import_optional": (
            "`error.name` is the module that is missing: None if that is `module` or a package "
            "that it lies in, else raise the error again"
        ),
        "Registry.supported_names": "`import_optional` each of `_optional` first",
    },
    "kernel/table.py": {
        "create_torch_kernels": (
            "this chapter's functions and `F.linear`; `store_cache` of minisgl.kernel.store, or "
            "None as long as there is no such file"
        ),
        "use_kernels": "set `_CHOSEN` last, so that a refused name leaves it",
    },
    "layers/linear.py": {
        "_LinearTPImpl.__init__": "shapes of weights are [out, in]",
        "_LinearTPImpl.post_load": 'its full name is `_concat_prefix(prefix, "weight")`',
    },
    "layers/rotary.py": {
        "_yarn_context": (
            "original_max_position_embeddings, else max_position; factor, else their ratio"
        ),
        "_yarn_inv_freq": (
            "the pair that makes t turns is dim * log(original / (2 pi t)) / (2 log base); the "
            "ramp's ends are rounded outward (floor, ceil) unless `truncate` is false, and limited "
            "to 0 … dim - 1"
        ),
    },
    "layers/embedding.py": {
        "ParallelLMHead.post_load": (
            "its own weight as in `_LinearTPImpl.post_load`; of a tied one keep what `pack` makes "
            "of the embedding's, shared, in `_packed`, or None if that is the table itself"
        ),
        "ParallelLMHead.forward": (
            "in prefill `batch.attn_metadata.get_last_indices(batch.size)` are the rows to keep"
        ),
    },
    "layers/attention.py": {
        "AttentionLayer.forward": (
            "the backend is called with (q, k, v, layer_id, batch), each of the first three "
            "[num_tokens, heads, head_dim]"
        ),
    },
    "utils/logger.py": {
        "RankLogger.process": "the settings are in `self.extra`; parts of the prefix joined by `|`",
        "init_logger": (
            "a line is `[2026-01-01|12:00:00|NAME] LEVEL message`; one handler, also when called "
            "twice; `propagate` off, or lines come twice"
        ),
    },
    "utils/hf.py": {
        "_load_hf_config": (
            "a model_type that transformers does not know comes back as a plain PretrainedConfig"
        ),
    },
    "models/config.py": {
        "_attention_switches": "the keys are has_qkv_bias, has_o_bias, has_qk_norm, in this order",
        "_refuse_unsupported": (
            "an architecture that is not registered (none given: nothing to refuse), "
            "quantization_config, mlp_bias, mlp_only_layers, decoder_sparse_step other than 1"
        ),
        "_max_position": (
            "no window counts if use_sliding_window is false, if no layer of layer_types slides, "
            "or if max_window_layers covers all layers"
        ),
        "_rope": (
            "the default kind has no scaling, and other kinds get original_max_position_embeddings "
            "if it is missing; settings per kind of layer and partial_rotary_factor are refused"
        ),
    },
    "kernel/utils.py": {
        "_processor": (
            "of /proc/cpuinfo the different lines that name the model or its instructions; where "
            "there is no such file, what `platform` tells"
        ),
        "_compile": (
            "the name: a hash of source, compiler, flags and `_processor()`; the command: "
            'compiler, flags, "-x", "c", "-", "-o", FILE, "-lm"; the source on its standard '
            "input; then `replace`"
        ),
        "Function.__call__": "noted and not called: 1, as of a function that could",
        "load_jit": (
            "first with THREADS, then without; a RuntimeError or an OSError is a None; PARAMETERS "
            "has each letter's type, and the `argtypes` of a function are a list of such"
        ),
        "as_floats": "`x` itself costs nothing: it is what most calls of a decode step bring",
    },
    "kernel/native_linear.py": {
        "_functions": "the letters of `linear_TYPE` in the order of its parameters; see `load_jit`",
        "native": (
            "(x, room, w, bias, y, n, in, out, threads), all contiguous; `room` is in float32, of "
            "x's shape, but for more than FEW rows in whole blocks of them"
        ),
    },
    "kernel/native_small.py": {
        "_functions": (
            "each C function's letters, in the order of its parameters, see `load_jit`; the keys: "
            '("add_rmsnorm", dtype), ("silu_and_mul", dtype), ("rope", dtype) and ("store", None)'
        ),
        "native_add_rmsnorm": "a tensor's shape, or a weight's, that doesn't fit: NotImplemented",
        "_rows": "None as well for another dtype or device, or if there are not `n` rows",
        "native_rope": (
            "q and k as `_rows`, the table `[positions, head_size]`, and heads come out even; "
            "C's 0, for a position that the table lacks, is NotImplemented"
        ),
        "native_store_cache": (
            "sizes and distances in bytes; the same shape for both caches, and for K and V; C's 0, "
            "for a slot that the pool lacks, is NotImplemented, and so is all that doesn't fit"
        ),
    },
    "engine/graph_cpu.py": {
        "Pool.like": (
            "a block as long as `x`'s storage whose user has expired, or a new one; "
            "`torch.frombuffer(block.numpy(), dtype=...)` makes another tensor of a block"
        ),
        "Recording.__torch_dispatch__": (
            "run it first: what it gave tells the rest. A view begins where one of `args` does "
            "(`memory`); `func._schema.is_mutable` tells what writes; COPYING copies from `args[0]`"
        ),
        "CPURecorder.__call__": "whatever happens, nobody listens to `Function` afterwards",
    },
    "attention/auto_backend.py": {
        "_functions": "the letters of `attend_TYPE` in the order of its parameters; see `load_jit`",
        "PagedDecodePlan.__init__": (
            "one size for all parts: the batch's tokens over the threads, rounded up, but within "
            "SMALLEST_PART and LARGEST_PART; `parts` and `firsts` as `attend_TYPE` wants them, "
            "int32; a part's scratch is, per head, 2 + head_dim and its scores, vectors of eight"
        ),
        "FixedDecodePlan.__init__": (
            "parts: LARGEST_PART each, for the longest requests; with short ones as many as there "
            "are requests and threads; scratch for LARGEST_PART scores"
        ),
        "AutoBackend.prepare_for_capture": (
            "metadata as for any batch, copied into the fixed plan of its padded size, and that "
            "plan in place of its own"
        ),
    },
    "models/utils.py": {
        "make_mlp": "the class for experts is `moe_module().MoEMLP`",
    },
    "models/register.py": {
        "create_decoder": "the decoder is imported in here, since it is built further down",
    },
    "scheduler/free_list.py": {
        "FreeList.__init__": "a new list hands out 0, 1, 2, …",
        "FreeList.give_back": (
            "numbers that come back together are handed out in the order in which they came back"
        ),
    },
    "scheduler/cache.py": {
        "CacheManager._allocate": "evict what is missing, and only if the cache can give that much",
        "CacheManager.check_integrity": (
            "free list and prefix cache check themselves; then: pages of two requests, pages that "
            "were not handed out, and pages that nobody has"
        ),
        "CacheManager.lazy_free_region": (
            "collect page numbers and not slots (see `_free`); give them back also after an error"
        ),
        "CacheManager.cache_req": (
            "spare are the slots from the old handle's cached_len to what the cache already had; "
            "finished: they and all that the cache did not take are freed; unfinished: keep and "
            "lock the new handle, and point the row at its slots; in the end unlock the old handle"
        ),
    },
    "kvcache/mha_pool.py": {
        "MHAKVCache.__init__": (
            "more ranks than KV heads: each has a copy (`allow_replicate`); `store_kv` calls the "
            "`store_cache` that `get_kernels()` has now"
        ),
    },
    "attention/base.py": {
        "EagerBackend.prepare_for_capture": "the same error as that of `init_capture_graph`",
        "EagerBackend.prepare_for_replay": "the same error as that of `init_capture_graph`",
    },
    "attention/torch_plans.py": {
        "sparse_products_work": "try a plan of one token, and catch the RuntimeError it may raise",
    },
    "attention/torch_backend.py": {
        "TorchBackend.__init__": (
            "the shape of `k_cache(0)` tells most; a layer's entry of `slots` is its K and its V "
            "as [num_slots, num_kv_heads, head_dim]"
        ),
        "TorchBackend.forward": "assert that the metadata are there, then write, then read",
        "TorchBackend.prepare_metadata": "the slots of a request stand in row `table_idx`",
    },
    "utils/device.py": {
        "physical_cores": "`loky.cpu_count`, called as that, with warnings and stderr caught",
        "_left": "no such file, or one that says max, raises: try the other version's names",
    },
    "engine/config.py": {
        "check_ranks": "the numbers that would do are at most as many as there are query heads",
    },
    "engine/sample.py": {
        "Sampler.prepare": "no temperature below 1e-6, also where 0 comes with a top_p below 1",
    },
    "engine/graph.py": {
        "_determine_cuda_graph_bs": "the largest: 256 with more than 80 GiB free, else 160",
        "_make_recorder": "on a CPU `CPURecorder()` of the optional minisgl.kernel.cpu.graph",
        "_weights": "`layer._parts()` gives weights and layers, whose own come in their place",
        "GraphRunner._capture_graphs": (
            "for each size, in this order: a decode batch of dummies, also as `padded_reqs`; its "
            "inputs from the buffer; the backend's metadata; then, as the context's batch and in "
            "inference mode, `record` of a `_forward_into` the buffer's first `bs` rows of logits"
        ),
    },
    "engine/engine.py": {
        "plan_memory": "the override changes the number of pages and not the budget",
        "Engine._claim_process": "a rank that is set already and the same stays, without an error",
        "Engine._load_model": "the table of operations before any layer; undone like RoPE's device",
        "Engine._check_logits": "a row's largest logit is finite if no entry is NaN or +inf",
        "Engine._draw": "`dist.broadcast` from rank 0, if there is a group",
        "Engine._make_page_table": "width: max_seq_len rounded up to a multiple of 32",
    },
}
HINTS = {(f"{PACKAGE}/{file}", n): hint for file, own in _HINTS.items() for n, hint in own.items()}
HINTS |= {  # of functions that the notebook itself holds
    ("", "admit"): (
        "(a) a row, the ids into the token pool; (b) ask the prefix cache for all but the last"
    ),
    ("", "turn"): (
        "(d) give out pages; (e) rows and positions, `out_loc` and `input_ids` of the padded "
        "requests, the backend's metadata; (f) prepare the sampling; (g) the pass; (h) each new "
        "token into the token pool, at device_len - 1; (i) append it on the host"
    ),
    ("", "serve"): (
        "(c) all that can decode run, at first in a prefill; (j) in the end pages and rows go back"
    ),
}
