"""What the browser checks share: a Chromium without a network, and a server for a folder.

Not a test module. Without Chromium the checks are skipped with a message, but where CI is set they
fail instead, so that they can't go missing unnoticed.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOW_TO_GET_ONE = (
    "no Chromium found: install it (`apt install chromium`, or `python -m playwright install "
    "chromium`), or set CHROMIUM to its path"
)
TIMEOUT_MS = 60_000
"""How long to wait for a condition: generous, since CI machines are slow and shared."""


def chromium_path(playwright: Any) -> str | None:
    """Where Chromium is: CHROMIUM, then the PATH, then the one that playwright installs."""
    named = os.environ.get("CHROMIUM")
    for name in [named, "chromium", "chromium-browser", "google-chrome", "chrome"]:
        if name and (found := shutil.which(name)):
            return found
    own = playwright.chromium.executable_path
    return own if own and Path(own).exists() else None


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser that can't reach any other host; skips (or in CI fails) without one."""
    missing = pytest.fail if os.environ.get("CI") else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install playwright")
    with sync_playwright() as playwright:
        path = chromium_path(playwright)
        if path is None:
            missing(HOW_TO_GET_ONE)
        browser = playwright.chromium.launch(
            executable_path=path,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ],
        )
        yield browser
        browser.close()


class Watch:
    """What a page did that it should not: requests to other hosts, errors, missing files."""

    def __init__(self, page: Any, base: str) -> None:
        self.base = base
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.weight = 0
        page.route("**/*", self._route)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        page.on("response", self._response)

    def _route(self, route: Any) -> None:
        url = route.request.url
        if url.startswith((self.base, "data:", "blob:")):
            route.continue_()
        else:
            self.outside.append(url)
            route.abort()

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(f"console: {message.text}")

    def _response(self, response: Any) -> None:
        if response.status >= 400:
            self.errors.append(f"{response.status}: {response.url}")
        self.weight += int(response.headers.get("content-length", 0))

    def check(self) -> None:
        assert not self.outside, f"the page asked another host: {self.outside}"
        assert not self.errors, f"the browser reports: {self.errors}"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder on localhost, as a base address that ends in a slash."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
