"""Pictures of chapter 06: requests, page table and pool during a run; what a sampler keeps.

Like :mod:`course.pictures`, the functions read the engine's own objects when they are called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from course import draw
from course.pictures import (
    _GAP,
    _LEFT,
    _LINE,
    _POOL_STEP,
    _ROW_STEP,
    _describe,
    _draw_foot,
    _draw_pool,
    _draw_table,
    _PageCanvas,
    _read_row,
)

if TYPE_CHECKING:
    import torch

    from minisgl.core import Req

__all__ = ["run_picture", "sampler_picture"]

_REQ_STEP = 112  # from one request's tokens to the next one's


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
    table_top = 20 + len(reqs) * _REQ_STEP + 30 + 52
    pool_top = table_top + page_table.shape[0] * _ROW_STEP + 54
    lines = -(-num_pages * page_size // _LINE) + -(-page_size // _LINE)
    foot = pool_top + lines * _POOL_STEP - 2
    states = " ".join(f"{name}: {_lengths(req)}." for name, req in reqs.items())
    desc = f"{states} {_describe(rows, page_size, num_pages)}"
    c = _PageCanvas(draw.MAX_WIDTH, foot + 74, title=title, desc=desc)
    for i, (name, req) in enumerate(reqs.items()):
        _draw_request(c, 8 + i * _REQ_STEP, name, req, texts[name], name in writing)
    c.legend(_LEFT, 12 + len(reqs) * _REQ_STEP, ["cached", "new", "todo"])
    reach = max(len(row.slots) for row in rows)
    reach = max(reach, *(req.max_device_len for req in reqs.values()))
    columns = min(max(16, reach), page_table.shape[1])
    _draw_table(c, page_table, rows, table_top, columns, page_size)
    _draw_pool(c, rows, pool_top, page_size, num_pages)
    _draw_foot(c, rows, foot, page_size, num_pages)
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


def sampler_picture(
    items: Sequence[tuple[str, float, bool]],
    rest: tuple[int, float, int],
    *,
    heading: str,
    maximum: float = 0.65,
) -> draw.Canvas:
    """A next-token distribution as bars, the likeliest first; what a filter cut is hatched.

    Args:
        items: (token, probability after temperature, whether it is kept), in falling order.
        rest: of the tokens not shown: how many, their probability, how many of them are kept.
        heading: the settings, one line.
        maximum: the probability at full width.
    """
    kept = sum(probability for _, probability, keep in items if keep)
    count = sum(keep for _, _, keep in items) + rest[2]
    desc = f"{heading}: {count} tokens are kept; " + ", ".join(
        f"{draw.visible(token)} {probability:.3f}{'' if keep else ' cut'}"
        for token, probability, keep in items
    )
    c = draw.Canvas(560, 44 + 26 * (len(items) + 1) + 40, title="The sampler", desc=desc)
    c.text(12, 18, heading, weight="bold")
    y = 40.0
    left, room = 130, 300
    for token, probability, keep in items:
        c.text(left - 8, y + 10, draw.visible(token), anchor="end", mono=True, size=13)
        width = round(room * probability / maximum, 1)
        if width >= 1:
            c.box(left, y, width, 20, kind="act" if keep else "waste")
        share = f"{probability / kept:.3f}" if keep and not rest[2] else ""
        label = f"{probability:.3f}" + ("" if keep else " cut")
        c.text(left + width + 8, y + 10, f"{label}   drawn {share}" if share else label, size=13)
        y += 26
    number, probability, still = rest
    what = "all kept" if still == number else f"{still:,} kept" if still else "all cut"
    c.text(12, y + 12, f"and {number:,} more tokens, {probability:.3f} in all, {what}", size=13)
    c.legend(12, y + 30, [("act", "kept"), ("waste", "cut by a filter")])
    return c
