"""Chapter 03: from measured times of messages to the α and β of the machine."""

from __future__ import annotations

from functools import partial

import numpy as np

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict

TOLERANCE = 0.10  # of the time, at every size asked for

MACHINES = {  # α in seconds, β in seconds per byte
    "loopback": (25e-6, 1 / 3e9), "Ethernet": (60e-6, 1 / 1.2e9),
    "InfiniBand": (2e-6, 1 / 24e9), "NVLink": (9e-6, 1 / 150e9),
}
SHORT = (1, 20, 300)  # bytes, not among those measured
LONG = (5_000_000, 50_000_000)


def _case(machine: str, noise: float, outliers: float, seed: int) -> Case:
    """Times of messages of 4⁰ … 4¹³ bytes, ten each. `noise`: relative; `outliers`: their share,
    each 3 to 20 times slower, as when the operating system does something else."""
    alpha, beta = MACHINES[machine]
    random = np.random.default_rng([seed, int(alpha * 1e9), int(outliers * 100)])
    sizes = np.repeat(4.0 ** np.arange(14), 10)
    times = (alpha + beta * sizes) * np.exp(noise * random.standard_normal(sizes.size))
    slow = random.random(sizes.size) < outliers
    times = np.where(slow, times * random.uniform(3, 20, sizes.size), times)
    return Case(f"{machine}, {sizes.size} messages of 1 B to 64 MB", [(sizes, times)], comm=False,
                facts={"alpha": alpha, "beta": beta})


def _judge(case: Case, outcome: Outcome, sizes: tuple[int, ...]) -> Verdict:
    """Compare predicted and true times at `sizes`."""
    a, b, value = case.facts["alpha"], case.facts["beta"], outcome.values[0]
    wanted = f"{_shown(a, b)}; off by ≤ {TOLERANCE:.0%}"
    if not (isinstance(value, (tuple, list)) and len(value) == 2
            and all(type(v) in (int, float) for v in value)):
        return Verdict(False, f"returned {value!r}"[:80], "(α in s, β in s per byte)",
                       clue="Return two numbers: return alpha_s, beta_s_per_byte.")
    alpha, beta = map(float, value)
    errors = {n: abs(alpha + n * beta - (a + n * b)) / (a + n * b) for n in sizes}
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else np.inf)
    far = f"{errors[worst]:.0%}" if errors[worst] < 100 else "more than 100 times"
    came = f"{_shown(alpha, beta)}; {worst:,} B off by {far}"
    if errors[worst] <= TOLERANCE:
        return Verdict(True, came, wanted)
    return Verdict(False, came, wanted, clue=_clue(alpha, beta, a, b, worst))


def _shown(alpha: float, beta: float) -> str:
    return f"α = {alpha:.3g} s, β = {beta:.3g} s/B"


def _clue(alpha: float, beta: float, a: float, b: float, worst: int) -> str:
    """Which mistake makes alpha and beta of a and b?"""
    def near(x: float, y: float) -> bool:
        return abs(x - y) <= 0.3 * abs(y)

    if near(beta, 1 / b):
        return "β is seconds per byte; you returned bytes per second: take 1/β."
    if near(alpha, b) and near(beta, a):
        return "α and β are the wrong way round: return alpha, beta."
    if 0.05 < beta < 5 and alpha < 1e3 * a:
        return ("β looks like the slope of a line through the logarithms (log–log). α + nβ is no "
                "straight line there: a slope of 1 on the right, 0 on the left. Fit the numbers "
                "themselves, each weighted by its own time.")
    for factor, unit in ((1e3, "milliseconds"), (1e6, "microseconds"), (1e9, "nanoseconds")):
        if near(alpha, a * factor) or near(beta, b * factor):
            return f"The unit is seconds, and seconds per byte; yours look like {unit}."
    if near(beta, b / 8) or near(beta, b * 8):
        return "β is per byte, not per bit: a factor of 8."
    if all(0.85 < share < 0.97 for share in (alpha / a, beta / b)):
        return ("All times come out too short, as the minimum of each size does: the noise goes "
                "both ways. Take the median.")
    if worst in SHORT or not near(alpha, a):
        return ("α is lost in the noise. Plain least squares looks at absolute errors, so a few "
                "percent of noise on the 64 MB messages outweigh every short one: make the errors "
                "relative (divide by the time), or fit α on the short messages and β on the long "
                "ones. Some times are far too long: take the median of each size first.")
    return ("β is off: the long messages decide it. Times that were disturbed are far too long: "
            "take the median of each size, not the mean.")


def _build(seed: int) -> list[Check]:
    exact = [_case(m, 0.0, 0.0, seed) for m in ("loopback", "Ethernet")]
    noisy = [_case(m, 0.06, 0.0, seed) for m in MACHINES]
    disturbed = [_case(m, 0.03, 0.08, seed) for m in MACHINES]
    return [
        Check("exact times", 1, "2 machines, no noise", exact, partial(_judge, sizes=SHORT + LONG)),
        Check("short messages", 1, "4 machines, 6 % noise", noisy, partial(_judge, sizes=SHORT)),
        Check("long messages", 1, "4 machines, 6 % noise", noisy, partial(_judge, sizes=LONG)),
        Check("outliers", 2, "4 machines, 8 % outliers", disturbed,
              partial(_judge, sizes=SHORT + LONG)),
    ]


EXERCISE = Exercise("fit-alpha-beta", "Fit α and β", "03", 1, "fit", _build)
