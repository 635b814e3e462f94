"""Every mistake in solutions/mistakes/ loses points and earns its own hint first; what it leaves
behind is what learners have recorded; home and class say the same."""

from __future__ import annotations

import json
import sys

import pytest

from dtlab.grading import catalogue, grade_notebook
from dtlab.grading.exercise import find_exercise
from dtlab.grading.mistakes import Record, answer_of, hints_in, mistakes_in
from dtlab.grading.trusted import judge_mistakes
from tests.exercises.answers import ROOT, SOLUTIONS, first_hint, judged

sys.path.insert(0, str(ROOT / "scripts"))
from mistakes import up_to_date


@pytest.mark.timeout(600)
@pytest.mark.parametrize("exercise", catalogue())
def test_each_mistake_loses_points_and_earns_its_own_hint_first(exercise):
    judged = judge_mistakes(exercise, SOLUTIONS)
    assert judged.solution.passed, str(judged.solution)
    mistakes = mistakes_in(find_exercise(exercise), SOLUTIONS)
    assert len(mistakes) == len(judged.mistakes) >= 4
    for mistake, report in zip(mistakes, judged.mistakes, strict=True):
        assert report.points < report.max_points, mistake.hint
        assert report.hints[0] == mistake.hint
    record = Record(hints_in(find_exercise(exercise), SOLUTIONS), judged.known)
    assert up_to_date(exercise, record), "make mistakes"
    assert set(record.hints) <= {check.name for check in find_exercise(exercise).build(0)}


@pytest.mark.parametrize(("exercise", "number"), [
    ("shift", 1), ("vocab-loss", 3), ("consistent-hashing", 1), ("ssp-rule", 0)])
def test_home_and_class_give_the_same_hint_on_the_shown_cases(exercise, number, tmp_path):
    """At home by what is recorded, in the sandbox; in a class through a notebook."""
    mistake = mistakes_in(find_exercise(exercise), SOLUTIONS)[number]
    assert isinstance(mistake.answer, dict)
    home = judged(exercise, answer_of(mistake, find_exercise(exercise), SOLUTIONS))
    (source,) = SOLUTIONS.glob(f"{find_exercise(exercise).chapter}_*.ipynb")
    notebook = json.loads(source.read_text())
    others = catalogue().keys() - {exercise}
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["metadata"].get(
        "nbgrader", {}).get("grade_id") not in others]
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == exercise:
            code = "".join(cell["source"])
            for old, new in mistake.answer.items():
                code = code.replace(old, new)
            cell["source"] = code
    (tmp_path / "submitted.ipynb").write_text(json.dumps(notebook))
    graded = grade_notebook(tmp_path / "submitted.ipynb", sandbox="none")
    (report,) = [each for each in graded.exercises if each.exercise == exercise]
    assert first_hint(home) == report.hints[0] == mistake.hint


def test_where_only_hidden_inputs_are_wrong_the_mistakes_run_on_them(tmp_path):
    """An answer that makes a mistake for other sizes than the shown ones hears of that mistake."""
    source = SOLUTIONS / "03_messages.ipynb"
    notebook = json.loads(source.read_text())
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == "shift":
            cell["source"] = "".join(cell["source"]).replace(
                "return arrived", "return arrived if len(x) < 7 else x.clone()")
    (tmp_path / "submitted.ipynb").write_text(json.dumps(notebook))
    graded = grade_notebook(tmp_path / "submitted.ipynb", sandbox="none")
    (report,) = [each for each in graded.exercises if each.exercise == "shift"]
    assert 0 < report.points < report.max_points
    assert "is right with the inputs of `check`" in report.hints[0]
    assert "Each rank returned its own x" in report.hints[0]
