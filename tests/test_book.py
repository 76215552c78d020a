"""The built book as a reader meets it: in a browser, without a network and without a kernel."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import TIMEOUT_MS, Watch, chromium, served

from course import launch
from course.book import links, names, official
from course.book.names import anchor
from course.book.pages import Chapter as RoadMapChapter
from course.book.pages import as_hours, minutes
from course.building import notebooks

ROOT = Path(__file__).resolve().parent.parent
SETTLE_MS = 200
AXE = ROOT / "tests" / "vendor" / "axe-core" / "axe.min.js"
HEAVY = 3_000_000
"""No page may load more bytes than this."""


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


WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_PAGES = [page for page in pages() if stored_outputs(page, WIDGET_VIEW)]


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book, built from the working tree into a temporary folder; any warning is a failure.

    BOOK_HTML names a folder where it is built already, while one works on these tests.
    """
    if ready := os.environ.get("BOOK_HTML"):
        return Path(ready)
    out = tmp_path_factory.mktemp("book")
    return built(ROOT, out, "-W", "--keep-going")


def built(source: Path, out: Path, *options: str) -> Path:
    """Build the book of a folder; returns where its pages are."""
    command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", *options]
    done = subprocess.run(
        [*command, "--path-output", out],
        cwd=source,
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)},
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
    """An open page with widgets, and what its notebook's state says that they show."""

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
    yield Chapter(request.param, page, watch, expected_widgets(request.param))
    page.context.close()


def opened(page: Any, site: str, name: str) -> Watch:
    """Open a page and wait until its widgets, if it has any, can be used."""
    watch = Watch(page, site)
    page.goto(f"{site}{name}.html", wait_until="load")
    page.wait_for_function(
        "[...document.querySelectorAll('.mg-player')].every(p => p.dataset.ready)"
    )
    return watch


# -- what the widget state says the widgets should show -------------------------------------------


class Shown:
    """One widget, as the state in the notebook describes it: captions by variant."""

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


def expected_widgets(name: str) -> list[Shown]:
    """What the notebook stores for each of its widgets, in order."""
    notebook = json.loads((ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))
    state = notebook["metadata"]["widgets"][WIDGET_STATE]["state"]
    return [Shown(state, o[WIDGET_VIEW]["model_id"]) for o in stored_outputs(name, WIDGET_VIEW)]


def caption(widget: Any) -> str:
    """The caption that the reader sees now."""
    return " ".join(widget.locator("figcaption:visible").inner_text().split())


def wait_for_caption(widget: Any, text: str, what: str) -> None:
    """Wait until the widget shows the frame with this caption."""
    try:
        widget.page.wait_for_function(
            """([widget, text]) => {
                const shown = [...widget.querySelectorAll('figcaption')];
                return shown.length == 1
                    && shown[0].textContent.split(/\\s+/).filter(Boolean).join(' ') == text
                    && widget.querySelector('.mg-pic svg').getBoundingClientRect().width > 50;
            }""",
            arg=[widget.element_handle(), text],
            timeout=20_000,
        )
    except Exception:
        pytest.fail(f"{what}: expected {text!r}, shown {caption(widget)!r}")


# -- pages ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def figures() -> Iterator[list[str]]:
    """What each page weighs and how fast it is, printed at the end (`pytest -s` shows it)."""
    lines: list[str] = []
    yield lines
    print("\n    bytes    HTML  ready  page (ready: milliseconds until its widgets work)")
    print("\n".join(lines))


