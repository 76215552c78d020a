"""From the tensors of a checkpoint to the weights of a model, one at a time.

Official counterpart: `python/minisgl/models/weight.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minisgl.distributed.info import get_tp_info
from minisgl.models.config import ModelConfig
from minisgl.models.register import moe_module
from minisgl.utils.hf import cached_load_hf_config, download_hf_weight, read_json
from minisgl.utils.logger import init_logger
from minisgl.utils.misc import div_ceil, div_even

# Projections that read the same input become one: parts in the order in which they are stacked.
_MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def _get_merge_info(key: str) -> tuple[str, str, tuple[str, ...]] | None:
    """`(merged key, which part, all parts in order)` of a tensor that is merged, else None."""
    path = key.split(".")
    for merged, parts in _MERGED.items():
        if len(path) > 1 and path[-2] in parts:
            return ".".join([*path[:-2], merged, path[-1]]), path[-2], parts
    return None


class MergeBuffer:
    """Where parts of merged weights wait for each other.

    `waiting` maps a merged key to the parts that are there so far, by name.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that wait now."""
        return sum(t.nbytes for parts in self.waiting.values() for t in parts.values())

    def add(self, key: str, value: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Take one tensor in; give one out, under the model's key, or None if parts are missing."""
        info = _get_merge_info(key)
        if info is None:
            return key, value
        merged, part, order = info
        parts = self.waiting.setdefault(merged, {})
        parts[part] = value
        if len(parts) < len(order):
            return None
        del self.waiting[merged]
        return merged, torch.cat([parts[name] for name in order])

    def check_empty(self) -> None:
        """Raise ValueError naming what still waits, and for which parts."""
        lines = []
        for merged, parts in sorted(self.waiting.items()):
            order = _MERGED[merged.split(".")[-2]]
            missing = ", ".join(name for name in order if name not in parts)
            lines.append(f"{merged} is incomplete: the checkpoint has no {missing}")
        if lines:
            more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
            raise ValueError("\n  ".join(["incomplete weights:", *lines[:8], *more]))


def _part(value: torch.Tensor, dim: int, rank: int, size: int, key: str) -> torch.Tensor:
    """Cut number `rank` of `size` equal parts out of `value` along `dim`."""
    length = div_even(value.shape[dim], size, what=f"entries of {key}")
    return value.narrow(dim, rank * length, length).contiguous()


def _shard_tensor(key: str, value: torch.Tensor, r: int, n: int, num_kv_heads: int) -> torch.Tensor:
    """What rank `r` of `n` holds of a tensor of the checkpoint; all of it if `n` is 1.

    The layers that compute with it (`layers/linear.py`, `layers/embedding.py`) set the rules:
    outputs are cut by rows, inputs by columns, the vocabulary into ranges padded with zeros.
    """
    module, leaf = key.split(".")[-2:] if "." in key else ("", key)
    if n == 1:
        return value
    if module in ("q_proj", "gate_proj", "up_proj"):
        return _part(value, 0, r, n, key)
    if module in ("k_proj", "v_proj"):
        # Fewer KV heads than ranks: neighboring ranks hold the same one.
        rank, size = (r * num_kv_heads // n, num_kv_heads) if num_kv_heads < n else (r, n)
        return _part(value, 0, rank, size, key)
    if module in ("o_proj", "down_proj") and leaf == "weight":
        return _part(value, 1, r, n, key)
    if module in ("embed_tokens", "lm_head"):
        rows = div_ceil(value.shape[0], n)
        mine = value[r * rows : (r + 1) * rows]
        return torch.cat([mine, value.new_zeros(rows - len(mine), *value.shape[1:])])
    return value


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file. ValueError when it is damaged, cut off or something else."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is cut off or not a safetensors file: {error}. "
            "If it was downloaded, download it again."
        ) from error


def _explain_no_weights(folder: Path) -> Exception:
    """The error for a folder without safetensors."""
    pickled = [f for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in folder.glob(kind)]
    if pickled:
        return ValueError(
            f"{folder} holds only pickled weights ({pickled[0].name}), which are refused: to "
            "unpickle a file is to run the code in it. If you trust where it came from, convert "
            "it once with transformers: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder), and load the new folder."
        )
    found = ", ".join(sorted(f.name for f in folder.iterdir())[:8]) or "nothing"
    return FileNotFoundError(f"no *.safetensors in {folder}, which holds {found}")


