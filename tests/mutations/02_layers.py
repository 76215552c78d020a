"""Other solutions of chapter 02: the first ones are wrong, the last ones right but different."""

from course.mutations import Change

BASE = "minisgl/layers/base.py"
NORM = "minisgl/kernel/norm.py"
LNORM = "minisgl/layers/norm.py"
LINEAR = "minisgl/layers/linear.py"
ROPE = "minisgl/layers/rotary.py"
KROPE = "minisgl/kernel/rotary.py"
EMBED = "minisgl/layers/embedding.py"
INDEX = "minisgl/kernel/index.py"
ATTN = "minisgl/layers/attention.py"
ACT = "minisgl/kernel/activation.py"
MISC = "minisgl/utils/misc.py"
TORCH_UTILS = "minisgl/utils/torch_utils.py"
KLINEAR = "minisgl/kernel/linear.py"

O_PROJ = (
    "class LinearOProj(LinearRowParallel):\n"
    '    """The projection after attention: its inputs are this rank\'s query heads."""'
)
CHOOSE = """\
    if name not in supported_linear_kernels():
        known = ", ".join(supported_linear_kernels())
        raise ValueError(f"unknown linear kernel {name!r}; there are: {known}")
    _LINEAR_KERNEL = name"""

CHANGES = [
    Change(
        "weights are copied into the old tensors",
        BASE,
        "BaseOP.load_state_dict",
        "setattr(self, name, state_dict.pop(path))",
        "setattr(self, name, state_dict.pop(path).clone())",
        "check_names_and_loading",
        "replaced, not copied",
    ),
    Change(
        "loaded tensors stay in the dictionary",
        BASE,
        "BaseOP.load_state_dict",
        "state_dict.pop(path)",
        "state_dict[path]",
        "check_names_and_loading",
        "taken out of the dictionary",
    ),
    Change(
        "keys left over are not noticed",
        BASE,
        "_check_state_dict",
        '    problems += [f"unexpected: {key}" for key in given if key not in expected]\n',
        "",
        "check_names_and_loading",
        "extra",
    ),
    Change(
        "a wrong dtype is accepted",
        BASE,
        "_check_state_dict",
        "if old.dtype != new.dtype:",
        "if False:",
        "check_names_and_loading",
        "should name",
    ),
    Change(
        "the load stops half way at a bad key",
        BASE,
        "BaseOP.load_state_dict",
        "_check_state_dict(type(self).__name__, expected, state_dict)",
        "pass",
        "check_names_and_loading",
        "",
    ),
    Change(
        "attributes with an underscore count as weights",
        BASE,
        "BaseOP._parts",
        'not name.startswith("_") and ',
        "",
        "check_names_and_loading",
        "_scratch",
    ),
    Change(
        "lists are numbered from 1",
        BASE,
        "OPList._parts",
        "enumerate(self.op_list)",
        "enumerate(self.op_list, 1)",
        "check_names_and_loading",
        "layers.1.left",
    ),
    Change(
        "the norm is computed in bfloat16",
        NORM,
        "rmsnorm",
        "F.rms_norm(x.to(torch.float32), weight.shape, None, eps).to(x.dtype)",
        "(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))",
        "check_rmsnorm",
        "where do you round",
    ),
    Change(
        "the norm rounds after the weight, not before",
        NORM,
        "rmsnorm",
        "None, eps).to(x.dtype)",
        "None, eps)",
        "check_rmsnorm",
        "where do you round",
    ),
    Change(
        "a float32 weight promotes the activations",
        NORM,
        "rmsnorm",
        ".to(x.dtype).mul_(weight)",
        ".to(x.dtype) * weight",
        "check_rmsnorm",
        "must not promote",
    ),
    Change(
        "eps is added to the root, not under it",
        NORM,
        "rmsnorm",
        "F.rms_norm(x.to(torch.float32), weight.shape, None, eps).to(x.dtype)",
        "(x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)",
        "check_rmsnorm",
        "where do you round",
    ),
    Change(
        "forward_inplace returns the result and leaves its argument alone",
        LNORM,
        "RMSNorm.forward_inplace",
        ", out=x",
        "",
        "check_rmsnorm",
        "should have changed its argument",
    ),
    Change(
        "the fused norm forgets the residual",
        NORM,
        "fused_add_rmsnorm",
        "total = residual + x",
        "total = x",
        "check_fused_norm",
        "new residual stream",
    ),
    Change(
        "the fused norm returns the old residual",
        NORM,
        "fused_add_rmsnorm",
        "weight, eps), total",
        "weight, eps), residual",
        "check_fused_norm",
        "new residual stream",
    ),
    Change(
        "the fused norm returns what it normalized as the stream",
        NORM,
        "fused_add_rmsnorm",
        "    return rmsnorm(total, weight, eps), total",
        "    y = rmsnorm(total, weight, eps)\n    return y, y",
        "check_fused_norm",
        "new residual stream",
    ),
    Change(
        "the fused norm adds into the residual in place",
        NORM,
        "fused_add_rmsnorm",
        "total = residual + x",
        "total = residual.add_(x)",
        "check_fused_norm",
        "residual was changed",
    ),
    Change(
        "without a residual the normalized rows start the stream",
        LNORM,
        "RMSNormFused.forward",
        "return rmsnorm(x, self.weight, self.eps), x",
        "return (rmsnorm(x, self.weight, self.eps),) * 2",
        "check_fused_norm",
        "starts the stream",
    ),
    Change(
        "only K is counted beside Q, not K and V",
        LINEAR,
        "LinearQKVMerged.__init__",
        "local_qo + 2 * local_kv",
        "local_qo + local_kv",
        "check_linear_layers",
        "",
    ),
    Change(
        "a bias of a row-parallel layer is added on every rank",
        LINEAR,
        "LinearRowParallel.forward",
        "        y = self._comm.all_reduce(self._kernel.apply(x, self.weight))\n"
        "        return y if self.bias is None else y + self.bias  # once, not once per rank",
        "        return self._comm.all_reduce(self._kernel.apply(x, self.weight, self.bias))",
        "check_row_parallel_sum",
        "bias",
    ),
    Change(
        "RoPE pairs neighbors",
        KROPE,
        "rotate",
        "    x1, x2 = x.chunk(2, dim=-1)\n"
        "    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)",
        "    x1, x2 = x[..., 0::2], x[..., 1::2]\n"
        "    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)",
        "check_rope",
        "interleaved layout",
    ),
    Change(
        "RoPE turns the wrong way",
        KROPE,
        "rotate",
        "(x1 * cos - x2 * sin, x2 * cos + x1 * sin)",
        "(x1 * cos + x2 * sin, x2 * cos - x1 * sin)",
        "check_rope",
        "q differs",
    ),
    Change(
        "the key is not rotated",
        KROPE,
        "apply_rope_with_cos_sin_cache",
        "k.reshape(key.shape)",
        "key",
        "check_rope",
        "k differs",
    ),
    Change(
        "cosines and sines change places in the table",
        ROPE,
        "RotaryEmbedding.__init__",
        "(angles.cos(), angles.sin())",
        "(angles.sin(), angles.cos())",
        "check_rope",
        "q differs for {}",
    ),
    Change(
        "llama3: the blend is the wrong way round",
        ROPE,
        "_llama3_inv_freq",
        "(1 - share) * inv_freq / factor + share * inv_freq",
        "share * inv_freq / factor + (1 - share) * inv_freq",
        "check_rope",
        "'llama3'",
    ),
    Change(
        "yarn: the attention factor is forgotten",
        ROPE,
        "_get_rope",
        "make(lambda _: inv_freq, _yarn_attention_factor(scaling, max_position))",
        "make(lambda _: inv_freq)",
        "check_rope",
        "'yarn'",
    ),
    Change(
        "the RoPE table is made on the meta device",
        ROPE,
        "get_rope",
        'device = _ROPE_DEVICE or torch.get_default_device()\n    if device.type == "meta":',
        "device = torch.get_default_device()\n    if False:",
        "check_rope_on_meta",
        "is_meta",
    ),
    Change(
        "tokens of other ranks are looked up all the same",
        INDEX,
        "indexing",
        " * mine.unsqueeze(-1)",
        "",
        "check_embedding_on_ranks",
        "to the rows of [0, 24",
    ),
    Change(
        "a rank owns the padding behind the vocabulary, too",
        EMBED,
        "VocabParallelEmbedding.__init__",
        "div_ceil(num_embeddings, tp.size)",
        "num_embeddings // tp.size",
        "check_embedding_on_ranks",
        "",
    ),
    Change(
        "in prefill all rows are scored",
        EMBED,
        "ParallelLMHead.forward",
        "if batch.is_prefill:",
        "if False:",
        "check_lm_head",
        "",
    ),
    Change(
        "the row after the last one is scored",
        EMBED,
        "ParallelLMHead.forward",
        "x[batch.attn_metadata.get_last_indices(batch.size)]",
        "x[batch.attn_metadata.get_last_indices(batch.size) - 1]",
        "check_lm_head",
        "prefill",
    ),
    Change(
        "a tied head keeps a weight of its own",
        EMBED,
        "ParallelLMHead.__init__",
        "            del self.weight",
        "            pass",
        "check_lm_head",
        "no weight of its own",
    ),
    Change(
        "v is taken for k",
        ATTN,
        "AttentionLayer.forward",
        "q, k, v = qkv.split",
        "q, v, k = qkv.split",
        "check_attention_layer",
        "llama",
    ),
    Change(
        "the norm of q and k comes after RoPE",
        ATTN,
        "AttentionLayer.forward",
        None,
        "        ctx = get_global_ctx()\n"
        "        d, q_size = self.head_dim, self.num_qo_heads * self.head_dim\n"
        "        kv_size = self.num_kv_heads * d\n"
        "        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)\n"
        "        q, k = self.rotary.forward(ctx.batch.positions, q, k)\n"
        "        q, k, v = (x.reshape(len(x), -1, d) for x in (q, k, v))\n"
        "        if self.q_norm is not None:\n"
        "            q, k = self.q_norm.forward(q), self.k_norm.forward(k)\n"
        "        return ctx.attn_backend.forward(q, k, v, self.layer_id, ctx.batch)"
        ".view(-1, q_size)",
        "check_attention_layer",
        "qwen3",
    ),
    Change(
        "the activation is on up, not on gate",
        ACT,
        "silu_and_mul",
        "gate = F.silu(gate)",
        "gate, up = F.silu(up), gate",
        "check_activations",
        "gate",
    ),
    Change(
        "GELU by tanh instead of the error function",
        ACT,
        "gelu_and_mul",
        "F.gelu(gate)",
        'F.gelu(gate, approximate="tanh")',
        "check_activations",
        "gelu",
    ),
    Change(
        "a rank looks up the first row of the next rank, too",
        "minisgl/kernel/index.py",
        "indexing",
        "(local < length)",
        "(local <= length)",
        "check_embedding_on_ranks",
        "to the rows of [25, 50, 75]",
    ),
    Change(
        "an exact multiple is rounded up, too",
        MISC,
        "div_ceil",
        "-(-a // b)",
        "a // b + 1",
        "check_rounding_up",
        "of 16 and 16 should be (1, 16), got (2, 32)",
    ),
    Change(
        "an error inside the block leaves the default dtype changed",
        TORCH_UTILS,
        "torch_dtype",
        "    try:\n        yield\n    finally:\n        torch.set_default_dtype(previous)",
        "    yield\n    torch.set_default_dtype(previous)",
        "check_default_dtype",
        "after an error inside the block the default is torch.bfloat16",
    ),
    Change(
        "the default dtype is always float32 afterwards, and never what was asked for",
        TORCH_UTILS,
        "torch_dtype",
        "    torch.set_default_dtype(dtype)",
        "    torch.set_default_dtype(previous)",
        "check_default_dtype",
        "inside the block new tensors are torch.float32",
    ),
    Change(
        "the ranks' logits are laid below each other",
        EMBED,
        "ParallelLMHead._gather",
        "torch.cat(parts, dim=-1)",
        "torch.cat(parts, dim=0)",
        "check_logits_of_all_ranks",
        "[6, 49], not [3, 97]",
    ),
    Change(
        "the padding rows are scored",
        EMBED,
        "ParallelLMHead._gather",
        "[:, : self.num_embeddings]",
        "",
        "check_logits_of_all_ranks",
        "[3, 98], not [3, 97]",
    ),
    Change(
        "a rank keeps its own logits",
        EMBED,
        "ParallelLMHead._gather",
        "if self._tp_size == 1:",
        "if True:",
        "check_logits_of_all_ranks",
        "[3, 49], not [3, 97]",
    ),
    Change(
        "the gathered logits are only looked at in another shape",
        EMBED,
        "ParallelLMHead._gather",
        None,
        "        if self._tp_size == 1:\n            return logits\n"
        "        rows = len(logits)\n"
        "        return self._comm.all_gather(logits).view(rows, -1)[:, : self.num_embeddings]",
        "check_logits_of_all_ranks",
        "rank 0 of 2 has wrong scores",
    ),
    Change(
        "a bias of o_proj is added on every rank",
        LINEAR,
        "",
        O_PROJ,
        O_PROJ + "\n\n    def forward(self, x: torch.Tensor) -> torch.Tensor:\n"
        "        return self._comm.all_reduce(self._kernel.apply(x, self.weight, self.bias))",
        "check_row_parallel_sum",
        "LinearOProj on two ranks is off",
    ),
    Change(
        "a bias of a row-parallel layer is cut per rank",
        LINEAR,
        "LinearRowParallel.__init__",
        "        super().__init__(input_size, output_size, local_isize, output_size, has_bias)",
        "        super().__init__(input_size, output_size, local_isize, output_size, has_bias)\n"
        "        self.bias = torch.empty(output_size // self._tp_size) if has_bias else None",
        "check_row_parallel_sum",
        "a bias is never cut: [2], not [5]",
    ),
    Change(
        'the kernel "auto" cannot be chosen',
        KLINEAR,
        "supported_linear_kernels",
        '{"auto", "torch", *(file.stem.removeprefix("linear_") for file in files)}',
        '{"torch", *(file.stem for file in files)}',
        "check_choice_of_kernel",
        "unknown linear kernel 'auto'",
    ),
    Change(
        "any name is taken, and fails when a layer is built",
        KLINEAR,
        "set_linear_kernel",
        CHOOSE,
        "    _LINEAR_KERNEL = name",
        "check_choice_of_kernel",
        "the error should name what was asked for",
    ),
    Change(
        "a refused kernel is chosen all the same",
        KLINEAR,
        "set_linear_kernel",
        CHOOSE,
        "    _LINEAR_KERNEL, known = name, supported_linear_kernels()\n"
        "    if name not in known:\n"
        '        raise ValueError(f"unknown linear kernel {name!r}; there are: {known}")',
        "check_choice_of_kernel",
        "a refused name should leave",
    ),
    # Right, in another way.
    Change(
        "rounding up by adding first",
        MISC,
        "div_ceil",
        "-(-a // b)",
        "(a + b - 1) // b",
    ),
    Change(
        "the logits are gathered as a transposed stack",
        EMBED,
        "ParallelLMHead._gather",
        "        parts = self._comm.all_gather(logits).chunk(self._tp_size, dim=0)\n"
        "        return torch.cat(parts, dim=-1)[:, : self.num_embeddings]",
        "        stack = self._comm.all_gather(logits).view(self._tp_size, len(logits), -1)\n"
        "        return stack.transpose(0, 1).flatten(1)[:, : self.num_embeddings]",
    ),
    Change(
        "the norm with rsqrt",
        NORM,
        "rmsnorm",
        "F.rms_norm(x.to(torch.float32), weight.shape, None, eps).to(x.dtype)",
        "(x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)",
    ),
    Change(
        "rotate_half as transformers writes it",
        KROPE,
        "rotate",
        "    x1, x2 = x.chunk(2, dim=-1)\n"
        "    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)",
        "    x1, x2 = x.chunk(2, dim=-1)\n"
        "    turned = torch.cat((-x2, x1), dim=-1)\n"
        "    return x * torch.cat((cos, cos), -1) + turned * torch.cat((sin, sin), -1)",
    ),
    Change(
        "lookup by plain indexing",
        INDEX,
        "indexing",
        "result = F.embedding(indices, weights)\n",
        "result = weights[indices.long()]\n",
    ),
    Change(
        "names gathered without recursion into a shared dictionary",
        BASE,
        "BaseOP.state_dict",
        "                value.state_dict(prefix=path, result=result)",
        "                result.update(value.state_dict(prefix=path))",
    ),
]
