"""What chapter 04 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from dtlab import Comm, collectives, cost, plots, simulate
from dtlab.collectives import ALGORITHMS
from dtlab.collectives.auto import cheapest
from dtlab.cost.broadcast_reduce import chain_form
from dtlab.grading.exercise import catalogue
from dtlab.machine import Machine
from dtlab.topology import uniform

ROOT = Path(__file__).resolve().parent.parent.parent
ALPHA, BETA, N = 20e-6, 0.8e-9, 100_000_000
RANKS = [*range(1, 10), 13]


@pytest.fixture(scope="module")
def prose() -> str:
    """The text of the chapter, line breaks and emphasis removed."""
    notebook = nbformat.read(ROOT / "notebooks" / "04_collectives.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.sub(r"\s+", " ", text.replace("*", ""))


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
    assert "Rank 7 has it after step 3, from rank 6" in prose
    animation = plots.stepper_frames("broadcast", "binomial", 8)
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
    assert "With 237 segments the chain takes 89.7 ms, 12 % over the bound: the fastest" in prose
    assert best == 237
    assert round(chain_s(16, N, best) * 1e3, 1) == 89.7
    assert round(chain_s(16, N, best) / bound - 1, 2) == 0.12
    assert chain_s(16, N, best) < min(times.values())
    assert "it was more than twice as slow" in prose
    assert times["chain"] > 2 * chain_s(16, N, best)
    assert "with half of the best k, or twice as many, you lose less than 3 %" in prose
    assert max(chain_s(16, N, k) for k in (best // 2, 2 * best)) < 1.03 * chain_s(16, N, best)


@pytest.mark.parametrize(("ranks", "n"), [(3, 400_000), (4, 10**6), (9, 10**7), (16, 10**6)])
@pytest.mark.parametrize("segments", [1, 2, 7, 30])
def test_the_chain_takes_what_its_form_says_for_any_k(ranks: int, n: int, segments: int) -> None:
    took = run(ranks, "broadcast", "chain", n // (4 * ranks) * 4 * ranks, segments=segments)
    n = n // (4 * ranks) * 4 * ranks
    assert took.elapsed_s == pytest.approx(chain_s(ranks, n, segments), rel=1e-9)


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
    assert "a well-cut chain comes closer to the bound still" in prose
    for ranks in (16, 128, 1024):
        short, long = best(ranks, 1024), best(ranks, 100 * 1024**2)
        assert min(short, key=lambda a: short[a]) == "binomial"
        assert min(long, key=lambda a: long[a]) == "chain"
    assert "on 1024 ranks the tree wins again at 1 MB" in prose
    middle = best(1024, 1024**2)
    assert min(middle, key=lambda a: middle[a]) == "binomial"


# ---- duals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("one", "other"), [
    ("broadcast flat", "reduce flat"), ("broadcast binomial", "reduce binomial"),
    ("broadcast chain", "reduce chain"), ("scatter binomial", "gather binomial"),
    ("scatter linear", "gather linear"),
    ("all_gather recursive_doubling", "reduce_scatter recursive_halving"),
])
def test_duals_are_each_other_turned_round(prose: str, ranks: int, one: str, other: str) -> None:
    assert "Turn every arrow round" in prose
    n = 4 * 5040 * 13
    there, back = (run(ranks, *name.split(), n) for name in (one, other))
    turned = sorted((m.dst, m.src, m.nbytes) for m in there.trace.transfers)
    assert turned == sorted((m.src, m.dst, m.nbytes) for m in back.trace.transfers)
    assert there.elapsed_s == pytest.approx(back.elapsed_s)


# ---- scatter, all-gather, all-to-all -----------------------------------------------------------


def test_the_scatter_of_eight(prose: str) -> None:
    assert "Four: rank 4 got the pieces 4 to 7 in step 1, and has handed 6 and 7 on" in prose
    animation = plots.stepper_frames("scatter", "binomial", 8)
    assert [(a.src, a.dst, a.pieces) for a in animation[1].arrows] == [(0, 4, (4, 5, 6, 7))]
    assert (4, 6, (6, 7)) in [(a.src, a.dst, a.pieces) for a in animation[2].arrows]


@pytest.mark.parametrize("ranks", RANKS)
def test_binomial_scatter_and_gather_and_brucks_all_gather_meet_the_bound(
    prose: str, ranks: int
) -> None:
    assert "Bruck's all-gather, at every size, for any p" in prose
    for n in (4 * ranks, 4000 * ranks, 400_000 * ranks):
        for name in ("scatter binomial", "gather binomial", "all_gather bruck"):
            took = run(ranks, *name.split(), n).elapsed_s
            bound = cost.lower_bound_s(name.split()[0], ranks, n, ALPHA, BETA)
            assert took == pytest.approx(bound)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_all_reduce_is_a_reduce_scatter_then_an_all_gather(prose: str, ranks: int) -> None:
    assert "An all-reduce is a reduce-scatter, then an all-gather." in prose
    n = 4 * 5040 * 13
    halves = [run(ranks, name, "ring", n) for name in ("reduce_scatter", "all_gather")]
    whole = run(ranks, "all_reduce", "ring", n)
    assert sum(half.elapsed_s for half in halves) == pytest.approx(whole.elapsed_s)
    for rank in range(ranks):
        assert sum(h.trace.sent_bytes(rank) for h in halves) == whole.trace.sent_bytes(rank)

    def both(comm: Comm) -> bool:
        x = torch.arange(60 * comm.size).view(comm.size, -1) * (comm.rank + 3)
        mine = collectives.reduce_scatter(comm, x)
        together = collectives.all_gather(comm, mine)
        return torch.equal(together, collectives.all_reduce(comm, x.clone()))

    assert all(simulate(both, network=network(ranks)).values)


@pytest.mark.parametrize("ranks", [r for r in RANKS if r & (r - 1)])
def test_folding_costs_two_rounds_and_bytes(prose: str, ranks: int) -> None:
    assert "folds the ranks that are too many into neighbours, which costs two rounds" in prose
    n = 40_000 * ranks
    floor = ranks.bit_length() - 1
    assert cost.rounds("all_gather", "recursive_doubling", ranks, n) == floor + 2
    doubling, bruck = (run(ranks, "all_gather", a, n) for a in ("recursive_doubling", "bruck"))
    assert doubling.elapsed_s > bruck.elapsed_s
    assert "Where p is no power of two, recursive doubling and halving fall behind" in prose


def test_rank_zeros_part_for_rank_three_goes_through_rank_one(prose: str) -> None:
    assert "Rank 1 has rank 0's part for rank 3 (blue, column 3)" in prose
    animation = plots.stepper_frames("all_to_all", "bruck", 5)
    has = [[rank for rank in range(5) if frame.holds[rank, 3, 0]] for frame in animation]
    assert has[1] == [0, 1]
    assert has[2] == [0, 1, 3]


@pytest.mark.parametrize("ranks", RANKS)
def test_bruck_sends_about_half_a_round_and_never_more(prose: str, ranks: int) -> None:
    assert "with all parts whose d has that bit: half of them" in prose
    n, lg = 400 * ranks, math.ceil(math.log2(ranks))
    trace = run(ranks, "all_to_all", "bruck", n).trace
    assert all(trace.messages(rank) == lg for rank in range(ranks))
    assert all(trace.sent_bytes(rank) <= n * lg / 2 for rank in range(ranks))
    if ranks & (ranks - 1) == 0:
        assert trace.sent_bytes(0) == n * lg / 2


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mesh_sends_a_row_and_a_column_of_messages(prose: str, ranks: int) -> None:
    assert "X + Y − 2 messages a rank instead of p − 1, in two rounds" in prose
    assert "There the mesh is linear" in prose
    x, y = min(((p, ranks // p) for p in range(1, ranks + 1) if ranks % p == 0),
               key=lambda grid: (abs(grid[0] - grid[1]), grid[1]))
    trace = run(ranks, "all_to_all", "mesh", 400 * ranks).trace
    straight = run(ranks, "all_to_all", "linear", 400 * ranks).trace
    for rank in range(ranks):
        assert trace.messages(rank) == x + y - 2
        direct = 400 * (x - 1 + y - 1)  # to its own row and column
        assert trace.sent_bytes(rank) == direct + 2 * 400 * (ranks - x - y + 1) == (
            2 * straight.sent_bytes(rank) - direct)  # "nearly all parts travel twice"


def test_after_one_round_of_the_mesh_a_column_knows_what_its_row_has_to_say(prose: str) -> None:
    assert "for each rank in its own column, all that its row has to say" in prose
    frame = plots.stepper_frames("all_to_all", "mesh", 6)[1]
    for me, to in itertools.product(range(6), repeat=2):
        row = [rank for rank in range(6) if rank // 3 == me // 3]
        has = [source for source in range(6) if frame.holds[me, to, source]]
        assert has == (row if to % 3 == me % 3 else [me])


def test_where_cores_are_few_the_fewest_messages_then_the_fewest_bytes_win(prose: str) -> None:
    assert "Small parts: the fewest messages. Large ones: the fewest bytes. In between" in prose
    laptop = Machine(alpha=60e-6, beta=0.25e-9, gamma=0, lanes=2, overhead=20e-6)
    parts = (64, 8192, 32_768, 131_072)
    assert [cheapest("all_to_all", 8, 8 * part, 4, laptop) for part in parts] == [
        "central", "central", "mesh", "linear"]
    assert "Linear: 56 messages in all" in prose
    assert "Mesh, 4 × 2: 32, in two rounds. Bruck: 24, in three. Central: 14" in prose
    names = ("linear", "mesh", "bruck", "central")
    assert [len(run(8, "all_to_all", name, 8 * 400).trace.transfers) for name in names] == [
        56, 32, 24, 14]
    assert "Bruck's is never first here: it needs more messages than central, and more" in prose
    assert max(cost.sent_bytes("all_to_all", "bruck", 8, 800)) > max(
        cost.sent_bytes("all_to_all", "mesh", 8, 800))


@pytest.mark.parametrize("ranks", RANKS)
def test_central_has_every_part_pass_through_rank_0(prose: str, ranks: int) -> None:
    assert "2(p − 1) messages in all, no more; but every part passes through rank 0" in prose
    trace = run(ranks, "all_to_all", "central", 400 * ranks).trace
    assert len(trace.transfers) == 2 * (ranks - 1)
    assert all(0 in (m.src, m.dst) for m in trace.transfers)


def test_where_each_rank_has_a_port_central_is_the_last_by_far(prose: str) -> None:
    assert "as in section 11, central is the last by far" in prose
    for p, n in itertools.product((8, 12, 64), (4096 * 3, 1 << 20)):
        took = {name: cost.time_s("all_to_all", name, p, p * n, 1e-5, 1e-9)
                for name in ALGORITHMS["all_to_all"]}
        assert took.pop("central") > 1.9 * max(took.values())


# ---- scan, order, barrier ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_after_two_rounds_a_scan_covers_four_ranks_that_end_with_mine(
    prose: str, ranks: int
) -> None:
    assert "After two rounds rank r has the sum of the four ranks that end with r" in prose
    animation = plots.stepper_frames("scan", "recursive_doubling", ranks)
    frame = animation[min(2, len(animation) - 1)]
    for rank in range(ranks):
        covered = frame.holds[rank, 0].nonzero()[0].tolist()
        assert covered == list(range(max(0, rank - 3), rank + 1))


def then(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The digits of b (from 1 to 9 each) behind those of a."""
    return torch.tensor([int(f"{x}{y}") for x, y in zip(a.tolist(), b.tolist(), strict=True)])


