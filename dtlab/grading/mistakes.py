"""Mistakes as data: wrong answers, and the hints that they earn; and the usual hint of a check, for
answers whose mistake is not known.

A mistake is a variation of the course's solution, so its code gives the solution away: it stands in
`solutions/mistakes/`, which no learner's bundle holds. Learners have only what each mistake
*leaves behind* on the cases that `check` shows, as fingerprints: `exercises/*.json`, written by
`make mistakes`. An answer that leaves the same behind has made the same mistake.
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

Hints = Mapping[str, str]  # check → what to say when it fails and no mistake is known
Prints = Mapping[str, Sequence[Fingerprint | None]]  # check → of its cases, None where it passes


class Mistake(NamedTuple):
    """A wrong answer and its hint. answer: code that defines the function; or what to replace in
    the solution's cell, old text → new text."""

    answer: str | Mapping[str, str]
    hint: str


class Traces(NamedTuple):
    """The traces of a mistake: fingerprints of what the checks have looked at."""

    hint: str
    prints: Prints


class Record(NamedTuple):
    """The usual hints of an exercise's checks, and what its mistakes leave behind on the cases that
    `check` shows."""

    hints: Hints
    mistakes: Sequence[Traces]


# ---- the mistakes themselves --------------------------------------------------------------------


def mistakes_in(exercise: Exercise, folder: Path) -> list[Mistake]:
    """The exercise's mistakes, in the order in which they are looked through; [] without a file."""
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
    """Function → (the cells that its notebook sets up with, the cell that solves the exercise)."""
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


# ---- what they leave behind ---------------------------------------------------------------------


@cache
def recorded(exercise_id: str) -> Record:
    """Read what learners have of the exercise's file in `solutions/mistakes/`."""
    file = record_file(exercise_id)
    if not file.exists():
        return Record({}, ())
    told = json.loads(file.read_text("utf-8"))
    return Record(told["hints"], [Traces(each["hint"], {
        check: [row and Fingerprint(row[0], (row[1], row[2]), *row[3:]) for row in rows]
        for check, rows in each["prints"].items()}) for each in told["mistakes"]])


def record_file(exercise_id: str) -> Path:
    """The file of the exercise's recorded traces."""
    return Path(exercises.__path__[0]) / f"{module_name(exercise_id)}.json"


def record_text(record: Record) -> str:
    """The content of that file: a line for each check of each mistake."""
    def row(print_: Fingerprint | None) -> str:
        if print_ is None:
            return "null"
        numbers = (*print_.sums, print_.amount, print_.rtol)
        return json.dumps([print_.kind, *(float(f"{x:.9g}") for x in numbers), print_.sent])

    blocks = []
    for hint, prints in record.mistakes:
        lines = [f'  {json.dumps(check)}: [{", ".join(map(row, rows))}]'
                 for check, rows in prints.items() if any(rows)]
        blocks.append(f'{{"hint": {json.dumps(hint, ensure_ascii=False)},\n "prints": {{\n'
                      + ",\n".join(lines) + "}}")
    hints = json.dumps(record.hints, ensure_ascii=False, indent=1)
    return f'{{"hints": {hints},\n"mistakes": [\n' + ",\n".join(blocks) + "\n]}\n"


def hint_of(known: Sequence[Traces], check: str, prints: Mapping[int, Fingerprint | None],
            failed: Set[str], given: Sequence[str] = ()) -> str:
    """The hint of the mistake that leaves what an answer leaves in the cases of this check: of
    `prints`, case → fingerprint, None if it passes. "" if none does.

    One that is alike in all cases goes before one alike in all that fail, and that before one alike
    in the first that fails. Among several, one whose hint is `given` already goes first, then
    one that fails the same checks as the answer (`failed`), and has sent as many bytes.
    """
    wrong = [case for case, mine in prints.items() if mine is not None]
    for cases in (list(prints), wrong, wrong[:1]):
        alike = [mistake for mistake in known if (rows := mistake.prints.get(check, ()))
                 and all(_alike(prints[case], rows[case]) for case in cases)]
        if alike:
            return min(alike, key=lambda mistake: (
                mistake.hint not in given,
                {name for name, rows in mistake.prints.items() if any(rows)} != failed,
                [_sent(prints[case]) for case in cases]
                != [_sent(mistake.prints[check][case]) for case in cases])).hint
    return ""


def _alike(mine: Fingerprint | None, theirs: Fingerprint | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return mine.matches(theirs)


def _sent(print_: Fingerprint | None) -> str:
    return print_.sent if print_ else ""
