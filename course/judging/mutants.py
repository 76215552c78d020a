"""How good the checks are, measured by mutants: wrong versions of a definition, made by rule.

`mutant_rules` makes them. A chapter is judged by `survey`: its checks run once on the book's
package, to see which definitions each of them reaches; then every mutant runs in a fork of that
process, in which one function has got another code object, against the checks that reach it. What
survives there is tried once more on a package of its own, since a function may have done its work
before the fork. `tests/mutants.yml` names the mutants that no check could tell from the original,
each with its reason.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import yaml

from course.building import notebooks
from course.building.package import build, package_texts
from course.building.roots import RootFinder
from course.building.source import check_path, module_name
from course.building.syntax import parts
from course.judging.judge import Job, Judge, calls, forked, judging_environment, set_up, warm_up
from course.judging.mutant_rules import Mutant, mutants_of
from course.judging.program import Program, program
from course.judging.verdict import RIGHT, WRONG, Verdict, verdict
from course.workbooks.pieces import to_write

EQUIVALENT = "tests/mutants.yml"
MEMORY = 6 << 30  # bytes that a mutant may take beyond what its process has
GRACE = 5.0  # seconds that a mutant gets at least; more if its checks take long


# --- One chapter ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What became of a mutant: the verdict that caught it, or None if it survived."""

    mutant: Mutant
    caught: Verdict | None
    is_named: bool = False  # the verdict names the definition, its class or who uses it
    reached: bool = True  # some check runs the definition


def mutants(root: Path, chapter: str) -> tuple[dict[str, str], list[Mutant]]:
    """The texts that a chapter's definitions stand in, and their mutants."""
    texts = package_texts(notebooks.build_cells(root))
    texts[""] = program(root, chapter).text
    wanted: dict[str, list[str]] = {}
    for item in to_write(root, [chapter]):
        wanted.setdefault(item.path, []).append(item.name)
    return texts, [m for p, names in wanted.items() for m in mutants_of(texts[p], p, names)]


def equivalent(root: Path, chapter: str) -> dict[str, str]:
    """The mutants of a chapter that are no mistakes: key → reason."""
    file = root / EQUIVALENT
    listed = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    return (listed or {}).get(chapter) or {}


def survey(root: Path, chapter: str, sample: int | None = None, workers: int = 2) -> list[Fate]:
    """Judge a chapter's mutants, equivalent ones aside: all, or a fixed `sample` of them."""
    texts, found = mutants(root, chapter)
    known = equivalent(root, chapter)
    found = [m for m in found if m.key not in known]
    if sample is not None and sample < len(found):
        found = sorted(random.Random(chapter).sample(found, sample), key=found.index)
    with tempfile.TemporaryDirectory(prefix="course-mutants-") as folder:
        build(root, Path(folder))
        with ThreadPoolExecutor(workers) as pool:
            shares = [found[i::workers] for i in range(workers)]
            fates = [
                f
                for share in pool.map(lambda s: _judge(root, chapter, folder, texts, s), shares)
                for f in share
            ]
    return sorted(fates, key=lambda f: found.index(f.mutant))


