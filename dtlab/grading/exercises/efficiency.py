"""Chapter 01: speedup, efficiency and Amdahl's share from measured times."""

from __future__ import annotations

import numpy as np

from dtlab.cost import amdahl_speedup
from dtlab.grading.case import Case, Wanted
from dtlab.grading.draws import scale
from dtlab.grading.exercise import Check, Exercise
from dtlab.grading.standard import items

SPEEDUP, EFFICIENCY, SHARE = ITEMS = "speedup", "efficiency", "serial share"


def _right(times: dict[int, float]) -> tuple[dict[int, float], dict[int, float], float]:
    """Speedup T_1/T_n, efficiency T_1/(n·T_n), and the least-squares share s of
    T_n/T_1 = s + (1 − s)/n."""
    n, t = np.array(list(times)), np.array(list(times.values()))
    (share,), *_ = np.linalg.lstsq((1 - 1 / n)[:, None], t / times[1] - 1 / n)
    speedup = {k: times[1] / s for k, s in times.items()}
    return speedup, {k: s / k for k, s in speedup.items()}, float(share)


def _build(seed: int) -> list[Check]:
    def case(tried: str, times: dict[int, float], uneven: float = 1.0) -> Case:
        """All times are longer by one factor, and each by one of its own, up to `uneven`."""
        longer = scale(seed, tried, *times)
        times = {n: s * longer * scale(seed, tried, n, most=uneven) for n, s in times.items()}
        return Case(tried, [(dict(times),)], comm=False, wanted=Wanted(
            [_right(times)], items=ITEMS, what="by the formula", rtol=1e-9))

    def amdahl(share: float, *ns: int) -> Case:
        share *= scale(seed, share)
        return case(f"a serial share of {share:.3g}",
                    {n: 3.0 / amdahl_speedup(share, n) for n in ns})

    exact = [amdahl(0.1, 1, 2, 4, 8), amdahl(0.25, 1, 3, 5), amdahl(0.02, 1, 16, 128)]
    edges = [case("perfect scaling", {n: 8.0 / n for n in (1, 2, 8)}),
             case("no scaling", dict.fromkeys((1, 2, 4), 5.0)),
             case("slower than one", {1: 1.0, 2: 1.5, 4: 2.0}, 1.1),
             case("more than n times as fast", {1: 8.0, 2: 3.5, 4: 1.9}, 1.04),
             case("any order of keys", {8: 2.0, 1: 10.0, 2: 5.5}, 1.1)]
    noisy = [case("measured times", {1: 10.0, 2: 5.6, 4: 3.1, 8: 2.4}, 1.1),
             case("measured times", {1: 0.8, 3: 0.35, 6: 0.21, 12: 0.17}, 1.1)]
    return [
        Check(SPEEDUP, 2, "times that obey Amdahl", exact, items(SPEEDUP)),
        Check(EFFICIENCY, 2, "times that obey Amdahl", exact, items(EFFICIENCY)),
        Check(SHARE, 2, "times that obey Amdahl", exact, items(SHARE)),
        Check("edges", 1, "perfect, none, slower, super-linear, any order", edges,
              items(EFFICIENCY, SHARE)),
        Check("least squares", 1, "measured times, which obey nothing", noisy, items(SHARE)),
    ]


EXERCISE = Exercise("efficiency", "Efficiency", "scaling", _build)
