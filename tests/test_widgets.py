"""Steppers and live widgets, without a browser (tests/test_book.py and test_lab.py have one)."""

from __future__ import annotations

import json
from typing import Any

import ipywidgets
import pytest

from course.pictures import canvas as draw
from course.pictures import widgets
from course.pictures.stepper import Frame, stepper
from course.pictures.widgets import live


def picture(label: str) -> draw.Canvas:
    c = draw.Canvas(120, 60, title=f"picture {label}")
    c.box(5, 5, 50, 40, kind="new", text=label, key="a")
    c.box(60, 5, 50, 40, kind="cached", text=label, key="a")
    return c


def frames(count: int, name: str = "step") -> list[Frame]:
    return [Frame(picture(f"{name}{i}"), f"**{name}** {i}: `x` is {i}") for i in range(count)]


def model_states(widget: ipywidgets.Widget) -> dict[str, dict[str, Any]]:
    """The state that a notebook stores for this widget and all that it refers to."""
    everything = ipywidgets.Widget.get_manager_state()["state"]
    found: dict[str, dict[str, Any]] = {}
    todo = [widget.model_id]
    while todo:
        model = todo.pop()
        if model in found:
            continue
        found[model] = everything[model]
        text = json.dumps(everything[model]["state"])
        todo += [m for m in everything if f"IPY_MODEL_{m}" in text]
    for model, value in everything.items():  # links refer to widgets, not the other way round
        if value["model_name"] == "LinkModel" and value["state"]["source"][0][10:] in found:
            found[model] = value
    return found


def links(widget: ipywidgets.Widget) -> set[tuple[str, str, str, str]]:
    """(from widget, its trait, to widget, its trait) for all kernel-free links, by model id."""
    return {
        (s["source"][0][10:], s["source"][1], s["target"][0][10:], s["target"][1])
        for s in (m["state"] for m in model_states(widget).values())
        if "source" in s and "target" in s
    }


# -- stepper --------------------------------------------------------------------------------------


def test_play_moves_slider_moves_stack_without_a_kernel() -> None:
    w = stepper(frames(3), "A title")
    (play,), (slider,), (stack,) = w.plays, w.sliders, w.stacks
    assert (slider.min, slider.max, play.min, play.max) == (0, 2, 0, 2)
    assert len(stack.children) == 3 and stack.selected_index == 0
    assert links(w) == {
        (play.model_id, "value", slider.model_id, "value"),
        (slider.model_id, "value", stack.model_id, "selected_index"),
    }


def test_stored_forms() -> None:
    """The first picture for code hosts and nbval, and every caption as text."""
    w = stepper(frames(2), "A `title`")
    bundle = w._repr_mimebundle_()
    assert bundle["image/svg+xml"] == str(picture("step0"))
    assert bundle["text/plain"] == "[widget] A title\n  0. step 0: x is 0\n  1. step 1: x is 1"
    assert "application/vnd.jupyter.widget-view+json" in bundle
    again = stepper(frames(2), "A `title`")._repr_mimebundle_()
    assert [again[m] for m in ("image/svg+xml", "text/plain")] == [
        bundle[m] for m in ("image/svg+xml", "text/plain")
    ]


def test_state_is_small() -> None:
    """Each picture once, one style sheet for all, shared layouts."""
    count = 30
    w = stepper(frames(count), "t")
    states = model_states(w)
    text = json.dumps(states)
    assert text.count("<style>") == 1
    bare = sum(len(json.dumps(picture(f"step{i}").svg(with_style=False))) for i in range(count))
    assert len(text) < bare + count * 700 + 30_000, f"{len(text)} bytes for {bare} of pictures"
    layouts = [m for m in states.values() if m["model_name"] == "LayoutModel"]
    assert len(layouts) < 12


def test_style_of_the_widget_covers_the_links_of_all_frames() -> None:
    busy = draw.Canvas(200, 60, title="busy")
    for i in range(5):
        busy.box(i * 20, 0, 15, 15, key=str(i))
        busy.box(i * 20, 20, 15, 15, key=str(i))
    w = stepper([Frame(picture("a"), "few"), Frame(str(busy), "many, from text")])
    assert ".mg:has(.k4:hover" in w._head.value and ".k5" not in w._head.value


def test_variants_of_equal_length_share_one_slider() -> None:
    w = stepper({"small": frames(3, "s"), "large": frames(3, "l")}, "t")
    assert isinstance(w.chooser, ipywidgets.ToggleButtons)
    assert len(w.sliders) == 1 and len(w.stacks) == 2
    got = links(w)
    assert (w.chooser.model_id, "index", w.outer.model_id, "selected_index") in got
    for stack in w.stacks:
        assert (w.sliders[0].model_id, "value", stack.model_id, "selected_index") in got
    assert "  small\n    0. s 0: x is 0" in repr(w)


def test_variants_of_unequal_length_have_a_slider_each() -> None:
    w = stepper({"two": frames(2), "three": frames(3), "one": frames(1)})
    assert [s.max for s in w.sliders] == [1, 2]
    for slider, stack in zip(w.sliders, w.stacks[:2], strict=True):
        assert (slider.model_id, "value", stack.model_id, "selected_index") in links(w)


def test_many_variants_become_a_list() -> None:
    w = stepper({f"a variant with a long name {i}": frames(2) for i in range(4)})
    assert isinstance(w.chooser, ipywidgets.Dropdown)


