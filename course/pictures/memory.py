"""Pictures that more than one chapter draws.

:func:`package_map` reads the chapters themselves. The others read the engine's objects at the
moment they are called, so that a notebook can call them after every step of its code and hand the
pictures to `widgets.stepper`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from course.building import notebooks
from course.building.roots import find_root, reference_root
from course.building.source import directive
from course.pictures import canvas as draw

if TYPE_CHECKING:
    import torch

    from minisgl.core import Req

__all__ = [
    "batch_fields_picture",
    "forward_picture",
    "kv_tensor_picture",
    "life_picture",
    "memory_picture",
    "merge_picture",
    "package_map",
    "page_table_picture",
    "run_picture",
    "sampler_picture",
    "start_picture",
]

_LEFT = 92  # room for the labels of rows
_LINE = 16  # slots of the pool on a line
_GAP = 3  # between two pages
_ROW_H, _ROW_STEP = 26, 36  # a row of the table, and from one row to the next
_POOL_H, _POOL_STEP = 34, 54
_MAX_SLOTS = 160
_REQ_STEP = 112  # in a run, from one request's tokens to the next one's


# -- every chapter: where you are -----------------------------------------------------------------


def package_map(chapter: str | None = None, *, root: Path | None = None) -> draw.Canvas:
    """The modules of the package, with the chapter that builds each: a "you are here".

    It is read from the build cells of all chapters in the order of `_toc.yml`: what the chapters
    before `chapter` build is drawn as there, what `chapter` builds as new, the rest as to come.
    A folder's `__init__.py` stands for the folder and has no box of its own; a file of an earlier
    chapter that this one adds to has a plus sign.

    Args:
        chapter: the notebook's name, such as "04_kvcache"; None draws the finished package.
        root: the folder with `_toc.yml` and `notebooks/`; by default the one that holds `course/`,
            so that a folder of workbooks shows the same map, else the one the notebook lies in.

    Raises:
        CourseError: for a chapter that is not in the table of contents.
    """
    if root is None:
        places = (reference_root(), find_root())
        root = next((place for place in places if (place / "_toc.yml").is_file()), places[0])
    order = notebooks.chapters(root)
    if chapter is not None and chapter not in order:
        known = ", ".join(order)
        raise notebooks.CourseError(f"there is no chapter {chapter!r}; the chapters are {known}")
    here = len(order) if chapter is None else order.index(chapter)
    builders: dict[str, list[int]] = {}  # file → the chapters that build parts of it, by number
    for number, name in enumerate(order):
        text = notebooks.notebook_path(root, name).read_text(encoding="utf-8")
        for cell in json.loads(text)["cells"]:  # (nbformat takes a second for all chapters)
            path = directive("".join(cell["source"])) if cell["cell_type"] == "code" else None
            if path is not None and number not in builders.setdefault(path, []):
                builders[path].append(number)
    lines = _map_lines(builders, here)
    return _draw_map(lines, [_short(name) for name in order], here)


@dataclass(frozen=True)
class _MapLine:
    """The files of one folder that one chapter begins: (label, whether `here` adds to it)."""

    folder: str
    chapter: int
    files: list[tuple[str, bool]]


def _map_lines(builders: Mapping[str, list[int]], here: int) -> list[_MapLine]:
    """The lines of the map: by folder in the order of their first files, then by chapter."""
    lines: dict[str, dict[int, list[tuple[str, bool]]]] = {}
    for path, chapters in builders.items():
        place = PurePosixPath(path)
        of_folder = lines.setdefault(f"{place.parent.name}/", {})
        if place.stem != "__init__":
            grown = here in chapters[1:]
            of_folder.setdefault(chapters[0], []).append((place.stem + " +" * grown, grown))
    return [
        _MapLine(folder, chapter, files)
        for folder, chapters in lines.items()
        for chapter, files in sorted(chapters.items())
    ]


def _short(chapter: str) -> str:
    """A chapter's number, or the last word of its name where it has none."""
    first, _, rest = chapter.partition("_")
    return first if first.isdigit() else (rest or first)[:4]


