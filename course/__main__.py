"""`python -m course COMMAND`: the course from the command line.

build, check, run, pull: the notebooks and the package. workbook, status: write it yourself.
mutations, mutants: how good the checks are. model: fetch the model.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from course.building import notebooks, package
from course.building.pull import pull
from course.building.roots import find_root, is_workbook, reference_root
from course.building.run import check_from_nothing, run
from course.judging import mutants, mutations
from course.judging.progress import status_lines
from course.workbooks.generate import generate
from course.workbooks.reference import chapter_named


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
    workbooks = commands.add_parser("workbook", help="blank workbooks to write minisgl yourself")
    workbooks.add_argument("folder", nargs="?", type=Path, help="where (default: workbooks/)")
    workbooks.add_argument("--answers", action="store_true", help="with the answers, folded")
    status = commands.add_parser("status", help="how far your workbooks are")
    status.add_argument("folder", nargs="?", type=Path, help="where (default: workbooks/)")
    status.add_argument("chapters", nargs="*", help="names such as 01_core (default: all)")
    status.add_argument("--quick", action="store_true", help="the last verdicts; run no check")
    mutations = commands.add_parser("mutations", help="wrong solutions, and who catches them")
    mutations.add_argument("chapters", nargs="*", help="names such as 01_core (default: all)")
    mutants = commands.add_parser("mutants", help="mistakes made by rule, and which survive")
    mutants.add_argument("chapters", nargs="*", help="names such as 01_core (default: all)")
    mutants.add_argument("--sample", type=int, help="so many of each chapter, always the same")
    commands.add_parser("model", help="fetch and convert the model, and print its folder")
    options = parser.parse_args(arguments)
    root = find_root()
    try:
        return globals()[f"_{options.command}"](root, options)
    except notebooks.CourseError as error:
        return _fail(error)
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}; name a folder that you may write to")


def _fail(error: Exception | str) -> int:
    """Say what went wrong, without a traceback."""
    print(error, file=sys.stderr)
    return 1


def _build(root: Path, options: argparse.Namespace) -> int:
    changed, extra = package.build(root, options.folder or root)
    for path in changed:
        print(f"built  {path}")
    for path in extra:
        print(f"extra  {path} (no notebook builds it)")
    print("minisgl/ is up to date" if not changed else f"{len(changed)} files written")
    return 0


def _check(root: Path, options: argparse.Namespace) -> int:
    faults = package.check_static(root)
    for fault in faults:
        print(fault)
    if faults:
        return 1
    count = len(package.package_texts(notebooks.build_cells(root)))
    print(f"ok  the {count} files of minisgl/ are what the notebooks build")
    if not options.static:
        for line in check_from_nothing(root):
            print(line, flush=True)
    return 0


def _run(root: Path, options: argparse.Namespace) -> int:
    for chapter in options.chapters or notebooks.chapters(root):
        name = Path(chapter).stem
        changed = run(root, name, fresh=options.fresh)
        print(f"{name}: {'updated' if changed else 'unchanged'}", flush=True)
    return 0


def _pull(root: Path, options: argparse.Namespace) -> int:
    cells = pull(root)
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


def _workbook(root: Path, options: argparse.Namespace) -> int:
    root = reference_root()
    folder = options.folder or root / "workbooks"
    done = generate(root, folder, answers=options.answers)
    for chapter in done.written:
        print(f"written    {chapter}")
    for chapter in done.unchanged:
        print(f"unchanged  {chapter}")
    for chapter in done.kept:
        print(f"kept       {chapter}: you have edited it; move it away to get a blank one")
    command = shlex.join(["jupyter", "lab", str(folder)])
    print(f"The workbooks are in {folder}; open them with `{command}`.")
    return 0


def _status(root: Path, options: argparse.Namespace) -> int:
    root = reference_root()
    folder = (options.folder or root / "workbooks").resolve()
    if not is_workbook(folder):
        raise notebooks.CourseError(f"{folder} holds no workbooks; `python -m course workbook`")
    names = [chapter_named(root, name) for name in options.chapters]
    for line in status_lines(root, folder, run=not options.quick, chapters=names):
        print(line, flush=True)
    return 0


def _mutations(root: Path, options: argparse.Namespace) -> int:
    missed = 0
    for line, is_missed in mutations.table(reference_root(), options.chapters):
        print(line, flush=True)
        missed += is_missed
    return 1 if missed else 0


def _mutants(root: Path, options: argparse.Namespace) -> int:
    for line in mutants.table(reference_root(), options.chapters, options.sample):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
