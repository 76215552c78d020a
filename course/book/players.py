"""Widgets on the book's pages: the same frames, without ipywidgets.

A notebook stores each `widgets.stepper` as the state of some thirty ipywidgets models,
and showing that in a page takes 1.9 MB of script. All it says, though, is: these pictures, in this
order, behind a slider. So the page gets exactly that as HTML: the first picture in place (there at
once, without a script, and on paper), the others in `<template>` elements, native controls, and
some lines of `course.js` that put one in the place of the other.

The frames are the stored ones, which the reader's own code drew; nothing is computed here. A widget
of another kind is left to ipywidgets' html-manager, and only pages that have one load it.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

from course.building.notebooks import WIDGET_STATE, WIDGET_VIEW
from course.pictures import canvas as draw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sphinx.application import Sphinx

BUTTONS_UP_TO = 60  # characters of names; more variants than that go into a list

State = dict[str, Any]


@dataclass(frozen=True)
class Player:
    """What a stored stepper shows: its title, and for each variant the HTML of its frames."""

    title: str
    note: str
    names: tuple[str, ...]
    variants: tuple[tuple[str, ...], ...]
    interval: int

    @property
    def together(self) -> bool:
        """Whether a step means the same in all variants, so that changing the variant keeps it."""
        return len({len(frames) for frames in self.variants}) == 1


class _Reader:
    """A notebook's widget state, by model."""

    def __init__(self, state: State) -> None:
        self.state = state

    def kind(self, ref: str) -> str:
        model = self.state.get(ref.removeprefix("IPY_MODEL_"), {})
        return str(model.get("model_name", ""))

    def of(self, ref: str) -> State:
        found: State = self.state[ref.removeprefix("IPY_MODEL_")]["state"]
        return found

    def children(self, ref: str) -> list[str]:
        return list(self.of(ref).get("children", []))

    def walk(self, ref: str) -> Iterator[str]:
        yield ref
        for child in self.children(ref):
            yield from self.walk(child)

    def first(self, ref: str, *kinds: str) -> str | None:
        """The first model of one of these kinds in the tree below `ref`."""
        return next((found for found in self.walk(ref) if self.kind(found) in kinds), None)

    def frames(self, stack: str) -> tuple[str, ...]:
        return tuple(str(self.of(child).get("value", "")) for child in self.children(stack))


def read(state: State, view: str) -> Player | None:
    """The stepper whose model is `view`; None for a widget of another kind."""
    reader = _Reader(state)
    if view not in state or "mg-widget" not in reader.of(view).get("_dom_classes", ()):
        return None
    stack = reader.first(view, "StackModel")
    if stack is None:
        return None
    chooser = reader.first(view, "DropdownModel", "ToggleButtonsModel")
    inner = [reader.first(child, "StackModel") for child in reader.children(stack)]
    names: tuple[str, ...] = ("",)
    if all(inner) and inner:
        # The controls of a live widget can be choices too; the stepper's own is the last but one.
        labels = [
            reader.of(found)["_options_labels"]
            for found in reader.walk(view)
            if reader.kind(found) in ("DropdownModel", "ToggleButtonsModel")
            and len(reader.of(found)["_options_labels"]) == len(inner)
        ]
        if chooser is None or not labels:
            return None
        names = tuple(map(str, labels[-1]))
        variants = tuple(reader.frames(found) for found in inner if found)
    else:
        variants = (reader.frames(stack),)
    if not all(f.startswith('<figure class="mg-figure"') for v in variants for f in v):
        return None
    texts = [str(reader.of(m).get("value", "")) for m in reader.walk(view)]
    play = reader.first(view, "PlayModel")
    return Player(
        title=_paragraph(texts, "mg-title"),
        note=_paragraph(texts, "mg-note"),
        names=names,
        variants=variants,
        interval=int(reader.of(play)["interval"]) if play else 1500,
    )


