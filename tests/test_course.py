"""What must hold for the course as it is committed: its package, its notebooks, its links."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from course.__main__ import main
from course.building import notebooks
from course.building.package import check_static
from course.building.rules import notebook_faults

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = notebooks.chapters(ROOT)
ALLOWED = {"minisgl", "torch", "transformers", "safetensors", "huggingface_hub", "psutil", "loky"}
COMMIT = "20fcd7f3c6a1898a61139fae1c97cc7a40bd8d66"  # of the official mini-sglang that we cite
PAGES = sorted([*(ROOT / "book").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")])


def prose(path: Path) -> str:
    """The Markdown of a page or of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as MyST makes them."""
    headings = re.findall(r"^#{1,4} +(.+?) *$", prose(path), flags=re.MULTILINE)
    plain = [re.sub(r"[`*]", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_minisgl_is_what_the_notebooks_build():
    assert not check_static(ROOT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not (os.environ.get("CI") or os.environ.get("MINISGL_SLOW")),
    reason="runs every notebook once more; CI does it, and so does `make check`",
)
def test_every_chapter_runs_on_what_came_before_it(monkeypatch, capfd):
    monkeypatch.setenv("MINISGL_ROOT", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["check"]) == 0, capfd.readouterr().err
    assert capfd.readouterr().out.count("ok  ") == 1 + len(CHAPTERS)


def test_every_notebook_is_a_chapter_of_the_book():
    assert sorted(CHAPTERS) == sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))


def test_minisgl_imports_neither_the_course_nor_anything_optional():
    for path in (ROOT / "minisgl").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:  # at import time; inside a function an import may be lazy
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert root in ALLOWED | set(sys.stdlib_module_names), f"{path}: {name}"
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) course\b", text, flags=re.MULTILINE), path


def test_every_module_imports_alone_and_opens_files_with_an_encoding():
    import minisgl

    modules = ["minisgl"] + [m.name for m in pkgutil.walk_packages(minisgl.__path__, "minisgl.")]
    code = "import sys, importlib\nfor m in sys.argv[1:]:\n    importlib.import_module(m)\n"
    for order in (modules, modules[::-1]):
        result = subprocess.run(
            [sys.executable, "-W", "error::EncodingWarning", "-c", code, *order],
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONWARNDEFAULTENCODING": "1"},
        )
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            if "github.com/sgl-project/mini-sglang/" in target:
                assert f"/{COMMIT}/" in target, f"{page.name}: {target} has no commit"
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor and path.suffix in {".md", ".ipynb"}:
            assert anchor in anchors(path), f"{page.name}: {target} has no such heading"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_notebook_keeps_the_rules(chapter):
    assert not notebook_faults(ROOT, chapter)


def test_the_readmes_picture_is_a_frame_of_the_widget():
    """The picture is a frame as the widget holds it, and the style that the page brings to it."""
    text = (ROOT / "book/_static/page_table.svg").read_text(encoding="utf-8").strip()
    state = notebooks.read(ROOT, "04_kvcache").metadata.widgets[notebooks.WIDGET_STATE]["state"]
    frames = [str(model["state"].get("value")) for model in state.values()]
    bare = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    assert any(bare in frame for frame in frames), "draw it again from chapter 04"


@pytest.mark.parametrize(
    ("named", "message"),
    [("/nonexistent", "there is no folder"), (str(ROOT / "tests"), "config.json")],
)
def test_a_wrong_model_is_one_clear_message(named, message):
    result = subprocess.run(
        [sys.executable, "-m", "course", "model"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "MINISGL_MODEL": named},
    )
    assert result.returncode == 1 and message in result.stderr
    assert "Traceback" not in result.stderr
