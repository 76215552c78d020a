"""What turns the chapters into the book's pages: a small Sphinx extension of our own.

It changes pages while they are built, never the notebooks:

* a build cell shows the file it belongs to as a caption (and the class that it goes on with), and
  the directive line is gone from the code (so it is not copied either);
* a block quote that begins with a bold label ("**Difference from upstream.** …") becomes a box;
* a picture of ours (`pictures`) stands in the page itself instead of in an image file, so that
  it follows the reader's theme and its linked parts work;
* a widget becomes a few lines of HTML with all its pictures (`players`);
* an answer is one fold: its words, its code, and what the code prints; so are a chapter's checks;
* C within Python is colored as C;
* names of the package lead to where they are built, terms to the glossary (`links`);
* formulas are MathML, which needs no script;
* pages load less: no FontAwesome script (icons come from the theme's font);
* directives for the Markdown pages are in `pages`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from ipython_pygments_lexers import IPython3Lexer
from pygments.lexers.c_cpp import CLexer
from pygments.token import String
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

from course import launch
from course.book import links, pages, players
from course.book.names import anchor
from course.book.pages import DIFFERENCE
from course.building import source
from course.building.parsing import parse
from course.pictures import canvas as draw

if TYPE_CHECKING:
    from sphinx.application import Sphinx


_LOGGER = logging.getLogger(__name__)


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
            if code is None:
                continue
            if launch.shown(code.astext()) != code.astext():
                _set_text(code, launch.shown(code.astext()))
            path = source.directive(code.astext())
            if path is None:
                continue
            rest = code.astext().lstrip().partition("\n")[2].lstrip("\n")
            _set_text(code, rest)
            cell["classes"].append("build-cell")
            caption = nodes.container(classes=["build-file"])
            cell_source = parse(rest)
            for name in ["", *_anchored(cell_source)]:
                target = anchor(path, name)
                if target not in taken:  # the first cell that builds it, if several do
                    taken.add(target)
                    caption["ids"].append(target)
            caption += nodes.inline("", "builds ", classes=["build-verb"])
            caption += nodes.literal("", path)
            for piece in cell_source.pieces:
                if piece.goes_on:  # the name becomes a link once all pages are known
                    members = ", ".join(name for m in piece.members for name in m.names)
                    name = nodes.literal("", piece.names[0], goes_on=(path, piece.names[0]))
                    said = nodes.inline("", f" goes on: {members}", classes=["build-verb"])
                    caption += nodes.inline("", "", nodes.Text(" · "), name, said)
            index = code.parent.index(code)
            code.parent.insert(index, caption)


def _anchored(cell: source.Source) -> list[str]:
    """What a build cell is linked to for: its definitions, and members of a class that goes on."""
    return [
        name
        for piece in cell.pieces
        for name in (piece.definitions if piece.goes_on else piece.names)
    ]


def _set_text(block: nodes.literal_block, text: str) -> None:
    block.rawsource = text
    block.children = []
    block += nodes.Text(text)


class LabeledBoxes(SphinxTransform):
    """Give a block quote that begins with a bold label the classes `box` and `box-LABEL`."""

    default_priority = 401

    def apply(self, **_: Any) -> None:
        taken: set[str] = set(self.document.ids)
        for quote in self.document.findall(nodes.block_quote):
            first = quote.children[0] if quote.children else None
            if not isinstance(first, nodes.paragraph) or not first.children:
                continue
            # (the parser leaves an empty text in front of a leading bold label)
            label = next((n for n in first.children if n.astext()), None)
            if isinstance(label, nodes.strong):
                slug = nodes.make_id(label.astext())
                quote["classes"] += ["box", f"box-{slug}"]
                if slug == DIFFERENCE and slug not in taken:
                    taken.add(slug)
                    quote["ids"].append(slug)


class OneFold(SphinxTransform):
    """Fold the cell after an answer's words with them: its output gives the answer away.

    In a notebook the words are `<details>…</details>` in a Markdown cell, and the code is the next
    cell, whose input is folded. The end of the fold moves behind that cell, whose code and output
    are then plain within it.
    """

    default_priority = 402

    def apply(self, **_: Any) -> None:
        for cell in list(self.document.findall(lambda n: _of_element(n, "cell_code"))):
            assert isinstance(cell, nodes.Element)
            parent = cell.parent
            at = parent.index(cell)
            end = parent[at - 1] if at else None
            if not cell.get("hide_mode") or not _closes(end):
                continue
            assert end is not None
            parent.remove(end)
            parent.insert(parent.index(cell) + 1, end)
            cell["hide_mode"] = None
            cell["classes"].append("answer")


class PythonWithC(IPython3Lexer):
    """Python whose strings named `…_C` are C, and are colored as C."""

    def get_tokens_unprocessed(
        self, text: str, stack: Sequence[str] = ("root",)
    ) -> Iterator[tuple[int, Any, str]]:
        at = 0
        for found in re.finditer(r'^\w+_C = r"""\n(.*?)^"""', text, re.MULTILINE | re.DOTALL):
            parts = [(at, found.start(1), super()), (found.start(1), found.end(1), CLexer())]
            for begin, end, lexer in parts:
                for place, kind, token in lexer.get_tokens_unprocessed(text[begin:end]):
                    yield begin + place, kind, token
            yield found.end(1), String.Double, '"""'
            at = found.end()
        for place, kind, token in super().get_tokens_unprocessed(text[at:], stack):
            yield at + place, kind, token


