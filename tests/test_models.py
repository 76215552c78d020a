"""Models and weights: what would clutter chapter 03. Configs of both generations, checkpoints in
any order and number of files, tensor-parallel cuts, and every kind of broken folder."""

from __future__ import annotations

import io
import json
import logging
import shutil
import struct
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from course.checkpoints import TINY_NAMES, tiny
from minisgl.core import Batch, Context, Req, SamplingParams, reset_global_ctx, set_global_ctx
from minisgl.distributed import reset_tp_info, set_tp_info
from minisgl.layers import set_rope_device
from minisgl.models import ModelConfig, create_model, load_weight
from minisgl.models.register import SUPPORTED_MODELS
from minisgl.models.weight import MergeBuffer, find_weights
from minisgl.utils import torch_dtype
from minisgl.utils.hf import cached_load_hf_config, download_hf_weight, load_tokenizer
from minisgl.utils.logger import init_logger
from minisgl.utils.registry import Registry, import_optional

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """Rank 0 of 1, a RoPE table on the CPU, and nothing global left behind."""
    reset_tp_info()
    set_tp_info(0, 1)
    set_rope_device(CPU)
    yield
    reset_tp_info()
    reset_global_ctx()
    set_rope_device(None)


def on_rank(rank: int, size: int) -> None:
    reset_tp_info()
    set_tp_info(rank, size)


def copy_of(folder: str, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "model"))


def edit_config(folder: Path, **changes: object) -> Path:
    """Change fields of config.json; `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.update(changes)
    kept = {key: value for key, value in config.items() if value is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return folder


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Change tensors of model.safetensors (`__` in a name stands for a dot); None removes one."""
    path = folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def config_of(folder: str | Path) -> ModelConfig:
    return ModelConfig.from_hf(cached_load_hf_config(str(folder)))


def weights_of(folder: str | Path) -> dict[str, torch.Tensor]:
    return dict(load_weight(str(folder), CPU))


def meta_model(folder: str | Path, dtype: torch.dtype = torch.float32):
    with torch.device("meta"), torch_dtype(dtype):
        return create_model(config_of(folder))


def loaded(folder: str | Path, dtype: torch.dtype = torch.float32):
    model = meta_model(folder, dtype)
    model.load_state_dict({key: value.to(dtype) for key, value in weights_of(folder).items()})
    return model


@dataclass
class Meta:
    cu_seqlens: torch.Tensor

    def get_last_indices(self, bs: int) -> torch.Tensor:
        return self.cu_seqlens[1 : bs + 1] - 1


class PackedAttention:
    """Causal attention within each request of a packed batch, without a cache."""

    def forward(self, q, k, v, layer_id, batch):
        ends = batch.attn_metadata.cu_seqlens.tolist()
        repeat = q.shape[1] // k.shape[1]
        out = []
        for start, end in pairwise(ends):
            parts = (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))
            one = [part[start:end].transpose(0, 1) for part in parts]
            seen = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True)
            out.append(seen.transpose(0, 1))
        return torch.cat(out).contiguous()


def logits_of(model, prompts: list[list[int]]) -> torch.Tensor:
    """`[len(prompts), vocab_size]`: the logits of each prompt's last token, in one packed pass."""
    reset_global_ctx()
    ctx = Context(page_size=1)
    ctx.attn_backend = PackedAttention()
    set_global_ctx(ctx)
    reqs = [
        Req(torch.tensor(ids, dtype=torch.int32), i, 0, 1, i, SamplingParams(), None)
        for i, ids in enumerate(prompts)
    ]
    batch = Batch(reqs, "prefill")
    batch.padded_reqs = reqs
    batch.input_ids = torch.cat([req.input_ids for req in reqs])
    batch.positions = torch.cat([torch.arange(req.device_len) for req in reqs]).int()
    batch.attn_metadata = Meta(torch.tensor([0, *(len(p) for p in prompts)]).cumsum(0))
    with ctx.forward_batch(batch), torch.inference_mode():
        return model.forward()


def prompts_for(config: ModelConfig, lengths=(5, 1, 40)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def assert_equals_hf(folder: str | Path, tolerance: float = 1e-4) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = prompts_for(config_of(folder))
    got = logits_of(loaded(folder), prompts)
    with torch.inference_mode():
        want = torch.cat([reference(torch.tensor([ids])).logits[:, -1] for ids in prompts])
    assert (got - want).abs().max() < tolerance


# --- logits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_equal_transformers(name: str, shards: int) -> None:
    assert_equals_hf(tiny(name, shards=shards))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": False}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"head_dim": 24}),
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"hidden_size": 60, "num_attention_heads": 8, "head_dim": 16}),
    ],
)
def test_shapes_and_switches(name: str, changes: dict) -> None:
    assert_equals_hf(tiny(name, **changes))


