"""Checks and grades: learners call `check`, `dtlab grade` calls `grade_notebook`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtlab.grading.exercise import Exercise, catalogue
    from dtlab.grading.learner_check import check
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

# Loaded when first used: a rank in the sandbox, which finds this package too, has none of it.
_FROM = {"check": "learner_check", "grade_notebook": "notebook", "NotebookReport": "notebook",
         "Report": "report", "Row": "report", "Exercise": "exercise", "catalogue": "exercise"}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(import_module(f"dtlab.grading.{_FROM[name]}"), name)
    raise AttributeError(f"module 'dtlab.grading' has no attribute {name!r}")
