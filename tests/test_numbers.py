"""Honest numbers: what the chapters' prose claims, a cell of the same chapter computes or prints.

Which numbers are claims: those with three significant digits or more, and those with a unit, in
the Markdown cells. Code, formulas, links and years are not looked at. What counts as evidence: a
number in the source of a code cell, or in an output that nbval compares, which is the same number
when it is rounded as the prose rounds it ("about 180 000" for 177,873). Timings are printed by
cells whose output nbval ignores, so they are no evidence, and no prose can quote them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from course.building import notebooks
from course.building.run import IGNORE_OUTPUT

ROOT = Path(__file__).resolve().parent.parent

# Numbers that no cell of the chapter shows. Where they follow from others, how: an expression that
# the test evaluates, by chapter and by the number as it is written.
DERIVED: dict[str, dict[str, str]] = {
    "00_tiny_engine": {
        "12.5": "(9 + 16) / 2",
        "3.5355": "math.sqrt(12.5)",
        "1.7616": "2 / (1 + math.exp(-2))",
        "199": "200 - 1",  # decodes of an answer of 200 tokens
        "55": "1000 * 0.055",  # milliseconds; the cell computes in seconds
    },
    "02_layers": {
        "12.5": "(9 + 16) / 2",
        "3.5355": "math.sqrt(12.5)",
        "996": "1000 - 4",
        "0.125": "2 ** (4 - 7)",
    },
    "03_models": {
        "192": "3 * 64",  # KV heads × head_dim of the default model
        "127": "2 ** 7 - 1",  # the largest number of eight bits with a sign
    },
    "04_kvcache": {"600": "601 - 1"},  # torch.randint's upper end is not included
    "05_attention": {"730": "134_515_008 * 4 / 46_080 / 16", "16,000": "16 * 1000"},
    "06_engine": {
        "0.571": "0.4 / 0.7",
        "2.4": "24 - 1.2 - 20.4",
    },
    "stage1_milestone": {
        "0.556": "0.5 / 0.9",
        "0.833": "(0.5 + 0.25) / 0.9",
        "46,080": "2 * 30 * 3 * 64 * 4",
        "184": "8 * 500 * 46_080 / 1e6",
        "538,060,032": "134_515_008 * 4",
        "11,677": "134_515_008 * 4 / 46_080",
    },
    "stage1_performance": {
        "0.538": "134_515_008 * 4 / 1e9",
        "180": "720 / 4",
        "134.5": "134_515_008 / 1e6",
        "5.9": "128 * 46_080 / 1e6",
        "94.4": "16 * 128 * 46_080 / 1e6",
    },
}
# And those that a question assumes, or another place says: chapter → number → who says so.
GIVEN: dict[str, dict[str, str]] = {
    "00_tiny_engine": {"2,000": "the question's example of a piece of a prefill"},
    "02_layers": {"49,152": "the default model's vocabulary; chapter 00 prints it"},
    "06_engine": {"1.2": "the question's model", "1,000": "the example's length of a request"},
}

UNITS = (
    r"(?:[KMGT]i?B|kB|bytes?|bits?|ms|µs|s|seconds?|minutes?|tokens?|parameters?|requests?|pages?"
    r"|slots?|layers?|heads?|lines|rows?|ranks?|%|percent|GHz|cores|numbers|draws|times)"
)
NUMBER = re.compile(
    r"(?<![\w.,/^–-])(\d{1,3}(?:[, \u00a0\u202f]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?![\w^]|[.,]\d)"
    rf"(\s?{UNITS}(?![\w-]))?"
)
SKIPPED = (
    re.compile(r"```.*?```", re.DOTALL),
    re.compile(r"`[^`]*`"),
    re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL),
    re.compile(r"\[[^\]]*\]\([^)]*\)"),
    re.compile(r"https?://\S+"),
    re.compile(r"\b(?:chapters?|section|figure|table|lines?|version) \d[\d.]*", re.IGNORECASE),
)


def claims(prose: str) -> Iterator[tuple[str, str]]:
    """The numbers of a Markdown text that claim something, each with the words around it."""
    for pattern in SKIPPED:
        prose = pattern.sub(" · ", prose)
    for found in NUMBER.finditer(prose):
        number, unit = found[1], found[2]
        digits = re.sub(r"\D", "", number).lstrip("0")
        year = re.fullmatch(r"(?:19|20)\d\d", number) is not None
        if unit or (len(digits) >= 3 and not year):
            around = prose[max(0, found.start() - 40) : found.end() + 20]
            yield number, " ".join(around.split())


def evidence(cells: list[Any]) -> set[float]:
    """Every number in the code cells' sources and in their compared outputs."""
    texts = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        texts.append("".join(cell["source"]))
        if IGNORE_OUTPUT in cell["metadata"].get("tags", []):
            continue
        for output in cell["outputs"]:
            texts.append("".join(output.get("text", "")))
            for kind in ("text/plain", "image/svg+xml"):
                text = "".join(output.get("data", {}).get(kind, ""))
                texts.append(re.sub(r"<[^>]*>", " ", text))
    numbers = set()
    for text in texts:
        for found in re.findall(r"\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?|\d+(?: \d{3})+", text):
            numbers.add(float(re.sub(r"[,_ ]", "", found)))
    return numbers


