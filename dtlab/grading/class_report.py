"""The results of a class as files: pages for people, tables for spreadsheets and Gradescope."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtlab.grading.class_grading import Graded
from dtlab.grading.exercise import catalogue
from dtlab.grading.notebook import NotebookReport
from dtlab.grading.report import Report, int_if_whole, pages, printable, text_table
from dtlab.grading.similarity import SHORTEST, alike

SHOWN = 15  # rows of the summary's lists


@dataclass
class LearnerRow:
    """All that one learner has handed in."""

    learner: str
    page: str  # the name of the learner's files
    graded: list[Graded] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        """The reports on the exercises that count."""
        return [report for each in self.graded if each.counts for report in each.report.exercises]

    @property
    def points(self) -> float:
        """Points earned."""
        return int_if_whole(sum(report.points for report in self.reports))

    @property
    def max_points(self) -> float:
        """Points that right answers to what was handed in earn."""
        return int_if_whole(sum(report.max_points for report in self.reports))

    @property
    def chapters(self) -> list[str]:
        """The notebooks that count."""
        return sorted(each.report.chapter for each in self.graded
                      if each.counts and each.report.chapter)

    @property
    def notes(self) -> list[str]:
        """The problems that a teacher should look at."""
        found = [] if self.graded else ["nothing was handed in"]
        for each in self.graded:
            name = each.hand_in.name
            if each.report.error:
                found.append(f"{name}: {each.report.error}")
            elif not each.counts:
                found.append(f"{name}: a later hand-in counts")
            if each.late:
                found.append(f"{name}: late")
        return found


def write_results(graded: Sequence[Graded], out: Path, seed: int | None,
                  names: Sequence[str] = ()) -> None:
    """Write index.html, class.csv, and for each learner a page and Gradescope's results.json.
    names: of all learners; those that handed nothing in have a row, too."""
    rows = rows_of(graded, names)
    (out / "learners").mkdir(parents=True, exist_ok=True)
    for old in (out / "learners").iterdir():
        if re.fullmatch(r"\d{3,}_[\w-]+\.(html|json)", old.name):  # a learner's number may change
            old.unlink()
    for row in rows:
        text = pages().get_template("learner.html").render(row=row)
        (out / "learners" / f"{row.page}.html").write_text(text, encoding="utf-8")
        (out / "learners" / f"{row.page}.json").write_text(json.dumps(
            gradescope_results(row.reports, row.notes), indent=1), encoding="utf-8")
    (out / "class.csv").write_text(points_csv("learner", "notes", [
        (row.learner, row, row.reports, "; ".join(row.notes)) for row in rows]),
        encoding="utf-8-sig")  # by its first bytes Excel knows UTF-8
    (out / "index.html").write_text(pages().get_template("class.html").render(
        rows=rows, hand_ins=len(graded), seed=seed, histogram=_histogram(rows), shortest=SHORTEST,
        seconds=sum(report.seconds for row in rows for report in row.reports),
        hardest=_hardest(rows), mistakes=_mistakes(rows),
        alike=alike({row.learner: {exercise: code for each in row.graded if each.counts
                                   for exercise, code in each.report.answers.items()}
                     for row in rows})), encoding="utf-8")


def rows_of(graded: Sequence[Graded], names: Sequence[str] = ()) -> list[LearnerRow]:
    """One row a learner, in the order of names."""
    theirs: dict[str, list[Graded]] = {name: [] for name in names}
    for each in graded:
        theirs.setdefault(each.hand_in.learner, []).append(each)
    ordered = sorted(theirs, key=lambda name: (name.casefold(), name))
    return [LearnerRow(name, f"{number:03}_" + re.sub(r"[^\w-]+", "_", name)[:60], theirs[name])
            for number, name in enumerate(ordered, 1)]


def to_csv(reports: Sequence[NotebookReport]) -> str:
    """One line a notebook."""
    return points_csv("notebook", "error", [(r.path, r, r.exercises, r.error) for r in reports])


def points_csv(who: str, what: str, rows: Sequence[
        tuple[str, LearnerRow | NotebookReport, Sequence[Report], str]]) -> str:
    """One line for each of `rows`, which are (name, all points, exercises, notes). who, what: the
    titles of the first column and the last."""
    ids = [each for each in catalogue() if any(r.exercise == each for row in rows for r in row[2])]
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow([who, "points", "max_points", *ids, what])
    for name, total, reports, notes in rows:
        earned = {report.exercise: report.points for report in reports}
        sums = [total.points, total.max_points] if reports else ["", ""]
        writer.writerow([_plain_cell(name), *sums, *(earned.get(each, "") for each in ids),
                         _plain_cell(notes)])
    return page.getvalue()


def class_table(reports: Sequence[NotebookReport], width: int = 110) -> str:
    """The same as `to_csv`, for people."""
    rows = [(report.path, f"{report.points:g} of {report.max_points:g}", ", ".join(
        f"{e.exercise} {e.points:g}/{e.max_points:g}" for e in report.exercises))
        for report in reports]
    return text_table(("notebook", "points", "exercises"), rows, width, unbroken=(0, 1))


def _plain_cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    text = printable(text)
    first = unicodedata.normalize("NFKC", text[:1])  # the wide ＝ is one, too
    return f"'{text}" if first in ("=", "+", "-", "@", "\t") else text


def gradescope_results(reports: Sequence[Report], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Format for Gradescope: https://gradescope-autograders.readthedocs.io/en/latest/specs/"""
    tests = [
        {"name": f"{report.exercise}: {row.name}", "score": row.points, "max_score": row.max_points,
         "status": "passed" if row.passed else "failed", "visibility": "visible",
         "output": "\n".join(part for part in (
             f"tried: {row.tried}", f"result: {row.actual}", f"expected: {row.expected}",
             row.hint and f"hint: {row.hint}") if part)}
        for report in reports for row in report.rows
    ]
    return {"score": int_if_whole(sum(report.points for report in reports)), "tests": tests,
            "visibility": "visible", "output": "\n".join(notes)}


def _written(rows: Sequence[LearnerRow]) -> list[Report]:
    """The reports of answers, without those of exercises that are as they were handed out."""
    return [report for row in rows for report in row.reports
            if not any(hint.startswith("Not written yet") for hint in report.hints)]


def _histogram(rows: Sequence[LearnerRow]) -> list[int]:
    """Count the learners who earned 0–9, 10–19, … 90–99, 100 percent."""
    counts = Counter(int(10 * row.points / row.max_points) for row in rows if row.max_points)
    return [counts[tenth] for tenth in range(11)]


def _hardest(rows: Sequence[LearnerRow]) -> list[tuple[str, str, int, int]]:
    """(exercise, check, how many passed, of how many), the hardest first."""
    passed: Counter[tuple[str, str]] = Counter()
    tried: Counter[tuple[str, str]] = Counter()
    for report in _written(rows):
        for check in report.rows:
            tried[report.exercise, check.name] += 1
            passed[report.exercise, check.name] += check.passed
    found = [(*which, passed[which], count) for which, count in tried.items()
             if passed[which] < count]
    return sorted(found, key=lambda row: (row[2] / row[3], row[0], row[1]))[:SHOWN]


def _mistakes(rows: Sequence[LearnerRow]) -> list[tuple[tuple[str, str], int]]:
    """((exercise, hint), how many learners read it), the commonest first."""
    counts = Counter((report.exercise, hint) for report in _written(rows)
                     for hint in report.hints[:1])
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]
