"""Grading notebooks, with hidden inputs."""

from __future__ import annotations

import ast
import re
import signal
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from dtlab.errors import ConfigError, DtlabError
from dtlab.grading.cell_executor import Executed, execute_cells
from dtlab.grading.exercise import Exercise, find_exercise
from dtlab.grading.isolation import check_secrets, choose_sandbox
from dtlab.grading.judge import grade_answer, in_own_process
from dtlab.grading.mistakes import KnownMistake, mistakes_in
from dtlab.grading.rank_server import RankServer, ServerEnded
from dtlab.grading.report import Report, Row, int_if_whole
from dtlab.grading.submitted import SubmittedNotebook, course_folder, read_submitted
from dtlab.grading.trusted import try_mistakes

ENDED = "it ended the process that graded it"
HAND_IN_LIMIT_S = 120.0  # of real time, for all code of a notebook; a right one takes ten seconds
JUDGING_LIMIT_S = 600  # for grading a notebook; the judge's process is killed after it


@dataclass
class NotebookReport:
    """The points of one notebook. If `error` is set, it could not be graded, and has none."""

    path: str
    exercises: list[Report] = field(default_factory=list)
    error: str = ""
    chapter: str = ""  # the course's name of the notebook, "05_all_reduce"
    answers: dict[str, str] = field(default_factory=dict)  # exercise → the learner's code

    @property
    def points(self) -> float:
        """Points earned."""
        return int_if_whole(sum(report.points for report in self.exercises))

    @property
    def max_points(self) -> float:
        """Points that right answers earn."""
        return int_if_whole(sum(report.max_points for report in self.exercises))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary, for scripts and `--json`."""
        return {
            "notebook": self.path,
            "chapter": self.chapter,
            "points": self.points,
            "max_points": self.max_points,
            "error": self.error,
            "exercises": [report.to_dict() for report in self.exercises],
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> NotebookReport:
        """The report that `to_dict` described."""
        exercises = [Report.from_dict(report) for report in data["exercises"]]
        return NotebookReport(data["notebook"], exercises, data["error"], data["chapter"],
                              data.get("answers", {}))

    def to_text(self, width: int | None = None) -> str:
        """Each exercise's table, and a summary."""
        if self.error:
            return f"{self.path}: {self.error}"
        parts = [report.to_text(width) for report in self.exercises]
        return "\n\n".join([*parts, f"{self.path}: {self.points:g} of {self.max_points:g} points"])

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        what = self.error or f"{self.points:g} of {self.max_points:g} points"
        return f"<NotebookReport {self.path}: {what}>"


def grade_notebook(path: str | Path, solutions: str | Path | None = None,
                   seed: int | None = None, sandbox: str | None = None) -> NotebookReport:
    """Grade a learner's notebook: its answers, with the course's own tests, hidden ones included.

    Takes seconds an exercise and never hangs. `solutions`: the folder of the course's notebooks,
    if it is not beside the package; `seed`: the class's own, for the hidden inputs (default: what
    the course's notebooks say); `sandbox`: "bubblewrap", "nobody" or "none" (default: the best
    that this machine has). Raises `ConfigError`, in one sentence, for a file that is
    missing, corrupt, empty, or holds no exercise of this course.
    """
    (report,) = grade_notebooks([path], solutions, seed, sandbox)
    if report.error:
        raise ConfigError(report.error)
    return report


def grade_notebooks(paths: Sequence[str | Path], solutions: str | Path | None = None,
                    seed: int | None = None, sandbox: str | None = None) -> list[NotebookReport]:
    """Grade several notebooks of one learner as `grade_notebook` does; if one can't be graded, its
    report says why. They share the judge's process and rank servers, as loading torch takes as long
    as grading. If a notebook ends one of these processes, the others are graded without it."""
    sandbox = choose_sandbox(sandbox)
    folder = course_folder(solutions)
    if sandbox == "nobody":
        check_secrets([folder, *(Path(path).parent for path in paths)])
    reports: list[NotebookReport] = []
    batch_size = len(paths)
    while remaining := [str(path) for path in paths[len(reports):]]:
        batch = remaining[:batch_size]
        try:
            reports += map(NotebookReport.from_dict,
                           in_own_process(_judge, batch, str(folder), seed, sandbox))
        except DtlabError as error:  # a notebook ended the judge's process: grade one by one
            if batch_size == 1:
                headline = str(error).splitlines()[0]
                reports.append(NotebookReport(batch[0], error=f"{batch[0]}: {ENDED} ({headline})"))
            batch_size = 1
    return reports


def _judge(paths: list[str], folder: str, seed: int | None, sandbox: str) -> list[dict[str, Any]]:
    """Grade notebooks up to the first that ends a server, and return their reports. Runs in a
    process of its own, from which the servers are forked if there is no sandbox."""
    found: list[SubmittedNotebook | str] = []
    for path in paths:
        try:
            found.append(read_submitted(path, folder))
        except ConfigError as error:
            found.append(str(error))
    libraries = {exercise.library for notebook in found if not isinstance(notebook, str)
                 for exercise in _exercises_of(notebook)}
    reports: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {library: stack.enter_context(RankServer(sandbox, library))
                   for library in libraries}
        for path, notebook in zip(paths, found, strict=True):
            if any(server.ended for server in servers.values()):
                break
            signal.alarm(JUDGING_LIMIT_S)
            report = (NotebookReport(path, error=notebook) if isinstance(notebook, str)
                      else _grade_one(path, notebook, servers, Path(folder), seed))
            reports.append(report.to_dict() | {"answers": report.answers})
        signal.alarm(0)
    return reports


