"""How pictures look: colors, kinds of boxes, patterns, the width of text, and the style sheet."""

from __future__ import annotations

import html
import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

MAX_WIDTH = 720
"""The widest picture that fits the text column of the book at full size."""

PHONE_WIDTH = 456
"""The widest picture that a phone (375 px) shows without scrolling inside its frame."""

MIN_SIZE = 13
"""The smallest font size, in user units. Smaller requests are raised to it."""

SHRINK = 0.75
"""A picture is scaled down to this share of its size at most; then its frame scrolls."""

Anchor: TypeAlias = Literal["start", "middle", "end"]

# -- colors ---------------------------------------------------------------------------------------

# hue -> (fill, line). Text in ink on every fill has a contrast of at least 7:1, and every line at
# least 3:1 against the background, in both themes (tests/test_draw.py computes it).
LIGHT: dict[str, tuple[str, str]] = {
    "blue": ("#cfe2f6", "#0a66a8"),
    "orange": ("#ffe2ad", "#a96800"),
    "green": ("#c6ecdc", "#007a58"),
    "yellow": ("#f6f0a0", "#857500"),
    "purple": ("#f3d6e6", "#a2447a"),
    "sky": ("#d9f3fd", "#2a86b0"),
    "red": ("#fcd5c3", "#c04a00"),
    "gray": ("#e3e6eb", "#646d7a"),
    "plain": ("#f6f7f9", "#75808f"),
    "free": ("#fbfcfd", "#8a93a0"),
    "todo": ("#ffffff", "#646d7a"),
    "rule": ("#ffffff", "#d3d8df"),
}
DARK: dict[str, tuple[str, str]] = {
    "blue": ("#173b5e", "#64b2ea"),
    "orange": ("#573a06", "#f0ab2c"),
    "green": ("#0e4636", "#3fcb9c"),
    "yellow": ("#454009", "#e3d84d"),
    "purple": ("#50283f", "#e59ac4"),
    "sky": ("#134b61", "#86d6f7"),
    "red": ("#5a2a10", "#f78e55"),
    "gray": ("#363c47", "#a0a9b6"),
    "plain": ("#242a33", "#8791a0"),
    "free": ("#1b2027", "#6f7987"),
    "todo": ("#14181e", "#a0a9b6"),
    "rule": ("#14181e", "#3a424e"),
}
INK = {"light": "#17202c", "dark": "#e9edf3"}
MUTED = {"light": "#4d5867", "dark": "#b4bdca"}
GROUND = {"light": "#ffffff", "dark": "#14181e"}

Pattern: TypeAlias = Literal["", "hatch", "cross"]
Strip: TypeAlias = Literal["", "bottom", "left"]


@dataclass(frozen=True)
class Look:
    """How one kind of box looks: hue, pattern inside, border dashes, corner radius, strip."""

    hue: str
    label: str
    pattern: Pattern = ""
    dash: str = ""
    radius: float = 4
    strip: Strip = ""
    strip_dash: str = ""


_IDENTITY = ("blue", "orange", "green", "purple", "yellow", "red", "sky", "gray")
_STRIP_DASHES = ("", "7 3", "2 2.5", "10 3 2 3", "4 2 1 2", "1 4", "14 4", "5 6")

LOOKS: dict[str, Look] = {
    "cached": Look("blue", "cached"),
    "new": Look("orange", "computed now", pattern="hatch"),
    "todo": Look("todo", "to come", dash="5 4"),
    "free": Look("free", "free"),
    "waste": Look("red", "wasted", pattern="cross"),
    "weight": Look("purple", "weight", radius=0),
    "act": Look("green", "activation", radius=10),
    "plain": Look("plain", ""),
    "dummy": Look("gray", "dummy", dash="1.5 3"),
}
for _i, (_hue, _dashes) in enumerate(zip(_IDENTITY, _STRIP_DASHES, strict=True)):
    LOOKS[f"page{_i}"] = Look(_hue, f"page {_i}", strip="bottom", strip_dash=_dashes)
