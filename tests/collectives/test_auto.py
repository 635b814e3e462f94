"""algorithm="auto" takes the algorithm with the least predicted time, the same on all ranks."""

from __future__ import annotations

import pytest
import torch

from dtlab import Comm, ConfigError, RankFailed, collectives, cost, plots, run, simulate, widgets
from dtlab.collectives import ALGORITHMS
from dtlab.collectives.auto import cheapest
from dtlab.collectives.registry import algorithm
from dtlab.machine import TYPICAL, Machine
from dtlab.topology import uniform
from tests import oracle

ALPHA, BANDWIDTH = 1e-5, 1e9


@pytest.mark.parametrize("p", [1, 2, 5, 8])
@pytest.mark.parametrize("n", [1, 5_000, 300_000])
@pytest.mark.parametrize("collective", sorted(ALGORITHMS))
def test_auto_is_as_fast_as_the_best_prediction(collective: str, n: int, p: int) -> None:
    x = torch.empty(n, device="meta")
    auto_s = simulate(oracle.call, collective, "auto", x,
                      network=uniform(p, ALPHA, BANDWIDTH)).elapsed_s
    pieces = p if collective in ("scatter", "gather", "all_gather", "reduce_scatter",
                                 "all_to_all") else 1
    nbytes = 0 if collective == "barrier" else 4 * n * pieces
    best_s = min(cost.time_s(collective, name, p, nbytes, ALPHA, 1 / BANDWIDTH)
                 for name in ALGORITHMS[collective])
    assert auto_s <= best_s * (1 + 1e-9)


def test_small_vectors_take_few_rounds_and_large_ones_few_bytes() -> None:
    network = Machine(alpha=1e-5, beta=1e-9, gamma=0.0)
    small, large = (cheapest("all_reduce", 16, n, 4, network) for n in (8, 100_000_000))
    assert cost.rounds("all_reduce", small, 16, 8) == 4
    assert max(cost.sent_bytes("all_reduce", large, 16, 100_000_000)) == 2 * 15 * 100_000_000 / 16


def test_where_cores_are_few_all_messages_count() -> None:
    """With one lane, 8 ranks that send lg p times each lose to a tree: 2(p − 1) messages in all."""
    crowded = Machine(alpha=1e-4, beta=0.0, gamma=0.0, lanes=1)
    chosen = cheapest("all_reduce", 8, 8, 4, crowded)
    assert sum(cost.messages("all_reduce", chosen, 8, 8)) == 2 * 7


@pytest.mark.parametrize("p", [1, 2, 3, 8, 13])
def test_messages_posted_together_pay_alpha_once(p: int) -> None:
    """Scatter, all sends at once: the root waits for nobody; each message starts o after the last.
    """
    alone = Machine(alpha=1e-4, beta=1e-9, gamma=0.0, overhead=1e-5)
    nbytes = 4 * p * 1000
    posted_s = 1e-4 + 4000 * 1e-9 + (p - 2) * 1e-5 if p > 1 else 0.0
    told = cost.predicted_s("scatter", "linear_nonblocking", p, nbytes, alone)
    assert told == pytest.approx(posted_s, rel=1e-9)
    for machine in (alone._replace(overhead=1e-4), alone._replace(overhead=1.0),
                    alone._replace(overhead=float("inf"))):  # no message costs more than alpha
        for collective, algorithms in ALGORITHMS.items():
            for name in algorithms:
                assert cost.predicted_s(collective, name, p, nbytes, machine) == pytest.approx(
                    cost.time_s(collective, name, p, nbytes, 1e-4, 1e-9), rel=1e-9)


def test_where_cores_are_few_the_total_counts() -> None:
    """Few messages in all, even if one rank has most of them; but not for long parts."""
    laptop = Machine(alpha=1e-4, beta=1e-9, gamma=0.0, lanes=2, overhead=2e-5)
    assert cheapest("all_to_all", 8, 8 * 64, 4, laptop) == "central"
    assert cheapest("all_to_all", 8, 8 << 17, 4, laptop) == "linear"
    assert cheapest("all_to_all", 8, 8 * 64, 4, laptop._replace(lanes=64)) == "linear"
    assert cheapest("all_to_all", 64, 64 * 64, 4, laptop._replace(lanes=64)) == "mesh"
    bursts_save_nothing = laptop._replace(lanes=64, overhead=1e-4)
    assert cheapest("gather", 64, 64 * 64, 4, bursts_save_nothing) == "binomial"
    assert cheapest("gather", 4, 4 * 64, 4, laptop._replace(lanes=8)) == "linear_nonblocking"
    assert cheapest("gather", 64, 64 * 64, 4, laptop._replace(lanes=64)) == "binomial"


