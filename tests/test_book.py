"""The built book as a reader meets it: in a browser, without a network and without a kernel."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import TIMEOUT_MS, Watch, chromium, served

ROOT = Path(__file__).resolve().parent.parent
SETTLE_MS = 300


def pages() -> list[str]:
    """The pages of the book in reading order, as in `_toc.yml`."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    return [toc["root"], *chapters]


def stored_outputs(page: str, mime: str) -> list[dict[str, Any]]:
    """The mime bundles with `mime` of a chapter's notebook, in order."""
    path = ROOT / f"{page}.ipynb"
    if not path.exists():
        return []
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", [])]
    return [o["data"] for o in outputs if mime in o.get("data", {})]


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_PAGES = [page for page in pages() if stored_outputs(page, WIDGET_VIEW)]


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book, built from the working tree into a temporary folder; any warning is a failure."""
    out = tmp_path_factory.mktemp("book")
    command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", "-W", "--keep-going"]
    env = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(
        [*command, "--path-output", out],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=600,
    )
    log = done.stdout + done.stderr
    warnings = [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line]
    assert done.returncode == 0, "jupyter-book build failed:\n" + "\n".join(
        warnings or [log[-3000:]]
    )
    return out / "_build" / "html"


@pytest.fixture(scope="session")
def site(book: Path) -> Iterator[str]:
    with served(book) as base:
        yield base


@pytest.fixture(scope="module")  # not longer: Playwright allows one at a time in a thread
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def new_page(browser: Any) -> Any:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(TIMEOUT_MS)
    return context.new_page()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = new_page(browser)
    yield page
    page.context.close()


@dataclass
class Chapter:
    """An open page with widgets, and what its embedded state says that they show."""

    name: str
    page: Any
    watch: Watch
    expected: list[Shown]

    def widget(self, number: int) -> Any:
        widget = self.page.locator(".mg-widget").nth(number)
        widget.scroll_into_view_if_needed()
        return widget


@pytest.fixture(scope="module", params=WIDGET_PAGES)
def chapter(request: pytest.FixtureRequest, browser: Any, site: str) -> Iterator[Chapter]:
    page = new_page(browser)
    watch = opened(page, site, request.param)
    yield Chapter(request.param, page, watch, expected_widgets(page))
    page.context.close()


def opened(page: Any, site: str, name: str) -> Watch:
    """Open a page and wait until its widgets, if it has any, are drawn."""
    watch = Watch(page, site)
    page.goto(f"{site}{name}.html", wait_until="load")
    views = page.locator(f'script[type="{WIDGET_VIEW}"]').count()
    page.wait_for_function(
        "n => document.querySelectorAll('.mg-widget .mg-pic svg').length >= n", arg=views
    )
    return watch


# -- what the widget state says the widgets should show -------------------------------------------


class Shown:
    """One widget, as the state embedded in the page describes it: captions by variant."""

    def __init__(self, models: dict[str, Any], root: str) -> None:
        self.models = models
        stacks = list(self._stacks(root))
        assert stacks, "a widget has a stack of frames"
        outer = self._children(stacks[0])
        if all(self._name(child) == "HTMLModel" for child in outer):
            self.variants = [self._captions(stacks[0])]
        else:
            inner = [next(iter(self._stacks(child))) for child in outer]
            self.variants = [self._captions(stack) for stack in inner]

    def _state(self, ref: str) -> dict[str, Any]:
        state: dict[str, Any] = self.models[ref.removeprefix("IPY_MODEL_")]["state"]
        return state

    def _name(self, ref: str) -> str:
        return str(self.models[ref.removeprefix("IPY_MODEL_")]["model_name"])

    def _children(self, ref: str) -> list[str]:
        return list(self._state(ref).get("children", []))

    def _stacks(self, ref: str) -> Iterator[str]:
        if self._name(ref) == "StackModel":
            yield ref
        else:
            for child in self._children(ref):
                yield from self._stacks(child)

    def _captions(self, stack: str) -> list[str]:
        found = []
        for child in self._children(stack):
            match = re.search(r"<figcaption>(.*?)</figcaption>", self._state(child)["value"], re.S)
            assert match, "every frame has a caption"
            found.append(_text(match[1]))
        return found


def _text(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())


def expected_widgets(page: Any) -> list[Shown]:
    state = json.loads(
        page.locator('script[type="application/vnd.jupyter.widget-state+json"]').inner_text()
    )["state"]
    views = page.locator(f'script[type="{WIDGET_VIEW}"]').all_inner_texts()
    return [Shown(state, json.loads(view)["model_id"]) for view in views]


def caption(widget: Any) -> str:
    """The caption that the reader sees now."""
    return " ".join(widget.locator("figcaption:visible").inner_text().split())


def wait_for_caption(widget: Any, text: str, what: str) -> None:
    """Wait until the widget shows the frame with this caption."""
    handle = widget.element_handle()
    try:
        widget.page.wait_for_function(
            """([widget, text]) => {
                const shown = [...widget.querySelectorAll('figcaption')];
                return shown.length == 1
                    && shown[0].textContent.split(/\\s+/).filter(Boolean).join(' ') == text
                    && widget.querySelector('.mg-pic svg').getBoundingClientRect().width > 50;
            }""",
            arg=[handle, text],
            timeout=30_000,
        )
    except Exception:
        pytest.fail(f"{what}: expected {text!r}, shown {caption(widget)!r}")


# -- pages ----------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize("name", pages())
def test_page(page: Any, site: str, name: str, tmp_path: Path) -> None:
    """No other host, no error, no sideways scrolling, in both themes and down to a phone."""
    watch = opened(page, site, name)
    assert page.locator("article h1").count() == 1
    for theme in ["light", "dark"]:
        page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
        for width in [1280, 375]:
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_timeout(SETTLE_MS)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} wide on a screen of {width}"
            page.screenshot(path=tmp_path / f"{theme}-{width}.png")
    watch.check()
    assert watch.weight < 6_000_000, f"{name} loads {watch.weight:,} bytes"


@pytest.mark.browser
def test_front_page_leads_into_the_book(page: Any, site: str) -> None:
    watch = Watch(page, site)
    page.goto(site)
    page.wait_for_url(f"{site}book/index.html")
    assert "cell by cell" in page.title()
    page.get_by_role("link", name="Set up").first.click()
    page.wait_for_url(f"{site}book/setup.html")
    watch.check()


def test_no_page_names_another_host_for_its_parts(book: Path) -> None:
    """Scripts, styles, pictures and fonts are the book's own (links to read on are fine)."""
    part = re.compile(r'<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//[^"]*"|<link[^>]*>')
    for file in book.rglob("*.html"):
        for tag in part.findall(file.read_text(encoding="utf-8")):
            assert "//" not in tag or 'rel="canonical"' in tag, f"{file.name}: {tag}"