@pytest.mark.browser
@pytest.mark.parametrize("name", pages())
def test_page(page: Any, site: str, book: Path, name: str, figures: list[str]) -> None:
    """No other host, no error, no barrier, no sideways scrolling, in both themes, on a phone."""
    watch = opened(page, site, name)
    ready = page.evaluate("Math.round(performance.getEntriesByName('widgets-ready')[0].startTime)")
    size = (book / f"{name}.html").stat().st_size
    figures.append(f"{watch.weight:9,} {size:9,} {ready:6}  {name}")
    assert watch.weight < HEAVY, f"{name} loads {watch.weight:,} bytes"
    assert page.locator("article h1").count() == 1
    for width in [375, 1280, 375]:
        page.set_viewport_size({"width": width, "height": 800})
        assert not unreachable(page), f"{name}, {width} wide, at once"
        aside = page.evaluate(
            """[...document.querySelectorAll("article div.math > math > *")].filter(formula => {
                const box = formula.closest("div.math");
                const [a, b] = [formula, box].map(e => e.getBoundingClientRect());
                const middle = Math.abs(a.left + a.right - b.left - b.right) < 4;
                return a.width < b.width ? !middle : a.left < b.left - 1;
            }).map(formula => formula.textContent)"""
        )
        assert not aside, f"formulas of {name} that don't stand in the middle: {aside}"
    page.wait_for_timeout(SETTLE_MS)
    assert not unreachable(page), f"{name}, {width} wide, later"
    closed = page.evaluate_handle("[...document.querySelectorAll('article details:not([open])')]")
    closed.evaluate("all => all.forEach(details => { details.open = true; })")
    assert not unreachable(page), f"{name}, unfolded"
    closed.evaluate("all => all.forEach(details => { details.open = false; })")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    for theme in ["light", "dark"]:
        page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
        for width in [1280, 375]:
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_timeout(SETTLE_MS)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} wide on a screen of {width}"
            found = barriers(page, theme, width)
            assert not found, f"{name}, {theme}, {width} wide:\n" + "\n".join(found)
    watch.check()


def unreachable(page: Any) -> list[str]:
    """Boxes that scroll sideways and that a keyboard can't reach, two frames from now.

    Or two frames after the theme has moved its sidebars, which moves the article in each frame.
    """
    found: list[str] = page.evaluate(
        """async width => {
            const moving = () => document.getAnimations().some(a => a instanceof CSSTransition);
            while (innerWidth !== width || moving()) await new Promise(requestAnimationFrame);
            for (const _ of [1, 2]) {
                await new Promise(requestAnimationFrame);  // before the frame's layout
                await new Promise(setTimeout);  // after it
            }
            return [...document.querySelectorAll("article pre, article table, article div")]
                .filter(box => box.checkVisibility() && box.scrollWidth > box.clientWidth
                    && ["auto", "scroll"].includes(getComputedStyle(box).overflowX)
                    && box.tabIndex < 0 && !box.querySelector("[tabindex='0'], a, button, input"))
                .map(box => box.outerHTML.slice(0, 80));
        }""",
        page.viewport_size["width"],
    )
    return found


def barriers(page: Any, theme: str, width: int) -> list[str]:
    """What axe-core finds on a page that is a serious or critical barrier for somebody.

    Contrast takes long and does not depend on the width, all else does not depend on the theme; and
    code, which is most of a page, has the same colors everywhere. So not all is looked at four
    times, and code beyond the first blocks without its colors, unless MINISGL_SLOW is set.
    """
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if not os.environ.get("MINISGL_SLOW"):
        page.evaluate(
            """[...document.querySelectorAll("pre")].slice(4)
                .forEach(block => { block.textContent = block.textContent; })"""
        )
        if width < 1280:
            options["rules"] = {"color-contrast": {"enabled": False}}
            if theme == "dark":
                return []
        elif theme == "dark":
            options["runOnly"] = ["color-contrast"]
    found = page.evaluate(
        """async options => {
            const result = await axe.run(document, options);
            return result.violations
                .filter(v => ["serious", "critical"].includes(v.impact))
                .flatMap(v => v.nodes.slice(0, 5).map(
                    n => `${v.id}: ${n.target.join(" ")} (${n.failureSummary})`));
        }""",
        options,
    )
    return [str(line) for line in found]


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
            slider = widget.locator("input[type=range]")
            if slider.count():
                slider.focus()
                page.keyboard.press("Home")
            wait_for_caption(widget, captions[0], f"{where}, step 0")
            for step in range(1, len(captions)):
                page.keyboard.press("ArrowRight")
                wait_for_caption(widget, captions[step], f"{where}, step {step}")
                said = " ".join(str(slider.get_attribute("aria-valuetext")).split())
                assert said == f"{step} of {len(captions) - 1}: {captions[step]}"
            assert widget.locator(".mg-pic svg").get_attribute("aria-label")
        if len(shown.variants) > 1:
            choose(widget, 0)
    chapter.watch.check()


