"""Whether a page is easy to use: read, printed, searched, on a phone, and by keyboard.

`pytest tests/test_page.py -s` prints the table of its measures. What is right or wrong on a page
is looked at in `test_book.py`, whose fixtures these tests share.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import TIMEOUT_MS
from test_book import (
    AXE,
    ROOT,
    WIDGET_PAGES,
    book,
    browser,
    new_page,
    opened,
    page,
    pages,
    site,
)

from course.book import links, players
from course.building import notebooks

__all__ = ["book", "browser", "page", "site"]  # the fixtures

SIDEWAYS = 20
"""At most so many blocks of code or output of all pages may scroll sideways at 1280."""
CUT = 17
"""At most so many figures may be wider than a phone: those that have to be drawn anew for it."""
STOPS = 90
"""At most so many stops of the Tab key on a page."""
SMALL_PX = 12
THEMES = ["light", "dark"]
CHAPTERS = [name for name in pages() if name.startswith("notebooks/")]

FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex]"
SEEN = "e => e.checkVisibility({visibilityProperty: true}) && !e.disabled"
LABELS = """
    [...document.querySelectorAll("article .mg-pic > svg text")]
        .filter(text => text.checkVisibility() && text.textContent.trim())
        .map(text => {
            const svg = text.ownerSVGElement;
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
            return parseFloat(getComputedStyle(text).fontSize) * scale;
        })
"""
WIDE = "e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1"


def unfold(page: Any) -> None:
    page.evaluate("document.querySelectorAll('article details').forEach(d => { d.open = true; })")


def sideways(page: Any) -> list[str]:
    """The blocks of code and output that scroll sideways."""
    found: list[str] = page.evaluate(
        f"[...document.querySelectorAll('article pre')].filter({WIDE})"
        ".map(e => e.textContent.slice(0, 60))"
    )
    return found


def stops(page: Any) -> int:
    """How often one presses Tab to get through a page."""
    found: int = page.evaluate(
        f"[...document.querySelectorAll({FOCUSABLE!r})]"
        f".filter({SEEN}).filter(e => e.tabIndex >= 0).length"
    )
    return found


# -- the measures ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measures(browser: Any, site: str) -> Iterator[dict[str, dict[str, Any]]]:
    """Each page at 1280, 1366 × 650 and 375 wide; printed as a table at the end."""
    found: dict[str, dict[str, Any]] = {}
    page = new_page(browser)
    for name in pages():
        watch = opened(page, site, name)
        row: dict[str, Any] = {"weight": watch.weight, "stops": stops(page)}
        unfold(page)
        row["blocks"] = page.locator("article pre").count()
        row["sideways"] = sideways(page)
        page.set_viewport_size({"width": 1366, "height": 650})
        page.wait_for_timeout(100)
        row["widgets"] = page.evaluate(
            """[...document.querySelectorAll(".mg-player")].map(player => {
                const box = e => e.getBoundingClientRect();
                const caption = box(player.querySelector("figcaption"));
                const bar = [".mg-bar", ".mg-choice", ".mg-title"]
                    .map(name => player.querySelector(name)).find(Boolean);
                return {
                    height: box(player).height,
                    picture: box(player.querySelector("svg")).height,
                    gap: caption.top - box(bar).bottom,
                    below: caption.bottom <= box(player.querySelector("svg")).top + 1,
                };
            })"""
        )
        page.set_viewport_size({"width": 375, "height": 800})
        page.wait_for_timeout(200)
        row["figures"] = page.locator("article .mg-pic").count()
        row["cut"] = page.evaluate(
            f"[...document.querySelectorAll('article .mg-pic')].filter({WIDE})"
            ".map(e => e.querySelector('svg').getAttribute('aria-label'))"
        )
        row["labels"] = page.evaluate(LABELS)
        row["tables"] = page.evaluate(
            "[...document.querySelectorAll('article .pst-scrollable-table-container')]"
            f".filter({WIDE}).length"
        )
        page.set_viewport_size({"width": 1280, "height": 900})
        found[name] = row
    page.context.close()
    yield found
    print("\n  weight  stops  blocks sideways  figures cut  labels <12  tallest widget  page")
    for name, row in found.items():
        small = sum(size < SMALL_PX - 0.1 for size in row["labels"])
        tallest = max((widget["height"] for widget in row["widgets"]), default=0)
        print(
            f"{row['weight']:8,} {row['stops']:6} {row['blocks']:7} {len(row['sideways']):8} "
            f"{row['figures']:8} {len(row['cut']):3} {small:11} {tallest:15.0f}  {name}"
        )


@pytest.mark.browser
def test_code_and_outputs_fit(measures: dict[str, dict[str, Any]]) -> None:
    wide = [f"{name}: {text}" for name, row in measures.items() for text in row["sideways"]]
    assert len(wide) <= SIDEWAYS, "\n".join(wide)


@pytest.mark.browser
def test_figures_on_a_phone(measures: dict[str, dict[str, Any]]) -> None:
    """Labels can be read, and what fits so is not cut; tables are cards."""
    small = {n: [s for s in row["labels"] if s < SMALL_PX - 0.1] for n, row in measures.items()}
    assert not any(small.values()), small
    cut = [f"{name}: {label}" for name, row in measures.items() for label in row["cut"]]
    assert len(cut) <= CUT, "\n".join(cut)
    assert not any("You are here" in label for label in cut)
    assert not sum(row["tables"] for row in measures.values()), "a table is cut"


@pytest.mark.browser
def test_few_stops(measures: dict[str, dict[str, Any]]) -> None:
    many = {name: row["stops"] for name, row in measures.items() if row["stops"] > STOPS}
    assert not many


@pytest.mark.browser
def test_a_widget_is_seen_at_once(measures: dict[str, dict[str, Any]]) -> None:
    """Its caption is under the slider and above the picture, and all fits a small window."""
    for name, row in measures.items():
        for widget in row["widgets"]:
            assert widget["below"] and widget["gap"] < 16, f"{name}: {widget}"
            assert widget["picture"] <= 481, f"{name}: {widget}"
            assert widget["height"] <= 650, f"{name}: {widget}"


@pytest.mark.browser
@pytest.mark.parametrize("name", ["notebooks/04_kvcache", "book/official_map"])
def test_no_violation_of_any_rule(page: Any, site: str, name: str) -> None:
    """Also of those that axe calls moderate or minor, on a phone."""
    opened(page, site, name)
    page.set_viewport_size({"width": 375, "height": 800})
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        """async () => {
            const options = {resultTypes: ["violations"],
                rules: {"color-contrast": {enabled: false}}};
            const result = await axe.run(document, options);
            return result.violations.map(v => `${v.id}: ${v.nodes[0].target} (${v.nodes.length})`);
        }"""
    )
    assert not found, "\n".join(found)


# -- buttons --------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
def test_a_pressed_button_can_be_read(page: Any, site: str, theme: str) -> None:
    """The contrast of each variant's button right after a click, the pointer still on it."""
    name = next(n for n in WIDGET_PAGES if "04" in n)
    opened(page, site, name)
    page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
    for button in page.locator(".mg-choice button").all():
        button.click()
        page.wait_for_timeout(250)
        assert button.evaluate(CONTRAST) >= 4.5, button.inner_text()