def test_one_frame_has_no_controls() -> None:
    w = stepper(frames(1))
    assert not w.sliders and not w.plays


def test_controls_have_words() -> None:
    """No control depends on an icon: descriptions, tooltips, and words on the play buttons."""
    w = stepper({"a": frames(2), "b": frames(2)})
    assert w.sliders[0].description == "Step" and "arrow keys" in w.sliders[0].tooltip
    assert w.chooser is not None and w.chooser.description == "Show:"
    for word in ["Play", "Pause", "First"]:
        assert word in w._head.value


def test_captions_are_escaped() -> None:
    w = stepper([Frame(picture("a"), "<b>not bold</b> & `<code>` **bold**")], "<i>t</i>")
    (shown,) = [child.value for child in w.stacks[0].children]
    assert "&lt;b&gt;not bold&lt;/b&gt; &amp; <code>&lt;code&gt;</code> <b>bold</b>" in shown
    assert "&lt;i&gt;t&lt;/i&gt;" in w._head.value


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: stepper([]), ValueError, "at least one frame"),
        (lambda: stepper({}), ValueError, "at least one variant"),
        (lambda: stepper({"a": frames(1), "b": []}), ValueError, "in variant 'b'"),
        (lambda: stepper([picture("a")]), TypeError, "expected a widgets.Frame, got Canvas"),
        (lambda: Frame("not svg", "x"), ValueError, "draw.Canvas"),
        (lambda: Frame(picture("a"), " "), ValueError, "needs a caption"),
    ],
)
def test_mistakes_say_what_is_wrong(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


# -- live -----------------------------------------------------------------------------------------


def counted(count: int = 3, name: str = "a", *, fail: bool = False) -> list[Frame]:
    if fail:
        raise ValueError("no <such> thing")
    assert count < 9, "too many"
    return frames(count, name)


def captions(w: widgets.Stepper) -> list[str]:
    return [frame.caption for frame in w.frames[""]]


def test_live_reruns_the_function() -> None:
    w = live(counted, "t", count=(1, 12), name=["a", "b"], fail=False)
    assert w.values == {"count": 3, "name": "a", "fail": False}
    first = w.stacks[0].children
    w.controls["name"].value = "b"
    assert captions(w)[0] == "**b** 0: `x` is 0"
    assert w.stacks[0].children == first, "equal shapes reuse the widgets"
    assert "b0" in first[0].value
    w.controls["count"].value = 5
    assert len(w.stacks[0].children) == 5 and w.sliders[0].max == 4
    assert repr(w).startswith("[widget] t (count=5, name='b', fail=False)")


def test_live_shows_errors_in_place_and_keeps_the_picture() -> None:
    w = live(counted, "t", count=(1, 12), fail=False)
    w.controls["count"].value = 10
    assert "<b>AssertionError</b>: too many" in w.message
    assert len(captions(w)) == 3
    w.controls["fail"].value = True
    assert "no &lt;such&gt; thing" in w.message
    w.controls["fail"].value = False
    w.controls["count"].value = 4
    assert w.message == "" and len(captions(w)) == 4


def test_live_keeps_the_step_and_closes_what_it_replaces() -> None:
    w = live(counted, "t", count=(1, 8))
    w.sliders[0].value = 2
    before = len(model_states(w)), len(ipywidgets.Widget.get_manager_state()["state"])
    for count in [8, 3, 1, 3] * 3:  # grows, shrinks, loses its slider, gets one again
        w.controls["count"].value = count
        assert len(w.stacks[0].children) == count
    assert (len(model_states(w)), len(ipywidgets.Widget.get_manager_state()["state"])) == before
    w.sliders[0].value = 2
    w.controls["count"].value = 8
    assert (w.sliders[0].value, w.stacks[0].selected_index) == (2, 2)
    w.sliders[0].value = w.stacks[0].selected_index = 7
    w.controls["count"].value = 3
    assert (w.sliders[0].value, w.stacks[0].selected_index) == (2, 2)


def test_first_run_raises() -> None:
    with pytest.raises(ValueError, match="such"):
        live(lambda fail=True: counted(fail=fail), fail=True)


def test_controls() -> None:
    def shown(size: int = 4, share: float = 0.5, how: str = "b", long: bool = True) -> list[Frame]:
        return frames(2)

    w = live(shown, size=(1, 16), share=(0.0, 1.0, 0.1), how={"A": "a", "B": "b"}, long=True)
    assert {n: type(c).__name__ for n, c in w.controls.items()} == {
        "size": "IntSlider",
        "share": "FloatSlider",
        "how": "Dropdown",
        "long": "Checkbox",
    }
    assert w.values == {"size": 4, "share": 0.5, "how": "b", "long": True}
    own = ipywidgets.IntText(3)
    assert live(shown, size=own).controls["size"] is own
    with pytest.raises(ValueError, match="at least one control"):
        live(shown)
    with pytest.raises(ValueError, match="not a parameter of shown"):
        live(shown, length=(1, 2))
    with pytest.raises(ValueError, match="don't know how to make a control"):
        live(shown, size=object())


def test_the_note_for_readers_without_a_kernel_names_the_controls() -> None:
    w = live(counted, count=(1, 8), name=["a", "b"])
    note = next(c.value for c in w.children if 'class="mg-note"' in getattr(c, "value", ""))
    assert "Run this chapter in JupyterLab to change count and name." in note
