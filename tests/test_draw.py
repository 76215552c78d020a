"""The drawings: well-formed, escaped, deterministic, readable, and linked without a script."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course.pictures import canvas as draw
from course.pictures import style
from course.pictures.canvas import Canvas, Cell, Node

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "<script>alert(1)</script> & \"quotes\" 'too' ]]> \x00\x1b\ud800"


def parsed(canvas: Canvas) -> ET.Element:
    return ET.fromstring(str(canvas))


def texts(canvas: Canvas) -> list[str]:
    return ["".join(t.itertext()) for t in parsed(canvas).iter(f"{SVG}text")]


def everything() -> Canvas:
    """A picture that uses every primitive."""
    c = Canvas(700, 1400, title="everything", desc="one of each")
    for i, kind in enumerate(draw.KINDS):
        c.box(
            8 + i % 10 * 68, 8 + i // 10 * 48, 60, 40, kind=kind, text=kind, sub=i, key=f"k{i % 3}"
        )
    spans = c.tokens(8, 160, [Cell("The", "cached", sub=0), "cat", Cell("sat", "new", mark="req1")])
    c.bracket(spans[0].left, spans[2].right, 206, "device_len = 3", kind="cached", key="k1")
    c.bracket(spans[0].left, spans[0].left, 155, "nothing", side="above")
    c.grid(90, 270, [[Cell(32, "page2"), None], ["x", Cell("", "waste")]], row_labels=["a", "b"])
    c.grid(300, 270, [["x", "y"]], col_labels=[0, 1], key="slot")
    c.mask(500, 270, [[True, False], [True, True]], row_labels=[0, 1], col_labels=[0, 1])
    c.matrix(8, 370, 60, 90, parts=[("q", 4, "weight"), ("k", 1, "act")], text="W", shape=[5, 4])
    c.matrix(90, 370, 60, 40, text="W", shape="[2, 2]")
    c.matrix(200, 370, 90, 40, parts=[("q", 4, "weight"), ("k", 1, "act")], axis="cols", key="m")
    c.arrow(10, 480, 100, 480, label="to", kind="new")
    c.arrow(110, 480, 200, 520, label="bent", bend=-20)
    c.arrow(300, 480, 300, 520, label="down", dashed=True)
    c.line(10, 530, 100, 530, dashed=True)
    c.dot(120, 530, shape="triangle", kind="act", tip="a mark")
    c.text(150, 530, "two\nlines", weight="bold", muted=True, mono=True, anchor="middle")
    c.tree(8, 560, [Node("root", children=[Node("leaf", "[3, 4]", kind="weight", key="k0")])])
    c.bars(8, 640, 500, [("a", 10, "new"), ("b", 0, "cached")], unit="MB")
    c.timeline(8, 720, 600, [("q", [(0, 2, "new", "read")])], end=4, now=1, ticks=[(0, "0")])
    c.chart(
        8, 800, 500, 260, {"a": [(1, 1), (2, 4)], "b": [(1, 9)]}, xlog=True, xlabel="x", ylabel="y"
    )
    c.legend(8, 1100, list(draw.KINDS))
    return c


def test_every_primitive_gives_well_formed_svg_of_one_look() -> None:
    """Well-formed, no ids, no script, no font below the smallest, equal each time."""
    svg = str(everything())
    root = ET.fromstring(svg)
    assert root.get("viewBox") == "0 0 700 1400"
    assert " id=" not in svg and "<script" not in svg and "url(" not in svg
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', svg)]
    assert min(sizes) >= draw.MIN_SIZE
    assert svg == str(everything())


@given(st.text())
def test_any_text_is_text(text: str) -> None:
    """Whatever a model emits: the SVG parses, and no element comes from the text."""
    c = Canvas(300, 100, title=text if text.strip() else "t", desc=text)
    c.box(0, 0, 300, 40, text=text, sub=text, key=text, tip=text)
    c.text(0, 60, text, key=text)
    root = parsed(c)
    known = {
        f"{SVG}{tag}" for tag in ("svg", "title", "desc", "style", "rect", "g", "text", "path")
    }
    assert {element.tag for element in root.iter()} <= known


def test_everything_that_takes_text_escapes_it() -> None:
    c = Canvas(700, 700, title=NASTY, desc=NASTY)
    c.box(0, 0, 500, 40, text=NASTY, sub=NASTY, key=NASTY, tip=NASTY)
    c.text(0, 60, NASTY, key=NASTY)
    c.bracket(0, 100, 80, NASTY)
    c.arrow(0, 120, 90, 120, label=NASTY)
    c.legend(0, 140, [("new", NASTY)])
    c.grid(200, 200, [[Cell(NASTY, tip=NASTY)]], row_labels=[NASTY], col_labels=[NASTY])
    c.mask(200, 300, [[True]], row_labels=[NASTY], col_labels=[NASTY])
    c.matrix(0, 400, 100, 40, parts=[(NASTY, 1, "weight")], text=NASTY, key="m")
    c.tree(0, 460, [Node(NASTY, NASTY)])
    c.bars(0, 500, 500, [(NASTY, 1, "new")], unit=NASTY)
    c.timeline(0, 540, 500, [(NASTY, [(0, 1, "new", NASTY)])], ticks=[(0, NASTY)])
    c.chart(0, 580, 500, 100, {NASTY: [(0, 1)]}, xlabel=NASTY, ylabel=NASTY)
    root = parsed(c)
    assert not list(root.iter(f"{SVG}script"))
    shown = "<script>alert(1)</script> & \"quotes\" 'too' ]]> \ufffd\ufffd\ufffd"
    assert root.findtext(f"{SVG}title") == shown
    assert shown in texts(c)


def test_title_and_description_are_the_text_alternative() -> None:
    c = Canvas(100, 50, title="A name", desc="What it says.")
    root = parsed(c)
    assert (root.get("role"), root.get("aria-label")) == ("img", "A name")
    assert root.findtext(f"{SVG}desc") == "What it says."
    assert c._repr_mimebundle_() == {
        "image/svg+xml": str(c),
        "text/plain": "[picture] A name\nWhat it says.",
    }
    with pytest.raises(ValueError, match="needs a title"):
        Canvas(100, 50, title=" ")
    with pytest.raises(ValueError, match="positive size"):
        Canvas(0, 50, title="x")


def test_equal_keys_are_linked_by_style_alone() -> None:
    """Both boxes have the class of their key; the first can be reached with the Tab key."""
    c = Canvas(300, 100, title="t")
    c.box(0, 0, 50, 40, text="a", key="loc32")
    c.box(60, 0, 50, 40, text="b", key="loc32")
    c.box(120, 0, 50, 40, text="alone", key="loc33")
    assert c.links == 1
    svg = str(c)
    groups = [g for g in parsed(c).iter(f"{SVG}g") if g.get("data-key") == "loc32"]
    assert [g.get("class", "").split()[-1] for g in groups] == ["k0", "k0"]
    assert [g.get("tabindex") for g in groups] == ["0", "-1"]
    assert [g.get("aria-label") for g in groups] == ["a", "b"]
    assert ".mg:has(.k0:hover,.k0:focus) .k0" in svg and ".k1" not in svg
    assert parsed(c).get("role") == "group", "parts that can be reached are not inside an img"
    assert draw.style(1) in svg and "<style>" not in c.svg(with_style=False)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda c: c.box(0, 0, 10, 10, kind="cache"),
            "unknown kind 'cache'; choose from cached, new",
        ),
        (lambda c: c.box(95, 0, 10, 10), "sticks out of the picture of 100 × 50"),
        (lambda c: c.box(0, 0, 10, 10, mark="new"), "mark= takes a page or a request"),
        (lambda c: c.bracket(20, 10, 0), "from left to right"),
        (lambda c: c.arrow(1, 1, 1, 1), "two different end points"),
        (lambda c: c.box(float("nan"), 0, 1, 1), "finite"),
        (lambda c: c.bars(0, 0, 100, [("a", -1, "new")]), "from zero up"),
        (lambda c: c.timeline(0, 0, 100, [], start=3, end=3), "end > start"),
        (lambda c: c.chart(0, 0, 100, 50, {}), "at least one point"),
        (lambda c: c.chart(0, 0, 100, 50, {"a": [(0, 1)]}, xlog=True), "above zero"),
    ],
)
def test_mistakes_say_what_to_do(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        call(Canvas(100, 50, title="t"))  # type: ignore[operator]


def test_text_that_does_not_fit_is_cut_and_kept_as_tooltip() -> None:
    c = Canvas(200, 50, title="t")
    c.box(0, 0, 60, 40, text="a rather long token")
    (shown,) = texts(c)
    assert shown.endswith("…") and draw.text_width(shown, draw.MIN_SIZE) <= 60
    assert "<title>a rather long token</title>" in str(c)


def test_tokens_of_a_row_have_one_size() -> None:
    c = Canvas(300, 50, title="t")
    c.tokens(0, 0, ["a", "␣longer", "b"])
    assert len(set(re.findall(r'font-size="([\d.]+)"', str(c)))) == 1


def test_visible() -> None:
    assert draw.visible(" Paris\n\t") == "␣Paris⏎⇥"
    assert draw.visible("a\x00b\r") == "a\ufffdb␍"


def test_legend_wraps_and_says_its_height() -> None:
    kinds = ["cached", "new", "todo", "waste"]
    assert Canvas(700, 100, title="t").legend(0, 0, kinds).h == 24
    narrow = Canvas(220, 100, title="t")
    assert narrow.legend(0, 0, kinds).h in (48, 72)


# -- colors ---------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted([luminance(a), luminance(b)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("theme", "colors"), [("light", style.LIGHT), ("dark", style.DARK)])
def test_contrast(theme: str, colors: dict[str, tuple[str, str]]) -> None:
    """Text on every fill, and lines against the ground (WCAG: 4.5 and 3)."""
    for hue, (fill, line) in colors.items():
        assert contrast(style.INK[theme], fill) >= 7, f"text on {hue}"
        assert contrast(style.MUTED[theme], fill) >= 4.5, f"quiet text on {hue}"
        if hue != "rule":
            assert contrast(line, style.GROUND[theme]) >= 3, f"line of {hue}"
    assert contrast(style.MUTED[theme], style.GROUND[theme]) >= 4.5


def test_no_two_kinds_look_alike_without_color() -> None:
    """Pattern, border, corners and strip tell kinds apart that mean different states."""
    looks = {name: kind for name, kind in style.LOOKS.items() if name not in ("free", "plain")}
    marks = [(k.pattern, k.dash, k.radius, k.strip, k.strip_dash) for k in looks.values()]
    assert len(set(marks)) == len(marks)
