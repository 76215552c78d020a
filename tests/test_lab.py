"""Chapter 01 in a real JupyterLab: run all, move a live control, see the real `Req`'s numbers."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import TIMEOUT_MS, Watch, chromium

ROOT = Path(__file__).resolve().parent.parent
CHAPTER = "01_core"
START_S = 120
RUN_MS = 300_000
PARTS = ["notebooks", "course", "minisgl", "_toc.yml", "pyproject.toml"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (ROOT / "notebooks" / f"{CHAPTER}.ipynb").exists(), reason=f"{CHAPTER} is not there yet"
    ),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A JupyterLab on a copy of the course: its base address and the token to open it."""
    copy = tmp_path_factory.mktemp("course")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(source, copy / part, ignore=ignored)
        else:
            shutil.copy(source, copy / part)
    forget_outputs(copy / "notebooks" / f"{CHAPTER}.ipynb")
    home = tmp_path_factory.mktemp("jupyter")
    # Draw all cells, also those out of sight; ask nothing about news.
    for plugin, value in {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        file = home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value), encoding="utf-8")
    env = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    options = [
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={copy / 'notebooks'}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = home / "log.txt"
    with log.open("w", encoding="utf-8") as out:
        server = subprocess.Popen(
            [*command, *options], env=env, stdout=out, stderr=out, start_new_session=True
        )
    base = f"http://127.0.0.1:{port}/"
    try:
        wait_until_up(f"{base}api?token={token}", server, log)
        yield base, token
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # the server and its kernels, nothing else
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(timeout=20)


def forget_outputs(path: Path) -> None:
    """Whatever is seen afterward was computed by the kernel."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    path.write_text(json.dumps(notebook), encoding="utf-8")


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        assert server.poll() is None, f"JupyterLab stopped:\n{said}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not answer within {START_S} s:\n{said}")


@pytest.fixture(scope="module")
def page(lab: tuple[str, str]) -> Iterator[Any]:
    base, token = lab
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1400, "height": 1000})
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.course_watch = Watch(page, base)
        page.goto(f"{base}lab/tree/{CHAPTER}.ipynb?token={token}")
        yield page


@pytest.fixture(scope="module")
def ran(page: Any) -> Any:
    """The chapter after *Run → Run All Cells*, when the last cell has its output."""
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    kernel = page.locator("#jp-main-statusbar", has_text=re.compile(r"Python 3[^|]*\|\s*Idle"))
    kernel.wait_for(timeout=START_S * 1000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()
    # If it still takes the kernel for missing, it asks which one.
    asked = page.locator(".jp-Dialog button.jp-mod-accept")
    page.locator(".jp-Dialog button.jp-mod-accept, .jp-InputPrompt:text('[*]')").or_(
        page.locator(".jp-InputPrompt:text-is('[1]:')")
    ).first.wait_for()
    if asked.count():
        asked.click()
    page.wait_for_function(
        """() => {
            const marks = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
                .map(e => e.textContent.trim())
                .filter(mark => mark);  // cells with hidden code have none
            return marks.length > 10 && marks.every(m => /^\\[\\d+\\]:$/.test(m));
        }""",
        timeout=RUN_MS,
    )
    return page


def live(page: Any) -> Any:
    """The first live widget of the notebook."""
    widget = page.locator(".mg-widget:has(.mg-controls)").first
    widget.locator(".mg-controls").wait_for()
    return widget


def control(widget: Any, name: str) -> Any:
    """The slider handle of the live control whose label contains `name`."""
    box = widget.locator(".mg-controls .widget-slider", has_text=re.compile(name))
    return box.locator(".noUi-handle").first


def numbers(widget: Any) -> dict[str, int]:
    """The lengths that the visible caption gives."""
    text = widget.locator("figcaption:visible").inner_text()
    return {name: int(n) for name, n in re.findall(r"(\w+_len)\D{0,4}(\d+)", text)}


def real(prompt: int, hit: int, max_tokens: int) -> dict[str, int]:
    """What a real `Req` says at admission."""
    import torch

    from minisgl.core import Req, SamplingParams

    req = Req(
        input_ids=torch.arange(prompt, dtype=torch.int32),
        table_idx=0,
        cached_len=hit,
        output_len=max_tokens,
        uid=0,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        cache_handle=None,
    )
    names = ["cached_len", "device_len", "extend_len", "remain_len"]
    return {name: getattr(req, name) for name in names}


def wait_for_numbers(widget: Any, expected: dict[str, int]) -> None:
    end = time.monotonic() + TIMEOUT_MS / 1000
    while (shown := {name: numbers(widget).get(name) for name in expected}) != expected:
        assert time.monotonic() < end, f"expected {expected}, shown {shown}"
        widget.page.wait_for_timeout(100)


def test_no_cell_failed(ran: Any) -> None:
    errors = ran.locator(".jp-OutputArea-output[data-mime-type*='error']")
    assert errors.count() == 0, errors.first.inner_text()


def test_a_live_control_reruns_the_real_req(ran: Any) -> None:
    """By keyboard: one more prompt token, and the widget shows what a `Req` of 7 says."""
    widget = live(ran)
    wait_for_numbers(widget, real(prompt=6, hit=2, max_tokens=3))
    handle = control(widget, "prompt")
    handle.scroll_into_view_if_needed()
    handle.focus()
    ran.keyboard.press("ArrowRight")
    wait_for_numbers(widget, real(prompt=7, hit=2, max_tokens=3))


def test_a_refused_value_says_why_and_keeps_the_picture(ran: Any) -> None:
    """A prompt of one token can't have two of them cached: the real error, in place."""
    widget = live(ran)
    before = numbers(widget)
    handle = control(widget, "prompt")
    handle.focus()
    ran.keyboard.press("Home")
    message = widget.locator(".mg-error")
    message.wait_for()
    assert "cached_len" in message.inner_text()
    assert numbers(widget) == before
    for _ in range(5):
        ran.keyboard.press("ArrowRight")
    wait_for_numbers(widget, real(prompt=6, hit=2, max_tokens=3))
    assert message.count() == 0


def test_play_works_in_the_lab(ran: Any) -> None:
    widget = live(ran)
    before = numbers(widget)
    widget.locator(".mg-bar .widget-play button").first.click()
    end = time.monotonic() + 30
    while numbers(widget) == before:
        assert time.monotonic() < end, "Play does not move the picture"
        ran.wait_for_timeout(100)
    widget.locator(".mg-bar .widget-play button").nth(1).click()
    wait_for_numbers(widget, before)


def test_nothing_from_another_host(ran: Any) -> None:
    assert not ran.course_watch.outside, ran.course_watch.outside
