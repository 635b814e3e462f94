"""Closed forms of failures: which optimum each one has, and where it holds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dtlab import ConfigError, cost

CASES = [(10, 300, 8861.5), (60, 1200, 8861.5), (600, 1200, 3600), (30, 0, 1000), (1, 60, 86_400)]


def best(share: Callable[[float], float], most: float) -> float:
    """Where a function with one peak is largest: golden section."""
    low, high, part = 1e-3, most, (5**0.5 - 1) / 2
    for _ in range(100):
        left, right = high - part * (high - low), low + part * (high - low)
        low, high = (left, high) if share(left) < share(right) else (low, right)
    return low


def test_failures_a_node_day_give_the_jobs_mean_time_to_failure() -> None:
    assert cost.job_mttf_s(2048, 0.0065) == pytest.approx(86_400 / (2048 * 0.0065))
    assert cost.job_mttf_s(10, node_mttf_s=500) == 50


@pytest.mark.parametrize(("save_s", "restart_s", "mttf_s"), CASES)
def test_dalys_interval_is_the_best_one_under_failures_at_all_times(
        save_s: float, restart_s: float, mttf_s: float) -> None:
    def share(interval_s: float) -> float:
        return cost.useful_share(interval_s, save_s, restart_s, mttf_s)

    ours, exact = cost.daly_interval_s(save_s, mttf_s), best(share, 20 * mttf_s)
    assert ours == pytest.approx(exact, rel=1e-3)
    assert share(ours) > (1 - 1e-5) * share(exact)
    assert share(cost.young_interval_s(save_s, mttf_s)) <= share(exact)


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 1.5, 1.99])
def test_dalys_interval_loses_little_in_all_of_its_range(ratio: float) -> None:
    exact = max(cost.useful_share(t, ratio, 0, 1) for t in (k / 1000 for k in range(1, 3000)))
    ours = cost.useful_share(cost.daly_interval_s(ratio, 1), ratio, 0, 1)
    assert ours > exact * (1 - (2e-5 if ratio <= 0.5 else 2e-3))
    assert cost.daly_interval_s(2, 1) == cost.daly_interval_s(5, 1) == 1


@pytest.mark.parametrize(("save_s", "restart_s", "mttf_s"), CASES)
def test_availabilitys_interval_is_the_best_one_if_recovery_never_fails(
        save_s: float, restart_s: float, mttf_s: float) -> None:
    interval_s = best(lambda t: cost.availability(t, save_s, restart_s, mttf_s), 20 * mttf_s)
    assert cost.availability_interval_s(save_s, restart_s, mttf_s) == pytest.approx(
        interval_s, rel=1e-5)
    period_s = save_s + (2 * (mttf_s + restart_s) * save_s + save_s**2) ** 0.5  # as it is printed
    assert interval_s + save_s == pytest.approx(period_s, rel=1e-5)


@pytest.mark.parametrize(("save_s", "restart_s", "mttf_s"), CASES)
def test_youngs_period_loses_the_least_time_to_first_order(
        save_s: float, restart_s: float, mttf_s: float) -> None:
    """Saving costs save/c of each second, work done again c/(2·MTTF)."""
    period_s = best(lambda c: -(save_s / c + c / (2 * mttf_s)), 20 * mttf_s)
    assert cost.young_interval_s(save_s, mttf_s) == pytest.approx(period_s, rel=1e-5)


def played_share(immune: bool, interval_s: float, save_s: float, restart_s: float, mttf_s: float,
                 failures: int) -> float:
    """One rank, failure by failure. `immune`: none strikes while it restarts or does work again."""
    draws = random.Random(0)
    period_s, wall_s, saved_s, into_s = interval_s + save_s, 0.0, 0.0, 0.0
    for _ in range(failures):
        life_s = draws.expovariate(1 / mttf_s)
        wall_s += life_s
        if immune:  # uptime goes on where it was; what is redone and the restart are extra
            periods, into_s = divmod(into_s + life_s, period_s)
            wall_s += restart_s + into_s
            saved_s += periods * interval_s
        elif life_s > restart_s:
            saved_s += (life_s - restart_s) // period_s * interval_s
    return saved_s / wall_s


@pytest.mark.parametrize(("interval_s", "save_s", "restart_s"), [
    (140, 10, 100), (450, 10, 600), (1000, 200, 50)])
def test_which_model_gives_which_share(interval_s: float, save_s: float, restart_s: float) -> None:
    """The two forms are exact, each under its own rule, and they differ."""
    case = interval_s, save_s, restart_s, 1000.0
    strikes, immune = (played_share(rule, *case, failures=100_000) for rule in (False, True))
    assert strikes == pytest.approx(cost.useful_share(*case), abs=0.004)
    assert immune == pytest.approx(cost.availability(*case), abs=0.004)
    assert cost.availability(*case) > cost.useful_share(*case) + 0.002


def test_the_three_shares_are_one_where_failures_are_rare() -> None:
    case = 500, 1, 60, 1e6
    assert cost.ettr(*case) == pytest.approx(cost.useful_share(*case), abs=1e-6)
    assert cost.availability(*case) == pytest.approx(cost.useful_share(*case), abs=1e-6)


def test_ettr_is_too_low_for_long_restarts_and_too_high_for_long_saves() -> None:
    assert cost.ettr(140, 10, 500, 1000) < cost.useful_share(140, 10, 500, 1000) - 0.02
    for interval_s, save_s in ((100, 10), (100, 100), (50, 200)):
        ours = cost.ettr(interval_s, save_s, 0, 10_000)
        more = ours / cost.useful_share(interval_s, save_s, 0, 10_000) - 1
        assert more == pytest.approx(save_s / 20_000, rel=0.05)


def test_wall_time_is_work_over_its_share() -> None:
    assert cost.wall_time_s(1e6, 421, 10, 300, 8861.5) == pytest.approx(
        8861.5 * 2.718281828459045 ** (300 / 8861.5)
        * (2.718281828459045 ** (431 / 8861.5) - 1) * 1e6 / 421)
    assert cost.useful_share(1e9, 10, 300, 1) == 0
    assert cost.wall_time_s(1, 1e9, 10, 300, 1) == float("inf")


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: cost.job_mttf_s(0, 1), "nodes must be"), (lambda: cost.job_mttf_s(1), "either"),
    (lambda: cost.job_mttf_s(1, 1, node_mttf_s=1), "either"),
    (lambda: cost.job_mttf_s(1, 0), "per_node_day must be"),
    (lambda: cost.young_interval_s(-1, 1), "save_s must be"),
    (lambda: cost.daly_interval_s(1, 0), "mttf_s must be"),
    (lambda: cost.useful_share(0, 1, 1, 1), "interval_s must be"),
    (lambda: cost.availability_interval_s(1, -1, 1), "restart_s must be"),
    (lambda: cost.ettr(100, 1, 60, 110), "holds where a failure costs less"),
    (lambda: cost.wall_time_s(0, 1, 1, 1, 1), "work_s must be"),
])
def test_nonsense_is_refused(call: Callable[[], float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()


def test_closed_forms_hold_for_times_however_small_or_large() -> None:
    assert cost.useful_share(1e-300, 1e-300, 0, 1e300) == 0.5
    assert cost.availability_interval_s(1e200, 0, 1) == pytest.approx(1e200)
    assert cost.young_interval_s(1e200, 1e200) == pytest.approx(2**0.5 * 1e200)
