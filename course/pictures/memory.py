"""The page table and the pool, as they are when one of these is called.

So a notebook can call them after every step of its code and hand the pictures to `widgets.stepper`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from course.pictures import canvas as draw
from course.pictures.style import look_of

if TYPE_CHECKING:
    import torch

    from minisgl.core import Req


_LEFT = 92  # room for the labels of rows
_LINE = 16  # slots of the pool on a line
_GAP = 3  # between two pages
_ROW_H, _ROW_STEP = 26, 36  # a row of the table, and from one row to the next
_POOL_H, _POOL_STEP = 34, 54
_MAX_SLOTS = 160
_REQ_STEP = 112  # in a run, from one request's tokens to the next one's


@dataclass(frozen=True)
class _Row:
    """What the table says of one request at this moment, as plain numbers."""

    name: str
    kind: str  # how the request's name is drawn
    number: int
    start_new: int  # positions [start_new, used) are being written by the pass that runs
    used: int
    slots: list[int]  # one for every position in the pages that the request holds

    @property
    def wasted(self) -> int:
        """Slots of its pages that no token needs yet."""
        return len(self.slots) - self.used


def _read_row(page_table: torch.Tensor, name: str, req: Req, page_size: int, writing: bool) -> _Row:
    used = req.device_len if writing else req.cached_len
    entries = page_table[req.table_idx].tolist()
    starts = entries[: -(-used // page_size) * page_size : page_size]
    # A row may end in the middle of its last page; the page has all its slots even so.
    slots = [start + i for start in starts for i in range(page_size)]
    slots[: len(entries)] = entries[: len(slots)]
    return _Row(name, f"req{req.uid % 6}", req.table_idx, min(req.cached_len, used), used, slots)


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """`slots` cut where they don't follow each other or a line of the pool ends: (first, count)."""
    start = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1 or slots[i] % _LINE == 0:
            yield slots[start], i - start
            start = i


class _PageCanvas(draw.Canvas):
    """A canvas with slots: small boxes that touch within a page and stand apart between pages."""

    def slot(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        kind: str,
        text: str = "",
        sub: str = "",
        key: str | None = None,
        tip: str | None = None,
        bold: bool = False,
    ) -> None:
        """A slot, or a run of slots, with its text at a fixed size and `sub` under it."""
        look = look_of(kind)
        parts = self._outline(look, x, y, w, h)
        halo = ["mgx"] if look.pattern else []
        for line, dy, classes in (
            (text, -7 if sub else 0, ["mgw"] if bold else []),
            (sub, 8, ["mgu"]),
        ):
            if line:
                cx, cy = x + w / 2, y + h / 2 + dy
                classes = [*classes, *halo]
                parts.append(self._label(cx, cy, line, size=13, anchor="middle", classes=classes))
        self._add(f"mgb h-{look.hue}", "".join(parts), key=key, label=text, tip=tip)

    def words(self, x: float, y: float, text: object, anchor: draw.Anchor = "start") -> None:
        """A small quiet label."""
        self.text(x, y, text, size=13, muted=True, anchor=anchor)


def page_table_picture(
    page_table: torch.Tensor,
    reqs: Mapping[str, Req],
    *,
    page_size: int,
    num_pages: int,
    writing: Collection[str] = (),
    columns: int | None = None,
    title: str = "The page table and the pool",
) -> draw.Canvas:
    """The page table as rows and positions, and under it the pool that its entries point into.

    A cell of the table and the slot it names have the same key: pointing at one lights the other.

    Args:
        page_table: `[rows, positions]`, token locations; its last row is the dummy request's.
        reqs: the requests that hold a row now, by the name to draw (a letter or two).
        page_size, num_pages: of the pool, the dummy's page not counted.
        writing: names of the requests whose pass is running: they have pages up to `device_len`,
            and [cached_len, device_len) is drawn as being written. The others, between two
            passes, are drawn up to `cached_len`.
        columns: how many positions to draw (default: as many as the requests' pages reach, and
            at least 16).

    Raises:
        ValueError: for a pool too large to be drawn slot by slot, or a name not in `reqs`.
    """
    if num_pages * page_size > _MAX_SLOTS:
        raise ValueError(
            f"{num_pages} × {page_size} slots are too many to draw: at most {_MAX_SLOTS}"
        )
    if strangers := set(writing) - set(reqs):
        raise ValueError(f"writing names {sorted(strangers)}, which are not among the requests")
    rows = [
        _read_row(page_table, name, req, page_size, name in writing) for name, req in reqs.items()
    ]
    reach = max([len(row.slots) for row in rows], default=0)
    columns = min(columns or max(16, reach), page_table.shape[1])
    desc = _describe(rows, page_size, num_pages)
    places = _places(0, page_table, page_size, num_pages)
    c = _PageCanvas(draw.MAX_WIDTH, places.bottom, title=title, desc=desc)
    _draw_memory(c, page_table, rows, places, columns, page_size, num_pages)
    return c