def _paragraph(texts: list[str], name: str) -> str:
    """The inside of the first `<p class="NAME">` in `texts`."""
    for text in texts:
        found = re.search(rf'<p class="{name}">(.*?)</p>', text, re.DOTALL)
        if found:
            return found[1]
    return ""


def _plain(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())


def render(player: Player, ident: str, *, autoplay: bool = False) -> str:
    """The player as HTML; `ident` is an id that no other element of the page has."""
    first, *_ = player.variants[0]
    named = [step_values(frames) for frames in player.variants]
    steps = max(map(len, player.variants))
    count = sum(map(len, player.variants))
    parts = [
        f'<div class="mg-widget mg-player" id="{ident}" role="group" '
        f'aria-label="{html.escape(_plain(player.title) or "Pictures")}" '
        f'data-interval="{player.interval}"{" data-together" if player.together else ""}'
        f"{' data-autoplay' if autoplay else ''}>"
    ]
    if player.title:
        parts.append(f'<p class="mg-title">{player.title}</p>')
    if player.note:
        parts.append(f'<p class="mg-note">{_honest(player.note, steps)}</p>')
    if len(player.names) > 1:
        parts.append(_choice(player, ident))
    if steps > 1:
        parts.append(
            '<div class="mg-bar">'
            '<button type="button" class="mg-play">▶\ufe0e Play</button>'
            '<button type="button" class="mg-first">First</button>'
            f'<span class="mg-steps"><label for="{ident}-step">{named[0][0]}</label>'
            f'<input type="range" class="mg-range" id="{ident}-step" min="0" '
            f'max="{len(player.variants[0]) - 1}" step="1" value="0" autocomplete="off">'
            f'<output for="{ident}-step">0</output></span></div>'
        )
    parts.append(f'<div class="mg-stage"{_value(named[0], 0)}>{first}</div>')
    if count > 1:
        parts.append(
            f'<p class="mg-paper">The first of {count} pictures; in the browser they move.</p>'
        )
    for number, frames in enumerate(player.variants):
        # The very first picture is in place already.
        for step, frame in list(enumerate(frames))[number == 0 :]:
            value = _value(named[number], step)
            parts.append(f'<template data-variant="{number}"{value}>{frame}</template>')
    parts.append("</div>")
    return "".join(parts)