def choose(widget: Any, index: int) -> None:
    """Pick a variant, with a row of buttons or a list."""
    buttons = widget.locator(".mg-choice button")
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
        play, first = widget.locator(".mg-play"), widget.locator(".mg-first")
        first.click()
        wait_for_caption(widget, captions[0], f"{where}, after First")
        height = widget.bounding_box()["height"]
        play.click()
        assert play.inner_text() == "Pause"
        wait_for_caption(widget, captions[1], f"{where}, after Play")
        first.click()
        wait_for_caption(widget, captions[0], f"{where}, after First")
        assert play.inner_text().endswith("Play")
        track = widget.locator("input[type=range]").bounding_box()
        middle = track["y"] + track["height"] / 2
        page.mouse.move(track["x"] + 10, middle)
        page.mouse.down()
        page.mouse.move(track["x"] + track["width"] + 30, middle, steps=4)
        page.mouse.up()
        wait_for_caption(widget, captions[-1], f"{where}, dragged to the end")
        moved = widget.bounding_box()["height"]
        first.click()
        assert widget.bounding_box()["height"] == moved >= height, "the page does not jump"
    chapter.watch.check()


@pytest.mark.browser
@pytest.mark.skipif("notebooks/01_core" not in pages(), reason="chapter 01 is not in the book")
def test_chapter_01_shows_the_worked_example(page: Any, site: str) -> None:
    """(cached, device, extend, remain) of the prompt of 6, prefix hit 2, 3 tokens to generate."""
    opened(page, site, "notebooks/01_core")
    widget = page.locator(".mg-widget").first
    slider = widget.locator("input[type=range]")
    slider.scroll_into_view_if_needed()
    slider.focus()
    seen = []
    expected = expected_widgets("notebooks/01_core")[0].variants[0]
    for step in range(4):
        wait_for_caption(widget, expected[step], f"step {step}")
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
    assert not widget.locator(".mg-controls").count(), "no kernel here, so no live controls"
    assert "JupyterLab" in widget.locator(".mg-note").inner_text()


@pytest.mark.browser
def test_linked_parts_light_up(chapter: Chapter) -> None:
    """Focus or pointer on one of several elements with a key makes all of them bold-edged."""
    page = chapter.page
    linked = page.locator(".mg-pic svg [data-key][tabindex]:has(> rect)")
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
        assert all(f'id="{anchor(file)}"' in text for file in files), "each file has an anchor"
        assert [_text(s) for s in shown] == files
        for block in re.findall(r"<pre[^>]*>(.*?)</pre>", text, re.S):
            assert not _text(block).startswith("#| build"), "the directive is still in the code"


def test_quotes_with_a_bold_label_are_boxes(book: Path) -> None:
    for name, texts in chapters_with("markdown"):
        labels = [m for text in texts for m in re.findall(r"(?m)(?<!> )^> \*\*(.+?)\*\*", text)]
        shown = (book / f"{name}.html").read_text(encoding="utf-8").count('<blockquote class="box ')
        assert shown <= len(labels) and bool(shown) == bool(labels), f"{name}: {labels}"


def test_pages_do_not_load_what_they_do_not_need(book: Path) -> None:
    """No FontAwesome script, no Thebe, no MathJax, and no ipywidgets."""
    for name in pages():
        text = (book / f"{name}.html").read_text(encoding="utf-8")
        assert "fontawesome.js" not in text and "THEBE" not in text
        assert text.count("<math ") == text.count('class="math') and "MathJax" not in text
        assert "embed.js" not in text and WIDGET_STATE not in text, f"ipywidgets in {name}"
        assert "<style>" not in re.sub(r"<noscript>.*?</noscript>", "", text, flags=re.S), (
            f"{name}: one style sheet serves all pictures"
        )


