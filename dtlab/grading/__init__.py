"""Checks and grades: learners call `check`, `dtlab grade` calls `grade_notebook`."""

from dtlab.grading.check import check
from dtlab.grading.exercise import Exercise, catalogue
from dtlab.grading.notebook import NotebookReport, grade_notebook
from dtlab.grading.report import Report, Row

__all__ = [
    "check",
    "grade_notebook",
    "Report",
    "NotebookReport",
    "Row",
    "Exercise",
    "catalogue",
]
