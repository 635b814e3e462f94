"""Chapter 14: a fast layout on a cluster of which nothing is known but what runs on it take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import scale, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises.choose_layout import Question, all_of, layout_case, predictor, within

RUNS = 200
SHARE = 1.05  # of the fastest one's time


def oracle(question: Question, rank: int) -> Callable[..., float | None]:
    """Return the referee's function: how long a step takes, None where there is no room for it."""
    predicted = predictor(question)

    def answer(comm: Comm, *layout: Any) -> float | None:
        found = predicted(*layout)
        return found[0] if found and found[1] <= question[6] else None

    return answer


def _runs(case: Case, outcome: Outcome) -> Verdict:
    """Is it a layout that there is, and has it room?"""
    question, planned = case.facts["question"], outcome.values[0]
    found = all_of(question).get(tuple(planned))
    return Verdict(found is not None and found[1] <= question[6],
                   str(planned)[:60] if planned else "no dictionary",
                   "a layout for which run doesn't give None", evidence=planned)


def _few(case: Case, outcome: Outcome) -> Verdict:
    return Verdict(outcome.asked[0] <= RUNS, f"{outcome.asked[0]} runs", f"≤ {RUNS}")


def _build(seed: int) -> list[Check]:
    def case(layers: int, hidden: int, heads: int, servers: int, batch: int, gigabytes: float,
             card: float) -> Case:
        hidden += heads * varied(seed, 9, layers, batch)
        card_Bps = card * scale(seed, layers, batch, most=1.4) * 1e9
        return layout_case(
            f"{layers} layers of {hidden}, {8 * servers} devices",
            (layers, hidden, heads, servers, 8, batch, gigabytes * 1e9, card_Bps), oracle)

    fast = [case(24, 4096, 32, 4, 64, 40, 400), case(32, 4096, 32, 4, 128, 80, 25)]
    slow = [case(32, 4096, 32, 4, 64, 40, 12), case(48, 8192, 64, 8, 128, 80, 4)]
    if seed:  # told alike, but wider, with other memory: no table holds both
        fast.append(case(32, 8192, 32, 4, 128, 80, 25))
        slow.append(case(32, 8192, 32, 4, 64, 20, 12))
    return [
        Check("runs", 2, "4 models on hidden clusters", [*fast, *slow], _runs),
        Check("fast network", 2, "within 5 % of the best", fast, within(SHARE), _runs),
        Check("slow network", 2, "within 5 % of the best", slow, within(SHARE), _runs),
        Check("few runs", 2, f"{RUNS} of them", [*fast, *slow], _few, _runs),
    ]


EXERCISE = Exercise("hidden-cluster", "A cluster that you can't see", "plan_hidden", _build)
