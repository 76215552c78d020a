"""The life of a request, and who fills a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from course.pictures import canvas as draw


def life_picture(states: Sequence[tuple[str, int, int]]) -> draw.Canvas:
    """The states of a request from its arrival to its departure, and what moves it on.

    Args:
        states: (name, cached_len, device_len) at admission, after the prefill, and at the end;
            read from a real `Req` as it moves.
    """
    (_, hit, prompt), (_, cached, device), (_, last_cached, last) = states
    computed = f"positions {hit} … {prompt - 1}" if prompt - hit > 1 else f"position {hit}"
    c = draw.Canvas(
        draw.PHONE_WIDTH,
        412,
        title="The life of a request",
        desc=f"It waits; admission gives it a row and {hit} tokens of a prefix hit; the prefill "
        f"computes {computed} and samples a token; each decode computes one position and samples "
        f"one more, while can_decode is true; at {last} tokens, {last_cached} of them cached, it "
        "is finished, and row and pages go back.",
    )
    left, width, height = 8.0, 176.0, 48.0
    boxes = [
        ("todo", "waiting", "a prompt and its wishes"),
        ("cached", "admitted", f"cached {hit}, device {prompt}"),
        ("cached", "running", f"cached {cached}, device {device}"),
        ("plain", "finished", f"cached {last_cached}, device {last}"),
    ]
    moves = [
        ("admission", "the scheduler: a row of the", "page table, a look for a prefix hit"),
        ("prefill", f"the engine computes {computed}", "and samples the first token"),
        ("no can_decode any more", "or the end-of-text token", "row and pages are given back"),
    ]
    spans = []
    for i, (kind, text, sub) in enumerate(boxes):
        y = 10.0 + i * 116
        spans.append(c.box(left, y, width, height, kind=kind, text=text, sub=sub, bold=True))
    for i, lines in enumerate(moves):
        x, y = left + 24, spans[i].bottom
        c.arrow(x, y, x, spans[i + 1].top)
        for j, line in enumerate(lines):
            c.text(x + 12, y + 15 + 19 * j, line, size=13, weight="normal" if j else "bold")
    again = spans[2]
    right = again.right + 34
    c.polyline([(again.right, again.top + 12), (right, again.top + 12), (right, again.bottom - 12)])
    c.arrow(right, again.bottom - 12, again.right, again.bottom - 12)
    for j, line in enumerate(
        ["decode, while can_decode:", "one position computed,", "one token more"]
    ):
        c.text(right + 10, again.top + 6 + 19 * j, line, size=13, weight="normal" if j else "bold")
    return c


FILLED_BY = (
    ("scheduler", "reqs, phase"),
    ("graph runner", "padded_reqs"),
    ("scheduler", "positions"),
    ("scheduler", "out_loc"),
    ("attention", "attn_metadata"),
    ("scheduler", "input_ids"),
    ("engine", "the pass"),
)
"""Who fills which fields of a `Batch`, in order; the last entry reads them all."""


def batch_fields_picture() -> draw.Canvas:
    """Who fills which field of a `Batch`, from top to bottom in the order of time."""
    lanes = list(dict.fromkeys(who for who, _ in FILLED_BY))
    pitch, step, top = 112.0, 44.0, 40.0
    order = "; ".join(f"{i}. {who}: {what}" for i, (who, what) in enumerate(FILLED_BY, 1))
    c = draw.Canvas(
        draw.PHONE_WIDTH,
        top + step * len(FILLED_BY) + 2,
        title="Who fills which field of a batch, and when",
        desc=f"From first to last: {order}.",
    )
    spans = []
    for i, lane in enumerate(lanes):
        x = 6 + i * pitch
        c.text(x + 53, 16, lane, size=13, weight="bold", anchor="middle")
        c.line(x + 53, 28, x + 53, top + step * len(FILLED_BY) - 8, kind="rule", width=1)
    for i, (who, what) in enumerate(FILLED_BY):
        x = 6 + lanes.index(who) * pitch
        kind = "new" if who == "engine" else f"req{lanes.index(who) % 6}"
        spans.append(c.box(x, top + i * step, 106, 30, kind=kind, text=what, size=13))
    for a, b in pairwise(spans):
        c.arrow(a.cx, a.bottom, b.cx, b.top)
    return c
