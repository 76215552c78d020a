"""The pictures that several chapters draw: they say what the tensors say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from course import pictures
from course.building.notebooks import CourseError, chapters, read
from course.pictures import canvas as draw
from course.pictures import package_map, page_table_picture
from minisgl.core import Req, SamplingParams
from minisgl.kvcache.naive_cache import NaiveCacheHandle
from minisgl.scheduler.cache import CacheManager


def scene(page_size: int, lengths: dict[str, int], num_slots: int = 64, width: int = 24):
    """Requests right before the pass that computes their whole prompts."""
    num_pages = num_slots // page_size
    table = torch.full((4, width), num_pages * page_size, dtype=torch.int32)
    reqs = {}
    for row, (name, length) in enumerate(lengths.items()):
        ids = torch.arange(length, dtype=torch.int32)
        reqs[name] = Req(ids, row, 0, 9, row, SamplingParams(), NaiveCacheHandle())
    CacheManager(num_pages, page_size, table, "naive").allocate_paged(list(reqs.values()))
    return table, reqs, num_pages


def keys(svg: str) -> dict[str, list[str]]:
    """data-key → the first text of each element that has it, in order."""
    found: dict[str, list[str]] = {}
    for key, body in re.findall(r'<g class="mgb[^"]*" data-key="(\w+)"[^>]*>(.*?)</g>', svg):
        text = re.search(r"<text[^>]*>([^<]*)</text>", body)
        found.setdefault(key, []).append(text[1] if text else "")
    return found


@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 32])
def test_every_cell_is_linked_to_its_slot(page_size: int) -> None:
    table, reqs, num_pages = scene(page_size, {"A": 6, "B": 15})
    picture = page_table_picture(
        table, reqs, page_size=page_size, num_pages=num_pages, writing="AB"
    )
    found = keys(str(picture))
    for name, req in reqs.items():
        for position in range(req.device_len):
            slot = int(table[req.table_idx, position])
            assert found[f"s{slot}"] == [str(slot), f"{name}{position}"]
        wasted = -req.device_len % page_size
        assert len(found.get(f"w{req.table_idx}", [])) >= (2 if wasted else 0)
    assert len(found[f"s{num_pages * page_size}"]) == 2, "the dummy's row and its page"
    taken = sum(-(-req.device_len // page_size) for req in reqs.values())
    wasted = taken * page_size - 21
    words = f"{taken} of {num_pages} pages taken, 21 slots hold a token, {wasted} wasted"
    assert words in str(picture)
    assert f"{num_pages - taken} of {num_pages} pages are free" in picture.desc


def test_between_two_passes_only_cached_tokens_are_drawn() -> None:
    table, reqs, num_pages = scene(4, {"A": 4})
    reqs["A"].complete_one()  # device_len is 5, but position 4 has no slot yet
    picture = page_table_picture(table, reqs, page_size=4, num_pages=num_pages)
    assert "1 of 16 pages taken, 4 slots hold a token, 0 wasted" in str(picture)


def test_an_empty_table_and_a_fresh_request() -> None:
    table, reqs, num_pages = scene(4, {})
    picture = page_table_picture(table, reqs, page_size=4, num_pages=num_pages)
    assert "0 of 16 pages taken" in str(picture) and "are free" in picture.desc
    table, reqs, _ = scene(4, {"A": 5})
    picture = page_table_picture(table, reqs, page_size=4, num_pages=16)
    assert "0 of 16 pages taken" in str(picture), "admitted, and not computed yet"


def test_a_row_that_ends_inside_a_page() -> None:
    table, reqs, num_pages = scene(16, {"A": 17}, width=20)
    picture = page_table_picture(table, reqs, page_size=16, num_pages=num_pages, writing="A")
    assert "2 of 4 pages taken, 17 slots hold a token, 15 wasted" in str(picture)


def test_refusals() -> None:
    table, reqs, num_pages = scene(4, {"A": 5})
    with pytest.raises(ValueError, match="too many to draw"):
        page_table_picture(table, reqs, page_size=16, num_pages=100)
    with pytest.raises(ValueError, match="not among the requests"):
        page_table_picture(table, reqs, page_size=4, num_pages=num_pages, writing="Z")


# -- the map of the package -----------------------------------------------------------------------


@pytest.fixture
def little_course(tmp_path: Path) -> Path:
    """Three chapters: two begin files, and the second adds to a file of the first."""
    (tmp_path / "notebooks").mkdir()
    chapters = {
        "01_one": ["minisgl/__init__.py", "minisgl/core.py", "minisgl/ops/__init__.py"],
        "02_two": ["minisgl/ops/norm.py", "minisgl/core.py", "minisgl/ops/norm.py"],
        "lab": ["minisgl/ops/fast.py"],
    }
    for name, paths in chapters.items():
        cells = [{"cell_type": "code", "source": [f"#| build {p}\n", "X = 1"]} for p in paths]
        cells.append({"cell_type": "markdown", "source": "#| build minisgl/not_code.py"})
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    lines = [f"- file: notebooks/{name}" for name in chapters]
    (tmp_path / "_toc.yml").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def test_the_map_says_what_is_there_what_is_new_and_what_comes(little_course: Path) -> None:
    def said(chapter: str | None) -> str:
        return package_map(chapter, root=little_course).desc

    assert said("01_one") == "This chapter: core. To come: ops/norm, ops/fast."
    assert said("02_two") == "This chapter: core +, ops/norm. To come: ops/fast."
    assert said("lab") == "Built before: core, ops/norm. This chapter: ops/fast."
    assert said(None) == "Built by the chapter on its left: core, ops/norm, ops/fast."
    with pytest.raises(CourseError, match="the chapters are 01_one, 02_two, lab"):
        package_map("03_three", root=little_course)


def test_the_map_of_the_real_package_is_whole_and_fits_a_phone() -> None:
    picture = package_map()
    modules = [p for p in Path("minisgl").rglob("*.py") if p.stem != "__init__"]
    for module in modules:
        assert re.search(rf"\b{module.stem}\b", picture.desc), f"{module} is not on the map"
    assert picture.width <= draw.PHONE_WIDTH
    assert str(picture) == str(package_map())


ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("chapter", chapters(ROOT))
def test_each_chapter_shows_its_own_map_as_it_is_now(chapter: str) -> None:
    """A chapter that adds a file changes the maps of all: then they have to be run again."""
    cells = [cell for cell in read(ROOT, chapter).cells if "package_map(" in cell.source]
    assert len(cells) == 1, "one map, at the top"
    assert f'package_map("{chapter}")' in cells[0].source
    shown = cells[0].outputs[0].data["text/plain"]
    assert shown.endswith(package_map(chapter).desc), f"stale: python -m course run {chapter}"


# -- pictures of one chapter ----------------------------------------------------------------------


def test_each_picture_says_its_numbers_and_fits_a_phone() -> None:
    life = [("admission", 2, 6), ("after the prefill", 6, 7), ("the end", 8, 9)]
    merged = {"qkv_proj": {"q": 576, "k": 192, "v": 192}, "gate_up_proj": {"gate": 8, "up": 8}}
    shape = [2, 30, 7, 16, 3, 64]
    drawn = {
        "positions 2 … 5": pictures.life_picture(life),
        "2. graph runner: padded_reqs; 3. scheduler: positions": pictures.batch_fields_picture(),
        "qkv_proj has 576 + 192 + 192 = 960 rows, from q, k, v": pictures.merge_picture(
            merged, 576
        ),
        "in slot 46 3 KV heads of 64 numbers, 768 bytes": pictures.kv_tensor_picture(
            shape, layer=3, slot=46, bytes_per_number=4
        ),
        "6. page table, needs 4 and 5": pictures.start_picture(),
        "24 GB the model takes 20, the pool 1.6, and 2.4 stay free": pictures.memory_picture(
            {"before": (24, 20, 1.6)}
        ),
        "2 rows of 49,152 logits": pictures.forward_picture(2, 9, 49152, 30),
    }
    for words, picture in drawn.items():
        assert words in picture.desc
        assert picture.width <= draw.PHONE_WIDTH


def test_a_step_of_a_start_needs_only_earlier_ones() -> None:
    for number, (_, needed) in enumerate(pictures.STARTING, 1):
        assert all(0 < other < number for other in needed)


@pytest.mark.parametrize("shape", [(2, 1, 2, 1, 1, 8), (2, 80, 5000, 256, 8, 128)])
def test_a_pool_of_any_size_can_be_drawn(shape: tuple[int, ...]) -> None:
    slot = (shape[2] - 1) * shape[3] - 1
    picture = pictures.kv_tensor_picture(shape, layer=0, slot=slot, bytes_per_number=2)
    assert f"in slot {slot}" in picture.desc
