"""Mutants made by rule: the rules, how a mutant is put in place, and a sample of a chapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.judging import mutants
from course.judging.judge import CAN_FORK
from course.judging.mutant_rules import mutants_of

ROOT = Path(__file__).resolve().parent.parent
TEXT = '''\
"""A module."""


class Counter:
    """Counts."""

    def __init__(self, start: int = 0) -> None:
        self.count, self.start = start, start

    @property
    def is_new(self) -> bool:
        """Whether nothing was counted."""
        return self.count <= self.start and not self.start < 0

    def add(self, reqs, padded_reqs):
        if len(reqs) > 3:
            raise ValueError(f"at most {3} requests, got {len(reqs)}")
        self.count += len(reqs[1:])
        self.last = max(reqs, key=abs)
'''


def changes(name: str) -> set[tuple[str, str]]:
    found = mutants_of(TEXT, "minisgl/counter.py", [name])
    assert all(m.apply(TEXT) != TEXT for m in found)
    return {(m.old.strip(), m.new.strip()) for m in found}


def test_each_rule_changes_what_it_should() -> None:
    init, is_new, add = (changes(f"Counter.{n}") for n in ("__init__", "is_new", "add"))
    assert {("0", "1"), ("0", "-1")} <= init, "a default"
    assert {("<=", "<"), ("<=", ">"), ("<", "<=")} <= is_new, "a comparison and its edge"
    both = "self.count <= self.start and not self.start < 0"
    assert (both, "((self.count <= self.start) or (not self.start < 0))") in is_new
    assert (both, "(self.count <= self.start)") in is_new, "a condition forgotten"
    assert ("not self.start < 0", "self.start < 0") in is_new
    assert {("len(reqs) > 3", "False"), ("+=", "-="), ("1", "")} <= add
    assert ("self.count += len(reqs[1:])", "pass") in add, "a statement left out"
    assert ("max(reqs, key=abs)", "max(reqs)") in add, "a keyword dropped"
    assert {("reqs", "padded_reqs"), ("max", "min")} <= add, "a neighbor"
    swapped = [new for old, new in add if old.startswith("self.count += ") and "\n" in old]
    assert swapped and swapped[0].startswith("self.last"), "two statements in the other order"


def test_what_is_said_to_a_person_is_left_alone() -> None:
    assert not [old for old, new in changes("Counter.add") if "at most" in old and new != "pass"]
    assert not [old for old, _ in changes("Counter.is_new") if "Whether" in old]


def test_keys_do_not_depend_on_the_line_and_tell_equal_changes_apart() -> None:
    before = mutants_of(TEXT, "minisgl/counter.py", ["Counter.add"])
    after = mutants_of("\n\n" + TEXT, "minisgl/counter.py", ["Counter.add"])
    assert [m.key for m in before] == [m.key for m in after]
    assert len({m.key for m in before}) == len(before)


def test_every_listed_equivalent_is_a_mutant_and_has_a_reason() -> None:
    for chapter in mutants.notebooks.chapters(ROOT):
        listed = mutants.equivalent(ROOT, chapter)
        if listed:
            keys = {m.key for m in mutants.mutants(ROOT, chapter)[1]}
            assert listed.keys() <= keys, f"{chapter}: {sorted(listed.keys() - keys)}"
            assert all(reason.strip() for reason in listed.values())


@pytest.mark.skipif(not CAN_FORK, reason="mutants are judged in forks: Linux")
def test_a_sample_is_judged_and_most_of_it_caught() -> None:
    fates = mutants.survey(ROOT, "01_core", sample=24)
    assert len(fates) == 24
    caught = [fate for fate in fates if fate.caught is not None]
    assert len(caught) >= 12, [fate.mutant.key for fate in fates if fate.caught is None]
    assert all(fate.caught.lines for fate in caught if fate.caught)