def _listed_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read, and the index's map from tensor to file if there is an index.

    As in transformers: `model.safetensors` if it is there, else what the index names. Without
    either, every `*.safetensors`. Raises FileNotFoundError for files that are named but missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single], None
    if not index.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise _explain_no_weights(folder)
        return paths, None
    wanted = read_json(index).get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise ValueError(f"{index} has no weight_map")
    paths = [folder / name for name in sorted(set(wanted.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}")
    return paths, wanted


def find_weights(folder: Path) -> dict[Path, list[str]]:
    """Which tensors to read from which file, in the order in which they lie there.

    Opens each file, so that whatever the files show to be wrong is found before a tensor is read:
    two files with one tensor, or quantized weights, which are not floating-point numbers, or come
    with scales, single numbers. Raises FileNotFoundError and ValueError that name the file.
    """
    paths, wanted = _listed_files(folder)
    found: dict[Path, list[str]] = {}
    owners: dict[str, Path] = {}
    for path in paths:
        with _open_safetensors(path) as file:
            names = file.offset_keys()
            if wanted is not None:
                names = [name for name in names if wanted.get(name) == path.name]
            looks = {name: file.get_slice(name) for name in names}
        for name, look in looks.items():
            if look.get_dtype() not in ("F64", "F32", "F16", "BF16") or not look.get_shape():
                raise ValueError(
                    f"{name} in {path} is {look.get_dtype()} {look.get_shape()}, part of quantized "
                    "weights, which are not supported; take the unquantized model"
                )
            if name in owners:
                raise ValueError(f"both {owners[name].name} and {path.name} hold {name}")
            owners[name] = path
        found[path] = names
    lost = sorted((wanted or {}).keys() - owners.keys())
    if lost:
        names = ", ".join(lost[:8])
        raise ValueError(f"the index of {folder} names tensors that its files lack: {names}")
    return found


_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _model_keys(plan: dict[Path, list[str]], tied: bool) -> dict[str, str]:
    """Name in the checkpoint → the model's, for all tensors of `find_weights` that are weights.

    No weight is `rotary_emb.inv_freq`. "model." goes before the names where the checkpoint has it
    nowhere. A `tied` head is left out beside an embedding that equals it, and without one *is* the
    embedding. ValueError for a tied head that differs, and for a checkpoint without an embedding.
    """
    files = {name: path for path, names in plan.items() for name in names}
    keys = {name: name for name in files if not name.endswith("rotary_emb.inv_freq")}
    if "embed_tokens.weight" in keys:
        keys = {name: name if name == _HEAD else f"model.{name}" for name in keys}
    table = next((name for name, key in keys.items() if key == _TABLE), None)
    if tied and _HEAD in keys and table is None:
        return {**keys, _HEAD: _TABLE}
    if table is None:
        some = ", ".join(sorted(keys)[:3])
        raise ValueError(f"the checkpoint has no {_TABLE}; its names are {some}, …")
    if tied and _HEAD in keys:
        del keys[_HEAD]
        with _open_safetensors(files[table]) as one, _open_safetensors(files[_HEAD]) as other:
            embedding, head = one.get_tensor(table), other.get_tensor(_HEAD)
            same = torch.equal(embedding, head.to(embedding.dtype))
        if not same:
            raise ValueError(
                f"the config ties the head to the embedding (tie_word_embeddings), but {_HEAD} and "
                f"{table} differ: to use both, set tie_word_embeddings to false in config.json"
            )
    return keys


logger = init_logger(__name__)


def _own(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy if it lies in the memory of `source`.

    A weight that is a view of the mapped file would be read from disk in the middle of a forward
    pass, count as free memory until then, and change or crash with the file.
    """
    shared = tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor


def _merged_weights(
    folder: Path, device: torch.device, config: ModelConfig, buffer: MergeBuffer
) -> Iterator[tuple[str, torch.Tensor]]:
    """The loop of `load_weight`: read, cut, move, merge."""
    tp = get_tp_info()
    plan = find_weights(folder)
    keys = _model_keys(plan, config.tie_word_embeddings)
    for path, names in plan.items():
        logger.info_rank0(f"reading {len(names)} tensors from {path}")
        with _open_safetensors(path) as file:
            for name in names:
                if name not in keys:
                    continue
                whole = file.get_tensor(name)  # on a CPU: a view of the mapped file
                mine = _shard_tensor(keys[name], whole, tp.rank, tp.size, config.num_kv_heads)
                ready = buffer.add(keys[name], mine.to(device))
                if ready is not None:
                    yield ready[0], _own(ready[1], whole)
    buffer.check_empty()


def load_weight(
    model_path: str, device: torch.device, *, buffer: MergeBuffer | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(key, tensor)` for every weight of the model on this rank, in the checkpoint's dtype.

    One tensor of the checkpoint is read at a time, cut for this rank, put on `device`, and passed
    on at once unless it must wait in `buffer` for the others that it is merged with. What is
    yielded is the caller's own memory: the file may change or go afterwards. If the config has
    experts, all of it goes through `stack_experts(weights, config)` of the module for them (see
    `moe_module`), a generator that takes these pairs and yields those of the model.

    Raises FileNotFoundError or ValueError, naming the file or tensor, for a folder that can't be
    loaded: before the first tensor if its files show it, at the end for parts that never came.
    """
    config = ModelConfig.from_hf(cached_load_hf_config(model_path))
    folder = Path(download_hf_weight(model_path))
    weights = _merged_weights(folder, device, config, MergeBuffer() if buffer is None else buffer)
    if config.is_moe:
        weights = moe_module().stack_experts(weights, config)
    yield from weights