def test_bfloat16() -> None:
    model = loaded(tiny("qwen3"), torch.bfloat16)
    assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16}
    logits = logits_of(model, [[1, 2, 3]])
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()


def test_packed_equals_alone() -> None:
    model = loaded(tiny("llama"))
    prompts = prompts_for(config_of(tiny("llama")))
    alone = torch.cat([logits_of(model, [ids]) for ids in prompts])
    assert (logits_of(model, prompts) - alone).abs().max() < 1e-4


def test_nothing_stays_on_meta_and_the_rope_table_is_real() -> None:
    model = loaded(tiny("llama"))
    assert not any(t.is_meta for t in model.state_dict().values())
    table = model.model.layers.op_list[0].self_attn.attn.rotary._cos_sin_cache
    assert not table.is_meta and table[0, 0] == 1


# --- config -----------------------------------------------------------------------------------

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
GENERATIONS = [
    # (name, transformers 4 fields, transformers 5 fields)
    ("llama", {"rope_theta": 500000.0}, {"rope_type": "default", "rope_theta": 500000.0}),
    (
        "llama",
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_type": "default", "rope_theta": 500000.0},
    ),
    ("llama", {}, {"rope_type": "default", "rope_theta": 10000.0}),
    (
        "llama",
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    ),
    (
        "llama",
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    ),
    (
        "qwen3",
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
    ),
    ("qwen2", {"rope_theta": 1000000}, {"rope_type": "default", "rope_theta": 1000000.0}),
    ("mistral", {"rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
]


@pytest.mark.parametrize(("name", "old", "new"), GENERATIONS)
def test_both_generations_give_one_config(name, old, new, tmp_path: Path) -> None:
    folder = copy_of(tiny(name), tmp_path)
    no_rope = {"rope_parameters": ..., "rope_theta": ..., "rope_scaling": ...}
    edit_config(folder, **{**no_rope, **old, "dtype": ..., "torch_dtype": "bfloat16"})
    first = config_of(folder)
    edit_config(
        folder, **{**no_rope, "rope_parameters": new, "torch_dtype": ..., "dtype": "bfloat16"}
    )
    second = config_of(folder)
    assert first == second
    assert first.rotary_config.base == new["rope_theta"]
    assert (first.rotary_config.scaling or {}).get("rope_type", "default") == new["rope_type"]


def fields(**changes: object) -> SimpleNamespace:
    """A config object as transformers 4 makes it."""
    plain = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "vocab_size": 100,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 500000.0,
        "rope_scaling": None,
    }
    return SimpleNamespace(**{k: v for k, v in {**plain, **changes}.items() if v is not ...})


def test_a_config_object_of_transformers_4() -> None:
    plain = ModelConfig.from_hf(fields()).rotary_config
    assert (plain.base, plain.scaling, plain.max_position) == (500000.0, None, 512)
    new = fields(rope_theta=..., rope_scaling=..., rope_parameters={"rope_theta": 500000.0})
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(fields())
    # A file of version 5 read by version 4: the class's default theta must not win.
    both = fields(rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert ModelConfig.from_hf(both).rotary_config.base == 500000.0
    # Mistral once kept theta inside rope_scaling.
    inside = fields(rope_theta=..., rope_scaling={"rope_type": "default", "rope_theta": 1e6})
    assert ModelConfig.from_hf(inside).rotary_config.base == 1e6


def test_what_a_config_leaves_out_and_what_it_says() -> None:
    small = ModelConfig.from_hf(fields(rope_theta=..., rope_scaling=..., rms_norm_eps=3e-6))
    assert small.rotary_config.base == 10000.0 and small.rotary_config.scaling is None
    assert not small.tie_word_embeddings and small.rms_norm_eps == 3e-6
    assert ModelConfig.from_hf(fields(tie_word_embeddings=True)).tie_word_embeddings
    for rope in ({"type": "yarn"}, {"type": "linear", "rope_type": "yarn"}, {"rope_type": "yarn"}):
        for place in ("rope_scaling", "rope_parameters"):
            config = ModelConfig.from_hf(fields(**{place: {"factor": 4.0, **rope}}))
            assert (config.rotary_config.scaling or {})["rope_type"] == "yarn"
    assert_equals_hf(tiny("qwen3", rms_norm_eps=0.1))


def test_heads() -> None:
    assert ModelConfig.from_hf(fields()).head_dim == 16
    assert ModelConfig.from_hf(fields(head_dim=None)).head_dim == 16
    assert ModelConfig.from_hf(fields(head_dim=32)).head_dim == 32
    assert ModelConfig.from_hf(fields(hidden_size=60, num_attention_heads=8, head_dim=16))
    assert ModelConfig.from_hf(fields(num_key_value_heads=None)).num_kv_heads == 4
    with pytest.raises(ValueError, match="hidden_size 60 is not a multiple"):
        ModelConfig.from_hf(fields(hidden_size=60, num_attention_heads=8))
    with pytest.raises(ValueError, match="5 query heads cannot share 2 KV heads"):
        ModelConfig.from_hf(fields(num_attention_heads=5, head_dim=16))


@pytest.mark.parametrize(
    ("changes", "qkv", "o", "norm"),
    [
        ({}, False, False, False),
        ({"attention_bias": True}, True, True, False),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, False, False, False),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, True, False, False),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, False, False, True),
        ({"architectures": None, "model_type": "qwen3"}, False, False, True),
    ],
)
def test_switches(changes: dict, qkv: bool, o: bool, norm: bool) -> None:
    config = ModelConfig.from_hf(fields(**changes))
    assert (config.has_qkv_bias, config.has_o_bias, config.has_qk_norm) == (qkv, o, norm)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 512),
        ({"sliding_window": None}, 512),
        ({"sliding_window": 4096}, 512),
        ({"sliding_window": 128}, 128),
        ({"sliding_window": 128, "use_sliding_window": False}, 512),
        ({"sliding_window": 128, "use_sliding_window": True}, 128),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, 512),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, 128),
        ({"sliding_window": 128, "layer_types": ["full_attention"] * 2}, 512),
        ({"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, 128),
    ],
)
def test_a_sliding_window_ends_the_context(changes: dict, limit: int, capfd) -> None:
    config = ModelConfig.from_hf(fields(**changes))
    assert config.rotary_config.max_position == limit
    assert ("sliding-window" in capfd.readouterr().err) == (limit < 512)


