"""Chapter 01 in a real JupyterLab: run all, move a live control, see the real `Req`'s numbers."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import TIMEOUT_MS
from lab import forget_outputs, jupyter_lab, opened, run_all

ROOT = Path(__file__).resolve().parent.parent
CHAPTER = "01_core"
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
    with jupyter_lab(copy / "notebooks", home, copy) as found:
        yield found


@pytest.fixture(scope="module")
def page(lab: tuple[str, str]) -> Iterator[Any]:
    with opened(lab, CHAPTER) as page:
        yield page


@pytest.fixture(scope="module")
def ran(page: Any) -> Any:
    """The chapter after *Run → Run All Cells*, when the last cell has its output."""
    run_all(page)
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
