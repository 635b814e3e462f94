"""Every exercise: the course's answer earns all points; what learners submit wrongly earns what it
should, and the report's first hint names the mistake."""

from __future__ import annotations

import pytest

from dtlab.grading import catalogue
from tests.exercises.answers import WRONG, first_hint, judged, solutions


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("exercise", catalogue())
def test_the_courses_answer_earns_all_points(exercise, seed):
    report = judged(exercise, solutions()[catalogue()[exercise].function], seed)
    assert report.points == report.max_points == catalogue()[exercise].points, str(report)
    assert report.hints == []


@pytest.mark.parametrize(("exercise", "answer", "points", "hint"), WRONG,
                         ids=[wrong.answer.__name__ for wrong in WRONG])
def test_a_wrong_answer_earns_what_it_should_and_the_hint_names_the_mistake(
        exercise, answer, points, hint):
    report = judged(exercise, answer)
    assert report.points == points, str(report)
    assert hint in first_hint(report), str(report)
    assert "works in the simulator" not in " ".join(report.hints)  # all of these fail there, too