@pytest.mark.browser
@pytest.mark.skipif(not WIDGET_PAGES, reason="no chapter yet")
def test_answers_unfold(page: Any, site: str) -> None:
    opened(page, site, WIDGET_PAGES[0])
    answers = page.locator("article details", has_text="Answer")
    assert answers.count() >= 4
    first = answers.first
    assert not first.locator("p").first.is_visible()
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    assert first.locator("p").first.is_visible()


@pytest.mark.browser
@pytest.mark.skipif(not WIDGET_PAGES, reason="no chapter yet")
def test_copied_code_is_the_code(browser: Any, site: str) -> None:
    """The copy button of a build cell gives all of it: pasted into a notebook, it builds."""
    page = new_page(browser)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=site.rstrip("/"))
    opened(page, site, "notebooks/01_core")
    cell = next(c for c in notebooks.build_cells(ROOT, ["01_core"]) if "class Req" in c.text)
    block = page.locator(".build-cell", has_text="class Req:")
    block.hover()
    block.locator(".cell_input .copybtn").click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.length > 0)")
    copied = page.evaluate("navigator.clipboard.readText()")
    directive, _, rest = cell.text.partition("\n")
    assert copied.split("\n", 1) == [directive, rest.strip("\n")]
    page.context.close()


# -- links and search -----------------------------------------------------------------------------


def test_no_link_leads_nowhere(book: Path) -> None:
    """Each link within the book has its page, and its anchor there."""
    texts = {file: file.read_text(encoding="utf-8") for file in book.rglob("*.html")}
    ids = {file: set(re.findall(r'\sid="([^"]+)"', text)) for file, text in texts.items()}
    dead = []
    for file, text in texts.items():
        for link in re.findall(r'<a\s[^>]*?href="([^"]*)"', text):
            path, _, target = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:|//", path) or (not path and not target):
                continue
            there = (file.parent / path.partition("?")[0]).resolve() if path else file
            if not there.exists():
                dead.append(f"{file.relative_to(book)}: no page {link}")
            elif target and there in ids and target not in ids[there]:
                dead.append(f"{file.relative_to(book)}: no anchor {link}")
    assert not dead, "\n".join(sorted(set(dead)))


def test_names_lead_to_where_they_are_built(book: Path) -> None:
    """In all chapters, and each definition has its place."""
    for item in names.definitions(ROOT):
        text = (book / "notebooks" / f"{item.chapter}.html").read_text(encoding="utf-8")
        assert f'id="{anchor(item.path, item.name)}"' in text, f"{item.path}: {item.name}"
        for member, _ in item.later:  # of a class that another cell goes on with
            page, place = item.place(member)
            text = (book / f"{page}.html").read_text(encoding="utf-8")
            assert f'id="{place}"' in text, f"{item.path}: {item.name}.{member}"
            begun = anchor(item.path, item.name)
            assert re.search(rf'class="build-file.*?href="[^"]*#{begun}"', text, re.S), begun
    text = (book / "notebooks" / "06_engine.html").read_text(encoding="utf-8")
    link = re.compile(r'<a class="built[^"]*" href="([^"]+)"[^>]*><code[^>]*>(.*?)</code>')
    shown = {_text(code): place for place, code in link.findall(text)}
    assert shown["Engine"] == "#minisgl-engine-engine-Engine"
    assert shown["Batch"] == "01_core.html#minisgl-core-Batch"
    for heading in re.findall(r"<h[1-6][^>]*>.*?</h[1-6]>", text, re.S):
        assert 'class="built' not in heading