def _draw_map(lines: list[_MapLine], names: list[str], here: int) -> draw.Canvas:
    left, height, gap = 138.0, 22.0, 4.0
    limit: float = draw.PHONE_WIDTH - 6
    states = ("cached", "new", "todo")
    said: dict[str, list[str]] = {state: [] for state in states}
    boxes: list[tuple[float, float, float, str, str]] = []  # x, y, width, kind, text
    labels: list[tuple[float, str, str, bool]] = []  # y, folder, chapter, whether it is this one
    x, y, folder = left, 30.0, ""
    for line in lines:
        state = states[(line.chapter >= here) + (line.chapter > here)]
        begins = line.folder != folder
        y += 5 * begins
        labels.append((y, line.folder * begins, names[line.chapter], state == "new"))
        folder, x = line.folder, left
        for text, grown in line.files:
            width: float = round(draw.text_width(text, 13) + 14)
            if x + width > limit:
                x, y = left, y + height + gap
            kind = "new" if grown else state
            boxes.append((x, y, width, kind, text))
            said[kind].append(f"{folder}{text}".removeprefix("minisgl/"))
            x += width + gap
        y += height + gap
    words = {"cached": "built before", "new": "this chapter", "todo": "to come"}
    if here == len(names):
        words["cached"] = "built by the chapter on its left"
    shown = [state for state in states if said[state]]
    desc = " ".join(f"{words[state].capitalize()}: {', '.join(said[state])}." for state in shown)
    title = "The package minisgl, and the chapter that builds each file"
    if here < len(names):
        title = f"You are here: the package minisgl in chapter {names[here]}"
    c = draw.Canvas(draw.PHONE_WIDTH, y + 38, title=title, desc=desc)
    c.text(8, 16, "folder", size=13, muted=True)
    c.text(left - 12, 16, "chapter", size=13, muted=True, anchor="end")
    c.text(left, 16, "files", size=13, muted=True)
    for top, name, number, current in labels:
        cy = top + height / 2
        c.text(8, cy, name, size=13, mono=True, weight="bold")
        c.text(
            left - 12,
            cy,
            number,
            size=13,
            anchor="end",
            muted=not current,
            weight="bold" if current else "normal",
        )
    for x, top, width, kind, text in boxes:
        faint = kind == "todo"
        c.box(x, top, width, height, kind=kind, text="" if faint else text, size=13)
        if faint:
            c.text(x + width / 2, top + height / 2, text, size=13, anchor="middle", muted=True)
    c.legend(8, y + 10, [(state, words[state]) for state in shown])
    return c


# -- chapter 01: the life of a request, and who fills a batch --------------------------------------


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


# -- chapter 02: merged weights --------------------------------------------------------------------


def merge_picture(groups: Mapping[str, Mapping[str, int]], columns: int) -> draw.Canvas:
    """Matrices of the checkpoint with the same input, stacked into one: rows add up.

    Args:
        groups: merged name → {name in the checkpoint: its rows}, in stacking order.
        columns: of all of them, the length of the input.
    """
    scale = {name: 116 / sum(parts.values()) for name, parts in groups.items()}
    said = "; ".join(
        f"{name} has {' + '.join(str(rows) for rows in parts.values())} = {sum(parts.values())} "
        f"rows, from {', '.join(parts)}"
        for name, parts in groups.items()
    )
    heights = [116.0 + 14 * (len(parts) - 1) for parts in groups.values()]
    c = draw.Canvas(
        draw.PHONE_WIDTH,
        40 + sum(heights) + 62 * len(groups),
        title="Matrices with the same input become one",
        desc=f"{said}. All have {columns} columns, so one product gives all their outputs side by "
        "side, and they are cut apart again where they are used.",
    )
    c.text(8, 16, "in the checkpoint", size=13, muted=True)
    c.text(176, 16, "one matrix", size=13, muted=True)
    c.text(306, 16, "one product gives", size=13, muted=True)
    top = 54.0
    for (name, parts), height in zip(groups.items(), heights, strict=True):
        kinds = [f"req{i}" for i in range(len(parts))]
        per_row = scale[name]
        total, y = sum(parts.values()), top
        merged_top = top + 7 * (len(parts) - 1)
        c.text(218, merged_top - 12, f"{total} × {columns}", size=13, anchor="middle")
        x, at = 306.0, merged_top
        for kind, (part, rows) in zip(kinds, parts.items(), strict=True):
            h = rows * per_row
            c.box(8, y, 84, h, kind=kind, text=part, size=13, key=f"{name}-{part}")
            c.text(98, y + h / 2, rows, size=13, muted=True)
            c.arrow(136, y + h / 2, 172, at + h / 2, kind="plain")
            c.box(176, at, 84, h, kind=kind, text=part, size=13, key=f"{name}-{part}")
            w = 142 * rows / total
            middle = merged_top + total * per_row / 2 - 17
            c.box(x, middle, w, 34, kind=kind, text=part, size=13, key=f"{name}-{part}")
            x, y, at = x + w, y + h + 14, at + h
        c.arrow(264, middle + 17, 300, middle + 17)
        c.text(377, middle - 12, f"{total} numbers a token", size=13, anchor="middle")
        c.text(218, at + 16, name, size=13, anchor="middle", weight="bold", mono=True)
        top += height + 62
    return c


