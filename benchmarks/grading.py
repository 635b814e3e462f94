"""How long grading takes: one learner's whole course, and a class of single-chapter hand-ins.

    python benchmarks/grading.py [--learners 100] [--jobs 2] [--sandbox bubblewrap]

Wanted on two cores: the course in under 60 s, the class of 100 in under 600 s, and a grader whose
memory does not grow with the class. Of ten hand-ins five are right, three miss an answer, and two
are as they were handed out.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dtlab.grading.class_grading import Graded, grade_class
from dtlab.grading.class_report import write_results

ROOT = Path(__file__).resolve().parent.parent
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
KINDS = [*5 * ["right"], *3 * ["one missing"], *2 * ["handed out"]]


def answer_cells(notebook: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The solution cells, by grade id."""
    marked = [cell for cell in notebook["cells"]
              if cell["metadata"].get("nbgrader", {}).get("solution")]
    return {cell["metadata"]["nbgrader"]["grade_id"]: cell for cell in marked}


def hand_in(solution: Path, kind: str, folder: Path) -> None:
    """Write the notebook of one learner."""
    notebook = json.loads(solution.read_text())
    empty = json.loads((ROOT / "exercises" / solution.name).read_text())
    if kind == "handed out":
        notebook = empty
    elif kind == "one missing":
        name, cell = random.choice(list(answer_cells(notebook).items()))
        cell["source"] = answer_cells(empty)[name]["source"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / solution.name).write_text(json.dumps(notebook))


def timed(folder: Path, options: argparse.Namespace) -> tuple[list[Graded], float, list[int]]:
    """What came, the seconds, and the grader's largest memory (MB) after each tenth."""
    memory = []

    def watch(each: Iterable[Any], total: int) -> Iterator[Any]:
        for number, done in enumerate(each, 1):
            yield done
            if number % max(total // 10, 1) == 0:
                memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)

    with tempfile.TemporaryDirectory() as out:
        begun = time.perf_counter()
        graded = grade_class(folder, Path(out), jobs=options.jobs, sandbox=options.sandbox,
                             watch=watch)
        write_results(graded, Path(out), None)
        return graded, time.perf_counter() - begun, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sandbox", default=None)
    options = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        course, several = Path(name) / "course", Path(name) / "class"
        for solution in SOLUTIONS:
            hand_in(solution, "right", course / "ada")
        for number in range(options.learners):
            hand_in(SOLUTIONS[number % len(SOLUTIONS)], KINDS[number % len(KINDS)],
                    several / f"learner{number:03}")
        for what, folder in (("one learner's course", course), ("a class", several)):
            graded, seconds, memory = timed(folder, options)
            points = sum(each.report.points for each in graded)
            print(f"{what}: {len(graded)} notebooks, {points:g} of "
                  f"{sum(each.report.max_points for each in graded):g} points, {seconds:.0f} s; "
                  f"grader's memory, MB, by tenths: {memory}", flush=True)


if __name__ == "__main__":
    main()
