"""Hints: of known mistakes, and each check's usual hint, for answers whose mistake is not known.

A mistake is a wrong answer, written as a variation of the solution. As its code gives the solution
away, it is in `solutions/mistakes/`, which no learner's bundle holds. Learners have only the
fingerprints of each mistake's results on the cases that `check` shows: `exercises/*.json`, written
by `make mistakes`. An answer with the same fingerprints has made the same mistake.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dtlab.errors import ConfigError
from dtlab.grading import exercises
from dtlab.grading.compare import Fingerprint
from dtlab.grading.exercise import Exercise, module_name

Hints = Mapping[str, str]  # check → its usual hint
Fingerprints = Mapping[str, Sequence[Fingerprint | None]]  # check → by case; None: it passes


class Mistake(NamedTuple):
    """A wrong answer and its hint. answer: code that defines the function; or replacements in the
    solution's cell, old text → new text."""

    answer: str | Mapping[str, str]
    hint: str


class KnownMistake(NamedTuple):
    """A mistake's hint, and the fingerprints of its results."""

    hint: str
    fingerprints: Fingerprints

    def fingerprint_in(self, check: str, case: int) -> Fingerprint | None:
        """The fingerprint of its result in this case; None: the case passes, or was not tried."""
        rows = self.fingerprints.get(check)
        return rows[case] if rows else None


class Record(NamedTuple):
    """The content of an exercise's JSON: usual hints, and mistakes on the cases that `check` shows.
    """

    hints: Hints
    mistakes: Sequence[KnownMistake]


def mistakes_in(exercise: Exercise, folder: Path) -> list[Mistake]:
    """The exercise's mistakes, in the order in which `hint_of` tries them; [] without a file."""
    return list(_space(exercise, folder).get("MISTAKES", ()))


def hints_in(exercise: Exercise, folder: Path) -> Hints:
    """The usual hints of the exercise's checks."""
    return dict(_space(exercise, folder).get("HINTS", {}))


def _space(exercise: Exercise, folder: Path) -> dict[str, Any]:
    file, space = folder / "mistakes" / f"{module_name(exercise.id)}.py", dict[str, Any]()
    if file.exists():
        exec(compile(file.read_text("utf-8"), str(file), "exec"), space)
    return space


def answer_of(mistake: Mistake, exercise: Exercise, folder: Path) -> Callable[..., Any]:
    """The wrong answer, as a function."""
    setup, code = solution_cells(folder)[exercise.function]
    if isinstance(mistake.answer, str):
        return function_in(setup + mistake.answer, exercise.function)
    for old, new in mistake.answer.items():
        if old not in code:
            raise ConfigError(f"{exercise.id}: the solution has no {old!r}, which a mistake "
                              f"replaces ({mistake.hint:.60})")
        code = code.replace(old, new)
    return function_in(setup + code, exercise.function)


def function_in(code: str, name: str) -> Callable[..., Any]:
    """The function of this name that the code defines."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "<answer>", "exec"), space)
    function: Callable[..., Any] = space[name]
    return function


@cache
def solution_cells(folder: Path) -> Mapping[str, tuple[str, str]]:
    """Map each function to (its notebook's set-up cells, the cell that solves the exercise)."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob("*.ipynb")):
        setup = ""
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            code, metadata = "".join(cell["source"]) + "\n", cell["metadata"]
            if "setup" in metadata.get("tags", []):
                setup += code
            elif metadata.get("nbgrader", {}).get("solution"):
                names = [line[4:].partition("(")[0] for line in code.splitlines()
                         if line.startswith("def ")]
                found |= dict.fromkeys(names, (setup, code))
    return found


@cache
def recorded(exercise_id: str) -> Record:
    """Read the exercise's JSON, which learners have, too; empty without a file."""
    file = record_file(exercise_id)
    if not file.exists():
        return Record({}, ())
    data = json.loads(file.read_text("utf-8"))
    return Record(data["hints"], [KnownMistake(each["hint"], {
        check: [row and Fingerprint(row[0], (row[1], row[2]), *row[3:]) for row in rows]
        for check, rows in each["prints"].items()}) for each in data["mistakes"]])


def record_file(exercise_id: str) -> Path:
    """The path of the exercise's JSON."""
    return Path(exercises.__path__[0]) / f"{module_name(exercise_id)}.json"


def record_text(record: Record) -> str:
    """Format the exercise's JSON, with a line for each check of each mistake."""
    def row(found: Fingerprint | None) -> str:
        if found is None:
            return "null"
        numbers = (*found.sums, found.amount, found.rtol)
        return json.dumps([found.kind, *(float(f"{x:.9g}") for x in numbers), found.sent])

    blocks = []
    for hint, fingerprints in record.mistakes:
        lines = [f'  {json.dumps(check)}: [{", ".join(map(row, rows))}]'
                 for check, rows in fingerprints.items() if any(rows)]
        blocks.append(f'{{"hint": {json.dumps(hint, ensure_ascii=False)},\n "prints": {{\n'
                      + ",\n".join(lines) + "}}")
    hints = json.dumps(record.hints, ensure_ascii=False, indent=1)
    return f'{{"hints": {hints},\n"mistakes": [\n' + ",\n".join(blocks) + "\n]}\n"


def hint_of(known: Sequence[KnownMistake], check: str, prints: Mapping[int, Fingerprint | None],
            failed: Set[str], given: Set[str] = frozenset()) -> str:
    """Return the hint of the known mistake with the answer's fingerprints in this check; "" if
    there is none. prints: case → the answer's fingerprint; None: the case passes.

    A mistake with the same fingerprints in all cases is preferred to one with the same in all cases
    that fail, and that to one with the same in the first case that fails. Among several, those
    are preferred whose hint is already `given`, then those that fail the same checks as the answer
    (`failed`), then those that sent as many bytes.
    """
    wrong = [case for case, mine in prints.items() if mine is not None]
    for cases in (list(prints), wrong, wrong[:1]):
        same = [mistake for mistake in known if mistake.fingerprints.get(check)
                and all(alike(prints[case], mistake.fingerprint_in(check, case)) for case in cases)]
        if same:
            return min(same, key=lambda mistake: (
                mistake.hint not in given,
                {name for name, rows in mistake.fingerprints.items() if any(rows)} != failed,
                [_sent(prints[case]) for case in cases]
                != [_sent(mistake.fingerprint_in(check, case)) for case in cases])).hint
    return ""


def alike(mine: Fingerprint | None, theirs: Fingerprint | None) -> bool:
    """Are the two of the same result, or of cases that pass?"""
    if mine is None or theirs is None:
        return mine is theirs
    return mine.matches(theirs)


def _sent(found: Fingerprint | None) -> str:
    return found.sent if found else ""