def test_only_clear_names_are_linked() -> None:
    found = names.Names(names.definitions(ROOT))

    def where(code: str, chapter: str = "") -> str:
        target = found.find(code, chapter)
        return target.anchor if target else ""

    assert (
        where("Req") == where("minisgl.core.Req") == where("Req.cached_len") == "minisgl-core-Req"
    )
    # What a later cell adds to a class is found there.
    for method in ("complete_one", "extend_len"):
        ways = (method, f"Req.{method}", f"req.{method}()", f"minisgl.core.Req.{method}")
        assert {where(way) for way in ways} == {f"minisgl-core-Req-{method}"}
    assert where("minisgl/core.py") == where("core.py") == where("minisgl.core") == "minisgl-core"
    assert where("layers/") == where("minisgl/layers/") == "map-layers"
    for unclear in ["base.py", "forward", "x", "config.json", "torch.cat", "forward_batch", "a b"]:
        assert not where(unclear), unclear
    assert where("forward_batch", "06_engine") == "minisgl-engine-engine-Engine-forward_batch"
    assert where("forward_batch", "01_core") == "minisgl-core-Context"


def test_the_first_mention_of_a_term_leads_to_the_glossary(book: Path) -> None:
    terms = links.glossary(ROOT)
    assert len(terms) > 50 and all(len(term.meaning) > 10 for term in terms)
    text = (book / "notebooks" / "04_kvcache.html").read_text(encoding="utf-8")
    found = re.findall(
        r'<a class="term[^"]*" href="\.\./book/glossary\.html#([\w-]+)" title="', text
    )
    assert len(found) > 5 and len(found) == len(set(found)), "each term once"


@pytest.mark.browser
def test_definitions_show_at_the_word(page: Any, site: str) -> None:
    """By keyboard as well as by pointer; Escape takes them away."""
    opened(page, site, "notebooks/04_kvcache")
    tip = page.locator("#mg-tip")
    for kind in ["a.term", "a.built"]:
        link = page.locator(f"article {kind}").first
        said = link.get_attribute("title")
        link.focus()
        assert tip.is_visible() and tip.inner_text() == said
        box = tip.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1280
        page.keyboard.press("Escape")
        assert tip.is_hidden()
        link.hover()
        assert tip.is_visible()
        page.mouse.move(5, 5)
        page.wait_for_function("document.querySelector('#mg-tip').hidden")


@pytest.mark.browser
@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_front_page_moves(page: Any, site: str, motion: str) -> None:
    """Its widget plays by itself once, unless the reader asked for less motion."""
    page.emulate_media(reduced_motion=motion)
    opened(page, site, "book/index")
    widget = page.locator(".mg-player")
    widget.scroll_into_view_if_needed()
    first = caption(widget)
    if motion == "reduce":
        page.wait_for_timeout(2500)
        assert caption(widget) == first
        return
    page.wait_for_function(
        "first => document.querySelector('.mg-player figcaption').innerText.trim() != first",
        arg=first,
    )
    widget.locator(".mg-play").click()
    assert widget.locator(".mg-play").inner_text().endswith("Play"), "the reader can stop it"


@pytest.mark.browser
def test_search_finds_class_names(page: Any, site: str) -> None:
    watch = Watch(page, site)
    for query, place in [
        ("CacheManager", "04_kvcache.html#minisgl-scheduler-cache-CacheManager"),
        ("allocate_paged", "04_kvcache.html#minisgl-scheduler-cache-CacheManager"),
    ]:
        page.goto(f"{site}search.html?q={query}")
        file, _, target = place.partition("#")
        link = f'[href*="{file}?mark={query.lower()}"][href*="#{target}"]'
        page.wait_for_selector(f"#search-results a{link}", timeout=TIMEOUT_MS)
    watch.check()


# -- the map to the official code -----------------------------------------------------------------


def test_the_map_is_complete(book: Path) -> None:
    """Each definition is there, with a counterpart or a reason, and so is each official one."""
    found = official.Map(ROOT)
    assert not found.faults(), "\n".join(found.faults())
    text = (book / "book" / "official_map.html").read_text(encoding="utf-8")
    for row in found.rows():
        assert f"#{anchor(row.ours.path, row.ours.name)}" in text, row.ours.name
        if row.official:
            assert found.url(row.official).replace("&", "&amp;") in text, row.ours.name


