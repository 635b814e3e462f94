"""Chapter 01: speedup, efficiency and Amdahl's share from measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dtlab.cost import amdahl_speedup
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict

Times = Mapping[int, float]


def _serial(times: Times) -> float:
    """The least-squares share s of T_n/T_1 = s + (1 − s)/n."""
    parts = [(1 - 1 / n, t / times[1] - 1 / n) for n, t in times.items()]
    return sum(a * y for a, y in parts) / (sum(a * a for a, _ in parts) or 1)


_MISTAKES: dict[str, list[tuple[str, Callable[[Times, int], float]]]] = {
    "speedup": [
        ("This is the efficiency: the speedup is T_1/T_n, without dividing by n.",
         lambda t, n: t[1] / t[n] / n),
        ("It is upside down: more devices take less *time*, so the speedup is T_1/T_n.",
         lambda t, n: t[n] / t[1]),
        ("This treats times as throughputs: R_n/(n·R_1) is for samples a second.",
         lambda t, n: t[n] / (n * t[1])),
    ],
    "efficiency": [
        ("This is the speedup: the efficiency is the speedup divided by n.",
         lambda t, n: t[1] / t[n]),
        ("This treats times as throughputs: R_n/(n·R_1) is for samples a second; with times it is "
         "T_1/(n·T_n).", lambda t, n: t[n] / (n * t[1])),
        ("It is upside down: T_1/(n·T_n).", lambda t, n: n * t[n] / t[1]),
    ],
}


def _right(what: str, times: Times) -> dict[int, float]:
    return {n: times[1] / t / (n if what == "efficiency" else 1) for n, t in times.items()}


def _answer(outcome: Outcome) -> tuple[Any, Any, Any] | Verdict:
    value = outcome.values[0]
    if isinstance(value, (tuple, list)) and len(value) == 3:
        return value[0], value[1], value[2]
    return Verdict(False, f"returned {str(value)[:50]}", "three things",
                   clue="Return speedups, efficiencies and the serial share: two dictionaries and "
                        "a number.")


def _judge(what: str) -> Callable[[Case, Outcome], Verdict]:
    def judge(case: Case, outcome: Outcome) -> Verdict:
        answer = _answer(outcome)
        if isinstance(answer, Verdict):
            return answer
        came, times = answer[what == "efficiency"], case.args[0][0]
        right = _right(what, times)
        if not isinstance(came, dict) or set(came) != set(right):
            return Verdict(False, f"{what}: {str(came)[:50]}", "a value for each number of devices",
                           clue="Return a dictionary with the same keys as `times`.")
        if all(_close(came[n], right[n]) for n in right):
            return Verdict(True, f"right for {len(right)} numbers of devices", what)
        n = next(n for n in right if not _close(came[n], right[n]))
        clue = next((clue for clue, wrong in _MISTAKES[what]
                     if all(_close(came[k], wrong(times, k)) for k in right)), "")
        return Verdict(False, f"{n} devices: {came[n]}"[:60], f"{right[n]:.4g}", clue=clue,
                       sure=bool(clue))

    return judge


def _share(case: Case, outcome: Outcome) -> Verdict:
    answer = _answer(outcome)
    if isinstance(answer, Verdict):
        return answer
    came, times = answer[2], case.args[0][0]
    right, most = _serial(times), max(times)
    if _close(came, right):
        return Verdict(True, f"{right:.4g}", "the share that fits best")
    own = times[most] / times[1]
    wrong = [
        ("This is the share that can be divided: return the other one, 1 minus it.", 1 - right),
        ("This takes all that the largest run doesn't gain for serial: 1/n of the work is still "
         "there. Solve T_n/T_1 = s + (1 − s)/n for s.", own),
        ("This is from the largest run alone: fit all of them, by least squares.",
         (own - 1 / most) / (1 - 1 / most) if most > 1 else math.nan),
        ("This is an average of the shares of each run: with least squares, runs with more devices "
         "weigh more.", _mean_share(times)),
    ]
    clue = next((clue for clue, value in wrong if _close(came, value)), "")
    return Verdict(False, f"{came}"[:40], f"{right:.4g}", clue=clue, sure=bool(clue))


def _mean_share(times: Times) -> float:
    shares = [(t / times[1] - 1 / n) / (1 - 1 / n) for n, t in times.items() if n > 1]
    return sum(shares) / len(shares) if shares else math.nan


def _close(came: Any, right: float) -> bool:
    return (isinstance(came, (int, float)) and not isinstance(came, bool)
            and math.isclose(came, right, rel_tol=1e-9, abs_tol=1e-12))


def _build(seed: int) -> list[Check]:
    def case(tried: str, times: Times) -> Case:
        return Case(tried, [(dict(times),)], comm=False)

    k = seed % 3
    exact = [case(f"a serial share of {s:g}", {n: (3.0 + k) / amdahl_speedup(s, n) for n in ns})
             for s, ns in ((0.1, (1, 2, 4, 8)), (0.25, (1, 3, 5)), (0.02 * (k + 1), (1, 16, 128)))]
    edges = [case("perfect scaling", {n: 8.0 / n for n in (1, 2, 8)}),
             case("no scaling", dict.fromkeys((1, 2, 4), 5.0)),
             case("slower than one", {1: 1.0, 2: 1.5, 4: 2.0}),
             case("any order of keys", {8: 2.0, 1: 10.0, 2: 5.5 + k})]
    noisy = [case("measured times", {1: 10.0, 2: 5.6, 4: 3.1 + 0.1 * k, 8: 2.4}),
             case("measured times", {1: 0.8, 3: 0.35, 6: 0.21, 12: 0.17})]
    return [
        Check("speedup", 2, "times that obey Amdahl", exact, _judge("speedup")),
        Check("efficiency", 2, "times that obey Amdahl", exact, _judge("efficiency")),
        Check("serial share", 2, "times that obey Amdahl", exact, _share),
        Check("edges", 1, "perfect, none, slower, any order", edges, _judge("efficiency")),
        Check("least squares", 1, "measured times, which obey nothing", noisy, _share),
    ]


EXERCISE = Exercise("efficiency", "Efficiency", "01", 2, "scaling", _build)