# -- chapter 04: the layout of the pool ------------------------------------------------------------


def kv_tensor_picture(
    shape: Sequence[int], *, layer: int, slot: int, bytes_per_number: int
) -> draw.Canvas:
    """The dimensions of the pool's one tensor, each a zoom into a part of the one before.

    Args:
        shape: `[2, layers, pages (the dummy's too), page_size, KV heads, head_dim]`.
        layer, slot: the way that is followed down.
        bytes_per_number: of the pool's dtype.
    """
    _, layers, pages, page_size, heads, head_dim = shape
    page, offset = divmod(slot, page_size)
    sizes = [layers, pages, page_size, heads]  # how many parts K, a layer, a page, a slot have
    numbers = [head_dim * heads * page_size * pages * layers]
    for size in sizes:
        numbers.append(numbers[-1] // size)
    weigh = [f"{number * bytes_per_number:,} bytes" for number in numbers]
    rows: list[tuple[str, list[str], int, str]] = [
        ("K and V", ["K", "V"], 0, weigh[0]),
        ("layers", [str(i) for i in range(layers)], layer, weigh[1]),
        ("pages", [str(i) for i in range(pages)], page, weigh[2]),
        ("slots", [str(page * page_size + i) for i in range(page_size)], offset, weigh[3]),
        ("KV heads", [f"{head_dim} numbers"] * heads, -1, weigh[4]),
    ]
    left, room, step = 118.0, draw.PHONE_WIDTH - 118 - 6, 74.0
    c = draw.Canvas(
        draw.PHONE_WIDTH,
        step * len(rows) + 4,
        title="The layout of the KV pool",
        desc=f"One tensor. First K and V; in K {layers} layers of {weigh[1]}; in layer {layer} "
        f"{pages} pages of {weigh[2]}, the last one the dummy's; in page {page} {page_size} slots; "
        f"in slot {slot} {heads} KV heads of {head_dim} numbers, {weigh[3]}.",
    )
    before: draw.Span | None = None
    for i, (name, parts, chosen, note) in enumerate(rows):
        y = 8 + i * step
        c.text(8, y + 8, name, size=13, weight="bold")
        c.text(8, y + 27, note, size=13, muted=True)
        # What doesn't fit is left out in the middle, but never the part that is followed down.
        width = max(draw.text_width(part, 13) for part in parts) + 9
        keep = _few(len(parts), int(room // max(width, 24)), chosen)
        pitch = room / len(keep)
        if before is not None:
            for edge, x in ((before.left, left), (before.right, left + room)):
                c.line(edge, before.bottom, x, y, kind="plain", dashed=True, width=1.2)
        for j, part in enumerate(keep):
            x = left + j * pitch
            if part is None:
                c.text(x + pitch / 2, y + 16, "…", anchor="middle")
                continue
            kind = "new" if part == chosen else "cached"
            if name == "pages" and part == pages - 1:
                kind = "dummy"
            span = c.box(x, y, pitch - 3, 34, kind=kind, text=parts[part], size=13)
            if part == chosen:
                before = span
    c.legend(8, c.height - 26, [("new", "where the next line looks in"), ("dummy", "dummy's page")])
    return c


def _few(count: int, places: int, chosen: int) -> list[int | None]:
    """Which of `count` parts to draw in `places` places: the ends and `chosen`; None is a gap."""
    if count <= places:
        return list(range(count))
    wanted = {0, 1, count - 1, *(i for i in (chosen - 1, chosen, chosen + 1) if 0 < i < count)}
    for i in range(count):
        if len(wanted) + 2 >= places:
            break
        wanted.add(i)
    shown: list[int | None] = []
    for i in sorted(wanted):
        if shown and shown[-1] is not None and i != shown[-1] + 1:
            shown.append(None)
        shown.append(i)
    return shown


# -- chapter 06: a start, its memory, and one pass -------------------------------------------------

STARTING = (
    ("rank, device, threads", ()),
    ("stream and context", (1,)),
    ("meet the other ranks", (1,)),
    ("measure, load the model, plan", (1, 3)),
    ("KV pool", (4,)),
    ("page table", (4, 5)),
    ("attention backend", (2, 5)),
    ("sampler, dummy request", (6,)),
    ("graph runner", (4, 7, 8)),
)
"""The steps in which an engine starts, each with the numbers of the steps that it builds on."""


def start_picture() -> draw.Canvas:
    """The order in which an engine starts: each step with the steps that it needs."""
    step, top = 44.0, 34.0
    needs = "; ".join(
        f"{i}. {what}" + (f", needs {' and '.join(map(str, of))}" if of else "")
        for i, (what, of) in enumerate(STARTING, 1)
    )
    c = draw.Canvas(
        draw.PHONE_WIDTH,
        top + step * len(STARTING) + 26,
        title="The order in which an engine starts",
        desc=f"{needs}. A failure or shutdown() undoes them in reverse order.",
    )
    c.text(40, 14, "step", size=13, muted=True)
    c.text(290, 14, "needs", size=13, muted=True)
    for i, (what, of) in enumerate(STARTING, 1):
        y = top + (i - 1) * step
        kind = "weight" if i == 4 else "cached" if i in (5, 6) else "plain"
        c.text(28, y + 16, i, anchor="end", weight="bold")
        span = c.box(40, y, 236, 32, kind=kind, text=what, size=14)
        if i < len(STARTING):
            c.arrow(span.cx, span.bottom, span.cx, y + step)
        for j, number in enumerate(of):
            c.box(290 + j * 40, y + 2, 34, 28, kind="act", text=number, size=13)
    bottom = top + step * len(STARTING)
    c.arrow(440, bottom - 14, 440, top + 4, dashed=True)
    c.text(448, bottom + 10, "undone upwards", size=13, anchor="end", muted=True)
    c.legend(40, bottom, [("weight", "weights"), ("cached", "the memory for KV")])
    return c


def memory_picture(plans: Mapping[str, tuple[float, float, float]]) -> draw.Canvas:
    """Bars of a device's memory: model, pool, and what is left free.

    Args:
        plans: label → (free before the model was loaded, model, pool), in GB.
    """
    left, room, step = 8.0, draw.PHONE_WIDTH - 16, 92.0
    said = "; ".join(
        f"{label}: of {free:g} GB the model takes {model:g}, the pool {pool:.1f}, and "
        f"{free - model - pool:.1f} stay free"
        for label, (free, model, pool) in plans.items()
    )
    c = draw.Canvas(
        draw.PHONE_WIDTH, step * len(plans) + 34, title="What the memory goes to", desc=f"{said}."
    )
    most = max(free for free, _, _ in plans.values())
    for i, (label, (free, model, pool)) in enumerate(plans.items()):
        y, x = 8 + i * step, left
        c.text(left, y + 10, label, size=13, weight="bold")
        for kind, size in (("weight", model), ("cached", pool), ("free", free - model - pool)):
            w = room * size / most
            text = f"{size:.1f} GB" if size >= 10 else f"{size:.1f}"
            fits = draw.text_width(text, 13) + 12 < w
            c.box(x, y + 24, max(w - 2, 1), 32, kind=kind, text=text if fits else "", size=13)
            if not fits:
                c.text(min(x + w / 2, left + room - 11), y + 68, text, size=13, anchor="middle")
            x += w
    kinds = [("weight", "model"), ("cached", "KV pool"), ("free", "for the passes' own tensors")]
    c.legend(left, step * len(plans) + 6, kinds)
    return c


def forward_picture(batch_size: int, tokens: int, vocab_size: int, layers: int) -> draw.Canvas:
    """One call of `forward_batch`, from the batch to the tokens, host on the left, device right.

    Args:
        batch_size, tokens: requests in the batch and tokens that they bring.
        vocab_size, layers: of the model.
    """
    c = draw.Canvas(
        draw.PHONE_WIDTH,
        566,
        title="One forward pass",
        desc=f"The host fills the batch and opens the context. On the device {tokens} token ids "
        f"are embedded and go through {layers} layers; attention in each writes K and V to the "
        f"pool and reads them by the page table. The LM head gives {batch_size} rows of "
        f"{vocab_size:,} logits. The host then books the pass with complete_one; the device "
        "samples one token for each request, keeps it for the next pass, and copies it to the "
        "host, which waits for the event before it reads.",
    )
    c.text(8, 14, "host", size=13, weight="bold")
    c.text(164, 14, "device", size=13, weight="bold")
    c.line(150, 4, 150, 556, kind="rule", width=1)
    host, device = 8.0, 164.0
    c.box(host, 32, 128, 44, kind="plain", text="the batch", sub="in the Context", size=14)
    c.arrow(136, 54, device, 54)
    x = [
        c.box(device, 32, 150, 44, kind="act", text="embedding", sub=f"{tokens} token ids"),
        c.box(device, 98, 150, 44, kind="weight", text="norm, q/k/v, RoPE", size=14),
        c.box(device, 164, 150, 44, kind="new", text="attention", sub="write, then read"),
        c.box(device, 230, 150, 44, kind="weight", text="output, norm, MLP", size=14),
        c.box(device, 310, 150, 44, kind="weight", text="last norm, LM head", size=14),
        c.box(
            device, 376, 150, 44, kind="act", text=f"{batch_size} × {vocab_size:,}", sub="logits"
        ),
        c.box(device, 442, 150, 44, kind="plain", text="sampler", sub="argmax, or a draw"),
        c.box(device, 508, 150, 44, kind="new", text=f"{batch_size} new tokens", size=14),
    ]
    for a, b in pairwise(x):
        c.arrow(a.cx, a.bottom, b.cx, b.top)
    c.polyline([(322, 98), (332, 98), (332, 274), (322, 274)])
    c.text(340, 252, f"× {layers} layers", size=13)
    c.box(356, 118, 92, 40, kind="cached", text="KV pool", size=14)
    c.box(356, 184, 92, 40, kind="plain", text="page table", size=14)
    c.arrow(314, 178, 356, 146)
    c.arrow(356, 204, 314, 196)
    c.text(340, 332, "the last row of\neach request", size=13, muted=True)
    c.box(host, 376, 128, 44, kind="plain", text="complete_one", sub="of each request", size=14)
    c.text(340, 530, "also the next\npass's input", size=13, muted=True)
    c.arrow(device, 530, 136, 530, label="")
    c.box(host, 508, 128, 44, kind="plain", text="append_host", sub="once it is copied", size=14)
    c.arrow(72, 420, 72, 508, dashed=True)
    return c


# -- chapter 04: the page table and the pool ------------------------------------------------------


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
        look = draw._kind(kind)
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


# -- chapter 06: a run of the engine, and what a sampler keeps ------------------------------------


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
