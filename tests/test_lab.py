"""Chapters in a real JupyterLab: run all, then move every live control and see the real numbers."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import TIMEOUT_MS
from lab import forget_outputs, jupyter_lab, opened, run_all, takes_minutes

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ["01_core", "04_kvcache", "05_attention", "06_engine"]
PARTS = ["notebooks", "course", "minisgl", "_toc.yml", "_config.yml", "pyproject.toml"]

pytestmark = pytest.mark.browser


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
    for chapter in CHAPTERS:
        forget_outputs(copy / "notebooks" / f"{chapter}.ipynb")
    home = tmp_path_factory.mktemp("jupyter")
    with jupyter_lab(copy / "notebooks", home, copy) as found:
        yield found


@pytest.fixture(scope="module", params=CHAPTERS)
def ran(request: pytest.FixtureRequest, lab: tuple[str, str]) -> Iterator[Any]:
    """A chapter after *Run → Run All Cells*, when the last cell has its output."""
    if request.param != CHAPTERS[0]:
        takes_minutes()
    with opened(lab, request.param) as page:
        run_all(page)
        yield page
    base, token = lab
    for kernel in asked(f"{base}api/kernels?token={token}"):  # one model in memory at a time
        asked(f"{base}api/kernels/{kernel['id']}?token={token}", "DELETE")


def asked(url: str, method: str = "GET") -> Any:
    """The answer of the server's interface."""
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
        return json.loads(answer.read() or "null")


def chapter(*names: str) -> pytest.MarkDecorator:
    """For these chapters only."""
    return pytest.mark.parametrize("ran", names, indirect=True)


def live(page: Any, number: int = 0) -> Any:
    """A live widget of the notebook, by its place."""
    widget = page.locator(".mg-widget:has(.mg-controls)").nth(number)
    widget.locator(".mg-controls").wait_for()
    return widget


def control(widget: Any, name: str) -> Any:
    """The part that takes the keys of the live control whose label contains `name`."""
    box = widget.locator(
        ".mg-controls .widget-slider, .mg-controls .widget-dropdown", has_text=re.compile(name)
    )
    return box.locator(".noUi-handle, select").first


def value(part: Any) -> str:
    """The value of a slider's handle or of a choice."""
    return str(part.evaluate("e => e.value ?? e.getAttribute('aria-valuenow')"))


def change(part: Any, back_to: str = "") -> None:
    """To another value, a step lower, or back; sliders by keyboard, choices by choosing."""
    if part.evaluate("e => e.matches('select')"):
        options = part.locator("option").evaluate_all("them => them.map(o => o.value)")
        part.select_option(back_to or next(o for o in options if o != value(part)))
    else:
        press(part, "ArrowRight" if back_to else "ArrowLeft")
        if back_to:
            assert value(part) == back_to


def press(part: Any, *keys: str) -> None:
    part.scroll_into_view_if_needed()
    part.focus()
    for key in keys:
        part.page.keyboard.press(key)


def shown(widget: Any) -> str:
    """A widget's pictures and captions at the step where it stands, as HTML."""
    return str(
        widget.locator(".mg-stack").evaluate_all("them => them.map(e => e.innerHTML).join()")
    )


def shown_at_both_ends(widget: Any) -> str:
    """What it shows at its first and at its last step; it stays at the last."""
    pictures = []
    for key in ["Home", "End"]:
        to_step(widget, key)
        pictures.append(shown(widget))
    return "".join(pictures)


def to_step(widget: Any, key: str) -> None:
    """Move every step slider there is: Home is the first step, End the last."""
    for handle in widget.locator(".mg-bar .noUi-handle").all():
        press(handle, key)


def wait_until(page: Any, holds: Callable[[], bool], message: Callable[[], str]) -> None:
    end = time.monotonic() + TIMEOUT_MS / 1000
    while not holds():
        assert time.monotonic() < end, message()
        page.wait_for_timeout(100)


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
    def seen() -> dict[str, int | None]:
        return {name: numbers(widget).get(name) for name in expected}

    wait_until(
        widget.page, lambda: seen() == expected, lambda: f"expected {expected}, shown {seen()}"
    )


def wait_for_text(widget: Any, *texts: str) -> None:
    """Wait until the visible captions contain these."""

    def missing() -> list[str]:
        said = " ".join(widget.locator("figcaption:visible").all_inner_texts())
        return [text for text in texts if text not in said]

    wait_until(widget.page, lambda: not missing(), lambda: f"not in the captions: {missing()}")


