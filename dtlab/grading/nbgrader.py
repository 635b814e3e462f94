"""nbgrader's autograding in the sandbox: two lines of a course's nbgrader_config.py.

    from dtlab.grading.nbgrader import use_sandbox
    use_sandbox(c)

nbgrader by itself executes a learner's notebook in a kernel of the teacher's. With these lines the
answers run in the sandbox instead, and nbgrader finds the points where it looks for them: in the
outputs of the graded cells.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.converters.autograde import Autograde
from nbgrader.preprocessors import Execute, NbGraderPreprocessor
from nbgrader.utils import is_grade
from traitlets import Integer, Unicode

from dtlab.errors import ConfigError
from dtlab.grading.notebook import grade_notebook
from dtlab.grading.report import Report


class GradeInSandbox(NbGraderPreprocessor):  # type: ignore[misc]  # nbgrader has no types
    """Takes the place of nbgrader's Execute."""

    sandbox = Unicode(None, allow_none=True, help="bubblewrap, nobody or none").tag(config=True)
    course = Unicode(None, allow_none=True, help="the folder of solutions").tag(config=True)
    seed = Integer(None, allow_none=True, help="the class's own hidden inputs").tag(config=True)

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        """Grade the notebook, and write each exercise's report below its graded cell."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "submitted.ipynb"
            file.write_text(nbformat.writes(nb))
            try:
                report = grade_notebook(file, self.course, self.seed, self.sandbox)
                found = {f"{each.exercise}-points": each for each in report.exercises}
                why = "this cell belongs to no exercise of the course"
            except ConfigError as error:
                found, why = {}, str(error).replace(str(file), "the notebook")
        for cell in nb.cells:
            if is_grade(cell) and cell.cell_type == "code":
                cell.outputs = _outputs(found.get(cell.metadata.nbgrader.grade_id), why)
        return nb, resources


def _outputs(report: Report | None, why: str) -> list[Any]:
    """Return the outputs of the graded cell: the table, and the points as its value."""
    if report is None:
        return [nbformat.v4.new_output("error", ename="NotGraded", evalue=why, traceback=[why])]
    table = {"text/html": report._repr_html_(), "text/plain": report.to_text(110)}
    return [nbformat.v4.new_output("display_data", table),
            nbformat.v4.new_output("execute_result", {"text/plain": f"{report.points:g}"},
                                   execution_count=1)]


def use_sandbox(config: Any, sandbox: str | None = None, course: str | Path | None = None,
                seed: int | None = None) -> None:
    """Let nbgrader grade in the sandbox. config: the `c` of nbgrader_config.py. The rest is as in
    `grade_notebook`."""
    steps = Autograde.autograde_preprocessors.default_args[0]
    config.Autograde.autograde_preprocessors = [
        GradeInSandbox if step is Execute else step for step in steps]
    config.GradeInSandbox.sandbox = sandbox
    config.GradeInSandbox.course = None if course is None else str(course)
    config.GradeInSandbox.seed = seed