class FoldedChecks(SphinxTransform):
    """Fold the cells that hold the chapter's checks, under a line that says how many there are.

    Neighbors share a fold. An exercise's check stays open: it stands beside the reader's attempt.
    """

    default_priority = 403

    def apply(self, **_: Any) -> None:
        cells = [n for n in self.document.findall(lambda n: _of_element(n, "cell_code"))]
        group: list[nodes.Element] = []
        for cell in cells:
            assert isinstance(cell, nodes.Element)
            if group and not (_is_checks(cell) and _follows(cell, group[-1])):
                _fold(group)
                group = []
            if _is_checks(cell):
                group.append(cell)
        _fold(group)


def _is_checks(cell: nodes.Element) -> bool:
    """Whether a code cell defines or runs checks of the chapter, and nothing that is shown."""
    text = "".join(block.astext() for block in cell.findall(nodes.literal_block))
    defines = re.search(r"(?m)^def check_|^course\.run_checks\(", text)
    return bool(defines) and "course.judge(" not in text and "build-cell" not in cell["classes"]


def _follows(cell: nodes.Element, other: nodes.Element) -> bool:
    """Whether nothing stands between two cells."""
    parent = cell.parent
    return other.parent is parent and parent.index(cell) == parent.index(other) + 1


def _fold(cells: list[nodes.Element]) -> None:
    """Put `<details>` around neighboring cells."""
    if not cells:
        return
    text = "\n".join(block.astext() for c in cells for block in c.findall(nodes.literal_block))
    count, passed = (len(re.findall(p, text, re.MULTILINE)) for p in (r"^def check_", r"^ok  "))
    said = f"{count} check{'s' * (count != 1)}" if count else "The checks are run"
    said += ": all pass" if passed >= max(count, 1) else ""
    parent = cells[0].parent
    begin = f'<details class="checks"><summary>{said}</summary>'
    parent.insert(parent.index(cells[0]), nodes.raw("", begin, format="html"))
    parent.insert(parent.index(cells[-1]) + 1, nodes.raw("", "</details>", format="html"))
    for cell in cells:
        cell["hide_mode"] = None
        cell["classes"].append("checks")


def _closes(node: nodes.Node | None) -> bool:
    return (
        isinstance(node, nodes.raw)
        and "html" in node.get("format", "")
        and node.astext().strip() == "</details>"
    )


