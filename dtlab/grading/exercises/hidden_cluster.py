"""Chapter 14: a fast layout on a cluster of which nothing is known but what runs on it take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises.choose_layout import NAMES, all_of, predictor, within

RUNS = 200
SHARE = 1.05  # of the fastest one's time


def run_plan(plan: Callable[..., Any], *question: Any) -> tuple[Any, int]:
    """In the sandbox: what the answer plans, and how many runs it starts."""
    runs, predicted = [0], predictor(question)
    layers, _, heads, servers, gpus, batch, memory_bytes, _ = question

    def run(pp: int, dp: int, tp: int, micro_batch: int, stage: int, recompute: str
            ) -> float | None:
        runs[0] += 1
        try:
            found = predicted(pp, dp, tp, micro_batch, stage, recompute)
        except ConfigError:
            return None
        return found[0] if found and found[1] <= memory_bytes else None

    planned = plan(run, layers, heads, servers * gpus, batch)
    return [planned.get(name) for name in NAMES] if isinstance(planned, dict) else [], runs[0]


def _runs(case: Case, outcome: Outcome) -> Verdict:
    """Is it a layout that there is, and has it room?"""
    (question,), (planned, _) = case.args, outcome.values[0]
    found = all_of(question).get(tuple(planned))
    return Verdict(found is not None and found[1] <= question[6],
                   str(planned)[:60] if planned else "no dictionary",
                   "a layout for which run doesn't give None")


def _few(case: Case, outcome: Outcome) -> Verdict:
    return Verdict(outcome.values[0][1] <= RUNS, f"{outcome.values[0][1]} runs", f"≤ {RUNS}")


def _build(seed: int) -> list[Check]:
    def case(layers: int, hidden: int, heads: int, servers: int, batch: int, gigabytes: float,
             card: float) -> Case:
        card_Bps = card * (1 + 0.1 * (seed % 5)) * 1e9
        return Case(f"{layers} layers of {hidden}, {8 * servers} devices", [
            (layers, hidden, heads, servers, 8, batch, gigabytes * 1e9, card_Bps)],
            comm=False, library=True, harness=run_plan)

    fast = [case(24, 4096, 32, 4, 64, 40, 400), case(32, 4096, 32, 4, 128, 80, 25)]
    slow = [case(32, 4096, 32, 4, 64, 40, 12), case(48, 8192, 64, 8, 128, 80, 4)]
    return [
        Check("runs", 2, "4 models on hidden clusters", [*fast, *slow], _runs),
        Check("fast network", 2, "within 5 % of the best", fast, within(SHARE), _runs),
        Check("slow network", 2, "within 5 % of the best", slow, within(SHARE), _runs),
        Check("few runs", 2, f"{RUNS} of them", [*fast, *slow], _few, _runs),
    ]


EXERCISE = Exercise("hidden-cluster", "A cluster that you can't see", "plan_hidden", _build)
