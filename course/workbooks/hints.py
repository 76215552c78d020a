"""What a stub says beyond what its body tells; the lines themselves are in `hints.yml`."""

from __future__ import annotations

from pathlib import Path

import yaml

from course.building.source import PACKAGE

_FILES = yaml.safe_load(Path(__file__).with_name("hints.yml").read_text(encoding="utf-8"))
HINTS: dict[tuple[str, str], str] = {
    ("" if file == "notebook" else f"{PACKAGE}/{file}", name): hint
    for file, own in _FILES.items()
    for name, hint in own.items()
}
"""(file, function) → a line; the file is "" for a function that the notebook itself holds."""
