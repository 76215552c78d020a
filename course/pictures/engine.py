"""The parts of an engine: merged weights, the pool, a start, its memory, a pass, a sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from course.pictures import canvas as draw


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


def engine_map() -> draw.Canvas:
    """The parts of an engine, and the chapter that builds each."""
    c = draw.Canvas(
        456,
        398,
        title="The parts of the engine and the chapters that build them",
        desc=(
            "From top to bottom: the server with its tokenizer (part three, to come), the "
            "scheduler (part two, to come), and the engine (chapter 06). Inside the engine: the "
            "model (03) made of layers (02), attention (05), the KV cache with its page table "
            "(04), and the sampler (06). Below, used by all: requests, batches, the context (01)."
        ),
    )
    c.box(8, 8, 440, 42, kind="todo", text="server, tokenizer", sub="part three")
    c.arrow(228, 50, 228, 64)
    c.box(8, 64, 440, 42, kind="todo", text="scheduler", sub="part two")
    c.arrow(228, 106, 228, 120, label="a batch")
    c.box(8, 120, 440, 176, kind="plain")
    c.text(20, 138, "engine/", weight="bold", mono=True)
    c.text(436, 138, "chapter 06", anchor="end", muted=True)
    c.box(20, 154, 206, 130, kind="cached")
    c.text(32, 173, "models/", weight="bold", mono=True)
    c.text(214, 173, "03", anchor="end", muted=True)
    c.box(32, 192, 182, 80, kind="cached")
    c.text(44, 211, "layers/", weight="bold", mono=True)
    c.text(202, 211, "02", anchor="end", muted=True)
    c.text(44, 234, "linear, norm, RoPE,")
    c.text(44, 254, "embedding, LM head")
    for y, name, what, chapter in [
        (154, "attention/", "over scattered pages", "05"),
        (199, "kvcache/", "pool and page table", "04"),
        (244, "sampler", "logits to tokens", "06"),
    ]:
        c.box(238, y, 198, 40, kind="cached")
        c.text(250, y + 12, name, weight="bold", mono=True, size=13)
        c.text(424, y + 12, chapter, anchor="end", muted=True, size=13)
        c.text(250, y + 29, what, size=13)
    c.box(8, 308, 440, 42, kind="cached")
    c.text(20, 329, "core.py", weight="bold", mono=True)
    c.text(90, 329, "requests, batches, the context")
    c.text(436, 329, "01", anchor="end", muted=True)
    c.legend(8, 366, [("cached", "part one"), ("todo", "to come")])
    return c
