"""What a model folder holds besides the weights, and how to come by the folder.

Official counterpart: `python/minisgl/utils/hf.py`.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. ValueError, with the place, when the file holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also text that is not UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, but holds a {type(value).__name__}")
    return value


def cached_load_hf_config(model_path: str) -> PretrainedConfig:
    """The config of a local folder or a Hub id, as `transformers` reads it.

    The result is the caller's own copy; the file is read again only when it has changed. Raises
    FileNotFoundError when a folder has no config.json, ValueError when it can't be read.
    """
    stamp = (0, 0)
    if Path(model_path).is_dir():
        path = Path(model_path, "config.json")
        if not path.is_file():
            raise FileNotFoundError(
                f"no config.json in {model_path}: this is not the folder of a model (a download "
                "that broke off, or one level too high?)"
            )
        stamp = (path.stat().st_mtime_ns, path.stat().st_size)
    return copy.deepcopy(_load_hf_config(model_path, stamp))


@functools.lru_cache(maxsize=16)
def _load_hf_config(model_path: str, stamp: tuple[int, int]) -> PretrainedConfig:
    """Read a config; `stamp` tells one version of the file from the next.

    The import of `transformers`, which is slow, stands in here. Whatever `AutoConfig` raises
    becomes a ValueError, except for a folder whose `model_type` is not in `CONFIG_MAPPING`: that
    comes back as a plain PretrainedConfig of the fields in its config.json. Code in a folder
    (`auto_map`) is never run, and nobody is asked whether it may.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    raw = read_json(Path(model_path, "config.json")) if Path(model_path).is_dir() else {}
    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:
        kind = raw.get("model_type")
        if kind and kind not in CONFIG_MAPPING:
            return PretrainedConfig.from_dict(raw)  # ModelConfig will refuse it by its name
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"cannot read the config of {model_path}: {reason}") from error


def download_hf_weight(model_path: str) -> str:
    """The local folder of a model: `model_path` itself, or where the Hub's files were put.

    Of a Hub id only the safetensors files and their index are downloaded (what is in the cache
    already is not), by `snapshot_download` of `huggingface_hub`, imported when it is needed. Any
    error of it becomes a ValueError: `model_path` is neither a folder nor such an id.
    """
    if Path(model_path).is_dir():
        return model_path
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.safetensors.index.json"]
    try:
        return snapshot_download(model_path, allow_patterns=patterns)
    except Exception as error:
        raise ValueError(
            f"{model_path!r} is no folder here, and as a Hub id it failed: {error}"
        ) from error


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or a Hub id, with its chat template if it has one.

    It is `AutoTokenizer` of `transformers` that reads it, imported in here; any error of it becomes
    a ValueError that names `model_path`. So does code in a folder (`auto_map` in its
    tokenizer_config.json): it is never run.
    """
    from transformers import AutoTokenizer

    path = Path(model_path, "tokenizer_config.json")
    if path.is_file() and read_json(path).get("auto_map"):
        raise ValueError(f"{path} needs code of its own (auto_map), which is never run")
    try:
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"cannot load the tokenizer of {model_path}: {error}") from error