def test_every_control_reruns_the_code_and_comes_back(ran: Any) -> None:
    """Another value gives another picture, the old value the old one again."""
    widgets = ran.locator(".mg-widget:has(.mg-controls)")
    assert widgets.count(), "no live widget"
    for number in range(widgets.count()):
        widget = live(ran, number)
        for name in widget.locator(".mg-controls .widget-label").all_inner_texts():
            part = control(widget, f"^{name}")
            before, old = shown_at_both_ends(widget), value(part)
            change(part)
            wait_until(
                ran,
                lambda w=widget, b=before: shown_at_both_ends(w) != b,
                lambda n=name: f"nothing changes with {n}",
            )
            assert not widget.locator(".mg-error").count(), widget.locator(".mg-error").inner_text()
            change(part, back_to=old)
            wait_until(
                ran,
                lambda w=widget, b=before: shown_at_both_ends(w) == b,
                lambda n=name: f"{n} does not come back",
            )
        to_step(widget, "Home")


@chapter("01_core")
def test_a_live_control_reruns_the_real_req(ran: Any) -> None:
    """By keyboard: one more prompt token, and the widget shows what a `Req` of 7 says."""
    widget = live(ran)
    wait_for_numbers(widget, real(prompt=6, hit=2, max_tokens=3))
    press(control(widget, "prompt"), "ArrowRight")
    wait_for_numbers(widget, real(prompt=7, hit=2, max_tokens=3))


@chapter("01_core")
def test_a_refused_value_says_why_and_keeps_the_picture(ran: Any) -> None:
    """A prompt of one token can't have two of them cached: the real error, in place."""
    widget = live(ran)
    before = numbers(widget)
    press(control(widget, "prompt"), "Home")
    message = widget.locator(".mg-error")
    message.wait_for()
    assert "cached_len" in message.inner_text()
    assert numbers(widget) == before
    press(control(widget, "prompt"), *["ArrowRight"] * 5)
    wait_for_numbers(widget, real(prompt=6, hit=2, max_tokens=3))
    assert message.count() == 0


def test_play_works_in_the_lab(ran: Any) -> None:
    widget = live(ran)
    to_step(widget, "Home")
    before = shown(widget)
    widget.locator(".mg-bar .widget-play button").first.click()
    wait_until(ran, lambda: shown(widget) != before, lambda: "Play does not move the picture")
    widget.locator(".mg-bar .widget-play button").nth(1).click()
    wait_until(ran, lambda: shown(widget) == before, lambda: "Stop does not go back")


@chapter("04_kvcache")
def test_a_longer_prompt_takes_the_pages_it_needs(ran: Any) -> None:
    """Page size 4: A's 9 tokens and B's 15 take 3 and 4 pages of the real pool."""
    widget = live(ran)
    press(control(widget, "prompt a"), *["ArrowRight"] * 3)
    wait_for_text(widget, "prompts of 9 and 15 tokens", f"New pages: {-(-9 // 4) + -(-15 // 4)}.")
    press(control(widget, "prompt a"), *["ArrowLeft"] * 3)
    wait_for_text(widget, "prompts of 6 and 15 tokens", f"New pages: {-(-6 // 4) + -(-15 // 4)}.")


@chapter("05_attention")
def test_more_new_tokens_shift_the_packed_queries(ran: Any) -> None:
    """B brings one more token: its queries end, and C's begin, one later."""
    widget = live(ran)
    press(control(widget, "new of b"), "ArrowRight")
    wait_for_text(widget, f"cu_seqlens_q is {[0, 6, 6 + 4, 6 + 4 + 1]}")
    press(control(widget, "new of b"), "ArrowLeft")
    wait_for_text(widget, f"cu_seqlens_q is {[0, 6, 9, 10]}")


@chapter("06_engine")
def test_the_number_of_tokens_is_the_number_of_passes(ran: Any) -> None:
    """Eight tokens are one prefill and seven decodes; with six, the last decode is number 5."""
    widget = live(ran)
    press(control(widget, "tokens"), *["ArrowLeft"] * 2)
    slider = widget.locator(".mg-bar .noUi-handle").first
    wait_until(
        ran,
        lambda: float(slider.get_attribute("aria-valuemax")) == 6,
        lambda: f"steps up to {slider.get_attribute('aria-valuemax')}, not 6",
    )
    press(slider, "End", "ArrowLeft")
    wait_for_text(widget, "decode 5")
    press(control(widget, "tokens"), *["ArrowRight"] * 2)
    press(slider, "Home")
    wait_for_text(widget, "prefill")


def test_nothing_from_another_host(ran: Any) -> None:
    assert not ran.course_watch.outside, ran.course_watch.outside
