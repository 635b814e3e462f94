"""Generate exercises/NN_topic.ipynb from solutions/NN_topic.ipynb, as nbgrader would.

    python scripts/exercises.py [--check] [--into FOLDER]

People edit the solutions only. The preprocessors are nbgrader's own, in the order in which
`nbgrader generate_assignment` runs them, without its database; so the same solution always gives
the same exercise, byte for byte. `--check` writes nothing and fails if a file has drifted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from nbconvert.exporters.exporter import ResourcesDict
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearHiddenTests,
    ClearMarkScheme,
    ClearOutput,
    ClearSolutions,
    ComputeChecksums,
    LockCells,
)

ROOT = Path(__file__).resolve().parent.parent
STEPS = (LockCells, ClearSolutions, ClearOutput, CheckCellMetadata, ComputeChecksums,
         ClearHiddenTests, ClearMarkScheme, ComputeChecksums, CheckCellMetadata)


def exercise_from(solution: Path) -> str:
    """The text of the exercise that belongs to this solution."""
    notebook = nbformat.read(solution, as_version=4)
    resources = ResourcesDict(unique_key=solution.stem)
    for step in STEPS:
        notebook, resources = step().preprocess(notebook, resources)
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    parser.add_argument("--into", type=Path, default=ROOT / "exercises", metavar="FOLDER")
    asked = parser.parse_args()
    wanted = {s.name: exercise_from(s) for s in sorted(ROOT.glob("solutions/*.ipynb"))}
    found = {path.name: path.read_text() for path in asked.into.glob("*.ipynb")}
    drifted = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    if asked.check:
        for name in drifted:
            print(f"exercises/{name} is not what solutions/{name} gives: run `make exercises`")
        return 1 if drifted else 0
    asked.into.mkdir(parents=True, exist_ok=True)
    for name in drifted:
        if name in wanted:
            (asked.into / name).write_text(wanted[name])
            print(f"exercises/{name}: written")
        else:
            (asked.into / name).unlink()
            print(f"exercises/{name}: removed, as solutions/{name} is no more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
