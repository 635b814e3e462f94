"""What chapter 04b says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest

from dtlab import cost, recording
from dtlab.collectives import ALGORITHMS
from dtlab.collectives.auto import cheapest
from dtlab.machine import Machine
from tests.notebooks.chapter import Chapter
from tests.notebooks.test_claims_04 import ALPHA, BETA, RANKS, N, run


@pytest.mark.parametrize("ranks", RANKS)
def test_binomial_scatter_and_gather_and_brucks_all_gather_meet_the_bound(
    prose: str, ranks: int
) -> None:
    assert "Bruck's all-gather, at every size, for any p" in prose
    for n in (4 * ranks, 4000 * ranks, 400_000 * ranks):
        for collective, name in (("scatter", "binomial"), ("gather", "binomial"),
                                 ("all_gather", "bruck")):
            assert cost.time_s(collective, name, ranks, n, ALPHA, BETA) == pytest.approx(
                cost.lower_bound_s(collective, ranks, n, ALPHA, BETA))


def test_rank_zeros_piece_for_rank_three_goes_through_rank_one(prose: str) -> None:
    assert "Rank 1 has rank 0's piece for rank 3 (blue, column 3)" in prose
    animation = recording.stepper_frames("all_to_all", "bruck", 5)
    has = [[rank for rank in range(5) if frame.holds[rank, 3, 0]] for frame in animation]
    assert has[1] == [0, 1]
    assert has[2] == [0, 1, 3]


@pytest.mark.parametrize("ranks", RANKS)
def test_bruck_sends_about_half_a_round_and_never_more(prose: str, ranks: int) -> None:
    assert "with all pieces whose d has that bit: half of them" in prose
    n, lg = 400 * ranks, math.ceil(math.log2(ranks))
    trace = run(ranks, "all_to_all", "bruck", n).trace
    assert all(trace.messages(rank) == lg for rank in range(ranks))
    assert all(trace.sent_bytes(rank) <= n * lg / 2 for rank in range(ranks))
    if ranks & (ranks - 1) == 0:
        assert trace.sent_bytes(0) == n * lg / 2


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mesh_sends_a_row_and_a_column_of_messages(prose: str, ranks: int) -> None:
    assert "X + Y − 2 messages a rank instead of p − 1, in two steps" in prose
    assert "There the mesh is linear" in prose
    x, y = min(((p, ranks // p) for p in range(1, ranks + 1) if ranks % p == 0),
               key=lambda grid: (abs(grid[0] - grid[1]), grid[1]))
    trace = run(ranks, "all_to_all", "mesh", 400 * ranks).trace
    straight = run(ranks, "all_to_all", "linear", 400 * ranks).trace
    for rank in range(ranks):
        assert trace.messages(rank) == x + y - 2
        direct = 400 * (x - 1 + y - 1)  # to its own row and column
        assert trace.sent_bytes(rank) == direct + 2 * 400 * (ranks - x - y + 1) == (
            2 * straight.sent_bytes(rank) - direct)
    assert "(X − 1)(Y − 1) of a rank's p pieces, 3 of 8 on a 4 × 2 grid" in prose


def test_after_one_round_of_the_mesh_a_column_knows_what_its_row_has_to_say(prose: str) -> None:
    assert "for each rank in its own column, the pieces of its whole row" in prose
    frame = recording.stepper_frames("all_to_all", "mesh", 6)[1]
    for me, to in itertools.product(range(6), repeat=2):
        row = [rank for rank in range(6) if rank // 3 == me // 3]
        has = [source for source in range(6) if frame.holds[me, to, source]]
        assert has == (row if to % 3 == me % 3 else [me])


def test_where_cores_are_few_the_fewest_messages_then_the_fewest_bytes_win(prose: str) -> None:
    assert "Small pieces: the fewest messages. Large ones: the fewest bytes. In between" in prose
    laptop = Machine(alpha=60e-6, beta=0.25e-9, gamma=0, lanes=2, overhead=20e-6)
    parts = (64, 8192, 32_768, 131_072)
    assert [cheapest("all_to_all", 8, 8 * part, 4, laptop) for part in parts] == [
        "central", "central", "mesh", "linear"]
    assert "Linear: 56 messages in all" in prose
    assert "Mesh, 4 × 2: 32, in two steps. Bruck: 24, in three. Central: 14" in prose
    names = ("linear", "mesh", "bruck", "central")
    assert [len(run(8, "all_to_all", name, 8 * 400).trace.transfers) for name in names] == [
        56, 32, 24, 14]
    assert "Bruck's is first at none of these four sizes" in prose
    assert "Only for pieces of about 24 kB is it first, narrowly" in prose
    assert [cheapest("all_to_all", 8, 8 * kB * 1000, 4, laptop) for kB in (22, 24, 26)] == [
        "central", "bruck", "mesh"]


@pytest.mark.parametrize("ranks", RANKS)
def test_central_has_every_piece_pass_through_rank_0(prose: str, ranks: int) -> None:
    assert "2(p − 1) messages in all, no more; but every piece passes through rank 0" in prose
    trace = run(ranks, "all_to_all", "central", 400 * ranks).trace
    assert len(trace.transfers) == 2 * (ranks - 1)
    assert all(0 in (m.src, m.dst) for m in trace.transfers)


def test_where_each_rank_has_a_port_central_is_the_last(prose: str) -> None:
    assert "as in section 5, central is last, and for large pieces by far" in prose
    for p, piece in itertools.product((8, 16), (64, 100_000)):
        took = {name: run(p, "all_to_all", name, p * piece).elapsed_s
                for name in ALGORITHMS["all_to_all"]}
        assert took.pop("central") / max(took.values()) > (1 if piece == 64 else 1.8)


@pytest.mark.parametrize("ranks", RANKS)
def test_after_two_rounds_a_scan_covers_four_ranks_that_end_with_mine(
    prose: str, ranks: int
) -> None:
    assert "After two rounds rank r has the sum of the four ranks that end with r" in prose
    animation = recording.stepper_frames("scan", "recursive_doubling", ranks)
    frame = animation[min(2, len(animation) - 1)]
    for rank in range(ranks):
        covered = frame.holds[rank, 0].nonzero()[0].tolist()
        assert covered == list(range(max(0, rank - 3), rank + 1))


def test_who_keeps_the_order(prose: str) -> None:
    """A scan and recursive doubling, on more ranks: tests/collectives/test_every_algorithm.py."""
    assert "take a scan, a binomial reduce to rank 0, or recursive doubling" in prose
    root_0, root_2, doubling, ring = map(json.loads, re.findall(  # digits, one behind the other
        r"\[[\d, ]+\]", Chapter("04b").printed("cell-065")))
    assert root_0 == doubling == [12345] * 5 != root_2
    assert len(set(ring)) == 5, "every chunk in another order"


@pytest.mark.parametrize(("ranks", "n"), [(16, 99_999_936), (16, 1024), (13, 13 * 80_000)])
def test_simulated_equals_the_closed_form_and_never_beats_the_bound(
    prose: str, ranks: int, n: int
) -> None:
    assert "Where p is no power of two, the all-gather by recursive doubling, the reduce-scatter" \
        in prose  # recomputed for chapter 04
    assert "Simulated equals closed form everywhere, but where one rank receives from all" in prose
    incast = {("gather", "linear_nonblocking"), ("all_to_all", "central")}
    ratios = {}
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms if collective != "all_reduce" else ():
            form = cost.form(collective, algorithm, ranks, n)
            took = (form.seconds(ALPHA, BETA, 0.0) if form.exact  # as tests/cost proves
                    else run(ranks, collective, algorithm, n).elapsed_s)
            call = collective, algorithm
            assert form.exact or call in incast or algorithm == "pipelined_ring"
            bound = cost.lower_bound_s(collective, ranks, n, ALPHA, BETA)
            of_bytes = cost.lower_bound_s(collective, ranks, n, 0.0, BETA)
            of_rounds = bound - of_bytes
            if form.together:  # "its ratio may be a little below 1"
                assert took >= of_bytes * (1 - 1e-9)
                assert took >= of_rounds or call == ("gather", "linear_nonblocking")
            else:
                assert took >= bound * (1 - 1e-9)
            ratios[call] = took / bound
    if n == 1024:
        assert "whatever has ⌈lg p⌉ of them is near 1" in prose
        assert ratios["gather", "linear_nonblocking"] < 0.3
        for (collective, algorithm), ratio in ratios.items():
            if cost.rounds(collective, algorithm, ranks, n) == 4:
                assert ratio < 1.05


def test_no_broadcast_or_reduce_is_best_for_both_sizes(prose: str) -> None:
    assert "No algorithm of broadcast or reduce is near 1 in both tables for 16 ranks" in prose
    for collective in ("broadcast", "reduce"):
        for algorithm in ALGORITHMS[collective]:
            ratios = [cost.time_s(collective, algorithm, 16, n, ALPHA, BETA)
                      / cost.lower_bound_s(collective, 16, n, ALPHA, BETA) for n in (1024, N)]
            assert max(ratios) > 1.8


# ---- bandwidths --------------------------------------------------------------------------------


def test_bus_bandwidth_is_that_of_the_wire_for_a_ring_on_any_number_of_ranks(prose: str) -> None:
    """The factors of the chapter's table are those of `cost.bus_factor`."""
    for p in (4, 32):
        factors = {"all-reduce": 2 * (p - 1) / p, "all-gather": (p - 1) / p, "broadcast": 1.0}
        for name, factor in factors.items():
            assert cost.bus_factor(name.replace("-", "_"), p) == factor
    for row in ("| all-reduce | 2(p−1)/p |", "| broadcast, reduce | 1 |",
                "| reduce-scatter, all-gather, all-to-all; scatter, gather | (p−1)/p |"):
        assert row in prose
    assert "on 4 ranks in 60 ms? n divided by the time is its algorithm bandwidth: 1.67" in prose
    ring_s = run(4, "all_gather", "ring", N).elapsed_s
    assert round(ring_s * 1e3) == 60
    assert round(N / ring_s / 1e9, 2) == 1.67

    def bus(collective: str, algorithm: str, ranks: int) -> float:
        rate = N / run(ranks, collective, algorithm, N).elapsed_s
        return rate * cost.bus_factor(collective, ranks) * BETA  # as a share of the wire

    assert "The rings' bus bandwidth is that of the wire, 1.25 GB/s, less a little for α" in prose
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        assert 0.99 < bus(collective, "ring", 32) < bus(collective, "ring", 4) < 1
    assert "Both flat ones fall to a tenth or so" in prose
    for collective in ("all_reduce", "broadcast"):
        fall = bus(collective, "flat", 32) / bus(collective, "flat", 4)
        assert fall == pytest.approx(0.1, abs=0.03)
    assert "reaches two thirds of the wire on 4 ranks, half of it on 32" in prose
    assert [round(bus("broadcast", "scatter_allgather", p), 1) for p in (4, 32)] == [0.7, 0.5]
    assert "can't reach more than p/(2(p−1)) of the wire: two thirds on 4 ranks" in prose
    for p in (4, 32):
        share = bus("all_reduce", "ring", p) / cost.bus_factor("all_reduce", p)
        assert 0.99 * p / (2 * (p - 1)) < share < p / (2 * (p - 1))