def test_within_the_window_the_logits_are_those_of_transformers() -> None:
    """Up to the window full attention is what a sliding-window model computes; one more differs."""
    from transformers import AutoModelForCausalLM

    folder = tiny("mistral", sliding_window=16)
    assert config_of(folder).rotary_config.max_position == 16
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    full = loaded(tiny("mistral"))  # the same weights without a window
    for length, same in [(15, True), (16, True), (17, False), (40, False)]:
        ids = prompts_for(config_of(folder), (length,))
        with torch.inference_mode():
            want = reference(torch.tensor(ids)).logits[:, -1]
        assert ((logits_of(full, ids) - want).abs().max() < 1e-4) == same


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel'.*Qwen3For"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.M"}}, "code of its own"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"rms_norm_eps": ...}, "no 'rms_norm_eps'"),
        ({"max_position_embeddings": None}, "no 'max_position_embeddings'"),
        ({"rope_scaling": {"full_attention": {"rope_theta": 1.0}}}, "per kind of layer|one RoPE"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"mlp_only_layers": [0]}, "mixture of experts"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(fields(**changes))


def test_refused_when_the_model_is_built() -> None:
    config = ModelConfig.from_hf(fields())
    with torch.device("meta"):
        with pytest.raises(ValueError, match="no architecture"):
            create_model(replace(config, architectures=[]))
        with pytest.raises(ValueError, match=r"unknown activation 'relu'; supported: silu, gelu"):
            create_model(replace(config, hidden_act="relu"))
        rotary = replace(config.rotary_config, scaling={"rope_type": "spiral"})
        with pytest.raises(ValueError, match=r"unknown RoPE type 'spiral'; supported: default"):
            create_model(replace(config, rotary_config=rotary))