def test_the_map_sees_other_interfaces() -> None:
    """Parameters and members that only one side has are found."""
    found = {row.ours.name: row for row in official.Map(ROOT).rows()}
    assert found["load_weight"].interface == ("+ buffer",)
    assert "+ device" in found["EngineConfig"].interface
    assert "− use_pynccl" in found["EngineConfig"].interface
    assert found["Batch"].interface == ()
    assert all(row.why for row in found.values() if row.interface)


def test_the_road_map_knows_all_chapters(book: Path) -> None:
    """Each is there with its time, read from the notebook."""
    assert minutes("about an hour and a half") == 90 and minutes("two and a half hours") == 150
    assert minutes("forty minutes more") == 40 and minutes("three hours") == 180
    assert minutes("it depends") is None
    found = names.definitions(ROOT)
    text = (book / "book" / "index.html").read_text(encoding="utf-8")
    for name in notebooks.chapters(ROOT):
        chapter = RoadMapChapter(ROOT, name, found)
        assert chapter.minutes, f"{name}: write **Time:** about an hour, …"
        assert f'href="../notebooks/{name}.html"' in text
        assert as_hours(chapter.minutes) in text


# -- paper, and no script -------------------------------------------------------------------------


@pytest.mark.browser
def test_on_paper(page: Any, site: str) -> None:
    """Answers are open, widgets show a picture and no controls, and nothing is cut off."""
    opened(page, site, "notebooks/01_core")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 720, "height": 1000})
    for details in page.locator("article details").all():
        inside = details.locator(":scope > :not(summary)").first
        assert inside.evaluate("e => e.getBoundingClientRect().height") > 0, "an answer is folded"
    for hidden in [".bd-sidebar-primary", ".mg-bar", ".copybtn", ".prev-next-area", ".mg-note"]:
        assert not page.locator(hidden).locator("visible=true").count(), hidden
    assert page.locator(".mg-widget .mg-pic svg").first.is_visible()
    wide = page.evaluate(
        """[...document.querySelectorAll("article pre, article table, .mg-pic")]
            .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 200))"""
    )
    assert not wide, f"cut off on paper: {wide}"


@pytest.mark.browser
def test_without_a_script(browser: Any, site: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}notebooks/01_core.html")
    expected = expected_widgets("notebooks/01_core")
    for number, shown in enumerate(expected):
        widget = page.locator(".mg-widget").nth(number)
        assert widget.locator(".mg-pic svg").is_visible()
        assert caption(widget) == shown.variants[0][0]
        assert not widget.locator("button").locator("visible=true").count()
    answer = page.locator("article details", has_text="Answer").first
    answer.locator("summary").click()
    assert answer.locator("p").first.is_visible()
    context.close()


# -- launching ------------------------------------------------------------------------------------


def test_first_cells_fit_the_configuration() -> None:
    """`python -m course.launch` was run since the repository's address changed."""
    wanted = launch.first_cell(launch.repository(ROOT))
    for chapter in notebooks.chapters(ROOT):
        cells = notebooks.read(ROOT, chapter).cells
        assert next(c.source for c in cells if c.cell_type == "code") == wanted, chapter


def test_only_what_is_missing_is_installed() -> None:
    assert launch.fits("5.24.1", ">=5.24,<6") and not launch.fits("6.0", ">=5.24,<6")
    assert launch.fits("8.1.9", ">=8.1.9,<9") and not launch.fits("7.7.1", ">=8.1.9,<9")
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert launch.missing(text) == [], "all of it is installed here"
    assert launch.missing("gguf>=900  # too new\ntorch==99\nruff>=900\n-e .") == ["gguf>=900"]
    named = {re.split(r"[<>=]", line)[0] for line in text.splitlines()}
    assert set(launch.NEEDED) <= named, "requirements.txt says which versions"


