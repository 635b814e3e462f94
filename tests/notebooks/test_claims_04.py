"""What chapter 04 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from dtlab import Comm, collectives, cost, recording, simulate
from dtlab.collectives import ALGORITHMS
from dtlab.cost.broadcast_reduce import chain_form
from dtlab.topology import uniform
from tests.notebooks.chapter import Chapter

ALPHA, BETA, N = 20e-6, 0.8e-9, 100_000_000
RANKS = [*range(1, 10), 13]
printed = Chapter("04").printed


def network(ranks: int) -> Any:
    return uniform(ranks, ALPHA, 1 / BETA)


def run(
    ranks: int, collective: str, algorithm: str, n: int, *, root: int = 0, **options: Any
) -> Any:
    """One call on n bytes in all, without data; its `Result`."""

    def call(comm: Comm) -> None:
        whole = torch.empty(n // 4, device="meta")
        rows = whole.view(comm.size, -1)
        given = {
            "gather": (rows[0],), "all_gather": (rows[0],), "reduce_scatter": (rows,),
            "all_to_all": (rows,), "scatter": (rows if comm.rank == root else None, rows[0]),
            "barrier": (),
        }.get(collective, (whole,))
        extra = {"root": root} if root else {}
        getattr(collectives, collective)(comm, *given, algorithm=algorithm, **extra, **options)

    return simulate(call, network=network(ranks))


def chain_s(ranks: int, n: int, segments: int) -> float:
    return chain_form(ranks, n, 4, segments).seconds(ALPHA, BETA, 0.0)


# ---- broadcast ---------------------------------------------------------------------------------


def test_a_thousand_ranks_know_it_after_ten_rounds(prose: str) -> None:
    assert "Ten rounds for 1000 ranks, 0.2 ms where flat took 21" in prose
    assert cost.rounds("broadcast", "binomial", 1000, 1000) == 10
    binomial, flat = (cost.time_s("broadcast", a, 1000, 1000, ALPHA, BETA)
                      for a in ("binomial", "flat"))
    assert round(binomial * 1e3, 1) == 0.2
    assert round(flat * 1e3) == 21
    assert "Each message takes 20.8 µs" in prose
    assert pytest.approx(20.8e-6) == ALPHA + 1000 * BETA


@pytest.mark.parametrize("ranks", RANKS)
def test_every_round_doubles_those_who_know_and_no_more_can_be(prose: str, ranks: int) -> None:
    assert "the number at most doubles" in prose
    for root in range(ranks):
        trace = run(ranks, "broadcast", "binomial", 4000 * ranks, root=root).trace
        knows, starts = {root}, sorted({m.start_s for m in trace.transfers})
        for now in starts:
            told = [(m.src, m.dst) for m in trace.transfers if m.start_s == now]
            assert {src for src, _ in told} <= knows
            assert len({src for src, _ in told}) == len(told)
            knows |= {dst for _, dst in told}
        assert knows == set(range(ranks))
        assert len(starts) == math.ceil(math.log2(ranks))


def test_the_tree_of_eight(prose: str) -> None:
    assert "Rank 7 has it after round 3, from rank 6" in prose
    animation = recording.stepper_frames("broadcast", "binomial", 8)
    assert not animation[2].complete[7].any()
    assert [a.src for a in animation[3].arrows if a.dst == 7] == [6]
    assert "its parent is 6, 110: the lowest one-bit taken away" in prose
    trace = run(8, "broadcast", "binomial", 8000).trace
    assert all(m.src == m.dst & (m.dst - 1) for m in trace.transfers)


def test_which_broadcast_wins_for_a_long_vector(prose: str) -> None:
    times = {a: run(16, "broadcast", a, N).elapsed_s for a in ALGORITHMS["broadcast"]}
    bound = cost.lower_bound_s("broadcast", 16, N, ALPHA, BETA)
    assert "takes four times as long as need be" in prose
    assert round(times["binomial"] / bound, 1) == 4.0
    assert "which takes nβ = 80 ms" in prose
    assert pytest.approx(0.080) == N * BETA
    best = round(math.sqrt(14 * N * BETA / ALPHA))
    assert "With 237 pieces the chain takes 89.7 ms, 12 % over the bound: the fastest" in prose
    assert best == 237
    assert round(chain_s(16, N, best) * 1e3, 1) == 89.7
    assert round(chain_s(16, N, best) / bound - 1, 2) == 0.12
    assert chain_s(16, N, best) < min(times.values())
    assert "it was more than twice as slow" in prose
    assert times["chain"] > 2 * chain_s(16, N, best)
    assert "with half of $k^$ pieces, or twice $k^$, you lose less than 3 %" in prose
    assert max(chain_s(16, N, k) for k in (best // 2, 2 * best)) < 1.03 * chain_s(16, N, best)
    assert "less than 3 % here, and never more than an eighth" in prose
    worst = {k: chain_s(1002, 25_000_000, k) for k in (500, 1000, 2000)}  # (p−2)α = nβ: all 4 equal
    assert worst[500] == pytest.approx(worst[2000]) == pytest.approx(9 / 8 * worst[1000])


def test_the_chain_takes_what_its_form_says_for_any_k() -> None:
    rows = re.findall(r"([\d.]+) ms, predicted +([\d.]+) ms", printed("cell-025"))
    assert len(rows) == 8
    assert all(simulated == predicted for simulated, predicted in rows)


@pytest.mark.parametrize(("ranks", "n"), [(3, 10**6), (5, 10**7), (16, N), (128, 10**6)])
def test_the_formula_finds_the_best_of_all_k(prose: str, ranks: int, n: int) -> None:
    assert r"k^ = \sqrt{\frac{(p-2)\,n\beta}{\alpha}}" in prose  # k*, its star taken for emphasis
    best = math.sqrt((ranks - 2) * n * BETA / ALPHA)
    least = min(chain_s(ranks, n, k) for k in range(1, int(4 * best) + 4))
    assert chain_s(ranks, n, max(1, round(best))) <= 1.002 * least


def test_where_tree_and_chain_and_scatter_allgather_stand(prose: str) -> None:
    def best(ranks: int, n: int) -> dict[str, float]:
        k = max(1, round(math.sqrt((ranks - 2) * n * BETA / ALPHA)))
        rest = {a: cost.time_s("broadcast", a, ranks, n, ALPHA, BETA)
                for a in ("binomial", "scatter_allgather")}
        return rest | {"chain": chain_s(ranks, n, k)}

    assert "Short vectors want the tree" in prose
    assert "keeps every port's share below 2n bytes, whatever p is" in prose
    for ranks in RANKS:
        trace = run(ranks, "broadcast", "scatter_allgather", 5040 * 13 * 4).trace
        assert all(max(trace.sent_bytes(r), trace.received_bytes(r)) < 2 * 5040 * 13 * 4
                   for r in range(ranks))
    assert "in 8 pieces (with its best k it would win at the right end)" in prose
    assert "a well-cut chain comes closer to the bound still, at 100 MB" in prose
    for ranks in (16, 128, 1024):
        short, long = best(ranks, 1024), best(ranks, 100 * 1024**2)
        assert min(short, key=lambda a: short[a]) == "binomial"
        assert min(long, key=lambda a: long[a]) == "chain"
    assert "on 1024 ranks the tree wins again at 1 MB" in prose
    middle = best(1024, 1024**2)
    assert min(middle, key=lambda a: middle[a]) == "binomial"


# ---- duals -------------------------------------------------------------------------------------


def test_duals_are_each_other_turned_round(prose: str) -> None:
    assert "Turn every arrow round" in prose
    assert printed("cell-037").count(": True") == 5


# ---- scatter, all-gather -----------------------------------------------------------------------


def test_the_scatter_of_eight(prose: str) -> None:
    assert "Four: rank 4 got the pieces 4 to 7 in round 1, and has handed 6 and 7 on" in prose
    animation = recording.stepper_frames("scatter", "binomial", 8)
    assert [(a.src, a.dst, a.pieces) for a in animation[1].arrows] == [(0, 4, (4, 5, 6, 7))]
    assert (4, 6, (6, 7)) in [(a.src, a.dst, a.pieces) for a in animation[2].arrows]
    assert "For long vectors linear_nonblocking is faster by a few α" in prose
    linear, at_once, tree = (run(16, "scatter", algorithm, N).elapsed_s
                             for algorithm in ("linear", "linear_nonblocking", "binomial"))
    assert at_once == pytest.approx(tree - 3 * ALPHA)
    assert tree < linear


@pytest.mark.parametrize("ranks", RANKS)
def test_an_all_reduce_is_a_reduce_scatter_then_an_all_gather(prose: str, ranks: int) -> None:
    assert "An all-reduce is a reduce-scatter, then an all-gather." in prose
    whole, *halves = (cost.time_s(name, "ring", ranks, 4 * 5040 * 13, ALPHA, BETA)
                      for name in ("all_reduce", "reduce_scatter", "all_gather"))
    assert sum(halves) == pytest.approx(whole)
    assert printed("cell-049").count(": ") == 3
    assert "False" not in printed("cell-049")


@pytest.mark.parametrize("ranks", [r for r in RANKS if r & (r - 1)])
def test_folding_costs_two_rounds_and_bytes(prose: str, ranks: int) -> None:
    assert "a neighbour stand in for each rank beyond the largest power of two (folding, " \
        "chapter 05b), which" in prose
    n = 40_000 * ranks
    floor = ranks.bit_length() - 1
    assert cost.rounds("all_gather", "recursive_doubling", ranks, n) == floor + 2
    doubling, bruck = (run(ranks, "all_gather", a, n) for a in ("recursive_doubling", "bruck"))
    assert doubling.elapsed_s > bruck.elapsed_s


def test_a_collective_is_no_barrier(prose: str) -> None:
    assert "A collective isn't a barrier" in prose

    def late(comm: Comm) -> float:
        with comm.compute("work", seconds=float(comm.rank == 3)):
            pass
        collectives.broadcast(comm, torch.ones(3))
        return comm.now()

    values = simulate(late, network=network(4)).values
    assert max(values[:2]) < 1.0 <= values[3]