for _i in range(6):
    LOOKS[f"req{_i}"] = Look(
        _IDENTITY[_i], f"request {_i}", strip="left", strip_dash=_STRIP_DASHES[_i]
    )

KINDS: tuple[str, ...] = tuple(LOOKS)
"""The names that `kind=` takes:

`cached` (KV already in the pool), `new` (computed by this pass), `todo` (to come), `free`,
`waste`, `weight` (square corners), `act` (round corners), `plain`, `dummy`,
`page0` … `page7` (which page; use `f"page{n % 8}"`) and `req0` … `req5` (which request).
"""


def look_of(name: str) -> Look:
    try:
        return LOOKS[name]
    except KeyError:
        raise ValueError(f"unknown kind {name!r}; choose from {', '.join(KINDS)}") from None


# -- small helpers --------------------------------------------------------------------------------


def fmt(value: float) -> str:
    """A coordinate with at most two decimals; -0 and trailing zeros never appear."""
    if not math.isfinite(value):
        raise ValueError(f"a coordinate must be a finite number, got {value}")
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


# What XML 1.0 can't hold: control characters, lone surrogates, and two that aren't characters.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0d\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def clean(text: object) -> str:
    """`text` as a string that XML can hold; whatever it can't becomes U+FFFD."""
    return _NOT_XML.sub("\ufffd", str(text))


def esc(text: object) -> str:
    """`text` escaped for SVG content and for double-quoted attributes."""
    return html.escape(clean(text), quote=True)


_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible(token: str) -> str:
    """A token as a reader can see it: a space shows as `␣`, a newline as `⏎`, a tab as `⇥`.

    >>> visible(" Paris")
    '␣Paris'
    """
    return clean(token.translate(_VISIBLE))


def text_width(text: object, size: float = 14, *, mono: bool = False) -> float:
    """About how wide `text` is at font size `size`, in user units (never far too small)."""
    narrow, wide = set("iljtfrI.,:;'|!()[] "), set("mwMW@%—…")
    total = 0.0
    for char in clean(text):
        if ord(char) >= 0x1100:  # CJK, emoji and other wide characters
            total += 1.0 if ord(char) >= 0x2E80 else 0.75
        elif mono:
            total += 0.61
        else:
            total += 0.34 if char in narrow else 0.9 if char in wide else 0.58
    return total * size


def fit(text: str, room: float, size: float, mono: bool) -> tuple[str, float]:
    """`text` and a font size at which it fits into `room`: smaller type first, then an ellipsis."""
    needed = text_width(text, size, mono=mono)
    if needed <= room:
        return text, size
    size = max(MIN_SIZE, size * room / needed)
    if text_width(text, size, mono=mono) <= room:
        return text, size
    while text and text_width(text + "…", size, mono=mono) > room:
        text = text[:-1]
    return text.rstrip() + "…" if text else "…", size


def hatch(x: float, y: float, w: float, h: float, step: float = 7) -> str:
    """Path data of diagonal lines (bottom left to top right) inside a rectangle."""
    parts = []
    offset = step / 2
    while offset < w + h:
        x0, y0 = (x, y + offset) if offset <= h else (x + offset - h, y + h)
        x1, y1 = (x + offset, y) if offset <= w else (x + w, y + offset - w)
        parts.append(f"M{fmt(x0)} {fmt(y0)}L{fmt(x1)} {fmt(y1)}")
        offset += step
    return "".join(parts)


def cross(x: float, y: float, w: float, h: float, step: float = 9) -> str:
    """Path data of diagonal lines in both directions inside a rectangle."""
    parts = [hatch(x, y, w, h, step)]
    offset = step / 2
    while offset < w + h:
        x0, y0 = (x, y + h - offset) if offset <= h else (x + offset - h, y)
        x1, y1 = (x + offset, y + h) if offset <= w else (x + w, y + h - offset + w)
        parts.append(f"M{fmt(x0)} {fmt(y0)}L{fmt(x1)} {fmt(y1)}")
        offset += step
    return "".join(parts)


