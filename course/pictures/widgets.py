"""Widgets that show what the reader's own code did, step by step.

A widget never simulates: the notebook runs the real code, takes a snapshot after each step, draws
it with `course.draw`, and hands the pictures over as frames::

    frames = []
    for name in ["admission", "prefill", "decode 1"]:
        ...                                     # the real Req moves on
        frames.append(widgets.Frame(picture_of(req), f"{name}: cached_len is {req.cached_len}"))
    widgets.stepper(frames, title="The length fields of one request")

`stepper` moves without a kernel and without a network, so also in the built book.
`live` puts controls above a stepper that re-run the real code in JupyterLab.

Both carry their first picture as `image/svg+xml` and a summary of all captions as `text/plain`:
that is what a code host shows and what the test suite compares.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets as w

from course.pictures.stepper import (
    Frame,
    Frames,
    Stepper,
    by_variant,
    frame_html,
    inline,
    step_tip,
    stepper,
)

__all__ = ["Frame", "Live", "Stepper", "live", "stepper"]


class Live(Stepper):
    """What `live` returns; `controls` holds the control widgets by parameter name."""

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
            f"{inline(_listed([_spoken(name) for name in self.controls]))}.</p>"
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
            frames = by_variant(self._fn(**self.values))
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
                picture.value = frame_html(frame)

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
        slider.tooltip = step_tip(steps)

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


def _descendants(widget: w.Widget) -> Iterable[w.Widget]:
    for child in getattr(widget, "children", ()):
        yield from _descendants(child)
        yield child


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def live(fn: Callable[..., Frames], title: str = "", **controls: Any) -> Live:
    """A stepper whose frames come from re-running real code at the reader's values.

    Args:
        fn: called with one keyword argument per control; returns frames as for `stepper`.
            Its parameters' defaults are the controls' first values. An exception that it raises
            at a later value is shown above the last good picture; at the first it propagates.
        title: one line above the picture.
        controls: by parameter name: `(low, high)` or `(low, high, step)` for a slider, a list
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
