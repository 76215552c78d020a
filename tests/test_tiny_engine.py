"""Chapter 00 on another architecture: its cells, run on a small Qwen3, agree with transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from course import checkpoints

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "00_tiny_engine.ipynb"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def test_chapter_00_runs_on_qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With MINISGL_MODEL as a reader would set it: q/k norm, and heads wider than the hidden size.

    The checkpoint gets the default model's tokenizer. Up to the section on speed: what comes
    after it asks for nothing new of the model.
    """
    monkeypatch.delenv("MINISGL_MODEL", raising=False)
    tokenizer = Path(checkpoints.model())
    model = tmp_path / "qwen3"
    shutil.copytree(checkpoints.tiny("qwen3", vocab_size=49152, eos_token_id=2), model)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, model)
    monkeypatch.setenv("MINISGL_MODEL", str(model))

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    headings = [cell.source.splitlines()[0] for cell in notebook.cells if cell.source]
    notebook.cells = notebook.cells[: headings.index("## How fast is it?")]
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()

    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert "model.layers.0.self_attn.q_norm.weight" in printed, "this is not the Qwen3"
    assert printed.count("16 equal tokens") == 4
