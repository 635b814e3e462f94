"""Closed forms against the simulator, which knows nothing of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dtlab
from dtlab import cost, simulate, topology
from dtlab.bench.calls import IN_PIECES
from dtlab.cost.model import FORMS
from tests import oracle

ALPHA, BETA, GAMMA = 3.1e-6, 1 / 0.7e9, 1 / 2.9e9
# Elements and dtype: no element, one, fewer than ranks, uneven, even; 1 to 16 bytes each.
VECTORS = [(0, torch.float32), (1, torch.float64), (5, torch.uint8), (23, torch.float16),
           (67, torch.complex128), (720, torch.float32)]


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-30)


def as_told(asked: tuple[str, str, int, int], simulated_s: float, closed_s: float) -> bool:
    """Equal, if the closed form is exact; else at most that."""
    exact = cost.form(*asked).exact
    return same(simulated_s, closed_s) if exact else simulated_s <= closed_s * (1 + 1e-9)


def simulated(collective: str, algorithm: str, p: int, n: int, dtype: torch.dtype,
              alpha: float = ALPHA, bandwidth: float = 1 / BETA, gamma: float = GAMMA
              ) -> dtlab.Result:
    def fn(comm: dtlab.Comm) -> None:
        oracle.call(comm, collective, algorithm, torch.empty(n, dtype=dtype, device="meta"))

    return simulate(fn, network=topology.uniform(p, alpha, bandwidth), gamma=gamma)


def test_every_algorithm_has_a_form_and_every_form_an_algorithm() -> None:
    assert set(FORMS) == set(oracle.ALGORITHMS)


@pytest.mark.parametrize(("collective", "algorithm"), oracle.ALGORITHMS)
def test_time_bytes_and_messages_are_what_the_simulator_measures(
    collective: str, algorithm: str
) -> None:
    """test_every_algorithm.py has more ranks, and elements of 8 bytes."""
    for p in oracle.RANKS:
        for n, dtype in VECTORS:
            item = dtype.itemsize
            nbytes = n * item * (p if collective in IN_PIECES else 1)
            result = simulated(collective, algorithm, p, n, dtype)
            asked = (collective, algorithm, p, nbytes)
            closed_s = cost.time_s(*asked, ALPHA, BETA, GAMMA, item)
            assert as_told(asked, result.elapsed_s, closed_s), asked
            trace = result.trace
            assert [trace.sent_bytes(r) for r in range(p)] == cost.sent_bytes(*asked, item), asked
            assert [trace.messages(r) for r in range(p)] == cost.messages(*asked, item), asked


@pytest.mark.parametrize(("collective", "algorithm"), oracle.ALGORITHMS)
def test_rounds_are_counted_by_a_network_without_limit_of_bandwidth(
    collective: str, algorithm: str
) -> None:
    for p in oracle.RANKS:
        result = simulated(collective, algorithm, p, 20, torch.float32, 1.0, math.inf, 0.0)
        asked = (collective, algorithm, p, 80 * (p if collective in IN_PIECES else 1))
        assert as_told(asked, result.elapsed_s, cost.rounds(*asked))


@pytest.mark.parametrize(("collective", "algorithm"), oracle.ALGORITHMS)
def test_no_algorithm_is_faster_than_the_lower_bound_allows(
    collective: str, algorithm: str
) -> None:
    for p in oracle.RANKS:
        for terms in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):  # each bound by itself
            time_s = cost.time_s(collective, algorithm, p, 40 * p, *terms)
            assert time_s >= cost.lower_bound_s(collective, p, 40 * p, *terms) - 1e-9


def test_textbook_values() -> None:
    """Worked by hand: 8 ranks, a vector that divides, α = 1, β = 1/10, γ = 1/100."""
    hand = {
        ("broadcast", "flat"): 7 * (1 + 8), ("broadcast", "binomial"): 3 * (1 + 8),
        ("reduce", "flat"): 7 * (1 + 8 + 0.8), ("reduce", "binomial"): 3 * (1 + 8 + 0.8),
        ("all_reduce", "flat"): 14 * 9 + 7 * 0.8, ("all_reduce", "tree"): 6 * 9 + 3 * 0.8,
        ("all_reduce", "ring"): 14 * (1 + 1) + 7 * 0.1, ("barrier", "dissemination"): 3,
        ("broadcast", "chain"): (6 + 8) * (1 + 1), ("broadcast", "scatter_allgather"): 10 + 14,
        ("reduce", "rabenseifner"): 6 + 14 + 0.7, ("scatter", "linear"): 7 + 7,
        ("scatter", "binomial"): 3 + 7, ("gather", "binomial"): 3 + 7,
        ("all_gather", "ring"): 7 + 7, ("all_gather", "bruck"): 3 + 7,
        ("reduce_scatter", "pairwise"): 7 + 7 + 0.7,
        ("reduce_scatter", "recursive_halving"): 3 + 7 + 0.7,
        ("all_reduce", "recursive_doubling"): 3 * (1 + 8 + 0.8),
        ("all_reduce", "halving_doubling"): 6 + 14 + 0.7,
        ("all_reduce", "torus"): 2 * 3 + 2 * 1 + 14 + 0.7,  # 4 × 2
        ("all_reduce", "two_ring"): 28 * (1 + 0.5) + 7 * 0.1,
        ("all_to_all", "pairwise"): 7 + 7, ("all_to_all", "bruck"): 3 * (1 + 4),
        ("all_to_all", "linear"): 1 + 7,  # b·β = α: one starts when the one before has flowed
        ("scatter", "linear_nonblocking"): 1 + 7, ("gather", "linear_nonblocking"): 1 + 7,
        ("all_to_all", "central"): 2 * (1 + 7 * 8),
        ("all_to_all", "mesh"): (1 + 3 * 2) + (1 + 4),  # 4 × 2: 3 messages of 2 parts, 1 of 4
        ("scan", "linear"): 7 * (1 + 8 + 0.8), ("scan", "recursive_doubling"): 3 * (1 + 8 + 0.8),
        ("exscan", "linear"): 7 * (1 + 8) + 6 * 0.8, ("barrier", "central"): 14,
        ("barrier", "tree"): 6,
    }
    for (collective, algorithm), seconds in hand.items():
        assert same(cost.time_s(collective, algorithm, 8, 80, 1.0, 0.1, 0.01, 1), seconds)


@pytest.mark.parametrize("p", [*range(1, 10), 13, 16])
def test_the_bound_of_a_double_tree_is_above_the_time_by_a_factor_of_four_at_most(p: int) -> None:
    for n in (8, 4_000, 100_000, 1_000_000, 16_000_000):
        for gamma in (0.0, 1e-11):
            closed = cost.form("all_reduce", "double_tree", p, n)
            assert closed.exact == (p == 1)
            took_s = simulated("all_reduce", "double_tree", p, n // 4, torch.float32,
                               5e-6, 12.5e9, gamma).elapsed_s
            told_s = closed.seconds(5e-6, 1 / 12.5e9, gamma)
            assert told_s / 4 <= took_s <= told_s * (1 + 1e-9), n


def test_a_double_tree_takes_twice_what_the_literature_says_where_bytes_rule() -> None:
    for n in (16_000_000, 160_000_000):
        took_s = simulated("all_reduce", "double_tree", 16, n // 4, torch.float32,
                           5e-6, 12.5e9, 0.0).elapsed_s
        assert 1.5 < took_s / (2 * 4 * 5e-6 + 2 * n / 12.5e9) < 2.4


def test_a_ring_sends_what_no_algorithm_can_save() -> None:
    for p in (2, 4, 8, 16):
        assert cost.sent_bytes("all_reduce", "ring", p, 1600) == [2 * (p - 1) * 1600 // p] * p


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert cost.bus_factor("all_reduce", 4) == 1.5
    assert cost.bus_factor("all_gather", 4) == cost.bus_factor("reduce_scatter", 4) == 0.75
    assert cost.bus_factor("broadcast", 4) == cost.bus_factor("reduce", 4) == 1.0


@pytest.mark.parametrize(("arguments", "says"), [
    (("all_reduce", "rign", 4, 4, 1, 1), "ring"), (("all_reduce", "ring", 0, 4, 1, 1), "not 0"),
    (("all_reduce", "ring", 2.5, 4, 1, 1), "2.5"), (("all_reduce", "ring", True, 4, 1, 1), "True"),
    (("all_reduce", "ring", 4, -4, 1, 1), "-4"), (("all_reduce", "ring", 4, 4.5, 1, 1), "4.5"),
    (("all_reduce", "ring", 4, 4, -1, 1), "alpha"),
    (("all_reduce", "ring", 4, 4, 1, math.nan), "beta"),
    (("all_reduce", "ring", 4, 4, 1, 1, math.inf), "gamma"),
    (("all_reduce", "ring", 4, 4, 1, 1, 0, 0), "itemsize"),
])
def test_arguments_that_make_no_sense_are_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        cost.time_s(*arguments)


def test_unknown_collectives_are_answered_with_the_known_ones() -> None:
    with pytest.raises(dtlab.ConfigError, match="all_reduce"):
        cost.lower_bound_s("all_reduction", 4, 4, 1, 1)
    with pytest.raises(dtlab.ConfigError, match="all_reduce"):
        cost.bus_factor("all_reduction", 4)
    with pytest.raises(dtlab.ConfigError, match="not 0"):
        cost.bus_factor("all_reduce", 0)
    with pytest.raises(dtlab.ConfigError, match="not -1"):
        cost.lower_bound_s("all_reduce", -1, 4, 1, 1)
