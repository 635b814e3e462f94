"""Are the graders sharp? Grade every small mutation of every solution, and list what survives.

    python scripts/mutants.py [EXERCISE …] [--limit N] [--seed S] [-j N]

A mutant that still earns all points survives. Either a grader has a hole, or the mutation changes
neither what the answer does nor what it costs: then mutants.toml says why. Fails if, in an
exercise, fewer than 95 % of the mutants that differ lose points. Results are kept in artifacts/,
so that a run that was stopped goes on where it was, and an exercise is graded again only when its
grader or its solution has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import signal
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where a test loads this file

from mutations import Mutant, mutants

from dtlab.grading import catalogue, check
from dtlab.grading.exercise import Exercise

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "artifacts" / "mutants.jsonl"
GRADERS = ROOT / "dtlab" / "grading"
HIDDEN_SEED = 2  # the hidden tests'
LEAST = 0.95
LIMIT_S = 120  # for one mutant; the judge itself gives up before


class Solution(NamedTuple):
    """A solution cell, and the code that runs before it."""

    exercise: Exercise
    before: str
    code: str


class Task(NamedTuple):
    """A mutant to grade."""

    solution: Solution
    mutant: Mutant
    key: str  # under which its result is kept


def solutions() -> Iterator[Solution]:
    """All solution cells, in the order of the chapters."""
    by_function = {exercise.function: exercise for exercise in catalogue().values()}
    for path in sorted(ROOT.glob("solutions/*.ipynb")):
        before = ""
        for cell in json.loads(path.read_text())["cells"]:
            code, metadata = "".join(cell["source"]), cell["metadata"]
            if metadata.get("nbgrader", {}).get("solution"):
                found = [e for name, e in by_function.items() if f"def {name}(" in code]
                yield from (Solution(exercise, before, code) for exercise in found)
            elif "setup" in metadata.get("tags", []):
                before += code + "\n"


# ---- grading -----------------------------------------------------------------------------------


def tasks_of(solution: Solution, limit: int | None, seed: int) -> list[Task]:
    """The mutants to grade; with a limit, that many drawn at random."""
    found = list(mutants(solution.code))
    if limit is not None and limit < len(found):
        found = random.Random(seed).sample(found, limit)
    graders = _fingerprint(solution.exercise)
    return [Task(solution, mutant, hashlib.blake2b(
        (graders + solution.before + mutant.code).encode(), digest_size=12).hexdigest())
        for mutant in found]


@cache
def _shared_fingerprint() -> bytes:
    files = [*GRADERS.glob("*.py"), *GRADERS.glob("exercises/_*.py")]
    return b"".join(file.read_bytes() for file in sorted(files))


def _fingerprint(exercise: Exercise) -> str:
    """Of all that grades this exercise."""
    own = GRADERS / "exercises" / f"{exercise.build.__module__.split('.')[-1]}.py"
    return hashlib.blake2b(_shared_fingerprint() + own.read_bytes()).hexdigest()


def grade(before: str, code: str, exercise_id: str, function: str) -> float:
    """In a worker: the share of the points that this code earns."""
    def give_up(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    try:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(before + "\n" + code, space)
        report = check(exercise_id, space[function], show=False, seed=HIDDEN_SEED)
        return report.points / report.max_points
    except TimeoutError:
        return 0.0
    finally:
        signal.alarm(0)


def grade_all(tasks: list[Task], jobs: int) -> dict[str, float]:
    """Key → the share of the points. Reads what is kept and keeps what is new."""
    KEPT.parent.mkdir(exist_ok=True)
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    shares: dict[str, float] = dict(json.loads(line) for line in lines if line.endswith("]"))
    new = [task for task in tasks if task.key not in shares]
    workers = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    with workers, KEPT.open("a") as kept:
        under_way = {workers.submit(grade, solution.before, mutant.code, solution.exercise.id,
                                    solution.exercise.function): task
                     for task in new for solution, mutant, _ in [task]}
        for done in as_completed(under_way):
            task = under_way[done]
            shares[task.key] = done.result()
            kept.write(json.dumps([task.key, shares[task.key]]) + "\n")
            kept.flush()
    return shares


# ---- the report --------------------------------------------------------------------------------


def equivalent() -> dict[str, set[tuple[str, str]]]:
    """Exercise → the changes (line before, line after) that change nothing, with a reason each."""
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {exercise: {(change["before"], change["after"]) for change in changes}
            for exercise, changes in entries.items()}


def row(exercise: str, counts: tuple[int, int, int]) -> tuple[str, float]:
    """A line of the table, and the share of the mutants that differ which lose points."""
    killed, same, survived = counts
    share = killed / (killed + survived) if killed + survived else 1.0
    return (f"{exercise:22}{sum(counts):9}{killed:8}{same:12}{survived:10}{share:8.1%}", share)


def report(tasks: list[Task], shares: dict[str, float]) -> int:
    """Print the table and the survivors. Returns the exit status."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    known, survivors, poor = equivalent(), [], []
    for task in tasks:
        name, change = task.solution.exercise.id, (task.mutant.before, task.mutant.after)
        alive = shares[task.key] == 1
        which = 0 if not alive else 1 if change in known.get(name, ()) else 2
        counts[name][which] += 1
        if which == 2:
            survivors.append((name, *change))
    print(f"{'exercise':22}{'mutants':>9}{'killed':>8}{'equivalent':>12}{'survived':>10}{'':>8}")
    for name, each in counts.items():
        line, share = row(name, (each[0], each[1], each[2]))
        poor += [name] if share < LEAST else []
        print(line)
    total = [sum(each[i] for each in counts.values()) for i in range(3)]
    line, share = row("all", (total[0], total[1], total[2]))
    print(line)
    for name, before, after in survivors:
        print(f"\nsurvives in {name}:\n    - {before}\n    + {after}")
    if poor or share < LEAST:
        print(f"\nbelow {LEAST:.0%}: {', '.join(poor) or 'all'}")
    return 1 if share < LEAST else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("exercises", nargs="*", metavar="EXERCISE", help="ids; default: all")
    parser.add_argument("--limit", type=int, metavar="N", help="mutants of one exercise, at most")
    parser.add_argument("--seed", type=int, default=0, help="draws the mutants under a limit")
    parser.add_argument("-j", "--jobs", type=int, default=2, metavar="N")
    asked = parser.parse_args()
    unknown = set(asked.exercises) - set(catalogue())
    if unknown:
        parser.error(f"no such exercise: {', '.join(sorted(unknown))}")
    tasks = [task for solution in solutions()
             if not asked.exercises or solution.exercise.id in asked.exercises
             for task in tasks_of(solution, asked.limit, asked.seed)]
    return report(tasks, grade_all(tasks, asked.jobs))


if __name__ == "__main__":
    sys.exit(main())
