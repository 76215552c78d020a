"""The map to the official code: each definition of ours beside the official one.

`book/official.yml` holds what can't be computed: where the official names are (of one commit), and
why ours differ. What ours are, where they are built and in what their interface differs is read
from the notebooks each time the book is built.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from course.book.names import Definition, definitions

DATA = "book/official.yml"


@dataclass(frozen=True)
class Official:
    """An official definition: its file (within the package), its lines, and its interface."""

    file: str
    name: str
    lines: str
    takes: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    """Members of a class, methods with parameters: `device_len`, `append_host(next_token)`."""


@dataclass(frozen=True)
class Row:
    """One line of the map."""

    ours: Definition
    official: Official | None
    interface: tuple[str, ...]
    """In what the interface differs: `+ name`, `- name`, `name(+ parameter)`; () if it doesn't."""
    why: str
    shared: str = ""
    """Why it is there, if that is said once for several names of the file."""


def _official(file: str, name: str, entry: str | dict[str, Any]) -> Official:
    if isinstance(entry, str):
        return Official(file, name, entry)
    takes, has = entry.get("takes", ()), entry.get("has", ())
    return Official(file, name, entry["lines"], tuple(takes), tuple(has))


class Map:
    """Ours and theirs, side by side."""

    def __init__(self, root: Path) -> None:
        data = yaml.safe_load((root / DATA).read_text(encoding="utf-8"))
        self.commit: str = data["commit"]
        self.source: str = data["source"]
        self.lengths: dict[str, int] = {f: v["length"] for f, v in data["official"].items()}
        self.official = {
            (file, name): _official(file, name, entry)
            for file, value in data["official"].items()
            for name, entry in (value.get("names") or {}).items()
        }
        self.files: dict[str, dict[str, Any]] = data["files"]
        self.later: dict[str, str] = data["later"]
        self.absent: dict[str, str] = data["absent"]
        self.ours = [d for d in definitions(root) if d.name not in ("__all__", "__version__")]
        self._classes = {d.name: d for d in self.ours if d.kind == "class"}

    def url(self, official: Official | str) -> str:
        """The permanent link to an official definition, or to a file."""
        if isinstance(official, str):
            return self.source.format(commit=self.commit, file=official)
        first, _, last = official.lines.partition("-")
        file = self.source.format(commit=self.commit, file=official.file)
        return f"{file}#L{first}-L{last or first}"

    def counterpart(self, ours: Definition) -> Official | None:
        """The official definition of the same name and file, or the one that the data names."""
        named = self._entry(ours).get("official", "")
        if named:
            file, _, name = named.partition("#")
            return self.official[file, name or ours.name]
        return self.official.get((ours.file, ours.name))

    def _entry(self, ours: Definition) -> dict[str, Any]:
        entry = (self.files.get(ours.file, {}).get("names") or {}).get(ours.name) or {}
        return entry if isinstance(entry, dict) else {"why": entry}

    def row(self, ours: Definition) -> Row:
        official = self.counterpart(ours)
        why = self._entry(ours).get("why", "")
        shared = "" if official or why else self.files.get(ours.file, {}).get("ours", "")
        return Row(ours, official, self.difference(ours, official) if official else (), why, shared)

    def rows(self) -> list[Row]:
        """The public definitions of the package and the private ones that upstream has too."""
        rows = [self.row(d) for d in self.ours if d.name != "T" and d.name != "logger"]
        return [row for row in rows if row.ours.public or row.official]

    def faults(self) -> list[str]:
        """What the map lacks, as messages; [] when it is complete."""
        rows = self.rows()
        found = [
            f"{row.ours.path}: {row.ours.name} has no official counterpart; say why it is there "
            f"in {DATA} (files: … ours: or names:)"
            for row in rows
            if row.official is None and not (row.why or row.shared)
        ]
        found += [
            f"{row.ours.path}: {row.ours.name} differs from upstream "
            f"({', '.join(row.interface)}); say why in {DATA}"
            for row in rows
            if row.interface and not row.why
        ]
        covered = {(row.official.file, row.official.name) for row in rows if row.official}
        for file, name in self.official:
            reason = self.absent.get(f"{file}#{name}") or self.why_later(file)
            if (file, name) not in covered and not reason:
                found.append(f"upstream's {file} has {name}; say in {DATA} where it is or why not")
        known = {(d.file, d.name) for d in self.ours}
        for path, entry in self.files.items():
            for name in entry.get("names") or {}:
                if (path, name) not in known:
                    found.append(f"{DATA} tells of {path}: {name}, which no chapter builds")
        for key in self.absent:
            file, _, name = key.partition("#")
            if (file, name) not in self.official:
                found.append(f"{DATA}: upstream has no {key}")
            elif (file, name) in covered:
                found.append(f"{DATA}: {key} is there and called absent")
        return found

    def why_later(self, file: str) -> str:
        """In which part a file that isn't here will come, or why it won't; "" for one that is."""
        for prefix in sorted(self.later, key=len, reverse=True):
            if file == prefix or (prefix.endswith("/") and file.startswith(prefix)):
                return self.later[prefix]
        return ""

    # -- interfaces -------------------------------------------------------------------------------

    def difference(self, ours: Definition, official: Official) -> tuple[str, ...]:
        """In what our interface differs from the official one."""
        if isinstance(ours.node, ast.FunctionDef):
            return tuple(_differ(_parameters(ours.node), official.takes))
        if not isinstance(ours.node, ast.ClassDef) or not official.has:
            return ()
        mine = self._interface(ours)
        found, known = [], set()
        for member in official.has:
            name, called, rest = member.partition("(")
            known.add(name)
            have = mine.get(name)
            if name not in mine:
                # What isn't for callers is how it does it, not what it offers.
                found += [] if name.startswith("_") else [f"− {name}"]
            elif called and have is not None:
                theirs = tuple(filter(None, rest.removesuffix(")").split(", ")))
                found += [f"{name}: {change}" for change in _differ(have, theirs)]
        own = self._interface(ours, inherited=False)
        found += [f"+ {n}" for n in own if n not in known and not n.startswith("_")]
        return tuple(found)

    def _interface(
        self, ours: Definition, *, inherited: bool = True
    ) -> dict[str, tuple[str, ...] | None]:
        """The members of a class, and of those it derives from: name → parameters.

        None stands for what isn't called: fields and properties.
        """
        found: dict[str, tuple[str, ...] | None] = {}
        assert isinstance(ours.node, ast.ClassDef)
        for inner in ours.node.body:
            if isinstance(inner, ast.FunctionDef):
                decorators = {ast.unparse(d).split(".")[-1] for d in inner.decorator_list}
                is_value = decorators & {"property", "cached_property"}
                found[inner.name] = None if is_value else _parameters(inner)
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                found[inner.target.id] = None
            elif isinstance(inner, ast.Assign):
                found |= {t.id: None for t in inner.targets if isinstance(t, ast.Name)}
        for base in ours.bases if inherited else ():
            parent = self._classes.get(base)
            if parent is not None:
                found = {**self._interface(parent), **found}
        return found


def _parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    """Names of the parameters without self and cls, those of `*args` and `**kwargs` with stars."""
    arguments = node.args
    found = [a.arg for a in arguments.posonlyargs + arguments.args]
    if arguments.vararg:
        found.append(f"*{arguments.vararg.arg}")
    found += [a.arg for a in arguments.kwonlyargs]
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return tuple(name for name in found if name not in ("self", "cls"))


def _differ(ours: tuple[str, ...], theirs: tuple[str, ...]) -> list[str]:
    """Parameters that only one of the two has."""
    found = [f"− {name}" for name in theirs if name not in ours]
    return found + [f"+ {name}" for name in ours if name not in theirs]
