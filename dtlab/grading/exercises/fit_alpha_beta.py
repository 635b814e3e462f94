"""Chapter 03: from measured times of messages to the α and β of the machine."""

from __future__ import annotations

import math

import numpy as np

from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import generator, scale
from dtlab.grading.exercise import Check, Exercise, Judge, Verdict

TOLERANCE = 0.10  # of the time, at every size asked for

MACHINES = {  # α in seconds, β in seconds per byte, the least of both
    "loopback": (25e-6, 1 / 3e9), "Ethernet": (60e-6, 1 / 1.2e9),
    "InfiniBand": (2e-6, 1 / 24e9), "NVLink": (9e-6, 1 / 150e9),
}
SHORT = (1, 20, 300)  # bytes, not among those measured
LONG = (5_000_000, 50_000_000)


def _case(machine: str, noise: float, outliers: float, seed: int) -> Case:
    """Times of messages of 4⁰ … 4¹³ bytes, ten each. `noise`: relative; `outliers`: their share,
    at most three of each size, each 3 to 20 times slower, as when the operating system does
    something else."""
    alpha, beta = (x * scale(seed, machine, noise, x) for x in MACHINES[machine])
    random = generator(seed, machine, noise)
    sizes = np.repeat(4.0 ** np.arange(14), 10)
    times = (alpha + beta * sizes) * np.exp(noise * random.standard_normal(sizes.size))
    slow = random.random((14, 10)) < outliers
    slow &= slow.cumsum(axis=1) <= 3  # a median stands for the others
    times = np.where(slow.ravel(), times * random.uniform(3, 20, sizes.size), times)
    return Case(f"{machine}, {sizes.size} messages of 1 B to 64 MB", [(sizes, times)], comm=False,
                facts={"alpha": alpha, "beta": beta})


def _near(sizes: tuple[int, ...]) -> Judge:
    """Compare predicted and true times at `sizes`."""
    def judge(case: Case, outcome: Outcome) -> Verdict:
        a, b = case.facts["alpha"], case.facts["beta"]
        alpha, beta = map(float, outcome.values[0])
        errors = {n: abs(alpha + n * beta - (a + n * b)) / (a + n * b) for n in sizes}
        worst = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
        far = f"{errors[worst]:.0%}" if errors[worst] < 100 else "more than 100 times"
        return Verdict(errors[worst] <= TOLERANCE,
                       f"{_shown(alpha, beta)}; {worst:,} B off by {far}",
                       f"{_shown(a, b)}; off by ≤ {TOLERANCE:.0%}", evidence=(alpha, beta))

    return judge


def _shown(alpha: float, beta: float) -> str:
    return f"α = {alpha:.3g} s, β = {beta:.3g} s/B"


def _build(seed: int) -> list[Check]:
    exact = [_case(m, 0.0, 0.0, seed) for m in ("loopback", "Ethernet")]
    noisy = [_case(m, 0.06, 0.0, seed) for m in MACHINES]
    disturbed = [_case(m, 0.03, 0.08, seed) for m in MACHINES]
    return [
        Check("exact times", 1, "2 machines, no noise", exact, _near(SHORT + LONG)),
        Check("short messages", 1, "4 machines, 6 % noise", noisy, _near(SHORT)),
        Check("long messages", 1, "4 machines, 6 % noise", noisy, _near(LONG)),
        Check("outliers", 2, "4 machines, 8 % outliers", disturbed, _near(SHORT + LONG)),
    ]


EXERCISE = Exercise("fit-alpha-beta", "Fit α and β", "fit", _build)