def _judge(
    root: Path, chapter: str, folder: str, texts: dict[str, str], share: list[Mutant]
) -> list[Fate]:
    """Judge some mutants in a process of their own; survivors once more on their own package."""
    if not share:
        return []
    job = {"root": str(root), "chapter": chapter, "folder": folder}
    done = subprocess.run(
        [sys.executable, "-m", "course.judging.mutants"],
        input=json.dumps({**job, "mutants": [asdict(m) for m in share], "texts": texts}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**judging_environment(), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"judging the mutants of {chapter} failed:\n{done.stderr}")
    raw = json.loads(done.stdout.splitlines()[-1])
    fates = []
    with Judge(root, chapter) as judge:
        for mutant, (found, checks) in zip(share, raw, strict=True):
            said = _verdict(found)
            if said is None and checks:  # as slow as a reader's own run, and as exact
                changed = mutant.apply(texts[mutant.path])
                one = {mutant.path: changed} if mutant.path else {}
                text = "" if mutant.path else changed
                verdicts = judge.run(Job(folder, tuple(checks), one, text=text)).verdicts
                said = next((v for v in verdicts if v.kind != RIGHT), None)
            named = said is not None and _names(said, mutant, texts[mutant.path])
            fates.append(Fate(mutant, said, named, bool(checks)))
    return fates


def _verdict(raw: dict[str, Any] | None) -> Verdict | None:
    return None if raw is None else Verdict(raw["name"], raw["kind"], tuple(raw["lines"]))


def _names(said: Verdict, mutant: Mutant, text: str) -> bool:
    """Whether a verdict names the mutated definition, its class, or a function that uses it."""
    own = mutant.name.split(".")
    names = set(own) | {own[-1].strip("_")}
    short = own[-1]
    for part in parts(text):
        if re.search(rf"\b{re.escape(short)}\b", "\n".join(map(ast.unparse, part.node.body))):
            names |= set(part.name.split("."))
    words = set(re.findall(r"\w+", " ".join((said.name, *said.lines))))
    return bool(names & words) or any(n in said.name for n in names if len(n) > 3)


# --- The process that judges ----------------------------------------------------------------------


def _serve(job: dict[str, Any]) -> list[tuple[dict[str, Any] | None, list[str]]]:
    """For each mutant the verdict that caught it (or None), and the checks that reach it."""
    made = program(Path(job["root"]), job["chapter"])
    folder, texts = Path(job["folder"]), job["texts"]
    warm_up(made)
    sys.meta_path.insert(0, RootFinder(folder))
    sys.dont_write_bytecode = True
    namespace: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(folder)
    set_up(made, made.text, namespace)
    reached: dict[str, list[str]]
    seconds: dict[str, float]
    (reached, seconds), _ = forked(lambda: _reach(made, folder, namespace), 600.0)
    out: list[tuple[dict[str, Any] | None, list[str]]] = []
    for raw in job["mutants"]:
        mutant = Mutant(**raw)
        home = f"{mutant.path or 'notebook'}:{mutant.name}"
        checks = [name for name in made.checks if home in reached.get(name, ())]
        checks.sort(key=lambda name: seconds[name])
        limit = GRACE + 10 * sum(seconds[name] for name in checks)
        text = mutant.apply(texts[mutant.path])
        trial = partial(_try, mutant, text, checks, namespace)
        said = forked(trial, limit)[0] if checks else [None]
        if said is None:
            lost = f"{mutant.name}: it did not end, or its process died"
            said = [asdict(Verdict(checks[0], WRONG, (lost,)))]
        out.append((said[0], checks))
    return out


def _reach(
    made: Program, folder: Path, namespace: dict[str, Any]
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Which definitions each check runs, and how long it takes."""
    reached: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    for name in made.checks:
        with calls(folder, True) as used:
            verdict(namespace[name])
        started = time.monotonic()
        verdict(namespace[name])
        seconds[name] = time.monotonic() - started
        reached[name] = [*used, *_own(namespace[name], namespace)]
    return reached, seconds


def _own(check: Any, namespace: dict[str, Any]) -> list[str]:
    """The notebook's own functions that a check could call, by name, also through others."""
    found: dict[str, None] = {}
    todo = [check]
    while todo:
        for name in todo.pop().__code__.co_names:
            other = namespace.get(name)
            is_own = isinstance(other, FunctionType) and other.__module__ == "__main__"
            if is_own and f"notebook:{name}" not in found:
                found[f"notebook:{name}"] = None
                todo.append(other)
    return list(found)


def _try(
    mutant: Mutant, text: str, checks: list[str], namespace: dict[str, Any]
) -> list[dict[str, Any] | None]:
    """Put the mutant in place and run the checks until one fails: its verdict, in a list."""
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = used * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the fork ends)
    if not _put(mutant, text, namespace):
        return [None]
    for name in checks:
        said = verdict(namespace[name])
        if said.kind != RIGHT:
            return [asdict(said)]
    return [None]


def _put(mutant: Mutant, text: str, namespace: dict[str, Any]) -> bool:
    """Give the live function the mutant's code and defaults; False if that can't be done."""
    if mutant.path:
        module = importlib.import_module(module_name(check_path(mutant.path)))
        space, filename = vars(module), str(module.__file__)
    else:
        space, filename = namespace, "<mutant>"
    functions = _functions(space, mutant.name)
    codes = [c for c in _codes(compile(text, filename, "exec")) if c.co_qualname == mutant.name]
    nodes = [part.node for part in parts(text) if part.name == mutant.name]
    if not functions or not len(functions) == len(codes) == len(nodes):
        return False
    for function, code, node in zip(functions, codes, nodes, strict=True):
        if code.co_freevars != function.__code__.co_freevars:
            return False
        function.__code__ = code
        if function.__defaults__ or node.args.defaults:
            function.__defaults__ = tuple(_value(d, space) for d in node.args.defaults)
        words = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if function.__kwdefaults__:
            function.__kwdefaults__ = {a.arg: _value(d, space) for a, d in words if d}
    return True


def _value(node: ast.expr, space: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "<default>", "eval"), space)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _functions(space: dict[str, Any], name: str) -> list[FunctionType]:
    """The function objects behind a dotted name: under decorators, and both of a property."""
    *owners, last = name.split(".")
    found: Any = space
    for owner in owners:
        found = found.get(owner) if isinstance(found, dict) else vars(found).get(owner)
        if found is None:
            return []
    item: Any = found.get(last) if isinstance(found, dict) else vars(found).get(last)
    if isinstance(item, property):
        return [f for f in (item.fget, item.fset, item.fdel) if isinstance(f, FunctionType)]
    while hasattr(item, "__wrapped__") or not isinstance(item, FunctionType):
        if hasattr(item, "cache_clear"):
            item.cache_clear()
        inside = (getattr(item, name, None) for name in ("__wrapped__", "__func__", "func"))
        item = next((inner for inner in inside if inner is not None), None)
        if item is None:
            return []
    return [item]


# --- The table ------------------------------------------------------------------------------------


def table(root: Path, names: Sequence[str], sample: int | None = None) -> Iterator[str]:
    """The lines of the table: of each chapter the shares, and the mutants that survived."""
    for chapter in names or notebooks.chapters(root):
        started = time.monotonic()
        fates = survey(root, chapter, sample)
        if not fates:
            continue
        caught = [f for f in fates if f.caught is not None]
        named = sum(f.is_named for f in caught)
        share = 100 * len(caught) / len(fates)
        yield (
            f"{chapter:<20} {len(fates):>5} mutants  {share:5.1f} % caught, "
            f"{100 * named / max(1, len(caught)):5.1f} % of these by a message that names it; "
            f"{len(equivalent(root, chapter))} equivalent ones aside  "
            f"({time.monotonic() - started:.0f} s)"
        )
        for fate in fates:
            if fate.caught is None:
                why = "" if fate.reached else "  (no check runs it)"
                yield f"  survived, line {fate.mutant.line}: {fate.mutant.key}{why}"


if __name__ == "__main__":
    answer = _serve(json.loads(sys.stdin.read()))
    print()
    print(json.dumps(answer))