def shows(known: set[float], number: str) -> bool:
    """Whether one of the `known` numbers is `number`, as precisely as `number` is written."""
    plain = re.sub(r"[, \u00a0\u202f]", "", number)
    value = float(plain)
    if value in known:
        return True
    decimals = len(plain.partition(".")[2])
    zeros = len(plain) - len(plain.rstrip("0")) if "." not in plain else 0
    step = 10.0 ** (zeros or -decimals)
    # Rounded to the last digit that is not zero; a single digit is too coarse to be evidence.
    fine = len(plain.replace(".", "").strip("0")) >= 2
    return fine and any(abs(other - value) <= step / 2 for other in known)


@pytest.mark.parametrize("chapter", notebooks.chapters(ROOT))
def test_every_number_of_the_prose_is_one_that_a_cell_shows(chapter: str) -> None:
    text = notebooks.notebook_path(ROOT, chapter).read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    known, given = evidence(cells), DERIVED.get(chapter, {}) | GIVEN.get(chapter, {})
    loose = [
        f"{number!r} in cell {index + 1}: … {around} …"
        for index, cell in enumerate(cells)
        if cell["cell_type"] == "markdown"
        for number, around in claims("".join(cell["source"]))
        if number not in given and not shows(known, number)
    ]
    assert not loose, (
        f"{len(loose)} numbers that no cell of {chapter} shows; print them in a cell, or "
        "say in DERIVED or GIVEN where they are from:\n  " + "\n  ".join(loose)
    )


@pytest.mark.parametrize("chapter", sorted({*DERIVED, *GIVEN}))
def test_what_is_derived_is_right_and_still_in_the_prose(chapter: str) -> None:
    for number, expression in DERIVED.get(chapter, {}).items():
        value = eval(expression, {"math": math})
        assert shows({value}, number), f"{number} should be {expression} = {value}"
    text = notebooks.notebook_path(ROOT, chapter).read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    written = {number for cell in cells for number, _ in claims("".join(cell["source"]))}
    stale = {*DERIVED.get(chapter, {}), *GIVEN.get(chapter, {})} - written
    assert not stale, f"{chapter} does not say {sorted(stale)} any more"


def test_what_counts_as_a_claim_and_as_evidence() -> None:
    prose = "In 2023 `12345` of 46 080 bytes, 12.5 and 3 layers; $x^{999}$, [lines 1–900](x), 0.5."
    assert [number for number, _ in claims(prose)] == ["46 080", "12.5", "3"]
    known = {177873.0, 46080.0, 196.6}
    assert all(shows(known, number) for number in ["180 000", "178,000", "46,080", "197"])
    assert not any(shows(known, number) for number in ["170 000", "46,081", "196", "2"])
    ignored = {"cell_type": "code", "metadata": {"tags": [IGNORE_OUTPUT]}}
    timed = ignored | {"source": ["x = 7"], "outputs": [{"text": ["took 123 ms"]}]}
    assert evidence([timed]) == {7.0}
