"""Widgets that show what the reader's own code did, step by step.

A widget never simulates: the notebook runs the real code, takes a snapshot after each step, draws
it with `course.draw`, and hands the pictures over as frames::

    frames = []
    for name in ["admission", "prefill", "decode 1"]:
        ...                                     # the real Req moves on
        frames.append(widgets.Frame(picture_of(req), f"{name}: cached_len is {req.cached_len}"))
    widgets.stepper(frames, title="The length fields of one request")

:func:`stepper` moves without a kernel and without a network, so also in the built book.
:func:`live` puts controls above a stepper that re-run the real code in JupyterLab.

Both carry their first picture as ``image/svg+xml`` and a summary of all captions as ``text/plain``:
that is what a code host shows and what the test suite compares.
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as w

from course.pictures import canvas as draw

__all__ = ["Frame", "Live", "Stepper", "live", "stepper"]

PLAY_INTERVAL_MS = 1500
"""How long each frame stays while the widget plays, in milliseconds."""


@dataclass(frozen=True)
class Frame:
    """One step of a widget.

    Args:
        svg: the picture, a :class:`draw.Canvas` (or SVG text that ``str(canvas)`` gave).
        caption: what this picture says, in a sentence or two; shown below it and read aloud by a
            screen reader. ``code`` in back quotes and ``**bold**`` are set as such; everything
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


def _inline(text: str) -> str:
    """Plain text to HTML: everything escaped, then `code` and **bold**."""
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escaped)


def _plain(text: str) -> str:
    """A caption as one line of plain text, without its `code` and **bold** marks."""
    return " ".join(re.sub(r"`([^`]+)`|\*\*(.+?)\*\*", r"\1\2", text).split())


