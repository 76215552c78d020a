"""What turns the chapters into the book's pages: a small Sphinx extension of our own.

It changes pages while they are built, never the notebooks:

* a build cell shows the file it belongs to as a caption, and the directive line is gone from the
  code (so it is not copied either);
* a block quote that begins with a bold label ("**Difference from upstream.** …") becomes a box;
* a picture of ours (:mod:`course.draw`) stands in the page itself instead of in an image file, so
  that it follows the reader's theme and its linked parts work;
* pages load less: MathJax only where there is mathematics, no FontAwesome script (icons come from
  the theme's font);
* `picture NAME` is a directive for the Markdown pages that puts one of :data:`PICTURES` there.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

from course import draw, source

if TYPE_CHECKING:
    from collections.abc import Callable

    from sphinx.application import Sphinx


def anchor(path: str, name: str = "") -> str:
    """The id on a chapter's page of the place where `name` of `path` is built.

    >>> anchor("minisgl/core.py", "Req")
    'minisgl-core-Req'
    """
    stem = path.removesuffix(".py").removesuffix("/__init__")
    return re.sub(r"[^A-Za-z0-9_]+", "-", stem) + (f"-{name}" if name else "")


def _of_element(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Element) and node.get("nb_element") == name


class BuildCaptions(SphinxTransform):
    """Show the file of a build cell above it and drop the directive line from its code."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        taken: set[str] = set(self.document.ids)
        for cell in list(self.document.findall(lambda n: _of_element(n, "cell_code"))):
            assert isinstance(cell, nodes.Element)
            code = next(iter(cell.findall(nodes.literal_block)), None)
            path = source.directive(code.astext()) if code is not None else None
            if code is None or path is None:
                continue
            rest = code.astext().lstrip().partition("\n")[2].lstrip("\n")
            code.rawsource = rest
            code.children = []
            code += nodes.Text(rest)
            cell["classes"].append("build-cell")
            caption = nodes.container(classes=["build-file"])
            for name in source.parse(rest).names:
                target = anchor(path, name)
                if target not in taken:  # the first cell that builds it, if several do
                    taken.add(target)
                    caption["ids"].append(target)
            caption += nodes.inline("", "builds ", classes=["build-verb"])
            caption += nodes.literal("", path)
            index = code.parent.index(code)
            code.parent.insert(index, caption)


class LabeledBoxes(SphinxTransform):
    """Give a block quote that begins with a bold label the classes ``box`` and ``box-LABEL``."""

    default_priority = 401

    def apply(self, **_: Any) -> None:
        for quote in self.document.findall(nodes.block_quote):
            first = quote.children[0] if quote.children else None
            if not isinstance(first, nodes.paragraph) or not first.children:
                continue
            # (the parser leaves an empty text in front of a leading bold label)
            label = next((n for n in first.children if n.astext()), None)
            if isinstance(label, nodes.strong):
                slug = nodes.make_id(label.astext())
                quote["classes"] += ["box", f"box-{slug}"]


class InlinePictures(SphinxPostTransform):
    """Put our own SVG pictures into the page instead of behind an ``<img>``."""

    default_priority = 500  # after myst-nb has chosen one form of each output
    formats = ("html",)

    def run(self, **_: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            svg = self._svg(str(image.get("uri", "")))
            if svg is not None:
                image.replace_self(nodes.raw("", draw.framed(svg), format="html"))

    def _svg(self, uri: str) -> str | None:
        """The text of the picture at `uri` if it is one of ours."""
        if uri.startswith("data:image/svg+xml;base64,"):
            text = base64.b64decode(uri.partition(",")[2]).decode("utf-8")
        elif uri.endswith(".svg"):
            try:
                with open(f"{self.env.srcdir}/{uri}", encoding="utf-8") as file:
                    text = file.read()
            except OSError:
                return None
        else:
            return None
        return text if text.startswith("<svg") and 'class="mg"' in text[:200] else None


# -- pictures of the Markdown pages ---------------------------------------------------------------


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


PICTURES: dict[str, Callable[[], draw.Canvas]] = {"engine": engine_map}
"""Name → drawing function, for the `picture` directive."""


class Picture(SphinxDirective):
    """``{picture} NAME`` in a Markdown page: one of :data:`PICTURES`, in place."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in PICTURES:
            raise self.error(f"no picture {name!r}; there are {', '.join(PICTURES)}")
        canvas = PICTURES[name]()
        return [nodes.raw("", draw.framed(canvas.svg()), format="html")]


# -- lighter and cleaner pages --------------------------------------------------------------------


def _mathjax_where_needed(app: Sphinx) -> None:
    """Load MathJax on pages that hold mathematics, not on all that have such pages below them."""
    math: Any = app.env.get_domain("math")
    pages = math.data["has_equations"]
    math.has_equations = lambda page=None: pages.get(page, False) if page else any(pages.values())


MENDED: tuple[tuple[re.Pattern[str], str], ...] = (
    # The theme's FontAwesome script is 1.5 MB, and its icons also come from a font that the theme's
    # style sheet names. And it replaces the icons inside a widget's buttons by pictures, after
    # which these buttons throw.
    (re.compile(r"\s*<script[^>]*/fontawesome\.js[^>]*></script>"), ""),
    # Names for screen readers that hide the text which is there to be read.
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    (re.compile(r'(<button class="btn search-button-field[^>]*) aria-label="Search"'), r"\1"),
)
"""What is changed in the finished pages: pattern, replacement."""


def _mend_pages(app: Sphinx, error: Exception | None) -> None:
    """Change what the theme writes and has no setting for."""
    if error is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = before = page.read_text(encoding="utf-8")
        for pattern, replacement in MENDED:
            text = pattern.sub(replacement, text)
        if text != before:
            page.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's hook."""
    # Jupyter Book always sets this one, also where its extension isn't loaded.
    app.add_config_value("comments_config", {}, "")
    app.add_transform(BuildCaptions)
    app.add_transform(LabeledBoxes)
    app.add_post_transform(InlinePictures)
    app.add_directive("picture", Picture)
    app.connect("builder-inited", _mathjax_where_needed)
    app.connect("build-finished", _mend_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
