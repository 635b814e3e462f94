"""Write what the mistakes of each exercise leave behind, and how often the first hint names them.

    python scripts/mistakes.py [EXERCISE …] [--check]

Runs the mistakes in solutions/mistakes/ on the cases that `check` shows, and writes fingerprints
to dtlab/grading/exercises/*.json, from which learners get their hints. Fails if a mistake loses no
points or does not earn its own hint first; with --check, also if a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dtlab.grading import catalogue
from dtlab.grading.exercise import find_exercise
from dtlab.grading.mistakes import (
    KnownMistake,
    Record,
    hints_in,
    mistakes_in,
    record_file,
    record_text,
    recorded,
)
from dtlab.grading.trusted import judge_mistakes

SOLUTIONS = Path(__file__).resolve().parent.parent / "solutions"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("exercises", nargs="*", metavar="EXERCISE", help="ids; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args()
    print(f"{'exercise':22}{'mistakes':>9}{'lose points':>13}{'named first':>13}")
    found, total = [], [0, 0, 0]
    for exercise_id in asked.exercises or catalogue():
        mistakes = mistakes_in(find_exercise(exercise_id), SOLUTIONS)
        judged = judge_mistakes(exercise_id, SOLUTIONS)
        if not judged.solution.passed:
            found.append(f"the solution of {exercise_id} fails:\n{judged.solution}")
        lose = named = 0
        for mistake, report in zip(mistakes, judged.mistakes, strict=True):
            first = report.hints[0] if report.hints else "no hint"
            lose += report.points < report.max_points
            named += first == mistake.hint
            if report.points == report.max_points or first != mistake.hint:
                found.append(f"{exercise_id}, {report.points:g} points: {mistake.hint}\n"
                             f"    its first hint: {first}")
        counts = len(mistakes), lose, named
        total = [a + b for a, b in zip(total, counts, strict=True)]
        print(f"{exercise_id:22}{counts[0]:9}{counts[1]:13}{counts[2]:13}")
        record = Record(hints_in(find_exercise(exercise_id), SOLUTIONS), judged.known)
        if not asked.check:
            record_file(exercise_id).write_text(record_text(record))
        elif not up_to_date(exercise_id, record):
            found.append(f"{record_file(exercise_id)} is out of date: make mistakes")
    print(f"{'all':22}{total[0]:9}{total[1]:13}{total[2]:13}")
    print("\n" * bool(found) + "\n".join(found))
    return bool(found)


def up_to_date(exercise_id: str, record: Record) -> bool:
    """Is that what is recorded, up to rounding?"""
    hints, kept = recorded(exercise_id)
    return hints == record.hints and len(kept) == len(record.mistakes) and all(
        a.hint == b.hint and _same_prints(a, b)
        for a, b in zip(kept, record.mistakes, strict=True))


def _same_prints(kept: KnownMistake, new: KnownMistake) -> bool:
    return all(
        (old is None and mine is None) or (old and mine and old.matches(mine)
                                           and old.sent == mine.sent)
        for check, rows in new.fingerprints.items()
        for old, mine in zip(kept.fingerprints.get(check, [None] * len(rows)), rows, strict=True))


if __name__ == "__main__":
    sys.exit(main())