@pytest.mark.skipif(
    import_optional("minisgl.models.qwen3_moe") is not None, reason="experts are supported"
)
def test_experts_without_their_module() -> None:
    moe = fields(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    with pytest.raises(ValueError, match=r"'Qwen3MoeForCausalLM'; supported: LlamaForCausalLM"):
        ModelConfig.from_hf(moe)
    moe.architectures = ["LlamaForCausalLM"]
    config = ModelConfig.from_hf(moe)
    assert config.is_moe
    with torch.device("meta"), pytest.raises(ValueError, match=r"no minisgl\.models\.qwen3_moe"):
        create_model(config)


def test_a_module_for_experts_adds_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
from minisgl.models.register import SUPPORTED_MODELS

@SUPPORTED_MODELS.register("ExpertsForCausalLM")
def create(config):
    return ("experts", config.num_experts)
"""
    (tmp_path / "some_experts.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(SUPPORTED_MODELS, "_optional", ("some_experts",))
    monkeypatch.setattr(SUPPORTED_MODELS, "_table", dict(SUPPORTED_MODELS._table))
    config = ModelConfig.from_hf(fields(architectures=["ExpertsForCausalLM"], num_experts=8))
    assert create_model(config) == ("experts", 8)


# --- the folder -------------------------------------------------------------------------------


def test_config_that_is_not_json(tmp_path: Path) -> None:
    for text in ('{"model_type": "llama",', "", "[1]", "\xff"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"config\.json (is not valid JSON|should hold)"):
            cached_load_hf_config(str(tmp_path))


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        cached_load_hf_config(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        next(load_weight(str(tmp_path), CPU))


def test_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="is no folder here"):
        download_hf_weight("/nowhere/at/all")
    with pytest.raises(ValueError, match="cannot read the config of /nowhere"):
        cached_load_hf_config("/nowhere/at/all")


@pytest.mark.parametrize("model_type", ["gpt2", "never_heard_of"])
def test_unknown_architecture_lists_the_supported(model_type: str, tmp_path: Path) -> None:
    config = {"architectures": ["FooForCausalLM"], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        config_of(tmp_path)
    for name in ("Foo", "LlamaForCausalLM", "Mistral", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in str(caught.value)


def test_code_in_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No question on stdin either: the answer would come from nobody."""
    folder = tmp_path / "model"
    folder.mkdir()
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w', encoding='utf-8').close()\n"
    classes = "class C(PretrainedConfig): pass\nclass T(PreTrainedTokenizer): pass\n"
    head = "from transformers import PretrainedConfig, PreTrainedTokenizer\n"
    (folder / "conf.py").write_text(head + code + classes, encoding="utf-8")
    own = {"AutoConfig": "conf.C", "AutoTokenizer": ["conf.T", None]}
    config = {"model_type": "never_heard_of", "architectures": ["FooForCausalLM"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": own}), encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("a question was asked"))
    with pytest.raises(ValueError, match="unknown model architecture 'FooForCausalLM'"):
        config_of(folder)
    with pytest.raises(ValueError, match="code of its own"):
        load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").unlink()  # then config.json's auto_map counts
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        load_tokenizer(str(folder))
    # The library has classes for these, but what the folder wants is its own.
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="code of its own"):
        config_of(folder)
    config = {"auto_map": own, "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="code of its own"):
        load_tokenizer(str(folder))
    assert not ran.exists()


def test_config_without_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', "utf-8")
    with pytest.raises(ValueError, match="model_type"):
        cached_load_hf_config(str(tmp_path))


def test_heads_that_do_not_divide_in_a_file(tmp_path: Path) -> None:
    for name, changes in [
        ("llama", {"num_attention_heads": 7, "head_dim": ...}),
        ("qwen2", {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": ...}),
        ("qwen3", {"num_attention_heads": 5}),
    ]:
        folder = edit_config(copy_of(tiny(name), tmp_path / name), **changes)
        with pytest.raises(ValueError, match="multiple"):
            config_of(folder)


def test_unknown_rope_type_in_a_file(tmp_path: Path) -> None:
    rope = {"rope_type": "spiral", "rope_theta": 10000.0}
    folder = edit_config(copy_of(tiny("llama"), tmp_path), rope_parameters=rope)
    with pytest.raises(ValueError, match="unknown RoPE type 'spiral'"):
        meta_model(folder)


def test_config_cache_sees_changes_and_is_not_shared(tmp_path: Path) -> None:
    folder = str(copy_of(tiny("llama"), tmp_path))
    first = cached_load_hf_config(folder)
    first.num_hidden_layers = 77
    assert cached_load_hf_config(folder).num_hidden_layers == 3
    edit_config(Path(folder), num_hidden_layers=1234)
    assert cached_load_hf_config(folder).num_hidden_layers == 1234


# --- weights ----------------------------------------------------------------------------------


def test_keys_are_exactly_the_models() -> None:
    for name in TINY_NAMES:
        expected = meta_model(tiny(name)).state_dict()
        found = weights_of(tiny(name, shards=3))
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
        assert all(v.is_contiguous() for v in found.values())


def test_merged_weights_are_stacked_in_order() -> None:
    folder = tiny("qwen2")
    raw = load_file(Path(folder, "model.safetensors"))
    found = weights_of(folder)
    for leaf in ("weight", "bias"):
        parts = [raw[f"model.layers.1.self_attn.{p}_proj.{leaf}"] for p in "qkv"]
        assert torch.equal(found[f"model.layers.1.self_attn.qkv_proj.{leaf}"], torch.cat(parts))
    parts = [raw[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(found["model.layers.1.mlp.gate_up_proj.weight"], torch.cat(parts))


def write_in_order(path: Path, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A safetensors file whose tensors lie in the given order, which `save_file` does not keep."""
    header, at = {}, 0
    for name, tensor in tensors:
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(header).encode("utf-8")
    data = b"".join(tensor.contiguous().numpy().tobytes() for _, tensor in tensors)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_and_any_number_of_files(data: st.DataObject, tmp_path_factory) -> None:
    source = Path(tiny("qwen2", num_hidden_layers=2))
    tensors = load_file(source / "model.safetensors")
    names = data.draw(st.permutations(sorted(tensors)))
    number = data.draw(st.integers(1, 5))
    homes = data.draw(st.lists(st.integers(1, number), min_size=len(names), max_size=len(names)))
    folder = tmp_path_factory.mktemp("order")
    shutil.copy(source / "config.json", folder)
    files: dict[str, list[str]] = {}
    for name, home in zip(names, homes, strict=True):
        files.setdefault(f"part-{home}.safetensors", []).append(name)
    for file, inside in files.items():
        write_in_order(folder / file, [(name, tensors[name]) for name in inside])
    if data.draw(st.booleans()):
        index = {"weight_map": {name: file for file, inside in files.items() for name in inside}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    buffer = MergeBuffer()
    found = dict(load_weight(str(folder), CPU, buffer=buffer))
    want = weights_of(source)
    assert found.keys() == want.keys() and all(torch.equal(found[k], want[k]) for k in want)
    assert buffer.held_bytes == 0 and not buffer.waiting


def test_tensors_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    tensors = [(name, torch.zeros(2)) for name in ("c", "a", "b")]
    write_in_order(tmp_path / "model.safetensors", tensors)
    assert list(find_weights(tmp_path).values()) == [["c", "a", "b"]]


def test_one_tensor_at_a_time() -> None:
    """The generator is lazy: nothing waits for the end, and only parts of open groups are held."""
    buffer = MergeBuffer()
    stream = load_weight(tiny("llama"), CPU, buffer=buffer)
    first, _ = next(stream)
    assert first == "model.embed_tokens.weight" and buffer.held_bytes == 0
    stream.close()


def test_only_what_the_index_names_is_read(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama", shards=3), tmp_path)
    save_file({"tok_embeddings.weight": torch.zeros(3)}, folder / "consolidated.safetensors")
    assert weights_of(folder).keys() == weights_of(tiny("llama")).keys()
    # A stale copy of a tensor in a file that the index does not name for it.
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    other = next(f for f in set(index["weight_map"].values()) if "00002" in f)
    tensors = {**load_file(folder / other), "model.embed_tokens.weight": torch.zeros(1)}
    save_file(tensors, folder / other)
    assert weights_of(folder)["model.embed_tokens.weight"].shape == (200, 64)


def test_one_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama"), tmp_path)
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    assert weights_of(folder)


def table_of(name: str) -> torch.Tensor:
    return load_file(Path(tiny(name), "model.safetensors"))["model.embed_tokens.weight"]


def test_extra_lm_head_of_a_tied_model_is_dropped(tmp_path: Path) -> None:
    folder = edit_weights(copy_of(tiny("llama"), tmp_path), lm_head__weight=table_of("llama"))
    assert "lm_head.weight" not in weights_of(folder)
    model = loaded(folder)
    assert "lm_head.weight" not in model.state_dict()
    ids = [[1, 2, 3]]
    assert torch.equal(logits_of(model, ids), logits_of(loaded(tiny("llama")), ids))
    edit_weights(folder, lm_head__weight=table_of("llama").double())  # the same numbers
    assert weights_of(folder).keys() == weights_of(tiny("llama")).keys()


@pytest.mark.parametrize("number", [1, 3])
def test_a_head_of_its_own_in_a_tied_model(tmp_path: Path, number: int) -> None:
    """Refused, in one file or in several; as the message says, untied it loads as in transformers,
    which unties the two by itself."""
    folder = copy_of(tiny("llama", shards=number), tmp_path)
    head = 0.2 * torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    if number == 1:
        edit_weights(folder, lm_head__weight=head)
    else:
        save_file({"lm_head.weight": head}, folder / "head.safetensors")
        index = folder / "model.safetensors.index.json"
        table = json.loads(index.read_text(encoding="utf-8"))
        table["weight_map"]["lm_head.weight"] = "head.safetensors"
        index.write_text(json.dumps(table), encoding="utf-8")
    message = (
        r"lm_head\.weight and model\.embed_tokens\.weight differ.*tie_word_embeddings to false"
    )
    assert_load_fails(folder, ValueError, message)
    with pytest.raises(ValueError, match=message):
        next(load_weight(str(folder), CPU))
    from transformers import AutoModelForCausalLM

    prompts = prompts_for(config_of(folder))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        want = torch.cat([reference(torch.tensor([ids])).logits[:, -1] for ids in prompts])
    assert (logits_of(loaded(tiny("llama")), prompts) - want).abs().max() > 1  # not the table
    edit_config(folder, tie_word_embeddings=False)
    assert (logits_of(loaded(folder), prompts) - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "lone_head"),
    [("llama", False), ("llama-untied", False), ("qwen3", False), ("llama", True), ("qwen3", True)],
)
def test_names_without_model(tmp_path: Path, name: str, lone_head: bool) -> None:
    """As transformers: the stack alone, and of two tied tensors the head alone."""
    folder = copy_of(tiny(name), tmp_path)
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    if lone_head:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    else:
        tensors = {key.removeprefix("model."): value for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    want, found = weights_of(tiny(name)), weights_of(folder)
    assert found.keys() == want.keys() and all(torch.equal(found[k], want[k]) for k in want)
    assert_equals_hf(folder)


def test_names_with_another_prefix_are_shown(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors").items()
    tensors = {f"base_model.{key}": value.clone() for key, value in tensors}
    save_file(tensors, folder / "model.safetensors")
    message = (
        r"no model\.embed_tokens\.weight; its names are base_model\.model\.embed_tokens\.weight"
    )
    assert_load_fails(folder, ValueError, message)


QUANTIZED = [
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_that_no_config_declares(tmp_path: Path, kind: str) -> None:
    folder = copy_of(tiny("qwen3"), tmp_path)
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    names = [key for key in tensors if key.endswith("_proj.weight")]
    changed = {key: (100 * tensors[key]).to(getattr(torch, kind)) for key in names}
    for scales in ({}, {f"{key}_scale": torch.tensor(0.01) for key in names}):
        save_file({**tensors, **changed, **scales}, folder / "model.safetensors")
        assert_load_fails(folder, ValueError, r"layers\.\d.*_proj\.weight.* is .*quantized weights")
        with pytest.raises(ValueError, match="quantized weights"):
            next(load_weight(str(folder), CPU))


def test_scales_beside_floating_point_weights(tmp_path: Path) -> None:
    scale = {"model__layers__0__self_attn__q_proj__weight_scale": torch.tensor(0.5)}
    folder = edit_weights(copy_of(tiny("llama"), tmp_path), **scale)
    for size in (1, 2):
        on_rank(0, size)
        with pytest.raises(
            ValueError, match=r"q_proj\.weight_scale in .* is F32 \[\], part of quant"
        ):
            weights_of(folder)


def test_old_rope_buffers_are_ignored(tmp_path: Path) -> None:
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    folder = edit_weights(copy_of(tiny("llama"), tmp_path), **{name: torch.zeros(8)})
    assert loaded(folder)


def test_gate_and_router_names_are_not_confused() -> None:
    buffer = MergeBuffer()
    for name in ("model.layers.0.mlp.gate.weight", "q_proj_gain", "model.k_projector.weight"):
        assert buffer.add(name, torch.zeros(1)) is not None
    assert buffer.add("model.layers.0.mlp.experts.3.gate_proj.weight", torch.zeros(1)) is None
    ready = buffer.add("model.layers.0.mlp.experts.3.up_proj.weight", torch.ones(1))
    assert ready is not None and ready[0] == "model.layers.0.mlp.experts.3.gate_up_proj.weight"


def test_weights_are_their_own_memory(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama"), tmp_path)
    path = folder / "model.safetensors"
    for size in (1, 2):
        on_rank(0, size)
        before = weights_of(folder)
        kept = {key: value.clone() for key, value in before.items()}
        with path.open("r+b") as file:  # in place, as a careless download would
            file.seek(-4096, io.SEEK_END)
            file.write(bytes(4096))
        assert all(torch.equal(before[key], kept[key]) for key in kept)
        shutil.copy(Path(tiny("llama"), "model.safetensors"), path)


# --- tensor parallel --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "changes"),
    [
        ("llama-untied", 2, {}),
        ("qwen2", 2, {"vocab_size": 97}),
        ("llama-bias", 4, {}),  # 2 KV heads on 4 ranks
        ("qwen3", 4, {"num_key_value_heads": 1, "vocab_size": 5}),
    ],
)
def test_every_rank_gets_its_part(name: str, size: int, changes: dict) -> None:
    folder = tiny(name, **changes)
    config, whole = config_of(folder), weights_of(folder)
    heads, kv, dim = config.num_qo_heads, config.num_kv_heads, config.head_dim
    parts = []
    for rank in range(size):
        on_rank(rank, size)
        part = weights_of(folder)
        meta_model(folder).load_state_dict(dict(part))  # the shapes are this rank's
        parts.append(part)
    layer = "model.layers.2."
    for leaf in ("weight", "bias") if config.has_qkv_bias else ("weight",):
        qkv = whole[f"{layer}self_attn.qkv_proj.{leaf}"]
        q, k, v = qkv.split([heads * dim, kv * dim, kv * dim])
        for rank, part in enumerate(parts):
            local_q, local_kv = heads // size, max(kv // size, 1)
            first = rank * kv // size
            want = [
                q.unflatten(0, (heads, dim))[rank * local_q : (rank + 1) * local_q],
                k.unflatten(0, (kv, dim))[first : first + local_kv],
                v.unflatten(0, (kv, dim))[first : first + local_kv],
            ]
            got = part[f"{layer}self_attn.qkv_proj.{leaf}"]
            assert torch.equal(got, torch.cat([w.flatten(0, 1) for w in want]))
    columns = [part[f"{layer}mlp.down_proj.weight"] for part in parts]
    assert torch.equal(torch.cat(columns, 1), whole[f"{layer}mlp.down_proj.weight"])
    assert all(c.is_contiguous() for c in columns)
    rows = torch.cat([part["model.embed_tokens.weight"] for part in parts])
    vocab = whole["model.embed_tokens.weight"]
    assert torch.equal(rows[: len(vocab)], vocab) and rows[len(vocab) :].eq(0).all()
    if config.has_o_bias:  # added once, after the sum over ranks
        bias = f"{layer}self_attn.o_proj.bias"
        assert all(torch.equal(part[bias], whole[bias]) for part in parts)


def test_heads_that_do_not_divide_among_ranks() -> None:
    on_rank(0, 3)
    with pytest.raises(ValueError, match="query heads cannot be divided evenly into 3"):
        meta_model(tiny("llama"))
    with pytest.raises(ValueError, match=r"_proj\.weight cannot be divided evenly into 3"):
        weights_of(tiny("llama"))


# --- bad checkpoints --------------------------------------------------------------------------


def assert_load_fails(folder: Path, error: type[Exception], message: str) -> None:
    """Loading fails with that message, and a model that was loaded before keeps its weights."""
    model = loaded(tiny("llama"))
    before = dict(model.state_dict())
    with pytest.raises(error, match=message):
        model.load_state_dict(weights_of(folder))
    after = model.state_dict()
    assert after.keys() == before.keys() and all(after[k] is before[k] for k in before)


def test_truncated(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama"), tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        message = rf"model\.safetensors \({length} bytes\) is cut off"
        assert_load_fails(folder, ValueError, message)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert_load_fails(folder, ValueError, "cut off or not a safetensors file")


def test_a_damaged_later_file_is_found_before_anything_is_read(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama", shards=3), tmp_path)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ValueError, match=last.name):
        next(load_weight(str(folder), CPU))


def test_bad_index(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama", shards=3), tmp_path)
    index = folder / "model.safetensors.index.json"
    good = index.read_text(encoding="utf-8")
    first = sorted(folder.glob("*.safetensors"))[0]
    for text, message in [("{", "not valid JSON"), ("{}", "no weight_map")]:
        index.write_text(text, encoding="utf-8")
        assert_load_fails(folder, ValueError, message)
    table = json.loads(good)
    table["weight_map"]["model.extra.weight"] = first.name
    index.write_text(json.dumps(table), encoding="utf-8")
    assert_load_fails(folder, ValueError, r"tensors that its files lack: model\.extra\.weight")
    index.write_text(good, encoding="utf-8")
    first.unlink()
    assert_load_fails(folder, FileNotFoundError, f"names files that are not there: {first.name}")


def test_the_same_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama", shards=3), tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert weights_of(folder)
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "other.safetensors")
    assert_load_fails(
        folder, ValueError, r"both .* and other\.safetensors hold model\.norm\.weight"
    )


def test_wrong_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    for number, (changes, message) in enumerate(
        [
            ({"model__norm__weight": torch.zeros(65)}, r"wrong shape: model\.norm\.weight"),
            ({"model__norm__weight": None}, r"missing: model\.norm\.weight"),
            ({"model__extra": torch.zeros(1)}, r"unexpected: model\.extra"),
            (
                {"model__layers__1__self_attn__k_proj__weight": None},
                r"layers\.1\.self_attn\.qkv_proj\.weight is incomplete.*no k_proj",
            ),
            (
                {f"model__layers__1__mlp__{p}_proj__weight": None for p in ("gate", "up")},
                r"missing: model\.layers\.1\.mlp\.gate_up_proj\.weight",
            ),
        ]
    ):
        folder = edit_weights(copy_of(tiny("llama"), tmp_path / str(number)), **changes)
        assert_load_fails(folder, ValueError, message)


def test_untied_without_a_head(tmp_path: Path) -> None:
    folder = edit_weights(copy_of(tiny("llama-untied"), tmp_path), lm_head__weight=None)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        loaded(folder)


def test_more_layers_in_the_file_than_in_the_config(tmp_path: Path) -> None:
    folder = edit_config(copy_of(tiny("llama"), tmp_path), num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.2\."):
        loaded(folder)


def test_biases_are_never_dropped_silently(tmp_path: Path) -> None:
    folder = edit_config(copy_of(tiny("llama-bias"), tmp_path), attention_bias=False)
    with pytest.raises(ValueError, match=r"unexpected: .*qkv_proj\.bias"):
        loaded(folder)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    folder = copy_of(tiny("llama"), tmp_path)
    (folder / "model.safetensors").unlink()
    assert_load_fails(folder, FileNotFoundError, r"no \*\.safetensors in .* holds config\.json")
    torch.save({}, folder / "pytorch_model.bin")
    message = r"only pickled weights \(pytorch_model\.bin\).*run the code.*save_pretrained"
    assert_load_fails(folder, ValueError, message)


# --- registry and logger ----------------------------------------------------------------------


def test_registry() -> None:
    table: Registry[type] = Registry("shape")

    @table.register("round")
    @table.register("circle")
    class Circle:
        pass

    assert table["round"] is Circle and table.supported_names() == ["circle", "round"]
    table.assert_supported(["round", "circle"])
    with pytest.raises(ValueError, match="unknown shape 'cube'; supported: circle, round"):
        table["cube"]
    with pytest.raises(ValueError, match="unknown shape 'cube'"):
        table.assert_supported(["round", "cube"])
    with pytest.raises(ValueError, match="shape 'round' is already"):
        table.register("round")(int)


def test_registering_the_same_definition_again_replaces_it() -> None:
    table: Registry[object] = Registry("thing")

    def define() -> object:
        def thing() -> None: ...

        return table.register("thing")(thing)

    define()
    second = define()
    assert table["thing"] is second


def test_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    quiet = init_logger("minisgl.test.quiet")
    loud = init_logger("/some/where/loud.py", "part", level="info", use_pid=True)
    shown = io.StringIO()
    with redirect_stderr(shown):
        quiet.info("not shown")
        quiet.warning("shown %d", 1)
        loud.info("twice")
        loud.info_rank0("also")
        on_rank(1, 2)
        loud.info_rank0("only on rank 0")
        loud.warning("on rank 1")
    lines = shown.getvalue().splitlines()
    assert len(lines) == 4 and lines[0].endswith("|minisgl.test.quiet] WARNING shown 1")
    assert "|loud] INFO [part|pid=" in lines[1] and lines[3].endswith("] on rank 1")
    assert "rank=1" in lines[3] and "rank" not in lines[0]
    assert init_logger("minisgl.test.quiet").logger is logging.getLogger("minisgl.test.quiet")
    assert len(quiet.logger.handlers) == 1