class InlinePictures(SphinxPostTransform):
    """Put our own SVG pictures into the page instead of behind an `<img>`."""

    default_priority = 500  # after myst-nb has chosen one form of each output
    formats = ("html",)

    def run(self, **_: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            svg = self._svg(str(image.get("uri", "")))
            if svg is not None:
                framed = draw.framed(draw.bare(svg))
                image.replace_self(nodes.raw("", framed, format="html"))

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


# -- lighter and cleaner pages --------------------------------------------------------------------


def mathml(latex: str, *, display: bool = False) -> str:
    """A formula as MathML, which browsers draw by themselves; no script, no fonts of ours."""
    from latex2mathml.converter import convert

    text = str(convert(latex, display="block" if display else "inline"))
    text = re.sub(r"<mtext>.*?</mtext>", lambda m: m[0].replace(r"\_", "_"), text)
    return re.sub(
        r"<mi>(ln|log|exp|max|min)</mi>(?=<m[in])", r'\g<0><mspace width="0.17em"/>', text
    )


def _visit_math(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula; one that can't be read is a warning, and its source stands in the page."""
    display = isinstance(node, nodes.math_block)
    tag = "div" if display else "span"
    latex = node.astext().strip()
    try:
        inside = mathml(latex, display=display)
    except Exception as error:
        _LOGGER.warning("a formula can't be read: %s (%s)", latex, error, location=node)
        inside = translator.encode(latex)
    translator.body.append(f'<{tag} class="math notranslate">{inside}</{tag}>')
    raise nodes.SkipNode


MENDED: tuple[tuple[re.Pattern[str], str], ...] = (
    # The theme's FontAwesome script is 1.5 MB, and its icons also come from a font that the theme's
    # style sheet names. And it replaces the icons inside a widget's buttons by pictures, after
    # which these buttons throw.
    (re.compile(r"\s*<script[^>]*/fontawesome\.js[^>]*></script>"), ""),
    # The logo and the search field belong to a landmark, too.
    (
        re.compile(r'(<div id="pst-primary-sidebar")'),
        r'\1 role="complementary" aria-label="The book"',
    ),
    # Names for screen readers that hide the text which is there to be read.
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    # The theme's script marks an entry of the contents and forgets it at a jump; ours looks where
    # the page is (course.js), under a name that the theme doesn't know.
    (re.compile(r'id="pst-page-toc-nav"'), 'id="mg-contents"'),
    (re.compile(r'(<button class="btn search-button-field[^>]*) aria-label="Search"'), r"\1"),
)
"""What is changed in the finished pages: pattern, replacement."""


SEARCH_SCRIPTS = re.compile(
    r'\s*<script src="[./]*(?:_static/searchtools|_static/language_data|searchindex)\.js[^>]*>'
    r"</script>"
)
"""What is of use on the search page only: 215 KB, which the theme loads on each page."""


def _mend_pages(app: Sphinx, error: Exception | None) -> None:
    """Change what the theme writes and has no setting for."""
    if error is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = before = page.read_text(encoding="utf-8")
        for pattern, replacement in MENDED:
            text = pattern.sub(replacement, text)
        if 'id="search-results"' not in text:
            text = SEARCH_SCRIPTS.sub("", text)
        if text != before:
            page.write_text(text, encoding="utf-8")


# -- buttons that need a repository ---------------------------------------------------------------


def _buttons(app: Sphinx, config: Any) -> None:
    """Links to the repository, Binder and Colab: there once `repository: url` names one."""
    options = config.html_theme_options
    if options.get("repository_url"):
        options["use_repository_button"] = options["use_issues_button"] = True
    else:
        for key in ("repository_url", "repository_branch", "launch_buttons"):
            options.pop(key, None)


def _add_local_launch(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Among the launch buttons, the way to JupyterLab on the reader's own machine."""
    for button in context.get("header_buttons", ()):
        if button.get("label") == "launch-buttons":
            button["buttons"].insert(
                0,
                {
                    "type": "link",
                    "text": "JupyterLab",
                    "tooltip": f"On your machine: make lab, then {Path(pagename).name}.ipynb",
                    "icon": "fas fa-laptop",
                    "url": context["pathto"]("book/setup"),
                },
            )


def _add_search(app: Sphinx, pagename: str, *_: Any) -> None:
    """What search has beyond Sphinx's, on the page where one searches."""
    if pagename == "search":
        app.add_js_file("search.js")


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's hook."""
    # Jupyter Book always sets this one, also where its extension isn't loaded.
    app.add_config_value("comments_config", {}, "")
    app.add_transform(BuildCaptions)
    app.add_transform(LabeledBoxes)
    app.add_transform(OneFold)
    app.add_transform(FoldedChecks)
    for language in ("python", "ipython3"):
        app.add_lexer(language, PythonWithC)
    app.add_post_transform(InlinePictures)
    pages.setup(app)
    app.add_post_transform(players.Players)
    app.add_post_transform(links.Links)
    app.add_domain(links.Package)
    app.add_css_file(players.STYLE_SHEET)
    app.connect("config-inited", _buttons)
    app.connect("html-page-context", _add_local_launch, priority=600)
    app.connect("html-page-context", _add_search)
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math, None))
    app.connect("builder-inited", players.write_style_sheet)
    app.connect("builder-inited", links.load)
    app.connect("env-updated", links.rewrite_if_moved)
    app.connect("build-finished", _mend_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