CONTRAST = """e => {
    const light = color => {
        const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const style = getComputedStyle(e);
    const [a, b] = [style.color, style.backgroundColor].map(light).sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
}"""


# -- paper ----------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.skipif(not shutil.which("pdftotext"), reason="no pdftotext (poppler-utils)")
def test_folded_code_is_printed(page: Any, site: str, tmp_path: Path) -> None:
    """The print holds the code that is folded on the screen, and no page is left half empty."""
    opened(page, site, "notebooks/04_kvcache")
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    done = subprocess.run(
        ["pdftotext", "-layout", tmp_path / "page.pdf", "-"], capture_output=True, check=True
    )
    text = "".join(done.stdout.decode("utf-8").split())
    for cell in notebooks.read(ROOT, "04_kvcache").cells:
        if "hide-input" in cell.metadata.get("tags", ()):
            assert "".join(cell.source.split()[:8]) in text, cell.source[:80]


@pytest.mark.browser
def test_unfolded_code_is_there_at_once(page: Any, site: str) -> None:
    """In print nothing fades in: a print shows the first moment, in which it isn't there yet."""
    opened(page, site, "notebooks/04_kvcache")
    page.emulate_media(media="print")
    unfold(page)
    faint = page.evaluate(
        """[...document.querySelectorAll("article details > *")]
            .filter(e => getComputedStyle(e).opacity < 1).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not faint
    cut = page.evaluate(
        """[...document.querySelectorAll("article .cell_input, article .cell_input *")]
            .filter(e => e.checkVisibility() && getComputedStyle(e).overflowY !== "visible")
            .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not cut, "such a box can't be broken across pages"


# -- a phone --------------------------------------------------------------------------------------


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    context = browser.new_context(
        viewport={"width": 375, "height": 800}, has_touch=True, is_mobile=True
    )
    context.set_default_timeout(TIMEOUT_MS)
    yield context.new_page()
    context.close()


@pytest.mark.browser
def test_the_first_tap_shows_what_a_word_means(phone: Any, site: str) -> None:
    opened(phone, site, "notebooks/04_kvcache")
    before = phone.url
    word = phone.locator("article a.term").first
    word.tap()
    phone.wait_for_timeout(200)
    assert phone.url == before
    assert phone.locator("#mg-tip").is_visible()
    word.tap()
    phone.wait_for_url("**/glossary.html#*")


@pytest.mark.browser
def test_the_map_says_what_differs(phone: Any, site: str) -> None:
    """On a phone each definition is a card that names its columns."""
    opened(phone, site, "book/official_map")
    cell = phone.locator("table.map tbody tr td:nth-child(4):has(p:not(:empty))").first
    cell.scroll_into_view_if_needed()
    box = cell.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 375
    said = cell.evaluate("e => getComputedStyle(e, '::before').content")
    assert "what differs" in said


# -- where one is ---------------------------------------------------------------------------------


@pytest.mark.browser
def test_contents_follow_a_jump(page: Any, site: str) -> None:
    page.set_viewport_size({"width": 1366, "height": 800})
    opened(page, site, "notebooks/04_kvcache")
    links = page.locator("#mg-contents a")
    for number in [5, 2, links.count() - 1, 0]:
        link = links.nth(number)
        link.click()
        page.wait_for_function(
            """href => {
                const now = document.querySelectorAll("#mg-contents a[aria-current]");
                return now.length == 1 && now[0].getAttribute("href") == href
                    && document.querySelectorAll("#mg-contents a.active").length == 1;
            }""",
            arg=link.get_attribute("href"),
        )
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.wait_for_function("document.querySelector('.mg-read').style.transform == 'scaleX(1)'")


# -- search ---------------------------------------------------------------------------------------


@pytest.mark.browser
def test_search_puts_the_glossary_first(page: Any, site: str) -> None:
    """For each of its words; a name of the package comes after it, a place in a text last."""
    page.goto(f"{site}search.html?q=RoPE")
    first = page.locator("ul.search li a").first
    first.wait_for()
    assert "glossary.html" in first.get_attribute("href")
    page.wait_for_function("typeof Search !== 'undefined' && Search.hasIndex()")
    others = page.evaluate(
        """terms => terms.filter(([word, anchor]) => {
            const found = Search._performSearch(...Search._parseQuery(word)).pop();
            return !found || found[0] != "book/glossary" || found[2] != "#" + anchor;
        })""",
        [[term.word, term.anchor] for term in links.glossary(ROOT)],
    )
    assert not others


@pytest.mark.browser
def test_search_quotes_the_article(page: Any, site: str) -> None:
    """And leads to the section, where the words are marked and in sight."""
    page.goto(f"{site}search.html?q=prefill")
    page.wait_for_function("document.querySelectorAll('ul.search li p.context').length > 8")
    page.wait_for_timeout(300)
    results = page.locator("ul.search li")
    for result in results.all():
        said = " ".join(result.locator("p.context").all_inner_texts())
        assert not re.search(r"Contents|Debugging How to|Show the code|Exercises 1\.", said), said
    links = results.locator("a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert all("?mark=prefill" in link for link in links)
    assert sum("#" in link for link in links) >= len(links) - 2, links
    link = next(link for link in links if "05_attention" in link or "06_engine" in link)
    page.goto(site + link)
    page.wait_for_timeout(300)
    seen = page.evaluate(
        """[...CSS.highlights.get("mg-mark")].filter(range => {
            const box = range.getBoundingClientRect();
            return box.width && box.top >= 0 && box.bottom <= innerHeight;
        }).length"""
    )
    assert seen, "a mark is in sight"
    page.keyboard.press("Escape")
    assert not page.evaluate("CSS.highlights.has('mg-mark')")


# -- keyboard -------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize(
    "name", ["notebooks/02_layers", "notebooks/06_engine", "book/official_map"]
)
def test_everything_is_reached_by_keyboard(page: Any, site: str, name: str) -> None:
    """Whatever can be used is a stop of the Tab key, or one arrow key away from what is reached."""
    opened(page, site, name)
    unfold(page)
    lost = page.evaluate(
        f"""[...document.querySelectorAll("a[href], button, input, select, summary")]
            .filter({SEEN})
            .filter(e => e.tabIndex < 0 && !(e.roving && e.roving.some(o => o.tabIndex >= 0)))
            .filter(e => !e.matches("dialog, .headerlink, #pst-back-to-top")
                && !e.closest("dialog, svg"))
            .map(e => e.outerHTML.slice(0, 100))"""
    )
    assert not lost
    group = page.locator("article [data-rove][tabindex='0']:is(a, button)").last
    group.focus()
    count = group.evaluate("e => e.roving.length")
    seen = set()
    for _ in range(count):
        seen.add(page.evaluate("document.activeElement.roving.indexOf(document.activeElement)"))
        page.keyboard.press("ArrowRight")
    assert seen == set(range(count))


@pytest.mark.browser
def test_parts_of_a_picture_by_arrow_keys(page: Any, site: str) -> None:
    opened(page, site, "notebooks/04_kvcache")
    for picture in page.locator("article .mg-pic:has([data-rove])").all():
        assert picture.locator("[tabindex='0']").count() == 1, "one stop a picture"
        first = picture.locator("[tabindex='0']")
        first.focus()
        key = first.get_attribute("data-key")
        page.keyboard.press("ArrowRight")
        now = page.evaluate("document.activeElement.dataset.key")
        assert now and now != key
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("document.activeElement.dataset.key") == key


@pytest.mark.browser
def test_focus_is_seen(page: Any, site: str) -> None:
    """On the buttons above the article, too."""
    opened(page, site, "notebooks/01_core")
    buttons = page.locator(".header-article-items :is(button, a)").locator("visible=true")
    assert buttons.count() >= 3
    page.keyboard.press("Tab")  # focus by keyboard from here on
    for button in buttons.all():
        button.focus()
        style = button.evaluate(
            "e => { const s = getComputedStyle(e); return [s.outlineStyle, s.outlineWidth]; }"
        )
        assert style == ["solid", "2px"], button.evaluate("e => e.outerHTML.slice(0, 120)")


# -- answers --------------------------------------------------------------------------------------


def test_an_answer_is_one_fold(book: Path) -> None:
    """Words, code and output: nothing of it stands open in the page."""
    folds = 0
    for name in CHAPTERS:
        text = (book / f"{name}.html").read_text(encoding="utf-8")
        cells = notebooks.read(ROOT, name.partition("/")[2]).cells
        for words, code in pairwise(cells):
            tags = set(code.metadata.get("tags", ()))
            if not (
                words.cell_type == "markdown"
                and words.source.rstrip().endswith("</details>")
                and tags & {"hide-input", "hide-cell"}
            ):
                continue
            folds += 1
        assert not re.search(r'</details>\s*<div class="cell tag_hide-', text), name
        for answer in re.finditer(r'<div class="cell[^"]*\banswer\b', text):
            before = text[: answer.start()]
            assert before.count("<details") > before.count("</details>"), name
    assert folds > 30
    shown = sum(
        len(re.findall(r'<div class="cell[^"]*\banswer\b', (book / f"{n}.html").read_text("utf-8")))
        for n in CHAPTERS
    )
    assert shown == folds


@pytest.mark.browser
def test_answers_give_nothing_away(browser: Any, site: str) -> None:
    """With and without a script: the output shows with the answer and not before."""
    for script in [True, False]:
        context = browser.new_context(java_script_enabled=script)
        page = context.new_page()
        page.goto(f"{site}notebooks/04_kvcache.html")
        fold = page.locator("article details:has(.cell.answer)").last
        output = fold.locator(".cell_output")
        assert not output.is_visible()
        fold.locator("summary").first.click()
        assert output.is_visible() and fold.locator(".cell_input").is_visible()
        context.close()


# -- small ----------------------------------------------------------------------------------------


def test_ids_are_unique(book: Path) -> None:
    for file in book.rglob("*.html"):
        found = Counter(re.findall(r'<[a-z][^>]*?\sid="([^"]+)"', file.read_text("utf-8")))
        twice = [ident for ident, count in found.items() if count > 1]
        assert not twice, f"{file.relative_to(book)}: {twice}"


def test_hours_are_the_same_everywhere(book: Path) -> None:
    said = re.search(
        r"takes about (\d+) hours, (\d+)", (book / "book/index.html").read_text("utf-8")
    )
    assert said
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"takes about {said[1]} hours\W+{said[2]} with all", readme)


def test_a_slider_of_values_says_the_value(book: Path) -> None:
    """`temperature 0.5` and not `Step 1 / 5`."""
    text = (book / "notebooks" / "06_engine.html").read_text(encoding="utf-8")
    assert 'data-name="temperature" data-value="0.5"' in text
    assert 'data-name="top-p" data-value="0.9"' in text
    frames = ["<figcaption><b>decode 1</b></figcaption>", "<figcaption>prefill</figcaption>"]
    assert players.step_values(frames) == ("Step", ())


def test_a_page_promises_no_controls_that_it_lacks(book: Path) -> None:
    for name in WIDGET_PAGES:
        text = html.unescape((book / f"{name}.html").read_text(encoding="utf-8"))
        for part in text.split('<div class="mg-widget')[1:]:
            note = re.search(r'<p class="mg-note">(.*?)</p>', part.split("mg-stage")[0])
            if note and "mg-bar" not in part.split("mg-stage")[0]:
                assert note[1].startswith("One setting, as a picture."), note[1]
