"""Right answers earn all points, whatever their style.

Those of the course do so on the shown inputs in test_mistakes.py, and on hidden ones, in the
processes of a hand-in, in tests/grading/test_notebook.py; here, on those of many seeds.
"""

from __future__ import annotations

import pytest

from dtlab.grading import catalogue
from dtlab.grading.case import Outcome
from dtlab.grading.exercise import find_exercise
from tests.exercises.answers import judged_here, solution
from tests.exercises.right_answers import RIGHT


@pytest.mark.parametrize(("exercise", "answer"), [
    (exercise, answer) for exercise, answers in RIGHT.items() for answer in answers
], ids=lambda v: getattr(v, "__name__", v))
def test_a_right_answer_in_another_style_earns_all_points(exercise, answer):
    report = judged_here(exercise, answer, seed=1)
    assert report.points == report.max_points, str(report)
    assert report.hints == []


@pytest.mark.parametrize("exercise", ["efficiency", "fit-alpha-beta", "best-segments",
                                      "best-interval"])
def test_points_are_no_matter_of_luck(exercise):
    """Two seeds once drew most of the times of one size as outliers (274), and a number of segments
    between those that a learner rounds to (777777)."""
    answer = solution(exercise)
    for seed in (274, 777777, *range(300)):
        for check in find_exercise(exercise).build(seed):
            for case in check.cases:
                verdict = check.judge(case, Outcome([answer(*case.args[0])]))
                assert verdict.passed, (seed, check.name, verdict)


@pytest.mark.parametrize("exercise", ["ring-all-reduce", "sharded-store", "halving-doubling"])
def test_an_answer_fitted_to_the_shown_sizes_fails_the_hidden_test(exercise):
    """With the shown ones it is the course's own answer."""
    def sizes(x):
        return {len(w) for w in x.values()} if isinstance(x, dict) else {len(x)}

    shown = {n for check in catalogue()[exercise].build(0) for case in check.cases
             for n in sizes(case.args[0][0])}
    right = solution(exercise)

    def fitted(comm, x, *more):
        if not sizes(x) <= shown:
            raise ValueError("never seen")
        return right(comm, x, *more)

    report = judged_here(exercise, fitted, seed=2)
    assert report.points < 0.8 * report.max_points