# -- widgets --------------------------------------------------------------------------------------


@pytest.mark.browser
def test_every_widget_shows_the_right_frame(chapter: Chapter) -> None:
    """By keyboard, each step of each variant shows the caption that the state holds for it."""
    page = chapter.page
    assert page.locator(".mg-widget").count() == len(chapter.expected)
    for number, shown in enumerate(chapter.expected):
        widget = chapter.widget(number)
        for index, captions in enumerate(shown.variants):
            where = f"{chapter.name}, widget {number}, variant {index}"
            if len(shown.variants) > 1:
                choose(widget, index)
            slider = widget.locator(".mg-bar .noUi-handle:visible")
            if slider.count():
                assert slider.get_attribute("aria-label"), "a screen reader can name the slider"
                slider.focus()
                page.keyboard.press("Home")
            wait_for_caption(widget, captions[0], f"{where}, step 0")
            for step in range(1, len(captions)):
                page.keyboard.press("ArrowRight")
                wait_for_caption(widget, captions[step], f"{where}, step {step}")
            assert widget.locator(".mg-pic svg").get_attribute("aria-label")
        if len(shown.variants) > 1:
            choose(widget, 0)
    chapter.watch.check()


def choose(widget: Any, index: int) -> None:
    """Pick a variant, with a row of buttons or a list."""
    buttons = widget.locator(".widget-toggle-button")
    if buttons.count():
        buttons.nth(index).click()
    else:
        widget.locator("select").select_option(index=index)


@pytest.mark.browser
def test_play_and_drag(chapter: Chapter) -> None:
    """Play moves on by itself, First goes back, and the slider can be dragged to the end."""
    page = chapter.page
    for number, shown in enumerate(chapter.expected):
        captions = shown.variants[0]
        if len(captions) < 2:
            continue
        widget, where = chapter.widget(number), f"{chapter.name}, widget {number}"
        play = widget.locator(".widget-play:visible button")
        play.nth(1).click()
        wait_for_caption(widget, captions[0], f"{where}, after First")
        assert play_label(page, play.nth(0)).endswith("Play")
        play.nth(0).click()
        wait_for_caption(widget, captions[1], f"{where}, after Play")
        if len(captions) > 2:
            assert play_label(page, play.nth(0)) == "Pause"
        play.nth(1).click()
        wait_for_caption(widget, captions[0], f"{where}, after First")
        handle = widget.locator(".mg-bar .noUi-handle:visible")
        track = widget.locator(".mg-bar .noUi-target:visible").bounding_box()
        start = handle.bounding_box()
        page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
        page.mouse.down()
        page.mouse.move(track["x"] + track["width"] + 30, start["y"] + 5, steps=4)
        page.mouse.up()
        wait_for_caption(widget, captions[-1], f"{where}, dragged to the end")
    chapter.watch.check()


def play_label(page: Any, button: Any) -> str:
    """The word on a play button (its icon is hidden, so that no icon font is needed)."""
    label = button.evaluate("b => getComputedStyle(b, '::after').content")
    return str(label).strip('"')


