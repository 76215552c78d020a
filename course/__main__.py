"""`python -m course build | check | run | pull | model`: the course from the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from course import notebooks
from course.builder import find_root


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build minisgl/ from the notebooks, without a kernel")
    build.add_argument("folder", nargs="?", type=Path, help="where (default: here)")
    check = commands.add_parser("check", help="prove that minisgl/ is what the notebooks build")
    check.add_argument("--static", action="store_true", help="compare texts only, run nothing")
    run = commands.add_parser("run", help="re-execute chapters in place")
    run.add_argument("chapters", nargs="*", help="names such as 01_core (default: all)")
    run.add_argument("--fresh", action="store_true", help="take new timings, too")
    commands.add_parser("pull", help="write edits made in minisgl/ back into the notebooks")
    commands.add_parser("model", help="fetch and convert the model, and print its folder")
    options = parser.parse_args(arguments)
    root = find_root()
    try:
        return globals()[f"_{options.command}"](root, options)
    except notebooks.CourseError as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    """Say what went wrong, without a traceback."""
    print(error, file=sys.stderr)
    return 1


def _build(root: Path, options: argparse.Namespace) -> int:
    changed, extra = notebooks.build(root, options.folder or root)
    for path in changed:
        print(f"built  {path}")
    for path in extra:
        print(f"extra  {path} (no notebook builds it)")
    print("minisgl/ is up to date" if not changed else f"{len(changed)} files written")
    return 0


def _check(root: Path, options: argparse.Namespace) -> int:
    faults = notebooks.check_static(root)
    for fault in faults:
        print(fault)
    if faults:
        return 1
    count = len(notebooks.package_texts(notebooks.build_cells(root)))
    print(f"ok  the {count} files of minisgl/ are what the notebooks build")
    if not options.static:
        for line in notebooks.check_from_nothing(root):
            print(line, flush=True)
    return 0


def _run(root: Path, options: argparse.Namespace) -> int:
    for chapter in options.chapters or notebooks.chapters(root):
        name = Path(chapter).stem
        changed = notebooks.run(root, name, fresh=options.fresh)
        print(f"{name}: {'updated' if changed else 'unchanged'}", flush=True)
    return 0


def _pull(root: Path, options: argparse.Namespace) -> int:
    cells = notebooks.pull(root)
    for where in cells:
        print(f"pulled  {where}")
    print(f"{len(cells)} cells changed" + ("; run their chapters next" if cells else ""))
    return 0


def _model(root: Path, options: argparse.Namespace) -> int:
    from course.checkpoints import ModelUnavailable, model

    try:
        print(model())
    except (ModelUnavailable, FileNotFoundError, ValueError) as error:
        return _fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