def _exercises_of(notebook: SubmittedNotebook) -> list[Exercise]:
    return [find_exercise(_what_it_checks(test)[0]) for test in notebook.tests]


def _grade_one(path: str, notebook: SubmittedNotebook,
               servers: Mapping[tuple[str, ...], RankServer], folder: Path, seed: int | None
               ) -> NotebookReport:
    report = NotebookReport(path, chapter=notebook.source.stem)
    report.answers = {cell.answers: cell.code for cell in notebook.cells if cell.answers}
    until_s, found = time.monotonic() + HAND_IN_LIMIT_S, _exercises_of(notebook)
    try:
        executed = execute_cells(servers[found[0].library], notebook.cells,
                                 [exercise.function for exercise in found], until_s)
    except ServerEnded as error:
        executed = Executed({}, {cell.answers: str(error) for cell in notebook.cells})
    report.exercises = [
        _grade(servers[exercise.library], test, notebook, executed, seed, folder, until_s)
        for exercise, test in zip(found, notebook.tests, strict=True)]
    return report


def _grade(server: RankServer, test: str, notebook: SubmittedNotebook, executed: Executed,
           seed: int | None, course: Path, until_s: float) -> Report:
    """Grade the answer to one exercise. The points are for hidden inputs; the report's texts are of
    the inputs that `check` shows. If only hidden inputs fail, the mistakes run on these, too, to
    find the hint."""
    exercise_id, seeds = _what_it_checks(test)
    exercise = find_exercise(exercise_id)
    submission = executed.functions.get(exercise.function)
    if submission is None:
        trouble = executed.troubles.get(notebook.cell_of.get(exercise.function, ""))
        return _missing(exercise.id, trouble or "no cell defines it")
    hidden = seeds[-1] if seed is None else seed
    if hidden == 0:
        return grade_answer(server, submission, exercise, 0, until_s=until_s)
    shown = cache(lambda: grade_answer(server, submission, exercise, 0, until_s=until_s))

    @cache
    def known() -> list[KnownMistake]:
        """A hint on hidden inputs is shown only where the answer passes with the shown ones."""
        if not any(row.passed for row in shown().rows):
            return []
        return [traces for traces, _ in try_mistakes(exercise, hidden, course, server)]

    report = grade_answer(server, submission, exercise, hidden, known, until_s)
    if report.passed:
        report.rows = [_without_counts(row) for row in report.rows]
        return report
    return without_hidden_inputs(report, shown(), {m.hint for m in mistakes_in(exercise, course)})


def _without_counts(row: Row) -> Row:
    """Return a passed row with bounds alone: the number of bytes could reveal hidden inputs."""
    return replace(row, actual="right", nbytes=re.sub(r".* / ", "≤ ", row.nbytes),
                   rounds=re.sub(r".* / ", "≤ ", row.rounds))


def without_hidden_inputs(hidden: Report, shown: Report, ours: Set[str] = frozenset()) -> Report:
    """Return the points of `hidden` with the texts of `shown`: what an answer prints, raises,
    returns or sends could reveal hidden inputs. ours: the hints that hold no text of an answer."""
    rows = []
    for row, seen in zip(hidden.rows, shown.rows, strict=True):
        if row.passed:
            rows.append(_without_counts(row))
        elif not seen.passed:
            rows.append(replace(seen, points=0, max_points=row.max_points))
        else:
            rows.append(replace(
                seen, passed=False, points=0, actual="wrong with other inputs",
                hint=f"“{row.name}” is right with the inputs of `check`, and wrong with others: "
                     f"try check(…, seed=1), seed=2 and so on."
                     + f" {row.hint}" * (row.hint in ours)))
    return replace(shown, rows=rows, seconds=hidden.seconds + shown.seconds)


def _what_it_checks(test: str) -> tuple[str, list[int]]:
    """Return the exercise of a graded cell of the course, and the seeds of its calls of `check`."""
    calls = [node for node in ast.walk(ast.parse(test))
             if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check"]
    if not calls:
        raise ConfigError(f"a graded cell of the course's notebook calls no check: {test!r}")
    calls.sort(key=lambda call: call.lineno)
    seeds = [next((int(ast.literal_eval(word.value)) for word in call.keywords
                   if word.arg == "seed"), 0) for call in calls]
    return str(ast.literal_eval(calls[0].args[0])), seeds


def _missing(exercise_id: str, why: str) -> Report:
    """A report without points: the answer could not even be opened."""
    exercise = find_exercise(exercise_id)
    rows = [
        Row(c.name, False, 0, c.points, c.tried, why, "a function to call",
            hint=f"There is no {exercise.function} to call: {why}.")
        for c in exercise.build(0)
    ]
    return Report(exercise.id, exercise.title, rows)
