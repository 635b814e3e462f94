"""Chapter 15: how often to save, by the optimum that is asked for."""

from __future__ import annotations

import math

from dtlab.grading.case import Case, Wanted
from dtlab.grading.draws import scale
from dtlab.grading.exercise import Check, Exercise
from dtlab.grading.standard import items, values

MTTF, PERIOD, SHARE = ITEMS = "MTTF", "period", "share"
LOST, AVAILABILITY = GOALS = "least lost time", "best availability"


def _right(goal: str, nodes: int, node_mttf_h: float, save_s: float, restart_s: float
           ) -> tuple[float, float, float]:
    """Young's period and what it loses; or that of Saxena et al., and its availability."""
    mttf_s = node_mttf_h * 3600 / nodes
    if goal == LOST:
        period_s = math.sqrt(2 * save_s * mttf_s)
        return mttf_s, period_s, save_s / period_s + period_s / (2 * mttf_s)
    period_s = save_s + math.sqrt(2 * (mttf_s + restart_s) * save_s + save_s**2)
    return mttf_s, period_s, (1 - save_s / period_s) * mttf_s / (mttf_s + restart_s + period_s / 2)


def _case(goal: str, nodes: int, node_mttf_h: float, save_s: float, restart_s: float) -> Case:
    args = goal, nodes, node_mttf_h, save_s, restart_s
    tried = f"{goal}: {nodes:,} nodes of {node_mttf_h:g} h, save {save_s:g} s"
    return Case(tried, [args], comm=False, wanted=Wanted(
        [_right(*args)], items=ITEMS, what="by its formula", rtol=1e-6))


def _build(seed: int) -> list[Check]:
    def case(goal: str, nodes: int, node_mttf_h: float, save_s: float, restart_s: float) -> Case:
        slower, longer = (scale(seed, goal, nodes, what) for what in ("failures", "saves"))
        return _case(goal, nodes, slower * node_mttf_h, longer * save_s, slower * restart_s)

    jobs = [(2048, 3692.3, 60, 600), (16, 5000, 30, 300), (300, 1000, 240, 1800),
            (10_000, 25_000, 5.5, 90)]
    lost, available = ([case(goal, *job) for job in jobs] for goal in GOALS)
    edges = [case(goal, *job) for goal in GOALS for job in
             ((1, 24, 60, 600), (5000, 10_000, 300, 0), (4000, 4000, 200, 3600))]
    return [
        Check("MTTF", 1, "4 jobs", [*lost, *available], items(MTTF)),
        Check("least lost time", 2, "4 jobs", lost, items(PERIOD)),
        Check("best availability", 2, "4 jobs", available, items(PERIOD)),
        Check("shares", 2, "what is lost; the availability", [*lost, *available], items(SHARE)),
        Check("edges", 1, "one node, no restart, a restart as long as the MTTF", edges, values),
    ]


EXERCISE = Exercise("best-interval", "The best interval", "best_interval", _build)
