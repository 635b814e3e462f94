"""What chapter 05 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch

from dtlab import Comm, cost, recording, simulate
from dtlab.collectives import ALGORITHMS, all_reduce
from dtlab.topology import uniform
from tests.notebooks.chapter import Chapter

ALPHA, BETA, N = 20e-6, 0.8e-9, 102_400_000
TOLD = ("flat", "tree", "ring")
RANKS = [*range(1, 10), 13]
printed = Chapter("05").printed


def reduced(comm: Comm, algorithm: str, elements: int) -> None:
    all_reduce(comm, torch.empty(elements, device="meta"), algorithm=algorithm)


def sent(algorithm: str, ranks: int, elements: int) -> list[int]:
    """Bytes by rank; every algorithm's test compares them with the simulator's."""
    return cost.sent_bytes("all_reduce", algorithm, ranks, 4 * elements)


def took_s(algorithm: str, ranks: int, nbytes: int, gamma: float = 0.0) -> float:
    """In the simulator, or by a closed form that is exact: every algorithm's test compares them."""
    if cost.form("all_reduce", algorithm, ranks, nbytes).exact:
        return cost.time_s("all_reduce", algorithm, ranks, nbytes, ALPHA, BETA, gamma)
    network = uniform(ranks, ALPHA, 1 / BETA)
    return simulate(reduced, algorithm, nbytes // 4, network=network, trace=False,
                    gamma=gamma).elapsed_s


def ring_s(ranks: int, nbytes: float, beta: float = BETA) -> float:
    return 2 * (ranks - 1) * ALPHA + 2 * (ranks - 1) / ranks * nbytes * beta


def test_the_example(prose: str) -> None:
    assert "ResNet-50 has about 25.6 million parameters" in prose
    assert N == 4 * 25_600_000
    assert "β = 0.8 ns for each byte (1.25 GB/s)" in prose
    assert "10 Gb/s" in prose
    assert pytest.approx(10e9 / 8) == 1 / BETA


def test_four_machines_are_slower_than_one_with_flat_and_2_2_times_as_fast_with_a_ring(
    prose: str,
) -> None:
    def speedup(algorithm: str) -> float:
        return 4 * 0.150 / (0.150 + cost.time_s("all_reduce", algorithm, 4, N, ALPHA, BETA))

    assert "three quarters of the training step go into the all-reduce" in prose
    flat_s = cost.time_s("all_reduce", "flat", 4, N, ALPHA, BETA)
    assert flat_s / (0.150 + flat_s) == pytest.approx(0.75, abs=0.03)
    assert "2.2 instead of 0.94" in prose
    assert round(speedup("flat"), 2) == 0.94
    assert round(speedup("ring"), 1) == 2.2
    assert speedup("flat") < 1 < speedup("tree") < speedup("ring")
    assert "123 ms of sending are still there" in prose
    assert round(cost.time_s("all_reduce", "ring", 4, N, ALPHA, BETA) * 1e3) == 123


