"""Every rank-second is accounted for, and rightly: against closed forms, and second by second."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dtlab import ConfigError, Failures, cost, goodput
from dtlab.reliability import ANSWERS, KINDS
from tests.reliability.oracle import SecondBySecond

YEAR_S = 365 * 86_400


def random_case(seed: int) -> tuple[dict[str, Any], list[tuple[int, list[int]]]]:
    """A tiny case: whole seconds, a few nodes, some failures."""
    draws = random.Random(seed)
    answer = ANSWERS[seed % 3]
    group = draws.choice([1, 2]) if answer == "replicas" else 1
    nodes = group * draws.randint(1, 4)
    duration = draws.randint(60, 240)
    moments = sorted(draws.sample(range(1, duration), draws.randint(0, 14)))
    at = [(moment, draws.sample(range(nodes), min(nodes, draws.choice([1, 1, 1, 2]))))
          for moment in moments]
    copy = draws.choice([None, 2, 3, 5])
    return {"nodes": nodes, "save": draws.randint(1, 4), "restart": draws.randint(1, 12),
            "interval": draws.randint(3, 30), "answer": answer, "duration": duration,
            "spares": draws.choice([0, 0, 1, 2]), "repair": draws.choice([0, 7, 23, 50]),
            "copy": copy, "copy_restart": draws.randint(1, 5), "group": group}, at


@pytest.mark.parametrize("first", range(0, 3000, 100))
def test_the_events_give_what_counting_every_second_gives(first: int) -> None:
    for seed in range(first, first + 100):
        check_case(*random_case(seed))


def check_case(case: dict[str, Any], at: list[tuple[int, list[int]]]) -> None:
    counted = SecondBySecond(at=at, **case)
    played = goodput(
        case["nodes"], Failures(at=at), case["save"], case["restart"], case["interval"],
        answer=case["answer"], duration_s=case["duration"], spares=case["spares"],
        repair_s=case["repair"], copy_s=case["copy"], group=case["group"],
        copy_restart_s=case["copy_restart"] if case["copy"] else None)
    assert played.seconds == {kind: counted.seconds[kind] for kind in KINDS}
    assert played.failures == counted.failures


@pytest.mark.parametrize(("mttf_s", "save_s", "restart_s", "interval_s"), [
    (8861.5, 10, 300, 421), (3600, 60, 600, None), (1000, 100, 700, 300), (500, 400, 100, None),
    (3600, 0, 0, 50), (3600, 5, 0, 5000)])
def test_a_long_run_is_what_dalys_model_says(mttf_s: float, save_s: float, restart_s: float,
                                             interval_s: float | None) -> None:
    """About 5,000 failures: their number is off by 1.4 % (one standard deviation)."""
    run = goodput(7, 86_400 / mttf_s / 7, save_s, restart_s, interval_s, duration_s=5000 * mttf_s)
    assert run.failures == pytest.approx(5000, rel=0.05)
    assert run.closed_form == pytest.approx(
        cost.useful_share(run.interval_s, save_s, restart_s, mttf_s))
    assert run.difference is not None
    assert abs(run.difference) < 0.01


def test_a_year_of_ten_thousand_nodes_adds_up_exactly() -> None:
    run = goodput(10_000, 0.0065, 10, 300, duration_s=YEAR_S, ranks_per_node=8)
    assert sum(run.ticks.values()) == 10_000 * YEAR_S * 1_000_000
    assert sum(run.seconds.values()) == pytest.approx(80_000 * YEAR_S, rel=1e-12)
    assert run.failures == 23_803  # on any machine
    assert repr(run).startswith("Goodput(10,000 nodes, 31,536,000 s: 70.4% productive, ")


@pytest.mark.parametrize("failures", [
    Failures(0.02), Failures(0.02, "uniform"), Failures(0.02, "weibull"),
    Failures(0.02, "weibull", shape=2.0), Failures(0.0, rack=8, rack_per_day=0.1),
    Failures(0.01, rack=7, rack_per_day=0.05), Failures(0.01, bad=5, bad_factor=30)])
def test_failures_come_at_the_rate_that_they_are_said_to(failures: Failures) -> None:
    runs = [goodput(100, failures, 10, 60, 600, duration_s=400 * 86_400, seed=seed)
            for seed in range(3)]
    expected = failures.expected(100, 400 * 86_400)
    for run in runs:
        assert abs(run.failures - expected) < 4 * expected**0.5
        assert sum(run.ticks.values()) == 100 * 400 * 86_400 * 1_000_000
    assert goodput(100, failures, 10, 60, 600, duration_s=400 * 86_400).ticks == runs[0].ticks


def test_a_replica_is_absent_for_the_share_that_renewal_says() -> None:
    """Up for its MTTF on average, away for the repair."""
    run = goodput(20, 1.0, 10, 0, answer="replicas", repair_s=7200, duration_s=YEAR_S)
    assert run.shares["absent"] == pytest.approx(7200 / (86_400 + 7200), abs=0.003)
    assert run.shares["redone"] == 0
    grouped = goodput(20, 0.1, 10, 0, answer="replicas", repair_s=720, group=10,
                      duration_s=YEAR_S)
    assert grouped.shares["absent"] == pytest.approx(720 / (86_400 + 720), abs=0.001)


def test_shrinking_leaves_exactly_the_failed_nodes_out() -> None:
    run = goodput(50, 0.05, 10, 0, answer="shrink", repair_s=7200, copy_s=1, duration_s=YEAR_S)
    assert run.shares["absent"] == pytest.approx(7200 / (20 * 86_400 + 7200), rel=0.05)
    waits = goodput(50, 0.05, 10, 0, repair_s=7200, copy_s=1, duration_s=YEAR_S)
    assert waits.share < run.share


def test_bad_nodes_cost_until_they_are_excluded() -> None:
    fleet = {"nodes": 100, "save_s": 10, "restart_s": 300, "interval_s": 1000}
    kept = goodput(failures=Failures(0.01, bad=3), **fleet)  # type: ignore[arg-type]
    excluded = goodput(failures=Failures(0.01, bad=3, exclude_after=2),
                       **fleet)  # type: ignore[arg-type]
    good = goodput(failures=0.01, **fleet)  # type: ignore[arg-type]
    assert kept.failures > 2 * good.failures
    assert excluded.failures <= good.failures + 20
    assert kept.share < excluded.share


def test_a_copy_in_memory_helps_unless_its_holder_dies_too() -> None:
    def lost_s(places: list[int]) -> tuple[float, float]:
        run = goodput(4, Failures(at=[(90, places)]), 1, 20, 100, copy_s=7, copy_restart_s=2,
                      duration_s=200)
        return run.seconds["redone"] / 4, run.seconds["blocked"] / 4

    assert lost_s([1]) == lost_s([0, 2]) == (90 % 7, 2 + 1)  # one second for a save
    assert lost_s([1, 2]) == lost_s([3, 0]) == (90, 20)
    rack = Failures(rack=4, rack_per_day=1)
    disk = goodput(16, rack, 10, 300, 3600, copy_s=5, copy_restart_s=10)
    one = goodput(16, Failures(rack_per_day=0.25), 10, 300, 3600, copy_s=5, copy_restart_s=10)
    assert disk.share < one.share - 0.01


@pytest.mark.parametrize("spread", ["exponential", "uniform", "weibull"])
def test_failures_come_at_their_rate_from_the_first_day_on(spread: str) -> None:
    run = goodput(4000, Failures(0.02, spread), 1, 1, 600, duration_s=5 * 86_400)
    assert abs(run.failures - 400) < 4 * 20


@pytest.mark.parametrize(("spread", "shape", "soon"), [
    ("weibull", 0.2, 0.0155), ("weibull", 0.7, 0.0460), ("weibull", 2.0, 0.0500),
    ("uniform", 0.7, 0.0494)])
def test_nodes_in_place_last_as_long_as_renewal_theory_says(spread: str, shape: float, soon: float
                                                            ) -> None:
    """soon: ∫ P(life > t) dt over the first twentieth of the mean life, in parts of the mean."""
    failures, draws = Failures(1.0, spread, shape), random.Random(0)
    lasts = [failures.residual_s(draws, bad=False) < 0.05 * 86_400 for _ in range(50_000)]
    assert sum(lasts) / len(lasts) == pytest.approx(soon, abs=0.003)


def test_a_place_that_there_is_not_has_no_row() -> None:
    with pytest.raises(ConfigError, match="place must be 2 or less"):
        goodput(3, 0.0, 10, 300, 90, duration_s=1000).row(3)


def test_a_switch_takes_the_spares_of_its_rack_too() -> None:
    one, two = (goodput(4, Failures(rack=rack, rack_per_day=1), 10, 60, 600, spares=4,
                        repair_s=3600, duration_s=YEAR_S).shares["absent"] for rack in (8, 4))
    assert one == pytest.approx(3600 / 86_400, abs=0.01)
    assert two < one / 10


def test_spares_spare_the_wait() -> None:
    runs = [goodput(100, 0.01, 10, 300, repair_s=86_400, spares=spares).share
            for spares in (0, 1, 4)]
    assert runs[0] < runs[1] < runs[2]


def test_the_timeline_is_what_is_added_up() -> None:
    at = [(50.0, [1]), (120.0, [0, 2]), (180.0, [3])]
    for answer in ANSWERS:
        run = goodput(4, Failures(at=at), 5, 20, 30, answer=answer, repair_s=15, copy_s=4,
                      duration_s=300)
        seconds = dict.fromkeys(KINDS, 0.0)
        for place in range(4):
            row = run.row(place)
            assert row[0][0] == 0
            assert row[-1][1] == 300
            assert all(a[1] == b[0] and a[2] != b[2]
                       for a, b in pairwise(row))
            for start_s, end_s, kind in row:
                seconds[kind] += end_s - start_s
        assert seconds == pytest.approx(run.seconds)


def test_no_failure_costs_only_the_saves() -> None:
    run = goodput(3, 0.0, 10, 300, 90, duration_s=1000)
    assert run.shares == {"productive": 0.9, "redone": 0, "blocked": 0.1, "absent": 0}
    assert run.closed_form is run.difference is None
    assert goodput(3, 0.0, 10, 300, duration_s=1000, seed=np.int64(3)).interval_s == 1000


@pytest.mark.parametrize(("options", "sentence"), [
    ({"nodes": 0}, "nodes must be"), ({"failures": -1}, "per_node_day must be"),
    ({"save_s": float("nan")}, "save_s must be"), ({"restart_s": "1"}, "restart_s must be"),
    ({"interval_s": 0}, "interval_s must be"), ({"answer": "pray"}, "no answer 'pray'; choose"),
    ({"answer": np.ones(2)}, "there is no answer"),
    ({"group": 3}, "group is for replicas"), ({"duration_s": 0}, "duration_s must be"),
    ({"spares": -1}, "spares must be"), ({"seed": 0.5}, "seed must be"),
    ({"copy_s": -1}, "copy_s must be"),
    ({"failures": Failures(at=[(1, [8])])}, "strike the places 0 to 7"),
    ({"save_s": 0, "interval_s": None}, "give interval_s"),
    ({"duration_s": 1e-9}, "duration_s must be a microsecond or more"),
    ({"repair_s": 1e305}, "repair_s must be at most"),
    ({"interval_s": 1e305}, "interval_s must be at most"),
    ({"duration_s": 1e12}, "take too long to play"), ({"failures": 1e9}, "take too long to play"),
])
def test_nonsense_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    good = {"nodes": 8, "failures": 0.1, "save_s": 1, "restart_s": 1, "interval_s": 60}
    with pytest.raises(ConfigError, match=sentence):
        goodput(**good | options)


@pytest.mark.parametrize("options", [
    {"spread": "normal"}, {"spread": np.ones(2)}, {"shape": 0}, {"shape": 0.02}, {"rack": 0},
    {"bad": -1},
    {"exclude_after": 0}, {"at": 5}, {"at": [3]}, {"at": [(1, ["x"])]}, {"rack_per_day": -1},
    {"per_node_day": float("inf")}])
def test_failures_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Failures(**options)