# -- the style sheet ------------------------------------------------------------------------------

_DARK_SCOPE = ':is(html[data-theme="dark"],body[data-jp-theme-light="false"],body.vscode-dark)'
_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


_HALO = "stroke-width:4;stroke-linejoin:round;paint-order:stroke"


def _paint(prop: str, var: str, literal: str) -> str:
    """A declaration twice: the literal for simple SVG readers, then the variable for browsers."""
    return f"{prop}:{literal};{prop}:var(--mg-{var},{literal})"


def _both(fill_var: str, line_var: str, fill: str, line: str) -> str:
    return f"{_paint('fill', fill_var, fill)};{_paint('stroke', line_var, line)}"


def _base_style() -> str:
    rules = [
        f".mg{{max-width:100%;height:auto;font-family:{_SANS}}}",
        f".mg .mgg{{{_paint('fill', 'ground', GROUND['light'])}}}",
        f".mg text{{{_paint('fill', 'ink', INK['light'])};stroke:none}}",
        f".mg .mgu{{{_paint('fill', 'muted', MUTED['light'])}}}",
        f".mg .mgm{{font-family:{_MONO}}}",
        ".mg .mgw{font-weight:650}",
        ".mg .mgh{stroke-width:1.4;stroke-opacity:.42;fill:none}",
        ".mg .mgs{stroke-width:5;fill:none}",
        ".mg .mgl{fill:none}",
        ".mg .mgb>rect{stroke-width:1.5;stroke-width:var(--mg-hw,1.5);stroke:var(--mg-hs)}",
        ".mg .mgl{stroke:var(--mg-hs)}",
        f".mg .h-ink{{{_both('ink', 'ink', INK['light'], INK['light'])}}}",
    ]
    for hue, (fill, line) in LIGHT.items():
        rules.append(f".mg .h-{hue}{{{_both(hue + '-f', hue + '-l', fill, line)}}}")
        rules.append(f".mg .e-{hue}{{{_paint('fill', hue + '-l', line)}}}")
    for hue in ("orange", "red"):  # a halo keeps text readable on a pattern
        halo = _paint("stroke", f"{hue}-f", LIGHT[hue][0])
        rules.append(f".mg .h-{hue}>.mgx{{{halo};{_HALO}}}")
    ground = _paint("stroke", "ground", GROUND["light"])
    rules.append(f".mg .mgy{{{ground};{_HALO}}}")
    rules += [
        ".mg [tabindex]{cursor:pointer;outline:none}",
        ".mg:has([tabindex]:hover,[tabindex]:focus) .mgb{opacity:.5}",
        ".mg .mgb>rect,.mg .mgl{transition:stroke-width .1s}",
    ]
    dark = [
        f"--mg-ground:var(--pst-color-background,var(--jp-layout-color0,{GROUND['dark']}))",
        f"--mg-ink:{INK['dark']}",
        f"--mg-muted:{MUTED['dark']}",
        "color-scheme:dark",
    ]
    for hue, (fill, line) in DARK.items():
        dark += [f"--mg-{hue}-f:{fill}", f"--mg-{hue}-l:{line}"]
    rules.append(f"{_DARK_SCOPE} .mg{{{';'.join(dark)}}}")
    return "".join(rules)


_BASE_STYLE = _base_style()


def style(links: int = 0) -> str:
    """The style sheet of a picture with `links` linked keys, without the `<style>` tag.

    The rules name classes, not pictures: one copy serves every picture on a page. Rules for links
    are numbered, so that the copy for the largest number serves all.
    """
    if not links:
        return _BASE_STYLE
    on = ",".join(f".mg:has(.k{i}:hover,.k{i}:focus) .k{i}" for i in range(links))
    return (
        f"{_BASE_STYLE}{on}"
        f"{{opacity:1;font-weight:700;--mg-hw:3.5;--mg-hs:var(--mg-ink,{INK['light']})}}"
    )
