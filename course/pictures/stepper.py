"""Pictures behind a slider and a play button, moving without a kernel."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as w

from course.pictures import canvas as draw

PLAY_INTERVAL_MS = 1500
"""How long each frame stays while the widget plays, in milliseconds."""


@dataclass(frozen=True)
class Frame:
    """One step of a widget.

    Args:
        svg: the picture, a `draw.Canvas` (or SVG text that `str(canvas)` gave).
        caption: what this picture says, in a sentence or two; shown below it and read aloud by a
            screen reader. `code` in back quotes and `**bold**` are set as such; everything
            else is plain text.
    """

    svg: draw.Canvas | str
    caption: str

    def __post_init__(self) -> None:
        if not isinstance(self.svg, draw.Canvas) and not str(self.svg).lstrip().startswith("<svg"):
            raise ValueError("a Frame takes a draw.Canvas (or its SVG text), then a caption")
        if not self.caption.strip():
            raise ValueError("a Frame needs a caption: it is the picture's text alternative")


Frames = Sequence[Frame] | Mapping[str, Sequence[Frame]]


def _bare(frame: Frame) -> str:
    """A frame's picture without its style sheet; the widget has one for all frames."""
    if isinstance(frame.svg, draw.Canvas):
        return frame.svg.svg(with_style=False)
    return draw.bare(frame.svg)


def _whole(frame: Frame) -> str:
    return frame.svg.svg() if isinstance(frame.svg, draw.Canvas) else frame.svg


def _links(frame: Frame) -> int:
    if isinstance(frame.svg, draw.Canvas):
        return frame.svg.links
    numbers = re.findall(r'class="mgb[^"]* k(\d+)"', frame.svg)
    return max((int(n) + 1 for n in numbers), default=0)


def inline(text: str) -> str:
    """Plain text to HTML: everything escaped, then `code` and **bold**."""
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escaped)


def _plain(text: str) -> str:
    """A caption as one line of plain text, without its `code` and **bold** marks."""
    return " ".join(re.sub(r"`([^`]+)`|\*\*(.+?)\*\*", r"\1\2", text).split())


def frame_html(frame: Frame) -> str:
    """The picture with its caption below."""
    return (
        f'<figure class="mg-figure">{draw.framed(_bare(frame))}'
        f"<figcaption>{inline(frame.caption)}</figcaption></figure>"
    )


# Text instead of icons on the play buttons: icon fonts are missing in some viewers, and a word
# needs no explanation. Variables fall back from the book's theme to JupyterLab's to a literal.
_WIDGET_STYLE = """
.mg-widget{--mg-t:var(--pst-color-text-base,var(--jp-content-font-color1,#17202c));
--mg-b:var(--pst-color-border,var(--jp-border-color2,#c9ced6));
--mg-a:var(--mg-accent,var(--jp-brand-color1,#0a66a8));
border:1px solid var(--mg-b);border-radius:8px;padding:10px 14px 12px;margin:4px 0;
max-width:780px;overflow:hidden}
.mg-widget .mg-title{font-weight:650;line-height:1.35;margin:0 0 3px;color:var(--mg-t);
white-space:normal}
.mg-widget .widget-html,.mg-widget .widget-html-content,.mg-widget .mg-stack{height:auto;
width:100%;max-width:100%;margin:0;overflow:visible}
.mg-widget .widget-html-content{line-height:1.5;white-space:normal}
.mg-widget .mg-figure{margin:0}
.mg-widget .mg-pic{overflow-x:auto;overflow-y:hidden;padding:2px}
.mg-widget .mg-pic svg{display:block;min-width:var(--mg-w,0)}
.mg-widget .mg-figure figcaption{margin:6px 0 0;padding:0;text-align:left;color:var(--mg-t);
font-size:.95em;
font-weight:400;line-height:1.45;white-space:normal}
.mg-widget .mg-bar{flex-flow:row wrap;align-items:center;gap:2px 12px;overflow:visible}
.mg-widget .mg-bar,.mg-widget .widget-toggle-buttons{margin:3px 0}
.mg-widget .mg-bar>*,.mg-controls>*{max-width:100%}
.mg-widget .widget-play{flex:none;width:auto;height:auto;gap:4px;display:flex}
.mg-widget .widget-play button{width:auto;min-width:68px;max-width:none;flex:none;padding:0 10px;
height:32px;line-height:30px;font-size:13px;margin:0}
.mg-widget .widget-play button>*{display:none!important}
.mg-widget .widget-play button:nth-of-type(1)::after{content:"\\25B6\\FE0E  Play"}
.mg-widget .widget-play.mg-on button:nth-of-type(1)::after,
.mg-widget .widget-play button:nth-of-type(1):has(.fa-pause)::after{content:"Pause"}
.mg-widget .widget-play button:nth-of-type(2)::after{content:"First"}
.mg-widget .widget-toggle-buttons{height:auto;width:auto;display:flex;flex-flow:row wrap;
align-items:center;gap:2px 8px}
.mg-widget .widget-toggle-button{width:auto;padding:0 12px}
.mg-controls{flex-flow:row wrap;gap:2px 16px;overflow:visible}
.mg-widget .mg-error{border-left:4px solid #c04a00;padding:4px 10px;margin:4px 0;color:var(--mg-t)}
.mg-widget .mg-error:empty,.mg-widget .mg-note{display:none}
""".replace("\n", "")