def test_launch_buttons_and_foreign_widgets(tmp_path: Path) -> None:
    """With an address there are launch buttons; an unknown widget is left to ipywidgets."""
    address = "https://github.com/someone/course"
    config = (ROOT / "_config.yml").read_text(encoding="utf-8")
    (tmp_path / "_config.yml").write_text(
        config.replace('url: ""', f'url: "{address}"'), encoding="utf-8"
    )
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters:\n  - file: notebooks/01_foreign\n",
        encoding="utf-8",
    )
    shutil.copytree(ROOT / "book", tmp_path / "book")
    (tmp_path / "book" / "index.md").write_text("# Home\n", encoding="utf-8")
    (tmp_path / "notebooks").mkdir()
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            "widgets": {WIDGET_STATE: {"version_major": 2, "version_minor": 0, "state": FOREIGN}},
        },
        "cells": [
            {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Foreign"},
            {
                "cell_type": "code",
                "id": "b",
                "metadata": {},
                "execution_count": 1,
                "source": launch.first_cell(address),
                "outputs": [
                    {
                        "output_type": "display_data",
                        "metadata": {},
                        "data": {WIDGET_VIEW: {"model_id": "f" * 32, "version_major": 2}},
                    }
                ],
            },
        ],
    }
    path = tmp_path / "notebooks" / "01_foreign.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    built(tmp_path, tmp_path / "out", "-q")
    text = (tmp_path / "out/_build/html/notebooks/01_foreign.html").read_text(encoding="utf-8")
    assert "mybinder.org/v2/gh/someone/course/main?urlpath=lab/tree/notebooks/01_" in text
    assert "colab.research.google.com/github/someone/course/blob/main/notebooks/01_" in text
    assert "JupyterLab" in text and f'href="{address}"' in text
    assert "git clone" not in text and "load_ext" in text, "the page shows what a reader must know"
    assert "embed.js" in text and WIDGET_STATE in text


def test_no_launch_buttons_without_an_address(book: Path) -> None:
    if not launch.repository(ROOT):
        text = (book / "notebooks" / "01_core.html").read_text(encoding="utf-8")
        assert "mybinder" not in text and "colab" not in text and "fa-rocket" not in text


FOREIGN = {
    "f" * 32: {
        "model_name": "IntProgressModel",
        "model_module": "@jupyter-widgets/controls",
        "model_module_version": "2.0.0",
        "state": {"value": 3},
    }
}
"""The state of a widget that `course.book.players` does not know."""


@pytest.mark.parametrize("name", [p for p in pages() if p.startswith("notebooks/")])
def test_checks_are_folded_and_say_how_many_there_are(book: Path, name: str) -> None:
    text = (book / f"{name}.html").read_text(encoding="utf-8")
    folds = re.findall(
        r'<details class="checks"><summary>(.*?)</summary>(.*?)</details>', text, re.S
    )
    assert folds and all("check" in said for said, _ in folds)
    assert any(re.search(r"\d+ checks?: all pass", said) for said, _ in folds), folds
    open_text = re.sub(r"<details.*?</details>", "", text, flags=re.S)
    plain = re.sub(r"<[^>]+>", "", open_text)
    blocks = re.findall(r"(?m)^def (check_\w+)\((\w*)", plain)
    assert not [name for name, argument in blocks if not argument], "only exercises' stay open"


def test_c_within_python_is_shown_as_c(book: Path) -> None:
    text = (book / "notebooks/stage1_performance.html").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"(?s)<pre>.*?</pre>", text) if "add_rmsnorm_TYPE" in b)
    assert '<span class="kt">int64_t</span>' in block and '<span class="k">for</span>' in block
    assert re.search(r'<span class="cm">/\* .*?\*/</span>', block, re.S), "a comment of C"
    plain = re.sub(r"<[^>]+>", "", block)
    assert plain.count("&quot;&quot;&quot;") % 2 == 0 and 'class="err"' not in block