def step_values(frames: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """What the slider sets, and its value in each frame; ("Step", ()) if frames are just steps.

    Where the captions begin with the same settings and one of these differs, that is the value.

    >>> step_values(["<figcaption><b>batch 1</b></figcaption>", "<figcaption>batch 4</figcaption>"])
    ('batch', ('1', '4'))
    """
    settings = [_settings(frame) for frame in frames]
    for same in zip(*settings, strict=False):
        names_, values = {name for name, _ in same}, tuple(value for _, value in same)
        if len(names_) > 1:
            break
        if 1 < len(frames) == len(set(values)):
            return names_.pop(), values
    return "Step", ()


def _settings(frame: str) -> list[tuple[str, str]]:
    """The names with numbers at the beginning of a frame's caption: `top-k 3, top-p 0.5: …`."""
    caption = re.search(r"<figcaption>(.*?)</figcaption>", frame, re.DOTALL)
    lead = re.split(r"[:.](?:\s|$)", _plain(caption[1]) if caption else "")[0]
    parts = [re.fullmatch(r"([A-Za-z][A-Za-z -]*) (\d[\d.,]*)", part) for part in lead.split(", ")]
    return [(part[1], part[2]) for part in parts if part]


def _value(named: tuple[str, tuple[str, ...]], step: int) -> str:
    """The attributes of a frame that stands for a value."""
    name, values = named
    if not values:
        return ""
    return f' data-name="{html.escape(name)}" data-value="{html.escape(values[step])}"'


def _honest(note: str, steps: int) -> str:
    """The note about controls, in words that fit a page which has none of them."""
    if steps > 1:
        return note
    begin = "Run this chapter in JupyterLab to change"
    return note.replace(begin, "One setting, as a picture. In JupyterLab there are controls for")


def _choice(player: Player, ident: str) -> str:
    """What picks a variant: a row of buttons, or a list if that would be too wide."""
    names = [html.escape(name) for name in player.names]
    if sum(map(len, player.names)) <= BUTTONS_UP_TO:
        buttons = "".join(
            f'<button type="button" aria-pressed="{"false" if i else "true"}">{name}</button>'
            for i, name in enumerate(names)
        )
        return (
            f'<div class="mg-choice" role="group" aria-label="Show">'
            f"<span>Show:</span>{buttons}</div>"
        )
    options = "".join(f"<option>{name}</option>" for name in names)
    return (
        f'<div class="mg-choice"><label for="{ident}-show">Show:</label>'
        f'<select id="{ident}-show" autocomplete="off">{options}</select></div>'
    )


# -- in the page ----------------------------------------------------------------------------------


def notebook_state(path: Path) -> State:
    """The widget state that a notebook stores, by model; {} for none."""
    return _state(json.loads(path.read_text(encoding="utf-8")))


def _state(notebook: dict[str, Any]) -> State:
    stored = notebook.get("metadata", {}).get("widgets", {}).get(WIDGET_STATE, {})
    state: State = stored.get("state", {})
    return state


def stored(path: Path) -> list[Player]:
    """The players of a notebook, in the order of its outputs."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", [])]
    views = [
        o["data"][WIDGET_VIEW]["model_id"] for o in outputs if WIDGET_VIEW in o.get("data", {})
    ]
    state = _state(notebook)
    return [player for view in views if (player := read(state, view)) is not None]


class Players(SphinxPostTransform):
    """Put a player in the place of each stored stepper."""

    default_priority = 3  # before myst-nb chooses the form of each output
    formats = ("html",)

    def run(self, **_: Any) -> None:
        state: State | None = None
        left = 0
        for bundle in list(self.document.findall(_is_widget)):
            view = _view_id(bundle)
            if state is None:
                state = notebook_state(Path(self.env.doc2path(self.env.docname)))
            player = read(state, view)
            if player is None:
                left += 1
                continue
            ident = f"widget-{view[:8]}"
            bundle.replace_self(nodes.raw("", render(player, ident), format="html"))
        if state is not None and not left:
            _forget_scripts(self.env, self.env.docname)


def _is_widget(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.container)
        and node.get("nb_element") == "mime_bundle"
        and any(_mime(child) == WIDGET_VIEW for child in node.children)
    )


def _mime(node: nodes.Node) -> str:
    return str(node.get("mime_type", "")) if isinstance(node, nodes.Element) else ""


def _view_id(bundle: nodes.Node) -> str:
    """The model that a mime bundle shows."""
    assert isinstance(bundle, nodes.Element)
    view = next(child for child in bundle.children if _mime(child) == WIDGET_VIEW)
    found = re.search(r'"model_id":\s*"([0-9a-f]+)"', view.astext())
    return found[1] if found else ""


def _forget_scripts(env: Any, page: str) -> None:
    """Load neither the widget manager nor the widget state on a page."""
    files = env.nb_metadata.get(page, {}).get("js_files", {})
    for key in [key for key in files if key.startswith("ipywidgets_")]:
        del files[key]


# -- one style sheet for all pictures -------------------------------------------------------------

STYLE_SHEET = "pictures.css"


def write_style_sheet(app: Sphinx) -> None:
    """Write the style sheet of all pictures beside the book's own."""
    if app.builder.format != "html":
        return
    links = 0
    for path in Path(app.srcdir, "notebooks").glob("*.ipynb"):
        numbers = re.findall(r'class=\\?"mgb[^"]* k(\d+)', path.read_text(encoding="utf-8"))
        links = max([links, *(int(n) + 1 for n in numbers)])
    folder = Path(app.outdir, "_static")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STYLE_SHEET).write_text(draw.style(max(links, 32)), encoding="utf-8")