class Stepper(w.VBox):
    """What `stepper` returns; the frames it was made from are in `frames`."""

    def __init__(self, frames: Frames, title: str) -> None:
        self.title = title
        self.frames: dict[str, list[Frame]] = by_variant(frames)
        self._html_layout = w.Layout()
        self._html_style = w.HTML().style
        self._body = w.VBox(layout=self._html_layout)
        self._head = self._html("")
        super().__init__([self._head, self._body])
        self.add_class("mg-widget")
        self._build()

    # -- parts ----------------------------------------------------------------------------------

    def _html(self, value: str) -> w.HTML:
        """An HTML widget; all share one layout and style, which keeps the stored state small."""
        return w.HTML(value, layout=self._html_layout, style=self._html_style)

    def _head_html(self) -> str:
        """The style sheet that serves all frames, and the title."""
        links = max(_links(frame) for variant in self.frames.values() for frame in variant)
        title = f'<p class="mg-title">{inline(self.title)}</p>' if self.title else ""
        return f"<style>{draw.style(links)}{_WIDGET_STYLE}</style>{title}"

    def _link(self, source: w.Widget, trait: str, target: w.Widget, other: str) -> None:
        """Make `other` of `target` follow `trait` of `source` (and back), without a kernel."""
        self._jslinks.append(w.jslink((source, trait), (target, other)))

    def _build(self) -> None:
        variants = list(self.frames.values())
        lengths = {len(frames) for frames in variants}
        self._head.value = self._head_html()
        self._jslinks: list[w.Widget] = []
        self.stacks: list[w.Stack] = []
        self.sliders: list[w.IntSlider] = []
        self.plays: list[w.Play] = []
        self.chooser: w.ToggleButtons | w.Dropdown | None = None
        if len(variants) == 1:
            self._body.children = self._one(variants[0])
            return
        names = list(self.frames)
        kind = w.ToggleButtons if sum(map(len, names)) <= 60 else w.Dropdown
        self.chooser = kind(options=names, description="Show:", style={"description_width": "auto"})
        if len(lengths) == 1:
            # One slider moves all variants, so that they can be compared at the same step.
            bar = self._bar(lengths.pop())
            inner: list[w.Widget] = [self._stack(frames) for frames in variants]
        else:
            bar = []
            inner = [w.VBox(self._one(frames), layout=self._html_layout) for frames in variants]
        self.outer = w.Stack(inner, selected_index=0, layout=self._html_layout)
        self.outer.add_class("mg-stack")
        self._link(self.chooser, "index", self.outer, "selected_index")
        self._body.children = [self.chooser, *bar, self.outer]

    def _one(self, frames: Sequence[Frame]) -> list[w.Widget]:
        bar = self._bar(len(frames))
        return [*bar, self._stack(frames)]

    def _stack(self, frames: Sequence[Frame]) -> w.Stack:
        pictures = [self._html(frame_html(frame)) for frame in frames]
        stack = w.Stack(pictures, selected_index=0, layout=self._html_layout)
        stack.add_class("mg-stack")
        if self.sliders and len(frames) > 1:
            self._link(self.sliders[-1], "value", stack, "selected_index")
        self.stacks.append(stack)
        return stack

    def _bar(self, steps: int) -> list[w.Widget]:
        """The play buttons and the slider; nothing for a single frame."""
        if steps < 2:
            return []
        play = w.Play(
            min=0, max=steps - 1, interval=PLAY_INTERVAL_MS, show_repeat=False, description="Play"
        )
        play.tooltip = "Play, pause, back to the first step"
        slider = w.IntSlider(
            min=0,
            max=steps - 1,
            description="Step",
            tooltip=step_tip(steps),
            style={"description_width": "auto"},
            layout=w.Layout(flex="1 1 220px", width="auto", max_width="420px"),
        )
        self._link(play, "value", slider, "value")
        self.plays.append(play)
        self.sliders.append(slider)
        bar = w.HBox([play, slider])
        bar.add_class("mg-bar")
        return [bar]

    # -- what a notebook stores -----------------------------------------------------------------

    def _first(self) -> Frame:
        return next(iter(self.frames.values()))[0]

    def _summary(self) -> str:
        """Title and captions as text, the same each time."""
        lines = [f"[widget] {_plain(self.title)}" if self.title else "[widget]"]
        for name, frames in self.frames.items():
            pad = "  "
            if len(self.frames) > 1:
                lines.append(f"  {_plain(name)}")
                pad = "    "
            lines += [f"{pad}{i}. {_plain(frame.caption)}" for i, frame in enumerate(frames)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self._summary()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = dict(super()._repr_mimebundle_(**kwargs) or {})
        bundle["text/plain"] = self._summary()
        bundle["image/svg+xml"] = _whole(self._first())
        return bundle


def step_tip(steps: int) -> str:
    return f"Step 0 to {steps - 1}; use the arrow keys"


def by_variant(frames: Frames) -> dict[str, list[Frame]]:
    groups = dict(frames) if isinstance(frames, Mapping) else {"": frames}
    checked: dict[str, list[Frame]] = {}
    for name, group in groups.items():
        checked[str(name)] = list(group)
        if not checked[str(name)]:
            where = f" in variant {name!r}" if isinstance(frames, Mapping) else ""
            raise ValueError(f"a stepper needs at least one frame{where}")
        for frame in checked[str(name)]:
            if not isinstance(frame, Frame):
                raise TypeError(f"expected a widgets.Frame, got {type(frame).__name__}")
    if not checked:
        raise ValueError("a stepper needs at least one variant")
    return checked


def stepper(frames: Frames, title: str = "") -> Stepper:
    """Pictures behind a slider and a play button, moving without a kernel.

    Args:
        frames: the steps in order; or a dict of variants, name → steps, among which the reader
            chooses with a row of buttons, also without a kernel. If all variants have equally
            many steps, one slider moves them together. A single frame has no controls.
        title: one line above the picture.

    Returns:
        A widget: make it the last expression of a cell.

    Raises:
        ValueError: for no frames.
        TypeError: for a frame that is not a `Frame`.
    """
    return Stepper(frames, title)
