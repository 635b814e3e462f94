"""Grading a whole notebook, or a class's."""

from __future__ import annotations

import ast
import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtlab.errors import ConfigError
from dtlab.grading.case import Submission
from dtlab.grading.cell_executor import Executed, execute_cells
from dtlab.grading.check import check
from dtlab.grading.exercise import catalogue, find_exercise
from dtlab.grading.report import Report, Row, text_table, whole
from dtlab.grading.submitted import SubmittedNotebook, read_submitted


@dataclass
class NotebookReport:
    """The points of one notebook. If `error` is set, it could not be graded, and has none."""

    path: str
    exercises: list[Report] = field(default_factory=list)
    error: str = ""

    @property
    def points(self) -> float:
        """Points earned."""
        return whole(sum(report.points for report in self.exercises))

    @property
    def max_points(self) -> float:
        """Points that right answers earn."""
        return whole(sum(report.max_points for report in self.exercises))

    def to_dict(self) -> dict[str, Any]:
        """For scripts and `--json`."""
        return {
            "notebook": self.path,
            "points": self.points,
            "max_points": self.max_points,
            "error": self.error,
            "exercises": [report.to_dict() for report in self.exercises],
        }

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


def grade_notebook(path: str | Path, solutions: str | Path | None = None) -> NotebookReport:
    """Grade a learner's notebook: its answers, with the course's own tests, hidden ones included.

    Takes seconds an exercise and never hangs. `solutions`: the folder of the course's notebooks,
    if it is not beside the package. Raises `ConfigError`, in one sentence, for a file that is
    missing, corrupt, empty, or holds no exercise of this course.
    """
    notebook = read_submitted(path, solutions)
    executed = execute_cells(notebook.cells, [each.function for each in catalogue().values()])
    reports = [_grade(test, notebook, executed) for test in notebook.tests]
    return NotebookReport(str(path), [report for report in reports if report is not None])


def grade_many(
    paths: Iterable[str | Path], solutions: str | Path | None = None
) -> Iterator[NotebookReport]:
    """Grade notebooks one after the other. One that can't be graded is reported, by its `error`,
    and does not stop the others."""
    for path in paths:
        try:
            yield grade_notebook(path, solutions)
        except ConfigError as error:
            yield NotebookReport(str(path), error=str(error).removeprefix(f"{path}: "))


def to_csv(reports: Iterable[NotebookReport]) -> str:
    """One line per notebook: its points, those of each exercise, and why it has none."""
    reports = list(reports)
    ids = [i for i in catalogue() if any(e.exercise == i for r in reports for e in r.exercises)]
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow(["notebook", "points", "max_points", *ids, "error"])
    for report in reports:
        by_id = {each.exercise: each.points for each in report.exercises}
        points = ["" if report.error else report.points, report.max_points or ""]
        writer.writerow([report.path, *points, *(by_id.get(i, "") for i in ids), report.error])
    return page.getvalue()


def class_table(reports: Iterable[NotebookReport], width: int = 110) -> str:
    """The same as `to_csv`, for people: one line per notebook."""
    rows = []
    for report in reports:
        each = ", ".join(f"{e.exercise} {e.points:g}/{e.max_points:g}" for e in report.exercises)
        points = "–" if report.error else f"{report.points:g} of {report.max_points:g}"
        rows.append((report.path, points, report.error or each))
    return text_table(("notebook", "points", "exercises"), rows, width)


# ---- one graded cell ---------------------------------------------------------------------------


def _grade(test: str, notebook: SubmittedNotebook, executed: Executed) -> Report | None:
    """Run a graded cell of the course's notebook. It is ours, so it runs here; in it, the learner's
    function is a sealed `Submission`, which `check` sends to the sandbox."""
    exercise = catalogue()[_exercise_of(test)]
    submission = executed.functions.get(exercise.function)
    if submission is None:
        trouble = executed.troubles.get(notebook.cell_of.get(exercise.function, ""))
        return _missing(exercise.id, trouble or "no cell defines it")
    reports: list[Report] = []

    def recorded(exercise_id: str, function: Submission, seed: int = 0, **_: Any) -> Report:
        reports.append(check(exercise_id, function, show=False, seed=seed))
        return reports[-1]

    namespace: dict[str, Any] = {"check": recorded, exercise.function: submission}
    exec(compile(test, f"<test of {exercise.id}>", "exec"), namespace)
    return reports[-1]


def _exercise_of(test: str) -> str:
    """The exercise that a graded cell checks: the first argument of its `check`."""
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check":
            return str(ast.literal_eval(node.args[0]))
    raise ConfigError(f"a graded cell of the course's notebook calls no check: {test!r}")


def _missing(exercise_id: str, why: str) -> Report:
    """A report without points: the answer could not even be opened."""
    exercise = find_exercise(exercise_id)
    rows = [
        Row(c.name, False, 0, c.points, c.tried, why, "a function to call",
            hint=f"There is no {exercise.function} to call: {why}.")
        for c in exercise.build(0)
    ]
    return Report(exercise.id, exercise.title, rows)