@pytest.mark.parametrize("ranks", RANKS)
def test_the_busiest_rank_sends_p_n_with_flat_lg_p_n_with_tree_and_the_bound_with_ring(
    prose: str, ranks: int
) -> None:
    for answer in ("A p·n", "B lg p·n", "C 2·n", "D n/p"):
        assert answer in prose
    assert "They already move the least there is in total" in prose
    for elements, algorithm in product((1000, 1001, 7, 0), TOLD):
        assert sum(sent(algorithm, ranks, elements)) == 2 * (ranks - 1) * 4 * elements
    n = 4 * 5040  # divisible by 1 to 10
    lg = math.ceil(math.log2(ranks))
    bound = Fraction(2 * (ranks - 1) * n, ranks)
    assert max(sent("flat", ranks, n // 4)) == (ranks - 1) * n
    assert max(sent("tree", ranks, n // 4)) <= max(lg, 1) * n
    ring = sent("ring", ranks, n // 4)
    assert Fraction(sum(ring), ranks) == bound < 2 * n
    if ranks < 11:
        assert set(ring) == {bound}
    assert max(ring) - min(ring) <= 8, "an element or two"


def test_the_tree_of_eight(prose: str) -> None:
    assert "6 instead of the flat algorithm's 14" in prose
    assert cost.rounds("all_reduce", "tree", 8, N) == 6
    assert cost.rounds("all_reduce", "flat", 8, N) == 14
    assert "The busiest ranks are 0, with three children, and 4, with a parent and two" in prose
    by_rank = sent("tree", 8, 1000)
    assert [rank for rank in range(8) if by_rank[rank] == max(by_rank)] == [0, 4]
    assert max(by_rank) == 3 * 4000
    assert "In the last round up, two ranks of eight are at work" in prose
    trace = simulate(reduced, "tree", 1000, network=uniform(8, 1.0, math.inf)).trace
    assert [(m.src, m.dst) for m in trace.transfers if m.start_s == 2.0] == [(4, 0)]


def test_where_the_ring_stands_after_three_and_six_rounds(prose: str) -> None:
    assert "chunk 1 is complete on rank 0 after round 3. After round 6 everyone has every" in prose
    animation = recording.stepper_frames("all_reduce", "ring", 4)
    assert animation[3].complete.nonzero()[1].tolist() == [1, 2, 3, 0]
    assert not animation[2].complete.any()
    assert not animation[5].done
    assert animation[6].done
    assert animation[6].step == animation[6].steps


@pytest.mark.parametrize("ranks", RANKS)
def test_a_ring_needs_no_more_memory_than_one_chunk(
    prose: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no rank needs more memory than one chunk beside the vector" in prose
    asked: list[int] = []
    empty_like = torch.empty_like

    def counted(like: torch.Tensor) -> torch.Tensor:
        asked.append(like.numel())
        return empty_like(like)

    def ring(comm: Comm) -> None:
        ALGORITHMS["all_reduce"]["ring"](comm, torch.zeros(1000), "sum")

    monkeypatch.setattr(torch, "empty_like", counted)
    simulate(ring, network=uniform(ranks, 0.0, math.inf))
    one_chunk = -(-1000 // ranks)
    assert asked == [one_chunk] * ranks


def test_small_vectors_want_a_tree_by_a_factor_of_nine(prose: str) -> None:
    assert "on 64 ranks by a factor of nine: a ring needs 126 rounds where the tree needs" in prose
    tree, ring = (cost.time_s("all_reduce", a, 64, 4000, ALPHA, BETA) for a in ("tree", "ring"))
    assert round(ring / tree) == 9
    assert cost.rounds("all_reduce", "ring", 64, 4000) == 126
    assert cost.rounds("all_reduce", "tree", 64, 4000) == 12


@pytest.mark.parametrize("ranks", [3, 4, 5, 8, 13, 64, 1024])
@pytest.mark.parametrize(("alpha", "beta"), [(ALPHA, BETA), (ALPHA / 10, BETA), (ALPHA, BETA / 10)])
def test_the_crossover_is_where_the_formula_says(
    prose: str, ranks: int, alpha: float, beta: float
) -> None:
    assert "n is proportional to α/β" in prose  # n*, its star taken for emphasis
    lg = (ranks - 1).bit_length()
    n = (ranks - 1 - lg) / (lg - (ranks - 1) / ranks) * alpha / beta
    if n:  # three ranks: the ring is never slower
        tree, ring = (
            cost.time_s("all_reduce", a, ranks, round(n / 4 / ranks) * 4 * ranks, alpha, beta)
            for a in ("tree", "ring")
        )
        assert tree == pytest.approx(ring, rel=0.03)


def test_the_byte_term_doubles_and_the_latency_term_grows(prose: str) -> None:
    assert "the factor is 2(p−1)/p, and between 2 and 1024 machines it doubles" in prose
    assert round((2 * 1023 / 1024) / (2 * 1 / 2), 2) == 2
    assert "the small message takes 55 times as long on 1024 machines as on 16" in prose
    assert round(ring_s(1024, N // 1000) / ring_s(16, N // 1000)) == 55
    assert "about 41 ms at p = 1024" in prose
    assert round(ring_s(1024, 0) * 1e3) == 41


def test_a_thousand_ranks_are_no_wall(prose: str) -> None:
    def busy(ranks: int, nbytes: float) -> float:
        return 1 - ring_s(ranks, 0) / ring_s(ranks, nbytes)

    assert "For 1024 ranks that is a vector of n = p·α/β = 25.6 MB" in prose
    assert busy(1024, 25.6e6) == pytest.approx(0.5)
    assert "For 1 GB of gradients the ring keeps 1024 ports 98 % busy" in prose
    assert round(busy(1024, 1e9), 2) == 0.98
    assert "for 1 MB it wastes half of the time on 40 ranks already" in prose
    assert busy(40, 1e6) == pytest.approx(0.5)


def test_the_orders_of_summing_that_the_chapter_explains(prose: str) -> None:
    assert "all ranks have the same bits, with each of the three" in prose
    assert "((2²⁴ + 1) + 1) − 2²⁴ = 0" in prose
    assert "(2²⁴ + 1) + (1 − 2²⁴) = 1" in prose
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert ((big + one) + one) - big == 0
    assert (big + one) + (one - big) == 1
    parts = [big, one, one, -big]
    chunks = [((parts[c] + parts[c - 3]) + parts[c - 2]) + parts[c - 1] for c in range(4)]
    assert chunks == [0, 2, 2, 2]  # chunk c starts at rank c and goes round


def test_small_chunks_hide_most_of_the_adding_and_send_more_messages(prose: str) -> None:
    assert "messages, 2(p−1)k from each rank if a chunk is cut into k" in prose
    plain, adding = (took_s("ring", 4, N, gamma) for gamma in (0.0, 0.2e-9))
    hidden = adding - took_s("pipelined_ring", 4, N, 0.2e-9)
    assert 0.8 < hidden / (adding - plain) < 1
    pieces = -(-(N // 4) // (1 << 20))
    assert set(cost.messages("all_reduce", "pipelined_ring", 4, N)) == {6 * pieces}


def test_rank_0_adds_without_a_break_in_its_messages(prose: str) -> None:
    assert "From 1.8 ms on, its port receives and sends without a break" in prose
    result = simulate(reduced, "pipelined_ring", 4_000_000, network=uniform(4, ALPHA, 1 / BETA),
                      gamma=0.2e-9)
    for end in ("src", "dst"):
        until = 1.801e-3
        for m in sorted(result.trace.transfers, key=lambda m: m.start_s):
            if getattr(m, end) == 0 and m.end_s > 1.8e-3:
                assert m.start_s <= until
                until = max(until, m.end_s)
        assert until == pytest.approx(result.elapsed_s, rel=0.02)


def test_a_ring_without_chunks_is_as_slow_as_flat(prose: str) -> None:
    assert "As slow as flat, on a perfect circle" in prose
    rows = re.findall(r"(\d+) ranks: whole +([\d.]+) ms, in chunks +([\d.]+) ms", printed("whole"))
    assert len(rows) == 2
    for ranks, whole, chunks in ((int(p), float(a), float(b)) for p, a, b in rows):
        assert whole == pytest.approx(took_s("flat", ranks, N) * 1e3, abs=0.06)
        assert "p times, but for latency" in prose
        assert whole / chunks == pytest.approx(ranks, rel=0.01)


def test_a_ring_gives_31_of_40_gpus_and_a_straight_line(prose: str) -> None:
    assert "such that 40 GPUs come out at 31" in prose
    rows = [[float(x) for x in re.findall(r"[\d.]+", line)]
            for line in printed("baidu").splitlines()[1:]]
    speedup = {int(row[0]): (row[2], row[4]) for row in rows}
    assert round(speedup[40][0]) == 31
    for (ranks, (fast, slow)), (more, (faster, less_slow)) in pairwise(
            (p, s) for p, s in speedup.items() if p >= 8):
        assert (faster - fast) / (more - ranks) == pytest.approx(0.77, abs=0.015)
        assert (less_slow - slow) / (more - ranks) == pytest.approx(0.25, abs=0.02)
    assert "each GPU from the eighth on adds about 0.77 of a GPU" in prose
    assert "a quarter of a GPU for each" in prose
