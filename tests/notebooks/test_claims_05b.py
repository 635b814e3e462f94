"""What chapter 05b says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import inspect
import math
import re
from itertools import combinations
from typing import Any

import pytest
import torch

import dtlab
from dtlab import Comm, cost, plots, recording, simulate
from dtlab.calibration import overhead_s
from dtlab.collectives import ALGORITHMS, all_gather, all_reduce
from dtlab.collectives.all_reduce_trees import Tree
from dtlab.cost.folding import binary_digits
from dtlab.machine import TYPICAL
from dtlab.topology import uniform
from tests.notebooks.chapter import Chapter
from tests.notebooks.test_claims_05 import (
    ALPHA,
    BETA,
    RANKS,
    N,
    reduced,
    sent,
    took_s,
)

CHAPTER = Chapter("05b")
printed = CHAPTER.printed
EVERY = list(ALGORITHMS["all_reduce"])
TOLD = ["flat", "tree", "ring", "recursive_doubling", "halving_doubling", "binary_blocks",
        "double_tree"]
POWERS = [2**k for k in range(1, 11)]
FREE = 1e99  # a bandwidth


def time_s(algorithm: str, ranks: int, nbytes: int) -> float:
    return cost.time_s("all_reduce", algorithm, ranks, nbytes, ALPHA, BETA)


def rounds(algorithm: str, ranks: int, elements: int = 1000) -> float:
    return simulate(reduced, algorithm, elements, network=uniform(ranks, 1.0, FREE)).elapsed_s


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_recursive_doubling_needs_the_fewest_rounds_and_too_many_bytes(
    prose: str, ranks: int
) -> None:
    assert "each rank sends lg p·n, and all together 24 n where 14 n would do" in prose
    lg = ranks.bit_length() - 1
    assert rounds("recursive_doubling", ranks) == lg
    assert set(sent("recursive_doubling", ranks, 1000)) == {4000 * lg}
    animation = recording.stepper_frames("all_reduce", "recursive_doubling", ranks)
    for step, frame in enumerate(animation):  # both know the same, and twice as much as before
        assert (frame.holds.sum(axis=2) == 2**step).all()


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13])
def test_a_rank_hears_from_many_in_one_round_but_tells_one(prose: str, ranks: int) -> None:
    assert "each of them can send it to one other rank, for a port starts one message at" in prose

    def all_to_one(comm: Comm, towards: bool) -> None:
        pairs = [(r, 0) if towards else (0, r) for r in range(1, comm.size)]
        comm.exchange(*(dtlab.Send(torch.zeros(1), to) for of, to in pairs if of == comm.rank),
                      *(dtlab.Recv(torch.zeros(1), of) for of, to in pairs if to == comm.rank))

    starts = uniform(ranks, 1.0, FREE)
    assert simulate(all_to_one, True, network=starts).elapsed_s == pytest.approx(1)
    assert simulate(all_to_one, False, network=starts).elapsed_s == pytest.approx(ranks - 1)
    assert all(rounds(name, ranks) > (ranks - 1).bit_length() - 1e-6 for name in EVERY)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_halving_leaves_one_complete_chunk_and_sends_the_rings_bytes(
    prose: str, ranks: int
) -> None:
    assert "after lg p rounds each rank holds one chunk of n/p, complete" in prose
    assert "the ring's bytes, and the bound. But in 2 lg p rounds, not 2(p−1)" in prose
    lg = ranks.bit_length() - 1
    animation = recording.stepper_frames("all_reduce", "halving_doubling", ranks)
    assert animation[lg].complete.sum(axis=1).tolist() == [1] * ranks
    assert len(animation) - 1 == 2 * lg
    assert set(sent("halving_doubling", ranks, 1024)) == {2 * (ranks - 1) * 4096 // ranks}


@pytest.mark.parametrize("ranks", POWERS)
def test_for_powers_of_two_halving_is_no_slower_than_the_ring_and_as_fast_as_blocks(
    prose: str, ranks: int
) -> None:
    assert "the ring is nowhere the faster one, for any power of two" in prose
    for nbytes in (4096, 4096**2, 4096**3):
        assert time_s("halving_doubling", ranks, nbytes) <= time_s("ring", ranks, nbytes) * 1.0001
    assert "cost the same but for the rounding of the chunks (under 1 %)" in prose
    assert "Large vector, p a power of two, 4 or more" in prose
    fastest = min(("flat", "tree", "ring", "recursive_doubling", "halving_doubling",
                   "binary_blocks", "double_tree"), key=lambda a: time_s(a, ranks, 10**9))
    assert (fastest in ("halving_doubling", "binary_blocks")) == (ranks >= 4)
    for nbytes in (1264, 40_000, 100_000, 10**6, N):
        blocks, halving = (time_s(a, ranks, nbytes) for a in ("binary_blocks", "halving_doubling"))
        assert blocks == pytest.approx(halving, rel=0.01)


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_folding_makes_recursive_doubling_take_two_rounds_more(prose: str, ranks: int) -> None:
    assert "else folding, section 5, makes it (⌊lg p⌋ + 2)(α + nβ)" in prose
    floor, power = ranks.bit_length() - 1, ranks & (ranks - 1) == 0
    assert time_s("recursive_doubling", ranks, N) == pytest.approx(
        (floor + (0 if power else 2)) * (ALPHA + N * BETA))


def test_the_ninth_machine_more_than_doubles_the_time(prose: str) -> None:
    assert "our 102.4 MB take 143 ms on 8 ranks" in prose
    assert "The ninth machine more than doubles the time: 3.75 n cross the longest path" in prose
    eight, nine = (took_s("halving_doubling", p, N) for p in (8, 9))
    assert int(eight * 1e3) == 143
    assert nine / eight > 2
    longest = [cost.form("all_reduce", "halving_doubling", p, N).path_bytes / N for p in (8, 9)]
    assert longest == [1.75, 3.75]


def test_balanced_blocks_pay_and_lopsided_ones_do_not(prose: str) -> None:
    assert "balanced: blocks pay 23 % and 11 % over the bound, where folding pays more" in prose
    assert "16 + 1 is lopsided" in prose
    assert "And 8 + 4 + 1 is a little worse than folding" in prose

    found = {int(p): [float(ms) for ms in row] for p, *row in re.findall(
        r"^ *(\d+) .*?([\d.]+\.\d) +([\d.]+) +([\d.]+) +([\d.]+)$", printed("more-22"), re.M)}
    assert [len(binary_digits(p)) for p in (12, 24, 17, 13)] == [2, 2, 2, 3]
    for ranks, percent in ((12, 23), (24, 11)):
        folded, blocks, ring, bound = found[ranks]
        assert blocks / folded < 0.65
        assert 1 < blocks / ring < 1.25
        assert blocks / bound == pytest.approx(1 + percent / 100, abs=0.01)
        assert folded > 2 * bound
    assert found[17][1] / found[17][0] == pytest.approx(1, abs=0.01)
    assert 1 < found[13][1] / found[13][0] < 1.1


def test_what_the_ranks_hold_when_the_blocks_hand_up(prose: str) -> None:
    assert "it holds a quarter of x with 4 contributions. Ranks 0 and 4 each take a half" in prose
    animation = recording.stepper_frames("all_reduce", "binary_blocks", 12)
    assert (animation[3].holds[8].sum(axis=1) == 4).sum() == animation[3].pieces // 4
    assert sorted(a.dst for a in animation[4].arrows if a.src == 8) == [0, 4]
    assert "the second starts an α later, so section 7 counts 9 rounds" in prose
    assert len(animation) - 1 == 8
    assert rounds("binary_blocks", 12) == pytest.approx(9)


@pytest.mark.parametrize("ranks", [*RANKS[1:], 16, 17, 32])
def test_each_rank_is_inside_of_one_tree_and_a_leaf_of_the_other(prose: str, ranks: int) -> None:
    assert "each rank is inside of one tree and a leaf of the other" in prose
    assert "No rank sends more than 2 n, however many ranks there are" in prose
    assert "a rank has at most three neighbours in a tree" in prose
    trees = Tree(ranks, mirrored=False), Tree(ranks, mirrored=True)
    if ranks % 2 == 0:
        for rank in range(ranks):
            assert [bool(tree.children(rank)) for tree in trees] == [rank % 2 == 0, rank % 2 == 1]
    for tree in trees:
        assert all(len(tree.children(rank)) <= 2 for rank in range(ranks))
    assert max(sent("double_tree", ranks, 3200)) <= 2 * 4 * 3200
    if ranks % 2 == 0 and ranks > 2:
        assert "passes each of its segments up once and down twice; in the other tree" in prose
        assert max(cost.messages("all_reduce", "double_tree", ranks, N)) == 4 * 16


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_the_starts_of_two_trees_grow_by_four_for_a_segment_of_each(prose: str, ranks: int) -> None:
    assert "the number of α's grows like 2 lg p + 4k" in prose
    assert "k = 16 segments a tree, 32 in all" in prose

    def starts(k: int) -> float:
        def call(comm: Comm) -> None:
            x = torch.empty(6400, device="meta")
            all_reduce(comm, x, algorithm="double_tree", segments=k)

        return simulate(call, network=uniform(ranks, 1.0, FREE)).elapsed_s

    assert starts(32) - starts(16) == pytest.approx(64)
    assert starts(16) == pytest.approx(rounds("double_tree", ranks, 6400))
    assert starts(16) == pytest.approx(2 * math.log2(ranks) + 64, abs=5)


def test_two_trees_beat_one_and_the_ring_only_where_latency_rules(prose: str) -> None:
    assert "for large vectors they are better than the single tree, but behind the ring" in prose
    assert "for 100 kB on 63 ranks" in prose
    assert "so that even the single tree is ahead" in prose
    assert "from about 40 ranks on they leave the ring behind for all but large vectors" in prose
    large, small = ({name: float(ms) for name, ms in re.findall(
        rf"^(\w+) .*{size}: +([\d.]+) ms", printed("more-29"), re.M)}
        for size in ("8 ranks, 102.4 MB", "63 ranks, 100 kB"))
    assert small["tree"] < small["double_tree"] < small["ring"]
    assert took_s("double_tree", 44, 40_000) < took_s("ring", 44, 40_000)
    assert took_s("double_tree", 34, 40_000) > took_s("ring", 34, 40_000)
    assert large["ring"] < large["double_tree"] < large["tree"]
    assert took_s("ring", 63, N) < took_s("double_tree", 63, N) < took_s("tree", 63, N)
    animation = recording.stepper_frames("all_reduce", "double_tree", 8)
    assert sorted(arrow.src for arrow in animation[1].arrows) == list(range(8)), "leaves hand up"
    assert "by that estimate (8 ranks, 102.4 MB: 164 ms, the ring 144)" in prose
    assert round((2 * math.log2(8) * ALPHA + 2 * N * BETA) * 1e3) == 164
    assert "Why do they take 267 ms" in prose
    assert (round(large["ring"]), round(large["double_tree"])) == (144, 267)


def test_who_meets_which_bound(prose: str) -> None:
    assert "recursive doubling alone meets the bound, for powers of two" in prose
    assert "the pipelined ring and two of chapter 06's meet both for any p" in prose
    assert "All three: nobody here. Halving–doubling and binary blocks come nearest" in prose
    of_8, of_12 = printed("more-39").strip().split("\n\n")
    rings = {"ring", "pipelined_ring", "torus", "two_ring"}
    halving = {"halving_doubling", "halving_doubling_near", "binary_blocks"}
    for table, fewest, least in ((of_8, {"recursive_doubling"}, rings | halving),
                                 (of_12, set(), rings)):
        rows = dict(re.findall(r"^(\w+) +\d+ (.*)$", table, re.M))
        assert {*EVERY, "bound"} == rows.keys()
        assert {name for name, row in rows.items() if row.startswith("✓")} == fewest
        assert {name for name, row in rows.items() if row.lstrip("✓ ").count("✓") == 2} == least
        assert {row.lstrip("✓ ").count("✓") for row in rows.values()} == {0, 2}


def test_with_1000_ranks_the_ring_is_fastest_from_162_mb_and_with_1024_never(prose: str) -> None:
    assert "it says at most, and nothing is above it" in prose
    assert "1000 ranks, 512 + 256 + 128 + 64 + 32 + 8, it is, simulated from 162 MB on" in prose
    for megabytes, ring_wins in ((161, False), (162, True)):
        ring_s = cost.time_s("all_reduce", "ring", 1000, megabytes * 10**6, ALPHA, BETA)
        blocks_s = simulate(reduced, "binary_blocks", megabytes * 250_000,
                            network=uniform(1000, ALPHA, 1 / BETA)).elapsed_s
        assert (ring_s < blocks_s) == ring_wins
    assert "The closed forms say 135 MB: that of binary blocks is an upper bound." in prose
    assert cost.form("all_reduce", "ring", 1000, 10**8).exact
    assert not cost.form("all_reduce", "binary_blocks", 1000, 10**8).exact
    assert [1 << level for _, level in binary_digits(1000)] == [512, 256, 128, 64, 32, 8]
    last = plots.crossovers("all_reduce", TOLD, 1000, ALPHA, BETA)[-1]
    assert last.after == "ring"
    assert round(last.nbytes / 1e6) == 135
    turns = plots.crossovers("all_reduce", TOLD, 1024, ALPHA, BETA)
    assert all("ring" not in turn.after and "ring" not in turn.before for turn in turns)


def test_auto_knows_a_grid_for_12_ranks(prose: str) -> None:
    assert "It meets the bound in bytes in 10 rounds, where the ring takes 22" in prose
    assert (rounds("torus", 12), rounds("ring", 12)) == (10, 22)


def random_sum(comm: Comm, algorithm: str, elements: int = 20_000) -> torch.Tensor:
    mine = torch.rand(elements, generator=torch.Generator().manual_seed(comm.rank))
    return all_reduce(comm, mine, algorithm=algorithm)


def test_equal_letters_have_equal_bits_and_others_differ_by_a_few_last_places(prose: str) -> None:
    assert "binary blocks and `halving_doubling_near` all add in pairs first" in prose
    assert "at least a fifth of the sums differ, but only by a few units in the last" in prose
    network = uniform(8, 0.0, FREE)
    bits = {a: simulate(random_sum, a, network=network).values[0].view(torch.int32) for a in EVERY}
    alike = [{"tree", "recursive_doubling", "binary_blocks", "halving_doubling_near"},
             {"ring", "pipelined_ring"}]
    for one, other in combinations(EVERY, 2):
        apart = (bits[one] - bits[other]).abs()  # positive floats: their last places, counted
        if any({one, other} <= group for group in alike):
            assert not apart.any()
        else:
            assert (apart > 0).double().mean() > 0.2
            assert apart.max() <= 4


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_no_two_ranks_agree_if_each_begins_with_its_own(prose: str, ranks: int) -> None:
    assert "no two ranks agree" in prose

    def own_first(comm: Comm) -> torch.Tensor:
        mine = torch.rand(20_000, generator=torch.Generator().manual_seed(comm.rank))
        everyones, total = all_gather(comm, mine), mine.clone()
        for distance in range(1, comm.size):
            total += everyones[(comm.rank + distance) % comm.size]
        return total

    sums = simulate(own_first, network=uniform(ranks, 0.0, math.inf)).values
    for one, other in combinations(sums, 2):
        assert not torch.equal(one, other)
        assert torch.allclose(one, other, rtol=1e-6)


def test_what_the_chapter_says_of_lanes_and_bursts(prose: str) -> None:
    assert "all work divided by L, and (1 − 1/L) times the longest path" in prose
    asked = "all_reduce", "tree", 4, 4000
    path_s, work_s = cost.bounds_s(*asked, TYPICAL)
    assert TYPICAL.lanes == 2
    assert cost.predicted_s(*asked, TYPICAL) == pytest.approx(work_s + path_s / 2, rel=1e-9)
    assert "On the path, o counts once a message; on the lanes twice" in prose
    lone = TYPICAL._replace(beta=0.0)
    all_at_once = cost.bounds_s("all_to_all", "linear", 4, 4000, lone)
    assert all_at_once == pytest.approx(
        (lone.alpha + 2 * lone.overhead, (4 * lone.alpha + 8 * 2 * lone.overhead) / 2))
    at_the_root = cost.bounds_s("gather", "linear_nonblocking", 4, 4000, lone)[0]
    assert at_the_root == pytest.approx(lone.alpha + 2 * lone.overhead)
    assert "a pipelined ring is for networks: on the lanes it is only more messages" in prose
    for n in (1, 4, 16, 64):
        pieces, ring = (cost.predicted_s("all_reduce", name, 4, n << 20, TYPICAL)
                        for name in ("pipelined_ring", "ring"))
        assert pieces > ring if n > 4 else pieces == ring
    assert "sends bursts of 32 messages for o" in prose
    assert inspect.signature(overhead_s).parameters["messages"].default == 32


def test_the_worked_example_of_brents_bound(prose: str) -> None:
    for said in ("6 · (60 µs + 0.25 µs) = 361.5 µs; and three additions of 1 kB, 0.15 µs in all",
                 "24 · 60.25 µs = 1446 µs; on 2 lanes 723 µs", "723 µs + ½ · 361.65 µs = 903.8 µs"):
        assert said in prose
    assert TYPICAL[:4] == (60e-6, 0.25e-9, 0.05e-9, 2)
    ring = "all_reduce", "ring", 4, 4000
    assert cost.bounds_s(*ring, TYPICAL) == pytest.approx((361.65e-6, 723e-6))
    assert cost.predicted_s(*ring, TYPICAL) == pytest.approx(903.825e-6)
    assert "A tie: the tree's path is twice as long, and its work is three quarters" in prose
    tree, doubling = (("all_reduce", name, 4, 4000) for name in ("tree", "recursive_doubling"))
    assert cost.predicted_s(*tree, TYPICAL) == pytest.approx(cost.predicted_s(*doubling, TYPICAL))
    (path, work), (other_path, other_work) = (cost.bounds_s(*each, TYPICAL)
                                              for each in (tree, doubling))
    assert path == pytest.approx(2 * other_path, rel=0.01)
    assert work == pytest.approx(0.75 * other_work)


def test_the_guess_twenty_rounds_with_the_fewest_bytes(prose: str) -> None:
    assert "on 1024 ranks the ring takes 2046 rounds: 41 ms of nothing but latency" in prose
    assert cost.rounds("all_reduce", "ring", 1024, N) == 2046
    assert round(2046 * ALPHA * 1e3) == 41
    assert cost.rounds("all_reduce", "halving_doubling", 1024, N) == 20
    assert "The tree takes 20 rounds, but its busiest rank sends 10 n" in prose
    assert cost.rounds("all_reduce", "tree", 1024, N) == 20
    assert max(cost.sent_bytes("all_reduce", "tree", 1024, N)) == 10 * N


@pytest.mark.usefixtures("registering")
def test_the_thirteenth_algorithm_fills_the_gap_that_it_is_said_to_fill(prose: str) -> None:
    assert "where p is no power of two nobody gets by with so few" in prose
    assert "on 7 ranks recursive doubling takes 4, and the bound is 3" in prose
    assert rounds("recursive_doubling", 7) == pytest.approx(4)
    twelve = list(ALGORITHMS["all_reduce"])
    assert len(twelve) == 12
    for ranks in (3, 5, 6, 7, 9, 11, 12, 13):
        assert min(rounds(name, ranks) for name in twelve) > (ranks - 1).bit_length() + 0.9

    exec(CHAPTER.code_with("def gather_and_add"),
         {"dtlab": dtlab, "cost": cost, "all_gather": all_gather})
    for ranks in (*RANKS, 16):
        assert rounds("gather_and_add", ranks) == pytest.approx((ranks - 1).bit_length())
        trace = simulate(reduced, "gather_and_add", 1003, network=uniform(ranks, 1.0, FREE)).trace
        assert [trace.sent_bytes(rank) for rank in range(ranks)] == [(ranks - 1) * 4012] * ranks
    assert "Each rank receives (p−1)·n bytes" in prose
    assert "For small vectors, and where p is no power of two, it beats all twelve" in prose
    for ranks in (3, 5, 6, 7, 9, 11, 12, 13, 17):
        seconds = {name: cost.time_s("all_reduce", name, ranks, 40, ALPHA, BETA)
                   for name in ALGORITHMS["all_reduce"]}
        assert min(seconds, key=seconds.__getitem__) == "gather_and_add"
    assert "Run section 7 once more: its tables have a row for it now" in prose
    assert CHAPTER.code_with('EVERY = list(ALGORITHMS["all_reduce"])')
    first = plots.crossovers("all_reduce", [*twelve, "gather_and_add"], 7, ALPHA, BETA)[0]
    assert (first.before, first.after) == ("gather_and_add", "recursive_doubling")
    assert first.nbytes == pytest.approx(12_500, rel=0.01)  # 3α + 6nβ = 4α + 4nβ
    assert "On 8 ranks recursive doubling takes 3 rounds, too, and sends less" in prose
    assert max(sent("recursive_doubling", 8, 1003)) == 3 * 4012


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_each_chunk_of_a_ring_has_a_tree_of_its_own(prose: str, ranks: int) -> None:
    space: dict[str, Any] = {"recording": recording}
    exec(CHAPTER.source("p-trees").split("for algorithm in")[0], space)
    journeys, root_of = space["journeys"], space["root_of"]

    def roots(algorithm: str) -> list[int]:
        return [root_of(*trees, ranks) for trees in journeys(algorithm, ranks).values()]

    assert "the ring has p of them, each with a root of its own" in prose
    assert sorted(roots("ring")) == list(range(ranks))
    assert roots("tree") == [0] * ranks
    if ranks == 8:
        assert "and so has halving–doubling" in prose
        assert sorted(roots("halving_doubling")) == list(range(ranks))
    assert len({*roots("halving_doubling")}) == 1 << (ranks.bit_length() - 1)  # folded, too
    assert "paths without a branch" in prose
    for up, down in journeys("ring", ranks).values():
        assert all(b == (a + 1) % ranks for a, b in up + down)
        assert all(up[i][1] == up[i + 1][0] for i in range(ranks - 2))
    assert "In the tree it is" in prose  # the way down, a mirror of the way up
    for up, down in journeys("tree", ranks).values():
        assert {(b, a) for a, b in up} == set(down)
    assert root_of([(0, 1), (1, 0)], [(2, 0), (2, 1)], 3) is None  # no tree
    if ranks == 8:
        assert "those of halving–doubling are binomial trees, lg p deep" in prose
        for up, down in journeys("halving_doubling", ranks).values():
            assert {(b, a) for a, b in up} == set(down)
            children = [sum(b == rank for _, b in up) for rank in range(ranks)]
            assert sorted(children) == [0, 0, 0, 0, 1, 1, 2, 3]