class _Places(NamedTuple):
    """Heights of the parts of a picture of the page table and the pool."""

    table: float
    pool: float
    foot: float

    @property
    def bottom(self) -> float:
        return self.foot + 74


def _places(top: float, page_table: torch.Tensor, page_size: int, num_pages: int) -> _Places:
    """Where table, pool and legend lie if all of it begins at height `top`."""
    pool = top + 52 + page_table.shape[0] * _ROW_STEP + 54
    lines = -(-num_pages * page_size // _LINE) + -(-page_size // _LINE)
    return _Places(top + 52, pool, pool + lines * _POOL_STEP - 2)


def _draw_memory(
    c: _PageCanvas,
    page_table: torch.Tensor,
    rows: list[_Row],
    places: _Places,
    columns: int,
    page_size: int,
    num_pages: int,
) -> None:
    _draw_table(c, page_table, rows, places.table, columns, page_size)
    _draw_pool(c, rows, places.pool, page_size, num_pages)
    _draw_foot(c, rows, places.foot, page_size, num_pages)


def _count(rows: list[_Row], page_size: int) -> tuple[int, int, int]:
    """Pages taken, slots with a token, slots wasted."""
    taken = sum(len(row.slots) for row in rows) // page_size
    return taken, sum(row.used for row in rows), sum(row.wasted for row in rows)


def _describe(rows: list[_Row], page_size: int, num_pages: int) -> str:
    """The text alternative: who holds which pages."""
    parts = [f"{num_pages - _count(rows, page_size)[0]} of {num_pages} pages are free."]
    for row in rows:
        pages = ", ".join(str(slot // page_size) for slot in row.slots[::page_size])
        parts.append(
            f"{row.name} in row {row.number}: {row.used} tokens in pages {pages or 'none'}, "
            f"{row.wasted} slots wasted."
        )
    return " ".join(parts)


def _look(row: _Row, position: int, page_size: int) -> dict[str, Any]:
    """What a cell of the table and its slot in the pool share."""
    slot = row.slots[position]
    page = slot // page_size
    return {
        "kind": f"page{page % 8}",
        "key": f"s{slot}",
        "tip": f"slot {slot}, page {page}: {row.name}, position {position}",
        "bold": position >= row.start_new,
    }


def _look_of_tail(row: _Row, count: int, room: float) -> dict[str, Any]:
    """What the unused end of a request's last page looks like, `count` slots of it."""
    label = f"{count} wasted"
    return {
        "kind": "waste",
        "key": f"w{row.number}",
        "tip": f"{row.wasted} wasted at the end of {row.name}'s last page",
        "text": label if draw.text_width(label, 13) < room else "",
    }


def _draw_table(
    c: _PageCanvas,
    page_table: torch.Tensor,
    rows: list[_Row],
    top: float,
    columns: int,
    page_size: int,
) -> None:
    pitch = min(38, (draw.MAX_WIDTH - _LEFT - 4) / columns)
    width = columns * pitch - _GAP
    c.text(8, top - 38, "page table", size=13, weight="bold")
    c.words(_LEFT, top - 38, "for each position: the slot that holds the token")
    for position in range(0, columns, 4 if columns > 16 else 1):
        c.words(_LEFT + (position + 0.5) * pitch, top - 17, position, anchor="middle")
    at = {row.number: row for row in rows}
    dummy = page_table.shape[0] - 1
    for number in range(dummy):
        y = top + number * _ROW_STEP
        c.words(8, y + _ROW_H / 2, f"row {number}")
        c.box(_LEFT, y, width, _ROW_H, kind="free")
        if number in at:
            _draw_row(c, at[number], y, columns, pitch, page_size)
        else:
            c.words(_LEFT + 8, y + _ROW_H / 2, "free")
    y, slot = top + dummy * _ROW_STEP, int(page_table[dummy, 0])
    c.words(8, y + _ROW_H / 2, f"row {dummy}")
    what = f"the dummy request: every entry is {slot}"
    c.box(_LEFT, y, width, _ROW_H, kind="dummy", text=what, size=13, anchor="start", key=f"s{slot}")


def _draw_row(
    c: _PageCanvas, row: _Row, y: float, columns: int, pitch: float, page_size: int
) -> None:
    c.box(_LEFT - 38, y, 32, _ROW_H, kind=row.kind, text=row.name, size=14, bold=True)
    used = min(row.used, columns)
    for position in range(used):
        w = pitch - (_GAP if position % page_size == page_size - 1 else 0)
        look = _look(row, position, page_size)
        c.slot(_LEFT + position * pitch, y, w, _ROW_H, text=str(row.slots[position]), **look)
    tail = min(len(row.slots), columns) - used
    if tail > 0:
        w = tail * pitch - _GAP
        c.slot(_LEFT + used * pitch, y, w, _ROW_H, **_look_of_tail(row, row.wasted, w))
    if row.start_new < used:
        x0, x1 = _LEFT + row.start_new * pitch, _LEFT + used * pitch - _GAP
        c.line(x0, y - 5, x1, y - 5, kind="new", width=4)


def _draw_pool(
    c: _PageCanvas, rows: list[_Row], top: float, page_size: int, num_pages: int
) -> None:
    pitch = (draw.MAX_WIDTH - _LEFT - 4) / _LINE
    size = num_pages * page_size

    def place(slot: int) -> tuple[float, float]:
        line, column = divmod(slot, _LINE)
        return _LEFT + column * pitch, top + line * _POOL_STEP

    c.text(8, top - 36, "pool", size=13, weight="bold")
    pages = (
        f"{num_pages} pages of {page_size} slots" if page_size > 1 else f"{size} pages of 1 slot"
    )
    c.words(_LEFT, top - 36, f"{pages}, and one page for the dummy")
    for start in range(0, size, _LINE):
        y = place(start)[1] + _POOL_H / 2
        c.words(8, y, f"{start} … {min(start + _LINE, size) - 1}")
    taken = {slot // page_size for row in rows for slot in row.slots}
    for page in range(num_pages):
        x, y = place(page * page_size)
        if page_size > 1:
            c.words(x + 2, y - 10, f"page {page}")
        if page not in taken:
            for first, count in _runs([page * page_size + i for i in range(page_size)]):
                text = "free" if page_size > 1 else str(first)
                c.slot(*place(first), count * pitch - _GAP, _POOL_H, kind="free", text=text)
    for row in rows:
        for position, slot in enumerate(row.slots[: row.used]):
            w = pitch - (_GAP if slot % page_size == page_size - 1 else 0)
            text, look = f"{row.name}{position}", _look(row, position, page_size)
            c.slot(*place(slot), w, _POOL_H, text=text, sub=str(slot), **look)
        for first, count in _runs(row.slots[row.used :]):
            w = count * pitch - _GAP
            c.slot(*place(first), w, _POOL_H, **_look_of_tail(row, count, w))
    x, y = place(-(-size // _LINE) * _LINE)
    c.words(8, y + _POOL_H / 2, "dummy")
    w = min(page_size, _LINE) * pitch - _GAP
    text = str(size) if page_size == 1 else f"{size} …"
    tip = f"slot {size}, page {num_pages}: the dummy's"
    c.slot(x, y, w, _POOL_H, kind="dummy", text=text, key=f"s{size}", tip=tip)


def _draw_foot(c: _PageCanvas, rows: list[_Row], y: float, page_size: int, num_pages: int) -> None:
    taken, held, wasted = _count(rows, page_size)
    counts = f"{taken} of {num_pages} pages taken, {held} slots hold a token, {wasted} wasted"
    c.text(_LEFT, y + 8, counts, weight="bold")
    x = float(_LEFT)
    kinds = [("page0", "in use, a color a page"), ("waste", "wasted"), ("free", "free")]
    for kind, label in [*kinds, ("dummy", "the dummy's")]:
        c.slot(x, y + 26, 22, 16, kind=kind)
        c.words(x + 29, y + 34, label)
        x += 29 + draw.text_width(label, 13) + 18
    c.line(_LEFT, y + 60, _LEFT + 22, y + 60, kind="new", width=4)
    c.words(_LEFT + 29, y + 60, "bar above the cells, bold: written by this pass")


def run_picture(
    page_table: torch.Tensor,
    reqs: Mapping[str, Req],
    texts: Mapping[str, Sequence[str]],
    *,
    page_size: int,
    num_pages: int,
    writing: Collection[str] = (),
    title: str = "A run of the engine",
) -> draw.Canvas:
    """Each request's tokens and lengths, and under them the page table and the pool.

    Args:
        page_table: `[rows, positions]`, token locations; its last row is the dummy request's.
        reqs: the requests that hold a row, by the name to draw (a letter or two).
        texts: what their tokens say, those that are known by now.
        page_size, num_pages: of the pool, the dummy's page not counted.
        writing: names of the requests whose pass is running, pages allocated.
    """
    rows = [_read_row(page_table, name, r, page_size, name in writing) for name, r in reqs.items()]
    places = _places(20 + len(reqs) * _REQ_STEP + 30, page_table, page_size, num_pages)
    states = " ".join(f"{name}: {_lengths(req)}." for name, req in reqs.items())
    desc = f"{states} {_describe(rows, page_size, num_pages)}"
    c = _PageCanvas(draw.MAX_WIDTH, places.bottom, title=title, desc=desc)
    for i, (name, req) in enumerate(reqs.items()):
        _draw_request(c, 8 + i * _REQ_STEP, name, req, texts[name], name in writing)
    c.legend(_LEFT, 12 + len(reqs) * _REQ_STEP, ["cached", "new", "todo"])
    reach = max(len(row.slots) for row in rows)
    reach = max(reach, *(req.max_device_len for req in reqs.values()))
    columns = min(max(16, reach), page_table.shape[1])
    _draw_memory(c, page_table, rows, places, columns, page_size, num_pages)
    return c


def _lengths(req: Req) -> str:
    return (
        f"cached_len {req.cached_len}, device_len {req.device_len}, "
        f"extend_len {req.extend_len}, remain_len {req.remain_len}"
    )


def _draw_request(
    c: draw.Canvas, y: float, name: str, req: Req, texts: Sequence[str], writing: bool
) -> None:
    """One request's positions as boxes with their tokens, and its four lengths."""
    pitch = min(76, (draw.MAX_WIDTH - _LEFT - 4) / req.max_device_len)
    c.box(_LEFT - 38, y + 18, 32, 34, kind=f"req{req.uid % 6}", text=name, size=14, bold=True)
    for position in range(req.max_device_len):
        x = _LEFT + position * pitch
        c.text(x + (pitch - _GAP) / 2, y + 8, position, size=13, anchor="middle", muted=True)
        kind = "cached" if position < req.cached_len else "todo"
        if kind == "todo" and position < req.device_len:
            kind = "new" if writing else "todo"
        text = draw.visible(texts[position]) if position < len(texts) else ""
        c.box(x, y + 18, pitch - _GAP, 34, kind=kind, text=text, size=13)
    c.text(_LEFT, y + 66, _lengths(req), size=13, muted=True)
    c.text(_LEFT, y + 84, "".join(texts).replace("\n", "⏎"), size=13, mono=True)