def test_pieces_pay_where_each_rank_has_a_port_and_not_where_cores_are_shared() -> None:
    """A rank waits for each piece: on shared cores that is work, on a network it hides."""
    for collective, lg in (("all_reduce", "halving_doubling"),
                           ("reduce_scatter", "recursive_halving"),
                           ("all_gather", "recursive_doubling")):
        for nbytes in (1 << 20, 16 << 20, 64 << 20):
            assert cheapest(collective, 4, nbytes, 4, TYPICAL) == lg
        ports = TYPICAL._replace(lanes=float("inf"), overhead=0.0)
        assert cheapest(collective, 4, 64 << 20, 4, ports) == "pipelined_ring"


@pytest.mark.parametrize("lanes", [1, 2, 7, 1e9])
def test_a_prediction_is_no_less_than_either_bound_and_no_more_than_brents(lanes: float) -> None:
    machine = TYPICAL._replace(lanes=lanes)
    for collective, algorithms in ALGORITHMS.items():
        for name in algorithms:
            for p in (1, 2, 5, 8):
                asked = collective, name, p, 4096 * p, machine
                path_s, work_s = cost.bounds_s(*asked)
                told = cost.predicted_s(*asked)
                assert told == pytest.approx(work_s + path_s - path_s / lanes, rel=1e-9)
                assert told >= work_s * (1 - 1e-9)
                if lanes * work_s >= path_s:
                    assert told >= path_s * (1 - 1e-9)


def test_of_equals_the_one_with_fewer_messages_in_a_row_is_taken() -> None:
    """4 ranks on 2 lanes: 8 messages in 2 rounds, or 6 in 4: both α times 4."""
    laptop = Machine(alpha=1e-4, beta=1e-9, gamma=0.0, lanes=2)
    told = {name: cost.predicted_s("barrier", name, 4, 0, laptop) for name in ALGORITHMS["barrier"]}
    assert told["tree"] == told["dissemination"]
    assert cheapest("barrier", 4, 0, 4, laptop) == "dissemination"


@pytest.mark.parametrize("p", [1, 2, 3])
def test_auto_on_processes(p: int) -> None:
    def work(comm: Comm) -> list[float]:
        x = torch.full((1000,), float(comm.rank + 1))
        return collectives.all_reduce(comm, x, algorithm="auto")[::999].tolist()

    assert run(work, ranks=p).values == [[p * (p + 1) / 2] * 2] * p


def test_auto_still_says_what_is_wrong() -> None:
    with pytest.raises(RankFailed, match="takes a tensor, not list"):
        simulate(lambda comm: collectives.all_reduce(comm, [1.0], algorithm="auto"),
                 network=uniform(2, ALPHA, BANDWIDTH))
    with pytest.raises(ConfigError, match="auto"):
        simulate(lambda comm: collectives.all_reduce(comm, torch.ones(1), algorithm="autto"),
                 network=uniform(2, ALPHA, BANDWIDTH))


@pytest.mark.usefixtures("registering")
def test_an_algorithm_without_a_closed_form_is_never_chosen_and_harms_nobody() -> None:
    """One new function is a new algorithm; who wants it predicted adds a form."""
    @algorithm("barrier", "by_heart")
    def by_heart(comm: Comm) -> None:
        """Everyone believes that all have come."""

    def work(comm: Comm) -> None:
        collectives.barrier(comm, algorithm="by_heart")
        collectives.barrier(comm, algorithm="auto")

    assert simulate(work, network=uniform(5, 1e-6, 1e9)).trace.messages() > 0
    plots.cost_curves("barrier", None, 5, 1e-6, 1e-9)
    widgets.AlphaBetaExplorer("barrier").static()
    with pytest.raises(ConfigError, match="no closed form for 'barrier' 'by_heart'"):
        cost.time_s("barrier", "by_heart", 5, 0, 1e-6, 1e-9)
