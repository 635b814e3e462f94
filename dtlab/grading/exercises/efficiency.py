"""Chapter 01: speedup, efficiency and Amdahl's share from measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import mean
from typing import Any

from dtlab.cost import amdahl_speedup
from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.exercise import Check, Exercise, Verdict

Times = Mapping[int, float]  # number of devices → seconds
Formula = Callable[[Times, int], float]  # of the times, for n devices


def _fitted(times: Times, _: int) -> float:
    """The least-squares share s of T_n/T_1 = s + (1 − s)/n."""
    parts = [(1 - 1 / n, t / times[1] - 1 / n) for n, t in times.items()]
    return sum(a * y for a, y in parts) / sum(a * a for a, _ in parts)


RIGHT: dict[str, Formula] = {  # in the order in which the answer returns them
    "speedup": lambda t, n: t[1] / t[n],
    "efficiency": lambda t, n: t[1] / t[n] / n,
    "serial share": _fitted,
}
MISTAKES: dict[str, dict[str, Formula]] = {
    "speedup": {
        "This is the efficiency: the speedup is T_1/T_n.": lambda t, n: t[1] / t[n] / n,
        "It is upside down: the speedup is T_1/T_n.": lambda t, n: t[n] / t[1],
    },
    "efficiency": {
        "This is the speedup: divide it by n.": lambda t, n: t[1] / t[n],
        "This is in percent: return a share of 1.": lambda t, n: 100 * t[1] / t[n] / n,
        "With times it is T_1/(n·T_n), not as with throughputs.": lambda t, n: t[n] / (n * t[1]),
        "It is upside down: T_1/(n·T_n).": lambda t, n: n * t[n] / t[1],
        "It is cut off at 1, but n devices may be more than n times as fast (their caches hold "
        "more): return what the formula gives.": lambda t, n: min(1.0, t[1] / t[n] / n),
    },
    "serial share": {  # n: the largest number of devices
        "This is the share that can be divided: return 1 minus it.": lambda t, n: 1 - _fitted(t, n),
        "This takes all that the largest run doesn't gain for serial: 1/n of the work is still "
        "there. Solve T_n/T_1 = s + (1 − s)/n for s.": lambda t, n: t[n] / t[1],
        "This is from the largest run alone: fit all of them, by least squares.":
            lambda t, n: (t[n] / t[1] - 1 / n) / (1 - 1 / n),
        "This is the mean of all runs' shares: with least squares, more devices weigh more.":
            lambda t, _: mean((s / t[1] - 1 / n) / (1 - 1 / n) for n, s in t.items() if n > 1),
    },
}


REMINDERS = {
    "speedup": "The speedup is T_1/T_n; T_1 is times[1], wherever it stands.",
    "efficiency": "The efficiency is T_1/(n·T_n); T_1 is times[1], wherever it stands.",
    "serial share": "Find the one s that fits T_n/T_1 − 1/n = s·(1 − 1/n) best for all n, by least "
                    "squares: a line through 0.",
}


def _judge(case: Case, outcome: Outcome, what: str) -> Verdict:
    value, times = outcome.values[0], case.args[0][0]
    if not (isinstance(value, (tuple, list)) and len(value) == 3):
        return Verdict(False, f"returned {str(value)[:50]}", "three things",
                       clue="Return speedups, efficiencies and the serial share, in this order.")
    came, numbers = value[list(RIGHT).index(what)], list(times)
    if what == "serial share":
        came, numbers = {max(times): came}, [max(times)]
    if not isinstance(came, dict) or set(came) != set(numbers):
        return Verdict(False, f"{what}: {str(came)[:50]}", "a value for each number of devices",
                       clue="Return a dictionary with the same keys as `times`.")
    wrong = [n for n in numbers if not _close(came[n], RIGHT[what](times, n))]
    if not wrong:
        return Verdict(True, "right for all times", what)
    clue = next((clue for clue, formula in MISTAKES[what].items()
                 if all(_close(came[n], formula(times, n)) for n in numbers)), "")
    n = wrong[0]
    shown = f"{came[n]:.6g}" if isinstance(came[n], (int, float)) else str(came[n])
    return Verdict(False, f"{counted(n, 'device')}: {shown}"[:60],
                   f"{RIGHT[what](times, n):.4g}", clue=clue or REMINDERS[what], sure=bool(clue))


def _close(came: Any, right: float) -> bool:
    return type(came) in (int, float) and math.isclose(came, right, rel_tol=1e-9, abs_tol=1e-12)


def _build(seed: int) -> list[Check]:
    def case(tried: str, times: Times) -> Case:
        return Case(tried, [(dict(times),)], comm=False)

    k = seed % 3
    exact = [case(f"a serial share of {s:g}", {n: (3.0 + k) / amdahl_speedup(s, n) for n in ns})
             for s, ns in ((0.1, (1, 2, 4, 8)), (0.25, (1, 3, 5)), (0.02 * (k + 1), (1, 16, 128)))]
    edges = [case("perfect scaling", {n: 8.0 / n for n in (1, 2, 8)}),
             case("no scaling", dict.fromkeys((1, 2, 4), 5.0)),
             case("slower than one", {1: 1.0, 2: 1.5, 4: 2.0}),
             case("more than n times as fast", {1: 8.0 + k, 2: 3.5, 4: 2.5}),
             case("any order of keys", {8: 2.0, 1: 10.0, 2: 5.5 + k})]
    noisy = [case("measured times", {1: 10.0, 2: 5.6, 4: 3.1 + 0.1 * k, 8: 2.4}),
             case("measured times", {1: 0.8, 3: 0.35, 6: 0.21, 12: 0.17})]
    speedup, efficiency, share = (partial(_judge, what=what) for what in RIGHT)
    return [
        Check("speedup", 2, "times that obey Amdahl", exact, speedup),
        Check("efficiency", 2, "times that obey Amdahl", exact, efficiency),
        Check("serial share", 2, "times that obey Amdahl", exact, share),
        Check("edges", 1, "perfect, none, slower, super-linear, any order", edges, efficiency),
        Check("least squares", 1, "measured times, which obey nothing", noisy, share),
    ]


EXERCISE = Exercise("efficiency", "Efficiency", "01", 2, "scaling", _build)