@pytest.mark.parametrize("ranks", range(1, 10))
def test_who_keeps_the_order(prose: str, ranks: int) -> None:
    assert "take a scan, a reduce to rank 0 down the tree, or recursive doubling" in prose

    def order(comm: Comm, collective: str, algorithm: str) -> list[int]:
        x = torch.full((ranks,), comm.rank + 1)
        return ALGORITHMS[collective][algorithm](comm, x, op=then).tolist()

    def values(collective: str, algorithm: str) -> Any:
        return simulate(order, collective, algorithm, network=network(ranks)).values

    in_order = list(itertools.accumulate(map(str, range(1, ranks + 1))))
    for algorithm in ALGORITHMS["scan"]:
        assert values("scan", algorithm) == [[int(text)] * ranks for text in in_order]
    assert values("reduce", "binomial")[0] == [int(in_order[-1])] * ranks
    assert values("all_reduce", "recursive_doubling") == [[int(in_order[-1])] * ranks] * ranks
    if ranks > 2:
        assert len(set(values("all_reduce", "ring")[0])) == ranks, "every chunk in another order"


@pytest.mark.parametrize("ranks", RANKS)
def test_nobody_leaves_a_barrier_before_everybody_has_come(prose: str, ranks: int) -> None:
    assert "nobody leaves before everyone has come" in prose

    def late(comm: Comm, algorithm: str, slow: int) -> float:
        with comm.compute("work", seconds=float(comm.rank == slow)):
            pass
        collectives.barrier(comm, algorithm)
        return comm.now()

    for algorithm in ALGORITHMS["barrier"]:
        for slow in {0, ranks // 2, ranks - 1}:
            assert min(simulate(late, algorithm, slow, network=network(ranks)).values) >= 1.0


def test_a_collective_is_no_barrier(prose: str) -> None:
    assert "A collective isn't a barrier" in prose

    def late(comm: Comm) -> float:
        with comm.compute("work", seconds=float(comm.rank == 3)):
            pass
        collectives.broadcast(comm, torch.ones(3))
        return comm.now()

    values = simulate(late, network=network(4)).values
    assert max(values[:2]) < 1.0 <= values[3]


# ---- the table, the exercises ------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "n"), [(16, 99_999_936), (16, 1024), (13, 13 * 80_000)])
def test_simulated_equals_the_closed_form_and_never_beats_the_bound(
    prose: str, ranks: int, n: int
) -> None:
    assert "Simulated equals closed form everywhere, but where one rank receives from all" in prose
    incast = {("gather", "linear_nonblocking"), ("all_to_all", "central")}
    ratios = {}
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms if collective != "all_reduce" else ():
            took = run(ranks, collective, algorithm, n).elapsed_s
            form = cost.form(collective, algorithm, ranks, n)
            form_s = form.seconds(ALPHA, BETA, 0.0)
            call = collective, algorithm
            assert form.exact or call in incast or algorithm == "pipelined_ring"
            assert took == pytest.approx(form_s, rel=1e-9) or (not form.exact and took < form_s)
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


def test_the_exercises_have_the_points_that_the_chapter_names(prose: str) -> None:
    points = [each.points for each in catalogue().values() if each.chapter == "04"]
    assert f"({sum(points)} points)" in prose