def _frame_html(frame: Frame) -> str:
    """The picture with its caption below."""
    return (
        f'<figure class="mg-figure">{draw.framed(_bare(frame))}'
        f"<figcaption>{_inline(frame.caption)}</figcaption></figure>"
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
    """What :func:`stepper` returns; the frames it was made from are in ``frames``."""

    def __init__(self, frames: Frames, title: str) -> None:
        self.title = title
        self.frames: dict[str, list[Frame]] = _by_variant(frames)
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
        title = f'<p class="mg-title">{_inline(self.title)}</p>' if self.title else ""
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
        pictures = [self._html(_frame_html(frame)) for frame in frames]
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
            tooltip=_step_tip(steps),
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


class Live(Stepper):
    """What :func:`live` returns; ``controls`` holds the control widgets by parameter name."""

    def __init__(
        self, fn: Callable[..., Frames], title: str, controls: Mapping[str, w.Widget]
    ) -> None:
        self._fn = fn
        self.controls = dict(controls)
        super().__init__(fn(**self.values), title)
        box = w.HBox(list(self.controls.values()))
        box.add_class("mg-controls")
        note = self._html(
            '<p class="mg-note">Run this chapter in JupyterLab to change '
            f"{_inline(_listed([_spoken(name) for name in self.controls]))}.</p>"
        )
        self._error = self._html("")
        self.children = [self._head, box, note, self._error, self._body]
        for control in self.controls.values():
            control.observe(self._rerun, names="value")

    @property
    def values(self) -> dict[str, Any]:
        """The controls' present values, by parameter name."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def message(self) -> str:
        """The message of the last run as HTML; empty if it went well."""
        return str(self._error.value)

    def _rerun(self, _: object = None) -> None:
        try:
            frames = _by_variant(self._fn(**self.values))
        except Exception as error:  # shown in place; the last good picture stays
            name = type(error).__name__
            self._error.value = (
                f'<p class="mg-error" role="alert"><b>{html.escape(name)}</b>: '
                f"{html.escape(str(error)) or 'no message'}</p>"
            )
            return
        self._error.value = ""
        self._show(frames)

    def _show(self, frames: dict[str, list[Frame]]) -> None:
        """Put new frames in place of the old, into the widgets that are there where they fit."""
        before = [len(variant) for variant in self.frames.values()]
        now = [len(variant) for variant in frames.values()]
        fits = list(frames) == list(self.frames) and (
            before == now or (len(set(before)) == len(set(now)) == 1 and min(*before, *now) > 1)
        )
        self.frames = frames
        if not fits:
            self._rebuild()
            return
        self._head.value = self._head_html()
        if before != now:  # then one slider moves all variants
            self._resize(now[0])
        for stack, variant in zip(self.stacks, frames.values(), strict=True):
            for picture, frame in zip(stack.children, variant, strict=True):
                picture.value = _frame_html(frame)

    def _resize(self, steps: int) -> None:
        """Change the number of steps; a step beyond the end becomes the last."""
        (slider,), (play,) = self.sliders, self.plays
        step = min(slider.value, steps - 1)
        slider.value = step
        for stack in self.stacks:
            stack.selected_index = min(stack.selected_index or 0, step)
            old = list(stack.children)
            stack.children = (old + [self._html("") for _ in range(steps - len(old))])[:steps]
            stack.selected_index = step
            for picture in old[steps:]:
                picture.close()
        slider.max = play.max = steps - 1
        slider.tooltip = _step_tip(steps)

    def _rebuild(self) -> None:
        """Make all parts anew and close the old ones."""
        old = [*self._jslinks, *_descendants(self._body)]
        step = self.sliders[0].value if self.sliders else 0
        self._build()
        for slider in self.sliders:
            slider.value = min(step, slider.max)
        for widget in old:
            for part in [getattr(widget, "layout", None), getattr(widget, "style", None)]:
                if part is not None and part not in (self._html_layout, self._html_style):
                    part.close()
            widget.close()

    def _summary(self) -> str:
        head, *rest = super()._summary().split("\n")
        shown = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return "\n".join([f"{head} ({shown})", *rest])


def _step_tip(steps: int) -> str:
    return f"Step 0 to {steps - 1}; use the arrow keys"


def _descendants(widget: w.Widget) -> Iterable[w.Widget]:
    for child in getattr(widget, "children", ()):
        yield from _descendants(child)
        yield child


def _by_variant(frames: Frames) -> dict[str, list[Frame]]:
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


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


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
        TypeError: for a frame that is not a :class:`Frame`.
    """
    return Stepper(frames, title)


def live(fn: Callable[..., Frames], title: str = "", **controls: Any) -> Live:
    """A stepper whose frames come from re-running real code at the reader's values.

    Args:
        fn: called with one keyword argument per control; returns frames as for :func:`stepper`.
            Its parameters' defaults are the controls' first values. An exception that it raises
            at a later value is shown above the last good picture; at the first it propagates.
        title: one line above the picture.
        controls: by parameter name: ``(low, high)`` or ``(low, high, step)`` for a slider, a list
            (or dict label → value) for a choice, a bool for a check box, or an ipywidgets control.

    The controls need a kernel, so the built book hides them, with a note that says so; its slider
    and play button work.

    Raises:
        ValueError: for no controls, one that `fn` has no parameter for, or one whose abbreviation
            isn't understood; and whatever `fn` raises at the first values.

    Example::

        def lengths(prompt=6, hit=2, max_tokens=3):
            ...
            return frames

        widgets.live(lengths, "Length fields", prompt=(1, 12), hit=(0, 8), max_tokens=(1, 6))
    """
    if not controls:
        raise ValueError("live needs at least one control; use stepper for fixed frames")
    parameters = inspect.signature(fn).parameters
    made: dict[str, w.Widget] = {}
    for name, spec in controls.items():
        if name not in parameters:
            raise ValueError(f"{name!r} is not a parameter of {fn.__name__}{inspect.signature(fn)}")
        default = parameters[name].default
        control = spec
        if not isinstance(spec, w.Widget):
            control = w.interactive.widget_from_abbrev(spec, default)
        if control is None or not hasattr(control, "value"):
            raise ValueError(
                f"don't know how to make a control for {name!r} from {spec!r}: "
                "use (low, high), a list of choices, a bool, or an ipywidgets control"
            )
        if isinstance(control, w.Dropdown) and default in control._options_values:
            control.value = default
        control.description = _spoken(name)
        control.style.description_width = "auto"
        if hasattr(control, "continuous_update"):
            control.continuous_update = False
        if isinstance(control, (w.IntSlider, w.FloatSlider)):
            control.tooltip = f"{_spoken(name)}: {control.min} to {control.max}; use the arrow keys"
        made[name] = control
    return Live(fn, title, made)
