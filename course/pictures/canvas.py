"""Pictures for the course: one visual language, as plain SVG text.

A `Canvas` collects shapes and turns into an SVG string with `str(canvas)`. Put it into a
`widgets.Frame`, or let it be the last expression of a cell to show it on its own::

    c = draw.Canvas(460, 120, title="Two tokens", desc="One token is cached, one is computed.")
    c.box(10, 10, 60, 40, kind="cached", text="The", sub="0")
    c.box(74, 10, 60, 40, kind="new", text="cat", sub="1")
    c.bracket(10, 134, 60, "device_len = 2")
    c.legend(10, 96, ["cached", "new"])
    c

What every picture has, so that no chapter has to think of it:

* **Kinds, not colors.** A box says *what it is* (`kind="cached"`) and the color, the pattern and
  the border follow (`KINDS`). The colors derive from the palette of Okabe and Ito, which
  color-blind readers can tell apart, and no meaning rests on color alone: `new` is hatched,
  `todo` dashed, `waste` cross-hatched, `dummy` dotted; pages carry a strip along their
  bottom edge and requests one along their left edge, each with its own dash pattern.
* **Light and dark.** The picture follows the theme of the built book and of JupyterLab, and is
  light on its own white card where there is neither (a code host, a mail, a printout).
* **Escaped text.** Whatever comes from a model or a reader is text, never markup.
* **Linked parts.** Elements with the same `key` light up together when one of them is pointed
  at, tapped, or reached with the Tab key, without a kernel and without a script.
* **A text alternative**: `title` and `desc` say what the picture says.
* **No ids and no randomness**: equal calls give equal text, and any number of pictures can stand
  on one page.

Sizes are SVG user units, one per CSS pixel at full size. Keep `width` at or below
`MAX_WIDTH`. A picture up to `PHONE_WIDTH` wide is shown whole on a phone; a wider one
is scaled to three quarters at most and then scrolls inside its own frame. Text is never set
smaller than `MIN_SIZE`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from course.pictures.style import (
    KINDS,
    MAX_WIDTH,
    MIN_SIZE,
    PHONE_WIDTH,
    SHRINK,
    Anchor,
    Look,
    clean,
    cross,
    esc,
    fit,
    fmt,
    hatch,
    look_of,
    style,
    text_width,
    visible,
)

__all__ = [
    "KINDS",
    "MAX_WIDTH",
    "MIN_SIZE",
    "PHONE_WIDTH",
    "Canvas",
    "Cell",
    "Node",
    "Span",
    "style",
    "text_width",
    "visible",
]


@dataclass(frozen=True)
class Span:
    """Where something was drawn, so that brackets and arrows can point at it."""

    x: float
    y: float
    w: float
    h: float

    @property
    def left(self) -> float:
        return self.x

    @property
    def right(self) -> float:
        return self.x + self.w

    @property
    def top(self) -> float:
        return self.y

    @property
    def bottom(self) -> float:
        return self.y + self.h

    @property
    def cx(self) -> float:
        return self.x + self.w / 2

    @property
    def cy(self) -> float:
        return self.y + self.h / 2


@dataclass(frozen=True)
class Cell:
    """One cell of `Canvas.grid` or `Canvas.tokens`; see `Canvas.box`."""

    text: object = ""
    kind: str = "plain"
    sub: object = ""
    key: str | None = None
    mark: str | None = None
    tip: str | None = None


@dataclass(frozen=True)
class Node:
    """One line of `Canvas.tree`: a label, a note to the right of it, and what is inside."""

    label: str
    note: str = ""
    children: Sequence[Node] = ()
    kind: str = "plain"
    key: str | None = None


@dataclass
class _Element:
    """One drawn group: its classes, its inner SVG, and what links it to others."""

    classes: str
    body: str
    key: str | None = None
    label: str = ""
    tip: str | None = None


class Canvas:
    """A picture of `width` × `height` user units that is drawn shape by shape.

    Args:
        width, height: size of the drawing area; the origin is the top left corner.
        title: the picture's name, one short line (required).
        desc: the text alternative: what a reader would learn by looking.

    Methods that draw something with an extent return a `Span`.

    Raises:
        ValueError: for an empty title, a size that is not positive, an unknown kind, or a box
            that would stick out of the picture.
    """

    def __init__(self, width: float, height: float, *, title: str, desc: str = "") -> None:
        if not str(title).strip():
            raise ValueError("a picture needs a title: Canvas(width, height, title=…, desc=…)")
        if not (width > 0 and height > 0):
            raise ValueError(f"a picture needs a positive size, got {width} × {height}")
        self.width = width
        self.height = height
        self.title = title
        self.desc = desc
        self._elements: list[_Element] = []

    # -- basic shapes ---------------------------------------------------------------------------

    def _add(
        self,
        classes: str,
        body: str,
        *,
        key: str | None = None,
        label: str = "",
        tip: str | None = None,
    ) -> None:
        self._elements.append(_Element(classes, body, key, label, tip))

    def _check_inside(self, x: float, y: float, w: float, h: float, what: str) -> None:
        slack = 0.51
        if x < -slack or y < -slack or x + w > self.width + slack or y + h > self.height + slack:
            raise ValueError(
                f"{what} at x {fmt(x)}…{fmt(x + w)}, y {fmt(y)}…{fmt(y + h)} sticks out of the "
                f"picture of {fmt(self.width)} × {fmt(self.height)}: enlarge the canvas or move it "
                "in"
            )

    def _label(
        self,
        x: float,
        y: float,
        s: object,
        *,
        size: float,
        anchor: Anchor = "start",
        classes: Sequence[str] = (),
    ) -> str:
        """A `<text>` whose middle (of the small letters) is at height `y`."""
        size = max(size, MIN_SIZE)
        cls = f' class="{" ".join(classes)}"' if classes else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        return (
            f'<text x="{fmt(x)}" y="{fmt(y + size * 0.35)}" font-size="{fmt(size)}"{place}{cls}>'
            f"{esc(s)}</text>"
        )

    @staticmethod
    def _outline(
        look: Look, x: float, y: float, w: float, h: float, *, radius: float = 0
    ) -> list[str]:
        """The rectangle of a box and, where its kind has one, the pattern in it."""
        dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
        rx = f' rx="{fmt(radius)}"' if radius else ""
        parts = [f'<rect x="{fmt(x)}" y="{fmt(y)}" width="{fmt(w)}" height="{fmt(h)}"{rx}{dash}/>']
        if look.pattern:
            draw_lines = hatch if look.pattern == "hatch" else cross
            parts.append(f'<path class="mgh" d="{draw_lines(x + 1, y + 1, w - 2, h - 2)}"/>')
        return parts

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        kind: str = "plain",
        text: object = "",
        sub: object = "",
        key: str | None = None,
        mark: str | None = None,
        tip: str | None = None,
        size: float = 15,
        mono: bool = False,
        bold: bool = False,
        anchor: Anchor = "middle",
    ) -> Span:
        """A box with its top left corner at (`x`, `y`).

        Args:
            kind: what it is; one of `KINDS`.
            text: shown in the box; set smaller, then cut with an ellipsis, if it does not fit
                (the whole text is then the tooltip).
            sub: a second, smaller line under `text` (an index, a shape).
            key: boxes, texts and lines with the same key light up together.
            mark: a second identity, as a strip along an edge: `"req1"` on a cached box, say.
            tip: tooltip, and what a screen reader says for a linked box.
            anchor: "start" aligns the text left, "end" right.
        """
        look = look_of(kind)
        self._check_inside(x, y, w, h, f"box {str(text)!r}")
        parts = self._outline(look, x, y, w, h, radius=min(look.radius, w / 4, h / 4))
        strips = [look] if look.strip else []
        pad_left = 0.0
        if mark is not None:
            marked = look_of(mark)
            if not marked.strip:
                raise ValueError(f"mark= takes a page or a request (page0…, req0…), got {mark!r}")
            strips.append(marked)
        for strip in strips:
            own = "" if strip is look else f" h-{strip.hue}"
            sdash = f' stroke-dasharray="{strip.strip_dash}"' if strip.strip_dash else ""
            if strip.strip == "bottom":
                line = f"M{fmt(x + 1.5)} {fmt(y + h - 3)}H{fmt(x + w - 1.5)}"
            else:
                line = f"M{fmt(x + 3)} {fmt(y + 1.5)}V{fmt(y + h - 1.5)}"
                pad_left = 4
            parts.append(f'<path class="mgs{own}"{sdash} d="{line}"/>')

        text, sub = clean(text), clean(sub)
        inner = w - 8 - pad_left
        shown, size = fit(text, inner, size, mono) if text else ("", size)
        sub_size = max(MIN_SIZE, size - 2)
        shown_sub, sub_size = fit(sub, inner, sub_size, mono) if sub else ("", sub_size)
        if tip is None and (shown != text or shown_sub != sub):
            tip = f"{text} {sub}".strip()
        tx = {"start": x + 8 + pad_left, "middle": x + (w + pad_left) / 2, "end": x + w - 8}[anchor]
        cy = y + h / 2 - (1 if look.strip == "bottom" and h < 40 else 0)
        halo = ["mgx"] if look.pattern else []
        font = ["mgm"] if mono else []
        gap = (size + sub_size) / 4 + 1 if shown and shown_sub else 0
        if shown:
            heavy = ["mgw"] if bold else []
            parts.append(
                self._label(
                    tx, cy - gap, shown, size=size, anchor=anchor, classes=[*font, *heavy, *halo]
                )
            )
        if shown_sub:
            classes = [*font, "mgu", *halo]
            parts.append(
                self._label(tx, cy + gap, shown_sub, size=sub_size, anchor=anchor, classes=classes)
            )
        self._add(
            f"mgb h-{look.hue}", "".join(parts), key=key, label=f"{text} {sub}".strip(), tip=tip
        )
        return Span(x, y, w, h)

    def text(
        self,
        x: float,
        y: float,
        s: object,
        *,
        size: float = 14,
        anchor: Anchor = "start",
        weight: Literal["normal", "bold"] = "normal",
        mono: bool = False,
        muted: bool = False,
        key: str | None = None,
        tip: str | None = None,
    ) -> Span:
        """One or more lines of text (split at newlines); the first is centered on height `y`.

        `muted` sets it in the quieter text color (still readable: contrast above 4.5 in both
        themes). The returned span's width is an estimate.
        """
        size = max(size, MIN_SIZE)
        classes = ["mgm"] if mono else []
        if weight == "bold":
            classes.append("mgw")
        if muted:
            classes.append("mgu")
        lines = clean(s).split("\n")
        body = "".join(
            self._label(x, y + i * size * 1.35, line, size=size, anchor=anchor, classes=classes)
            for i, line in enumerate(lines)
            if line
        )
        self._add("mgb mgn", body, key=key, label=" ".join(lines), tip=tip)
        w = max(text_width(line, size, mono=mono) for line in lines)
        left = {"start": x, "middle": x - w / 2, "end": x - w}[anchor]
        return Span(left, y - size * 0.7, w, size * 1.35 * len(lines))

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        kind: str | None = None,
        dashed: bool = False,
        width: float = 1.5,
        key: str | None = None,
    ) -> None:
        """A straight line in the line color of `kind` (default: the text color).

        `kind="rule"` is a quiet grid line.
        """
        self.polyline([(x1, y1), (x2, y2)], kind=kind, dashed=dashed, width=width, key=key)

    def polyline(
        self,
        points: Sequence[tuple[float, float]],
        *,
        kind: str | None = None,
        dashed: bool | str = False,
        width: float = 1.5,
        key: str | None = None,
    ) -> None:
        """A line through `points`; `dashed` may be an SVG dash pattern such as `"2 3"`."""
        d = "M" + "L".join(f"{fmt(x)} {fmt(y)}" for x, y in points)
        self._path(d, kind=kind, dashed=dashed, width=width, key=key)

    def _path(
        self,
        d: str,
        *,
        kind: str | None,
        dashed: bool | str,
        width: float,
        key: str | None,
        extra: str = "",
        label: str = "",
    ) -> None:
        hue = "ink" if kind is None else "rule" if kind == "rule" else look_of(kind).hue
        pattern = "5 4" if dashed is True else dashed or ""
        dash = f' stroke-dasharray="{esc(pattern)}"' if pattern else ""
        self._add(
            f"mgb h-{hue}",
            f'<path class="mgl" stroke-width="{fmt(width)}"{dash} d="{d}"/>{extra}',
            key=key,
            label=label,
        )

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        label: str = "",
        kind: str | None = None,
        dashed: bool = False,
        width: float = 1.5,
        bend: float = 0,
        key: str | None = None,
    ) -> None:
        """An arrow from (`x1`, `y1`) to (`x2`, `y2`).

        `bend` curves it: that many units to the left of its direction at the middle (negative:
        right). `label` is set beside the middle, on the side of the bend.
        """
        length = math.hypot(x2 - x1, y2 - y1)
        if length == 0:
            raise ValueError("an arrow needs two different end points")
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        mx, my = (x1 + x2) / 2 + uy * bend, (y1 + y2) / 2 - ux * bend
        cx, cy = (x1 + x2) / 2 + uy * bend * 2, (y1 + y2) / 2 - ux * bend * 2
        if bend:
            end = math.hypot(x2 - cx, y2 - cy) or 1
            ex, ey = (x2 - cx) / end, (y2 - cy) / end
            d = f"M{fmt(x1)} {fmt(y1)}Q{fmt(cx)} {fmt(cy)} {fmt(x2 - ex * 5)} {fmt(y2 - ey * 5)}"
        else:
            ex, ey = ux, uy
            d = f"M{fmt(x1)} {fmt(y1)}L{fmt(x2 - ex * 5)} {fmt(y2 - ey * 5)}"
        hue = "ink" if kind is None else look_of(kind).hue
        bx, by = x2 - ex * 9, y2 - ey * 9
        head = (
            f'<path class="e-{hue}" stroke="none" d="M{fmt(x2)} {fmt(y2)}'
            f'L{fmt(bx - ey * 4)} {fmt(by + ex * 4)}L{fmt(bx + ey * 4)} {fmt(by - ex * 4)}Z"/>'
        )
        extra = head if hue != "ink" else head.replace(' class="e-ink"', "")
        if label:
            side = 1 if bend >= 0 else -1
            lx, ly = mx + uy * 10 * side, my - ux * 10 * side
            anchor: Anchor = "middle" if abs(ux) > 0.5 else "start" if uy * side > 0 else "end"
            extra += self._label(lx, ly, label, size=14, anchor=anchor, classes=["mgy"])
        self._path(d, kind=kind, dashed=dashed, width=width, key=key, extra=extra, label=label)

    def dot(
        self,
        x: float,
        y: float,
        r: float = 4,
        *,
        kind: str | None = None,
        shape: Literal["circle", "square", "triangle", "diamond"] = "circle",
        key: str | None = None,
        tip: str | None = None,
    ) -> None:
        """A small filled mark centered on (`x`, `y`); `shape` tells marks apart without color."""
        hue = "ink" if kind is None else look_of(kind).hue
        if shape == "circle":
            body = f'<circle cx="{fmt(x)}" cy="{fmt(y)}" r="{fmt(r)}"/>'
        else:
            corners = {
                "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
                "triangle": [(0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
                "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
            }[shape]
            points = "L".join(f"{fmt(x + dx * r)} {fmt(y + dy * r)}" for dx, dy in corners)
            body = f'<path d="M{points}Z"/>'
        paint = "" if hue == "ink" else f' class="e-{hue}"'
        self._add(f"mgb h-{hue}", f"<g{paint}>{body}</g>", key=key, tip=tip)

    def bracket(
        self,
        x0: float,
        x1: float,
        y: float,
        label: object = "",
        *,
        side: Literal["below", "above"] = "below",
        kind: str | None = None,
        mono: bool = False,
        key: str | None = None,
    ) -> Span:
        """A bracket from `x0` to `x1`, open toward what it measures, with `label` beyond it.

        `side="below"`: `y` is the top end of a bracket that stands under the thing measured.
        A length of nothing (`x0 == x1`) is drawn as a tick. The whole takes about 28 units. A
        label wider than its bracket is kept inside the picture.
        """
        if x1 < x0:
            raise ValueError(f"a bracket runs from left to right, got {x0} … {x1}")
        sign = 1 if side == "below" else -1
        d = f"M{fmt(x0)} {fmt(y)}v{fmt(6 * sign)}H{fmt(x1)}v{fmt(-6 * sign)}"
        extra = ""
        if label != "":
            half = text_width(label, 14, mono=mono) / 2
            cx = (x0 + x1) / 2
            cx = max(half + 2, min(self.width - half - 2, cx))
            classes = ["mgm"] if mono else []
            extra = self._label(cx, y + 17 * sign, label, size=14, anchor="middle", classes=classes)
        self._path(d, kind=kind, dashed=False, width=1.8, key=key, extra=extra, label=str(label))
        return Span(x0, y if sign > 0 else y - 28, x1 - x0, 28)

    def legend(
        self,
        x: float,
        y: float,
        kinds: Iterable[str | tuple[str, str]],
        *,
        width: float | None = None,
    ) -> Span:
        """What the kinds mean: a swatch and a word for each, wrapped to `width`.

        An entry is a kind (its usual meaning is the label), or `(kind, label)`. `y` is the top;
        a row is 24 units high.
        """
        limit = x + (width if width is not None else self.width - x)
        cx, cy = x, y
        for entry in kinds:
            kind, label = entry if isinstance(entry, tuple) else (entry, look_of(entry).label)
            label = label or kind
            need = 22 + 6 + text_width(label, 13) + 18
            if cx > x and cx + need - 18 > limit:
                cx, cy = x, cy + 24
            self.box(cx, cy + 2, 22, 16, kind=kind)
            self.text(cx + 29, cy + 10, label, size=13)
            cx += need
        return Span(x, y, limit - x, cy + 24 - y)

    # -- rows, grids and matrices ---------------------------------------------------------------

    def _cell(
        self, x: float, y: float, w: float, h: float, cell: Cell, *, mono: bool, size: float
    ) -> Span:
        """The box that `cell` describes."""
        return self.box(
            x,
            y,
            w,
            h,
            kind=cell.kind,
            text=cell.text,
            sub=cell.sub,
            key=cell.key,
            mark=cell.mark,
            tip=cell.tip,
            mono=mono,
            size=size,
        )

    def tokens(
        self,
        x: float,
        y: float,
        cells: Iterable[Cell | str],
        *,
        w: float = 46,
        h: float = 42,
        gap: float = 4,
        kind: str = "plain",
        mono: bool = False,
        size: float = 15,
    ) -> list[Span]:
        """A row of boxes, one for each token (a `Cell`, or just its text).

        Returns the spans, so that a bracket can stand under any run of them::

            spans = c.tokens(10, 30, [Cell("The", "cached"), Cell("cat", "new")])
            c.bracket(spans[0].left, spans[1].right, 80, "device_len = 2")
        """
        row = [Cell(cell, kind) if isinstance(cell, str) else cell for cell in cells]
        size = _common_size([row], w, size, mono)
        spans = []
        for i, cell in enumerate(row):
            spans.append(self._cell(x + i * (w + gap), y, w, h, cell, mono=mono, size=size))
        return spans

    def grid(
        self,
        x: float,
        y: float,
        rows: Sequence[Sequence[Cell | str | None]],
        *,
        w: float = 40,
        h: float = 32,
        gap: float = 3,
        kind: str = "plain",
        row_labels: Sequence[object] = (),
        col_labels: Sequence[object] = (),
        mono: bool = False,
        size: float = 14,
        key: str | None = None,
    ) -> list[list[Span]]:
        """Rows of boxes: a page table, the KV pool, the fields of a batch.

        Args:
            rows: a `Cell`, a text, or `None` (left out) for each place.
            row_labels: written to the left of the rows, right-aligned at `x - 8`.
            col_labels: written above the columns.
            key: if given, cells without a key of their own get `f"{key}{row}-{col}"`.

        Returns the spans of all places, drawn or not.
        """
        size = _common_size(rows, w, size, mono)
        spans: list[list[Span]] = []
        for c, label in enumerate(col_labels):
            cx = x + c * (w + gap) + w / 2
            self.text(cx, y - 11, label, size=13, anchor="middle", muted=True, mono=mono)
        for r, row in enumerate(rows):
            top = y + r * (h + gap)
            if r < len(row_labels):
                self.text(x - 8, top + h / 2, row_labels[r], size=14, anchor="end")
            line = []
            for c, cell in enumerate(row):
                left = x + c * (w + gap)
                line.append(Span(left, top, w, h))
                if cell is None:
                    continue
                if isinstance(cell, str):
                    cell = Cell(cell, kind)
                if cell.key is None and key is not None:
                    cell = replace(cell, key=f"{key}{r}-{c}")
                self._cell(left, top, w, h, cell, mono=mono, size=size)
            spans.append(line)
        return spans

    def mask(
        self,
        x: float,
        y: float,
        allowed: Sequence[Sequence[bool]],
        *,
        cell: float = 24,
        gap: float = 2,
        kind: str = "new",
        kinds: Sequence[str] = (),
        row_labels: Sequence[object] = (),
        col_labels: Sequence[object] = (),
        row_keys: Sequence[str | None] = (),
        col_keys: Sequence[str | None] = (),
    ) -> list[list[Span]]:
        """An attention mask: rows are queries, columns are keys.

        A place that may be seen is a filled box with a dot, one that may not is an empty box, so
        the two differ in print as well.

        Args:
            allowed: truth values by row (a nested list or a boolean tensor's `tolist()`).
            kind: kind of the places that may be seen; `kinds` gives one per column instead.
            row_keys, col_keys: link a label (and its row or column of places) to other elements;
                a place follows its column's key if there is one, else its row's.
        """
        spans: list[list[Span]] = []
        for c, label in enumerate(col_labels):
            col_key = col_keys[c] if c < len(col_keys) else None
            cx = x + c * (cell + gap) + cell / 2
            self.text(cx, y - 11, label, size=13, anchor="middle", muted=True, key=col_key)
        for r, row in enumerate(allowed):
            top = y + r * (cell + gap)
            row_key = row_keys[r] if r < len(row_keys) else None
            if r < len(row_labels):
                self.text(x - 8, top + cell / 2, row_labels[r], size=13, anchor="end", key=row_key)
            line = []
            for c, seen in enumerate(row):
                left = x + c * (cell + gap)
                col_key = col_keys[c] if c < len(col_keys) else None
                place_kind = (kinds[c] if c < len(kinds) else kind) if seen else "free"
                self.box(
                    left,
                    top,
                    cell,
                    cell,
                    kind=place_kind,
                    text="●" if seen else "",
                    size=13,
                    key=col_key if col_key is not None else row_key,
                )
                line.append(Span(left, top, cell, cell))
            spans.append(line)
        return spans

    def matrix(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        kind: str = "weight",
        text: object = "",
        shape: object = "",
        parts: Sequence[tuple[str, float, str]] = (),
        axis: Literal["rows", "cols"] = "rows",
        key: str | None = None,
    ) -> Span:
        """A matrix as a rectangle with its name and shape, or cut into named `parts`.

        `parts` are `(name, share, kind)`: bands along `axis` whose thickness follows `share`
        (q, k and v inside a merged weight, say; the shares may be row counts).
        """
        if not parts:
            return self.box(x, y, w, h, kind=kind, text=text, sub=shape, key=key)
        total = sum(share for _, share, _ in parts)
        at = 0.0
        for name, share, part_kind in parts:
            part = share / total
            part_key = None if key is None else f"{key}-{name}"
            if axis == "rows":
                self.box(x, y + at * h, w, part * h, kind=part_kind, text=name, key=part_key)
            else:
                self.box(x + at * w, y, part * w, h, kind=part_kind, text=name, key=part_key)
            at += part
        caption = " ".join(str(s) for s in (text, shape) if s != "")
        if caption:
            self.text(x + w / 2, y - 11, caption, size=14, anchor="middle")
        return Span(x, y, w, h)

    # -- trees and charts -----------------------------------------------------------------------

    def tree(
        self,
        x: float,
        y: float,
        roots: Sequence[Node],
        *,
        row: float = 26,
        indent: float = 22,
        note_x: float | None = None,
        mono: bool = True,
    ) -> float:
        """A tree as an indented list with guide lines; returns the y below its last row.

        Each `Node` takes one row of `row` units: a small box in its kind, its label, and its
        note (a shape, "merged from q, k, v") at `note_x`. Height needed: rows × `row`.
        """

        def walk(nodes: Sequence[Node], depth: int, top: float) -> float:
            left = x + depth * indent
            for node in nodes:
                cy = top + row / 2
                if depth:
                    self.line(left - indent + 6, cy, left - 3, cy, kind="plain", width=1.2)
                self.box(left, cy - 6, 12, 12, kind=node.kind, key=node.key)
                self.text(left + 19, cy, node.label, mono=mono, key=node.key)
                if node.note:
                    at = note_x
                    if at is None:
                        at = left + 19 + text_width(node.label, 14, mono=mono) + 14
                    self.text(at, cy, node.note, muted=True, mono=mono, key=node.key, size=13)
                below = walk(node.children, depth + 1, top + row)
                if node.children:
                    last = node.children[-1]
                    end = below - _rows(last.children) * row - row / 2
                    self.line(left + 6, cy + 6, left + 6, end, kind="plain", width=1.2)
                top = below
            return top

        return walk(roots, 0, y)

    def bars(
        self,
        x: float,
        y: float,
        width: float,
        items: Sequence[tuple[str, float, str]],
        *,
        unit: str = "",
        label_width: float = 120,
        row: float = 30,
        maximum: float | None = None,
        fmt: str = "{:,.4g}",
    ) -> float:
        """Horizontal bars, one per `(label, value, kind)`, each with its value at its end.

        Returns the y below the last bar. `width` includes labels and values; `maximum` fixes the
        scale, so that the frames of a stepper share one.
        """
        top_value = maximum if maximum is not None else max((v for _, v, _ in items), default=0)
        labels = [(fmt.format(value) + " " + unit).strip() for _, value, _ in items]
        value_width = max((text_width(label, 14) for label in labels), default=0) + 10
        room = width - label_width - value_width
        for (label, value, kind), shown in zip(items, labels, strict=True):
            if value < 0:
                raise ValueError(f"bars show values from zero up, got {label!r}: {value}")
            w = room * value / top_value if top_value > 0 else 0
            self.text(x + label_width - 8, y + row / 2, label, anchor="end")
            if w >= 0.5:
                self.box(x + label_width, y + 4, min(w, room), row - 8, kind=kind)
            else:
                self.line(x + label_width, y + 4, x + label_width, y + row - 4)
            self.text(x + label_width + min(w, room) + 7, y + row / 2, shown)
            y += row
        return y

    def timeline(
        self,
        x: float,
        y: float,
        width: float,
        lanes: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]],
        *,
        start: float = 0,
        end: float | None = None,
        now: float | None = None,
        label_width: float = 90,
        row: float = 32,
        ticks: Sequence[tuple[float, str]] = (),
    ) -> float:
        """Lanes over time, each `(label, [(from, to, kind, text), …])`; returns the y below.

        `ticks` are `(time, label)` under the lanes; `now` draws a vertical line. Intervals are
        half-open, in any unit.
        """
        last = max((to for _, spans in lanes for _, to, _, _ in spans), default=start + 1)
        end = end if end is not None else last
        if end <= start:
            raise ValueError(f"a timeline needs end > start, got {start} … {end}")
        scale = (width - label_width) / (end - start)
        left = x + label_width
        bottom = y + row * len(lanes)
        for i, (label, spans) in enumerate(lanes):
            top = y + i * row
            self.text(left - 8, top + row / 2, label, anchor="end")
            self.line(left, top + row - 1, x + width, top + row - 1, kind="rule", width=1)
            for begin, to, kind, text in spans:
                x0 = left + (max(begin, start) - start) * scale
                x1 = left + (min(to, end) - start) * scale
                if x1 > x0:
                    self.box(x0, top + 3, x1 - x0, row - 7, kind=kind, text=text, size=14)
        for at, label in ticks:
            tx = left + (at - start) * scale
            self.line(tx, bottom, tx, bottom + 5)
            self.text(tx, bottom + 15, label, size=13, anchor="middle", muted=True)
        if now is not None:
            tx = left + (now - start) * scale
            self.line(tx, y - 4, tx, bottom + 2, kind="waste", width=2)
        return bottom + (26 if ticks else 4)

    def chart(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        series: Mapping[str, Sequence[tuple[float, float]]],
        *,
        kinds: Sequence[str] = ("cached", "new", "act", "weight", "waste", "dummy"),
        xlabel: str = "",
        ylabel: str = "",
        xticks: Sequence[float] | None = None,
        ymax: float | None = None,
        xlog: bool = False,
        dashed: Sequence[str] = (),
        fmt: str = "{:,.4g}",
    ) -> None:
        """A line chart: one line per entry of `series`, told apart by color, mark and dashes.

        Args:
            series: label → points `(x, y)`, in order of x; y starts at zero.
            xticks: where to mark the x axis (default: the x values of the longest series).
            ymax: top of the y axis (default: a round number above the largest y).
            xlog: a base-2 logarithmic x axis (batch sizes 1, 2, 4, 8, 16).
            dashed: labels of series that are bounds or estimates, drawn dashed without marks.
        """
        points = [p for line in series.values() for p in line]
        if not points:
            raise ValueError("a chart needs at least one point")
        if xlog and min(px for px, _ in points) <= 0:
            raise ValueError("a logarithmic axis needs x values above zero")
        if xticks is None:
            xticks = [px for px, _ in max(series.values(), key=len)]
        top_value = ymax if ymax is not None else _round_up(max(py for _, py in points))

        def warp(value: float) -> float:
            return math.log2(value) if xlog else value

        low = min(warp(px) for px in [*xticks, *(px for px, _ in points)])
        high = max(warp(px) for px in [*xticks, *(px for px, _ in points)])
        steps = [top_value * i / 4 for i in range(5)]
        step_labels = [fmt.format(step) for step in steps]
        left = x + max(text_width(label, 13) for label in step_labels) + 10
        top = y + (24 if ylabel else 10)
        legend_rows = 24 * (1 + sum(text_width(s, 13) + 50 for s in series) // (width - 10))
        bottom = y + height - 24 - (20 if xlabel else 0) - legend_rows
        right = x + width - 12

        def place(px: float, py: float) -> tuple[float, float]:
            share = (warp(px) - low) / (high - low) if high > low else 0.5
            return left + 8 + share * (right - left - 16), bottom - (bottom - top) * py / top_value

        if ylabel:
            self.text(x, y + 8, ylabel, size=13, muted=True)
        for step, label in zip(steps, step_labels, strict=True):
            _, gy = place(xticks[0], step)
            self.line(left, gy, right, gy, kind="rule" if step else None, width=1)
            self.text(left - 7, gy, label, size=13, anchor="end", muted=True)
        for tick in xticks:
            tx, _ = place(tick, 0)
            self.line(tx, bottom, tx, bottom + 5, width=1)
            self.text(tx, bottom + 15, fmt.format(tick), size=13, anchor="middle", muted=True)
        if xlabel:
            self.text((left + right) / 2, bottom + 35, xlabel, size=13, anchor="middle", muted=True)
        shapes: tuple[Literal["circle", "square", "triangle", "diamond"], ...] = (
            "circle",
            "square",
            "triangle",
            "diamond",
        )
        cx, cy = x + 4, y + height - legend_rows + 12
        for i, (label, line) in enumerate(series.items()):
            kind, shape = kinds[i % len(kinds)], shapes[i % len(shapes)]
            bound = label in dashed
            key = f"series-{i}"
            if len(line) > 1:
                self.polyline(
                    [place(*p) for p in line], kind=kind, width=2.5, dashed=bound, key=key
                )
            if not bound:
                for px, py in line:
                    tip = f"{label}: {fmt.format(px)}, {fmt.format(py)}"
                    self.dot(*place(px, py), 4.5, kind=kind, shape=shape, tip=tip, key=key)
            need = 40 + text_width(label, 13) + 10
            if cx > x + 4 and cx + need > x + width:
                cx, cy = x + 4, cy + 24
            self.polyline([(cx, cy), (cx + 30, cy)], kind=kind, width=2.5, dashed=bound, key=key)
            if not bound:
                self.dot(cx + 15, cy, 4.5, kind=kind, shape=shape, key=key)
            self.text(cx + 37, cy, label, size=13, key=key)
            cx += need

    # -- output ---------------------------------------------------------------------------------

    def _linked(self) -> dict[str, int]:
        """Key → number, for the keys that at least two elements share, in order of appearance."""
        count: dict[str, int] = {}
        for element in self._elements:
            if element.key is not None:
                count[element.key] = count.get(element.key, 0) + 1
        return {key: i for i, key in enumerate(k for k, n in count.items() if n > 1)}

    @property
    def links(self) -> int:
        """How many keys link two or more elements of this picture."""
        return len(self._linked())

    def svg(self, *, with_style: bool = True) -> str:
        """The picture as SVG text; without its style sheet if something around it brings one."""
        linked = self._linked()
        reached: set[str] = set()
        body = []
        for element in self._elements:
            attributes = ""
            if element.key is not None:
                attributes = f' data-key="{esc(element.key)}"'
            number = linked.get(element.key) if element.key is not None else None
            classes = element.classes
            if number is not None and element.key is not None:
                classes += f" k{number}"
                # The first of each group is a stop for the Tab key; all can be tapped.
                stop = "-1" if element.key in reached else "0"
                reached.add(element.key)
                name = element.tip or element.label or element.key
                attributes += f' tabindex="{stop}" role="img" aria-label="{esc(name)}"'
            tip = f"<title>{esc(element.tip)}</title>" if element.tip else ""
            body.append(f'<g class="{classes}"{attributes}>{tip}{element.body}</g>')
        # Parts that can be reached one by one must not be swallowed by role="img".
        role = "group" if linked else "img"
        sheet = f"<style>{style(len(linked))}</style>" if with_style else ""
        desc = f"<desc>{esc(self.desc)}</desc>" if self.desc else ""
        w, h = fmt(self.width), fmt(self.height)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mg" viewBox="0 0 {w} {h}" '
            f'width="{w}" height="{h}" role="{role}" aria-label="{esc(self.title)}">'
            f"<title>{esc(self.title)}</title>{desc}{sheet}"
            f'<rect class="mgg" width="{w}" height="{h}" rx="6"/>{"".join(body)}</svg>'
        )

    def __str__(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return f"<picture: {self.title}>"

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **_: object
    ) -> dict[str, str]:
        plain = f"[picture] {self.title}" + (f"\n{self.desc}" if self.desc else "")
        return {"image/svg+xml": self.svg(), "text/plain": plain}


_STYLE_TAG = re.compile(r"<style>.*?</style>", re.DOTALL)


def bare(svg: str) -> str:
    """A picture without its style sheet, for a place that has one for all its pictures."""
    return _STYLE_TAG.sub("", svg, count=1)


def framed(svg: str) -> str:
    """A picture's HTML in a frame that scrolls by itself, also by keyboard, on a narrow page."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ', svg)
    width = float(found[1]) if found else MAX_WIDTH
    scroll = ""
    if width > PHONE_WIDTH:
        scroll = f' tabindex="0" role="group" style="--mg-w:{width * SHRINK:.0f}px"'
    return f'<div class="mg-pic"{scroll}>{svg}</div>'


def _common_size(
    rows: Sequence[Sequence[Cell | str | None]], room: float, size: float, mono: bool
) -> float:
    """The largest font size at or below `size` at which the text of every cell fits."""
    texts = [cell.text if isinstance(cell, Cell) else cell or "" for row in rows for cell in row]
    return min((fit(str(text), room - 8, size, mono)[1] for text in texts), default=size)


def _rows(nodes: Sequence[Node]) -> int:
    """How many rows a list of tree nodes takes, with all that is inside them."""
    return sum(1 + _rows(node.children) for node in nodes)


def _round_up(value: float) -> float:
    """The next of 1, 1.2, 1.6, 2 … times a power of ten at or above `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if m * power >= value)
