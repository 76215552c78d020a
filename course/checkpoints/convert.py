"""A Llama in GGUF form becomes a Hugging Face folder."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from course.checkpoints.source import ModelUnavailable, Source

MARKER = "course.json"  # the last file written to a converted folder: its files and their sizes

# GGUF's names for the tensors of a Llama, and transformers' names.
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, folder: Path, source: Source) -> None:
    """Write a Llama in GGUF form as a Hugging Face folder: float32 weights, config, tokenizer.

    Not with `from_pretrained(gguf_file=…)`: that needs accelerate, gives a model that
    `save_pretrained` refuses as quantized, and loses the tokenizer's rule that each digit is a
    token of its own. The layout of GGUF is in llama.cpp's convert_hf_to_gguf.py.
    """
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    weights = _weights(reader)
    digest = digest_of(weights)
    if source.weights_sha256 not in (None, digest):
        raise ModelUnavailable(
            f"the conversion of {source.name} gave other weights than it should (SHA-256 {digest},"
            f" expected {source.weights_sha256}). The versions of numpy and gguf that"
            " requirements.txt asks for give the right ones."
        )
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private
    _write_config(reader, folder, source.name)
    _write_tokenizer(reader, folder)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    marker = {"source": source.requirement, "weights_sha256": digest, "sizes": sizes}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _weights(reader: Any) -> dict[str, Any]:
    """Name → float32 array, dequantized, of all tensors of a Llama in GGUF form."""
    import numpy as np
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(_field(reader, "llama.attention.head_count")),
        "attn_k": int(_field(reader, "llama.attention.head_count_kv")),
    }
    weights = {}
    for tensor in reader.tensors:
        # "blk.7.attn_q.weight" → layer 7's "self_attn.q_proj.weight"
        *block, kind, suffix = tensor.name.split(".")
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind in heads:
            array = _unpermute(array, heads[kind])
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{GGUF_NAMES[kind]}.{suffix}"] = np.ascontiguousarray(array)
    return weights


def _unpermute(array: Any, heads: int) -> Any:
    """Undo GGUF's order of the rows of q and k, `[heads * head_dim, hidden]`.

    RoPE rotates pairs of rows. Hugging Face pairs row i of a head with row i + head_dim / 2;
    GGUF lays the two side by side.
    """
    rows, hidden = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _write_config(reader: Any, folder: Path, name: str) -> None:
    from transformers import GenerationConfig, LlamaConfig

    read = functools.partial(_field, reader)
    special = {
        "bos_token_id": int(read("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(read("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(read("tokenizer.ggml.padding_token_id")),
    }
    theta = float(read("llama.rope.freq_base"))
    config = LlamaConfig(
        name_or_path=name,
        architectures=["LlamaForCausalLM"],
        vocab_size=int(read("llama.vocab_size")),
        hidden_size=int(read("llama.embedding_length")),
        intermediate_size=int(read("llama.feed_forward_length")),
        num_hidden_layers=int(read("llama.block_count")),
        num_attention_heads=int(read("llama.attention.head_count")),
        num_key_value_heads=int(read("llama.attention.head_count_kv")),
        max_position_embeddings=int(read("llama.context_length")),
        # stored as a float32: the shortest decimal that gives it is the number that was meant
        rms_norm_eps=float(str(read("llama.attention.layer_norm_rms_epsilon"))),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=not any(t.name == "output.weight" for t in reader.tensors),
        dtype="float32",
        **special,
    )
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)


def _write_tokenizer(reader: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = _field(reader, "tokenizer.ggml.pre")
    if kind != "smollm":
        raise ValueError(f"a GGUF with the pre-tokenizer 'smollm' is needed, not {kind!r}")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf's TokenType.CONTROL
    types = _field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == control
        ]
    )
    named = {
        f"{name}_token": tokens[int(_field(reader, f"tokenizer.ggml.{key}_token_id"))]
        for name, key in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]
    }
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=int(_field(reader, "llama.context_length")),
        clean_up_tokenization_spaces=False,
        **named,
    ).save_pretrained(folder)


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF file has no field {name!r}")
    value = field.contents()
    if field.types[-1].name == "FLOAT32" and not isinstance(value, list):
        return field.parts[field.data[0]][0]  # as numpy's float32, which knows its short form
    return value


def digest_of(weights: dict[str, Any]) -> str:
    """SHA-256 over names, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].shape}\n".encode())
        digest.update(weights[name].tobytes())
    return digest.hexdigest()