@pytest.mark.browser
@pytest.mark.skipif("notebooks/01_core" not in pages(), reason="chapter 01 is not in the book")
def test_chapter_01_shows_the_worked_example(page: Any, site: str) -> None:
    """(cached, device, extend, remain) of the prompt of 6, prefix hit 2, 3 tokens to generate."""
    opened(page, site, "notebooks/01_core")
    widget = page.locator(".mg-widget").first
    handle = widget.locator(".mg-bar .noUi-handle")
    handle.scroll_into_view_if_needed()
    handle.focus()
    seen = []
    for step in range(4):
        wait_for_caption(widget, expected_widgets(page)[0].variants[0][step], f"step {step}")
        picture = " ".join(widget.locator(".mg-pic svg text").all_text_contents())
        values = {}
        for field in ["cached_len", "device_len", "extend_len", "remain_len"]:
            said = re.search(rf"{field}\D{{0,4}}(\d+)", caption(widget))
            drawn = re.search(rf"(?<!max_){field} = (\d+)", picture)
            assert said, f"the caption gives {field}: {caption(widget)}"
            assert not drawn or drawn[1] == said[1], f"caption and picture differ in {field}"
            values[field] = int(said[1])
        seen.append(tuple(values.values()))
        page.keyboard.press("ArrowRight")
    assert seen == [(2, 6, 4, 3), (6, 7, 1, 2), (7, 8, 1, 1), (8, 9, 1, 0)]
    assert widget.locator(".mg-controls").is_hidden(), "no kernel here, so no live controls"
    assert "JupyterLab" in widget.locator(".mg-note").inner_text()


@pytest.mark.browser
def test_linked_parts_light_up(chapter: Chapter) -> None:
    """Focus or pointer on one of several elements with a key makes all of them bold-edged."""
    page = chapter.page
    linked = page.locator(".mg-pic svg [data-key][tabindex='0']:has(> rect)")
    if not linked.count():
        pytest.skip("no linked parts on this page")
    first = linked.first
    first.scroll_into_view_if_needed()
    page.mouse.move(0, 0)
    key = first.get_attribute("data-key")
    edges = """([e, key]) => [...e.closest('svg').querySelectorAll('[data-key] > rect')]
        .filter(r => r.parentNode.dataset.key == key)
        .map(r => parseFloat(getComputedStyle(r).strokeWidth))"""
    handle = first.element_handle()
    before = page.evaluate(edges, [handle, key])
    assert max(before) < 2
    for light in [first.focus, first.hover]:
        light()
        page.wait_for_function(f"a => ({edges})(a).every(w => w > 3)", arg=[handle, key])
        first.evaluate("e => e.blur()")
        page.mouse.move(0, 0)
        page.wait_for_function(f"a => ({edges})(a).every(w => w < 2)", arg=[handle, key])


# -- code and boxes -------------------------------------------------------------------------------


def chapters_with(kind: str) -> Iterator[tuple[str, list[str]]]:
    """Each chapter's page name, with the sources of its cells of that kind."""
    for name in pages():
        path = ROOT / f"{name}.ipynb"
        if path.exists():
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            yield name, ["".join(c["source"]) for c in cells if c["cell_type"] == kind]


def test_build_cells_name_their_file(book: Path) -> None:
    """Each build cell has its file as a caption, and the directive is not part of the code."""
    for name, sources in chapters_with("code"):
        files = [m[1] for s in sources if (m := re.match(r"#\|\s*build\s+(\S+)", s))]
        text = (book / f"{name}.html").read_text(encoding="utf-8")
        shown = re.findall(r'<div class="build-file.*?<code[^>]*>(.*?)</code>', text, re.S)
        assert [_text(s) for s in shown] == files
        for block in re.findall(r"<pre[^>]*>(.*?)</pre>", text, re.S):
            assert not _text(block).startswith("#| build"), "the directive is still in the code"


def test_quotes_with_a_bold_label_are_boxes(book: Path) -> None:
    for name, texts in chapters_with("markdown"):
        labels = [m for text in texts for m in re.findall(r"(?m)(?<!> )^> \*\*(.+?)\*\*", text)]
        shown = (book / f"{name}.html").read_text(encoding="utf-8").count('<blockquote class="box ')
        assert shown <= len(labels) and bool(shown) == bool(labels), f"{name}: {labels}"


def test_pages_do_not_load_what_they_do_not_need(book: Path) -> None:
    """No FontAwesome script, no Thebe, and MathJax and the widget manager only where needed."""
    for name in pages():
        text = (book / f"{name}.html").read_text(encoding="utf-8")
        assert "fontawesome.js" not in text and "THEBE" not in text
        assert ("tex-chtml.js" in text) == ('class="math' in text), f"MathJax in {name}"
        assert ("embed.js" in text) == (name in WIDGET_PAGES), f"the widget manager in {name}"


@pytest.mark.browser
@pytest.mark.skipif(not WIDGET_PAGES, reason="no chapter yet")
def test_answers_unfold(page: Any, site: str) -> None:
    opened(page, site, WIDGET_PAGES[0])
    answers = page.locator("article details")
    assert answers.count() >= 4
    first = answers.first
    assert not first.locator("p").first.is_visible()
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    assert first.locator("p").first.is_visible()