def test_what_each_broadcast_moves_in_all_on_four_ranks(prose: str) -> None:
    assert "3 n in 3 messages for flat and binomial, 3 n in 24 for the chain, 4 n in 15" in prose
    traces = [run(4, "broadcast", a, N).trace for a in ALGORITHMS["broadcast"]]
    assert list(ALGORITHMS["broadcast"]) == ["flat", "binomial", "chain", "scatter_allgather"]
    assert [trace.sent_bytes() / N for trace in traces] == [3, 3, 3, 4]
    assert [len(trace.transfers) for trace in traces] == [3, 3, 24, 15]


def test_the_guess_six_rounds_for_4032_pieces(prose: str) -> None:
    assert "63 · 20 µs = 1260 µs" in prose
    assert "63 others: 4032 pieces" in prose
    assert 64 * 63 == 4032
    took = {name: cost.time_s("all_to_all", name, 64, 64 * 4, ALPHA, BETA)
            for name in ALGORITHMS["all_to_all"]}
    assert round(took["pairwise"] * 1e6) == 1260
    assert min(took, key=took.__getitem__) == "bruck"
    assert round(took["bruck"] * 1e6) == 121
    assert cost.rounds("all_to_all", "bruck", 64, 256) == 6


def test_the_table_also_takes_one_rank_which_sends_nothing() -> None:
    table = Chapter("04b").defined("setup", "network", "call", "cell-073")["table"]
    assert "| all_to_all bruck | 0 | 0.00 n |" in table(1, 1024).data
