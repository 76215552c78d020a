"""What the checks in JupyterLab share: a server on a folder, a page, *Run All Cells*.

Not a test module.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
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

START_S = 120
RUN_MS = 300_000
ERRORS = ".jp-OutputArea-output[data-mime-type*='error']"


def takes_minutes() -> None:
    """Skip the test that asks, unless everything is to be run."""
    if not (os.environ.get("CI") or os.environ.get("MINISGL_SLOW")):
        pytest.skip("takes minutes; CI runs it, and so does MINISGL_SLOW=1")


@contextlib.contextmanager
def jupyter_lab(folder: Path, home: Path, path: Path) -> Iterator[tuple[str, str]]:
    """A JupyterLab on a folder: its base address and the token to open it.

    Its settings lie in `home`, and its kernels import from `path`.
    """
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
        "PYTHONPATH": str(path),
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
        f"--ServerApp.root_dir={folder}",
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


@contextlib.contextmanager
def opened(lab: tuple[str, str], notebook: str) -> Iterator[Any]:
    """A page with a notebook, which a `Watch` looks after (`page.course_watch`)."""
    base, token = lab
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1400, "height": 1000})
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.course_watch = Watch(page, base)
        page.goto(f"{base}lab/tree/{notebook}.ipynb?token={token}&reset")
        yield page


def run_all(page: Any) -> None:
    """*Run → Run All Cells*, until the last cell has its output; an error ends it at once."""
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
        """errors => {
            const marks = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
                .map(e => e.textContent.trim())
                .filter(mark => mark);  // cells with hidden code have none
            const ran = marks.length > 10 && marks.every(m => /^\\[\\d+\\]:$/.test(m));
            return ran || (document.querySelector(errors) && !marks.includes('[*]:'));
        }""",
        arg=ERRORS,
        timeout=RUN_MS,
    )
    errors = page.locator(ERRORS)
    assert errors.count() == 0, errors.first.inner_text()
