"""Checks and grades. `check` is what learners call; `grade_notebook` and `grade_many` what
`dtlab grade` calls."""

from dtlab.grading.check import check
from dtlab.grading.exercise import Exercise, catalogue
from dtlab.grading.notebook import NotebookReport, grade_many, grade_notebook
from dtlab.grading.report import Report, Row

__all__ = [
    "check",
    "grade_notebook",
    "grade_many",
    "Report",
    "NotebookReport",
    "Row",
    "Exercise",
    "catalogue",
]
