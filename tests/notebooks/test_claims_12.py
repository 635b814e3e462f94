"""What chapter 12 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import importlib.util
import re
from itertools import groupby, pairwise

import pytest
import torch
from torch import nn

from dtlab import Comm, ConfigError, Deadlock, RankFailed, cost, simulate
from dtlab.models import SHAPES
from dtlab.parallel.pipeline import (
    Pipeline,
    Schedule,
    Timing,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from dtlab.plots import Picture, schedule
from dtlab.plots.schedule import spans_of
from dtlab.topology import uniform
from dtlab.trace import Trace
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("12")
printed = CHAPTER.printed
near = pytest.approx


def test_why_the_bubble_is_what_it_is(prose: str) -> None:
    assert "A rank waits for 9 s of 33 s" in prose
    assert "The last rank can't begin before the first micro-batch has come down" in prose
    assert "between the two it never waits. So the bubble is (p−1)(F+B)" in prose
    for p, m in ((2, 2), (4, 8), (5, 3)):
        for generate in (gpipe, one_f_one_b):
            timing = generate(p, m).time(1, 2)
            assert (timing.start[-1], timing.busy[-1]) == ((p - 1) * 1, 3 * m)
            assert timing.end[-1] == timing.start[-1] + timing.busy[-1]
            assert timing.end[0] == timing.end[-1] + (p - 1) * 2
            assert timing.bubble == timing.end[0] - 3 * m == (p - 1) * 3
            assert (timing.bubble, timing.longest) == (9, 33) or (p, m) != (4, 8)


def test_the_bubble_is_counted_on_one_rank(prose: str) -> None:
    assert "The next picture is 27 s wide all the same, as the ranks begin one after" in prose
    timing = zb_h2(4, 8).time()
    assert (timing.elapsed, timing.longest, timing.start) == (27, 24, [0, 1, 2, 3])
    assert "with GPipe and 1F1B rank 0, which begins first and ends last" in prose
    for generate in (gpipe, one_f_one_b):
        timing = generate(4, 8).time()
        assert (min(timing.start), max(timing.end)) == (timing.start[0], timing.end[0])
        assert timing.longest == timing.elapsed


def test_branches_side_by_side(prose: str) -> None:
    assert "A forward pass takes 1 s in each of the three parts, a backward pass 2 s" in prose
    one, two = 3 * 1 + 3 * 2, 1 + 1 + 2 + 2  # 3 forwards, 3 backwards; trunk, head, head, trunk
    assert printed("branches") == (
        f"one rank {one:.1f} s, two ranks {two:.1f} s; the same gradient: True\n")


def test_the_source_of_an_exercise_is_not_printed() -> None:
    (shown,) = CHAPTER.cells["source"].outputs
    assert "def looped_bfs" in shown.data["text/markdown"]
    for name in ("def one_f_one_b", "def interleaved", "def alternate", "def zb_h1"):
        assert not any(name in str(cell.get("outputs", "")) for cell in CHAPTER.cells.values())


def test_what_the_first_rank_holds(prose: str) -> None:
    assert "With 1F1B the first rank holds the most" in prose
    for p, m in ((2, 4), (4, 8), (8, 8), (5, 3)):
        held = one_f_one_b(p, m).time().held
        assert held[0] == max(held)
    lines = printed("memory-table").splitlines()
    first, *others = (int(word.split()[0]) for word in lines[0].split(": ")[1].split(", "))
    assert first < min(others)  # GPipe: the meter doesn't see rank 0's input
    assert "the meter doesn't see rank 0's input, hence GPipe's smaller number there" in prose


def test_what_interleaving_costs(prose: str) -> None:
    assert "The bubble is (p−1)(F+B)/v, where p divides m" in prose
    assert "for v ≥ 2 and such an m ≥ 2p, more memory: rank 0, which holds the most, holds " \
        "1 + (p−1)/(pv) times what it holds with 1F1B" in prose
    for p, v in ((4, 2), (4, 4), (3, 2), (8, 2)):
        factor = 1 + (p - 1) / (p * v)
        assert cost.micro_batches_in_flight("interleaved", p, 4 * p, v) == near(p * factor)
        assert cost.micro_batches_in_flight("interleaved", p, 4 * p, 1) == p
        assert interleaved(p, 2 * p + 1, v).time().held[0] > p * factor + 0.1
        assert (p * v - 1) / (p - 1) > v
    assert ("crosses pv − 1 boundaries on its way down instead of p − 1, more than v times as many"
            in prose)
    assert "the ratio, 4.5 s/24 s = 3/16" in prose
    assert "of the time that the step takes it is 4.5 s/28.5 s, 15.8 %" in prose
    timing = interleaved(4, 8, 2).time()
    assert (timing.bubble, timing.longest) == (near(4.5), near(28.5))
    assert timing.bubble_ratio == near(3 / 16)
    assert (f"{timing.bubble_ratio:.0%}", f"{timing.bubble_fraction:.1%}") == ("19%", "15.8%")
    assert "The same bubble, GPipe's memory" in prose
    assert "which then gathers them once forward and once backward" in prose
    for row in looped_bfs(4, 8, 2).rows:  # the chunks in one stretch each, down and up again
        stretches = [stage for stage, _ in groupby(action.stage for action in row)]
        assert len(stretches) == 3  # the last chunk turns round where it is
        kinds = [key for key, _ in groupby((action.kind, action.stage) for action in row)]
        assert len(kinds) == 4
    assert looped_bfs(4, 8, 2).time().bubble == interleaved(4, 8, 2).time().bubble
    assert looped_bfs(4, 8, 2).time().held[0] == 8


def test_backward_in_two(prose: str) -> None:
    assert "bubble is (p−1)(F+B−2W), as long as W takes no longer than F or I, and m ≥ p" in prose
    assert "here 3 s instead of 9 s" in prose
    assert (zb_h1(4, 8).time().bubble, one_f_one_b(4, 8).time().bubble) == (3, 9)
    assert "but now every rank holds 4, where 1F1B's hold 4, 3, 2 and 1" in prose
    assert zb_h1(4, 8).time().held == [4, 4, 4, 4]
    assert one_f_one_b(4, 8).time().held == [4, 3, 2, 1]
    assert "(p−1)(F+B−3W), where again W ≤ F and W ≤ I, and m ≥ 2p − 1" in prose
    assert "Here that is nothing, but every rank holds 2p − 1 = 7 micro-batches, not 4" in prose
    assert (zb_h2(4, 8).time().bubble, zb_h2(4, 8).time().held) == (0, [7] * 4)
    assert ("With F = I = W and m ≥ 2p − 1 that leaves no bubble, and no rank holds more than "
            "1F1B's first") in prose
    for p in (2, 4, 5):
        assert zb_v(p, 2 * p - 2).time().bubble > 0
        for m in (2 * p - 1, 2 * p, 3 * p):
            assert (zb_v(p, m).time().bubble, max(zb_v(p, m).time().held)) == (0, p)
    assert (zb_v(4, 8).time().bubble, max(zb_v(4, 8).time().held)) == (0, 4)


def test_where_the_formulas_of_the_zero_bubble_schedules_do_not_hold() -> None:
    for F, inputs, W in ((1, 1, 1.2), (0.5, 1, 1)):  # W > I, W > F
        B = inputs + W
        assert zb_h1(4, 12).time(F, B, W).bubble > 3 * (F + B - 2 * W) + 0.1
    assert zb_h1(4, 3).time().bubble > 3
    assert zb_h2(4, 6).time().bubble > 0


def test_what_dualpipe_v_wins_is_not_in_the_table(prose: str) -> None:
    assert "In our model of time a rank does one action at a time" in prose
    assert "what DualPipe-V costs shows, here 1.5 s, and what it wins does not" in prose
    timing = dualpipe_v(4, 8).time()
    assert timing.bubble == 1.5
    for row in timing.spans:
        assert all(end <= begin for (_, _, end), (_, begin, _) in pairwise(row))


def test_which_is_best_depends_on_the_times(prose: str) -> None:
    def all_times(*costs: float) -> dict[str, Timing]:
        return {generate.__name__: generate(4, 12).time(*costs)
                for generate in (one_f_one_b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v)}

    assert "ZB-V stays ahead here" in prose
    times = all_times(1.0, 1.8, 0.6, 0.1)
    assert min(times, key=lambda name: times[name].longest) == "zb_v"
    assert "ZB-H2 is ahead of it, 43.5 s against 47.75 s, for nearly twice the memory" in prose
    times = all_times(1.0, 2.0, 0.5, 0.5)
    assert min(times, key=lambda name: times[name].longest) == "zb_h2"
    assert (times["zb_h2"].longest, times["zb_v"].longest) == (43.5, 47.75)
    assert "Looped BFS takes as long as ZB-H2, and holds 12" in prose
    bfs = looped_bfs(4, 12).time(1.0, 2.0, 0.5, 0.5)
    assert (bfs.longest, max(bfs.held)) == (43.5, 12)


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "7/(m+7) < 0.1 needs m > 63, so 64" in prose
    enough, too_few = (one_f_one_b(8, m).time().bubble_fraction for m in (64, 63))
    assert enough < 0.1 <= too_few
    assert ("the output layer over a large vocabulary has as many weights as 2.4 blocks of "
            "Llama 3 8B, 1.2 of 70B, 0.66 of 405B") in prose
    assert "what still helps training (chapter 10b)" in re.sub(r"\[(.*?)\]\(.*?\)", r"\1", prose)
    for name, blocks in (("8B", 2.4), ("70B", 1.2), ("405B", 0.66)):
        shape = SHAPES[f"Llama 3 {name}"]
        output = shape.vocab * shape.hidden  # not tied: the embedding has as many again
        block = (shape.parameters - 2 * output) / shape.layers
        assert not shape.tied
        assert output / block == near(blocks, rel=0.03)


def wrong() -> dict[str, str]:
    """The chapter's schedules with mistakes, by name."""
    scope: dict[str, dict[str, str]] = {}
    exec(CHAPTER.source("mistakes").partition("for name, grid")[0], scope)
    return scope["WRONG"]


def test_six_ways_to_go_wrong(prose: str) -> None:
    assert "Six mistakes in schedules written by hand" in prose
    assert len(wrong()) == 6
    errors = set()
    for grid in wrong().values():
        with pytest.raises(ConfigError) as error:
            Schedule.parse(grid).check()
        errors.add(" ".join(str(error.value).splitlines()[0].split()[-3:]))
    assert len(errors) == 6


def test_which_of_the_six_hang(prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "The last hangs, and the first" in prose
    assert "The other four stop with an error" in prose
    monkeypatch.setattr(Schedule, "check", lambda self: self)  # run it all the same

    def step(comm: Comm, plan: Schedule) -> None:
        stages = [nn.Linear(4, 4) for _ in plan.stages_of(comm.rank)]
        x = torch.ones(2 * plan.micro_batches, 4)
        Pipeline(stages, plan, comm).step(x, x, nn.functional.mse_loss)

    for name, grid in wrong().items():
        hangs = name in ("flush forgotten", "a cycle")
        with pytest.raises(Deadlock if hangs else RankFailed):
            simulate(step, Schedule.parse(grid), network=uniform(2, 1e-6, 1e9))


def test_what_the_published_table_shows(prose: str) -> None:
    assert "The last line is the 19 % of section 5" in prose
    *rates, last = printed("published").splitlines()
    assert all(line.startswith("tables 5 and 6") for line in rates)
    assert "printed 0.1900" in last


def test_what_older_notes_use_is_gone(prose: str) -> None:
    assert "`torch.distributed.pipeline.sync.Pipe`, GPipe within one process" in prose
    assert importlib.util.find_spec("torch.distributed.pipelining") is not None
    assert importlib.util.find_spec("torch.distributed.pipeline") is None


def test_micro_batches_are_parts_of_one_mini_batch(prose: str) -> None:
    assert "They are parts of one mini-batch: the optimizer steps once, after the last" in prose
    assert "all gradients within 1e-10 of one device" in printed("equal")


def test_batch_norm_sees_one_micro_batch(prose: str) -> None:
    assert "as BatchNorm does, is the exception: it sees one micro-batch" in prose
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def gradient(comm: Comm, micro_batches: int, norm: type[nn.Module]) -> torch.Tensor | None:
        torch.manual_seed(1)
        stage = nn.Sequential(nn.Linear(4, 4), norm(4))
        Pipeline(stage, gpipe(1, micro_batches), comm).step(x, x, nn.functional.mse_loss)
        return stage[0].weight.grad

    for norm, alike in ((nn.BatchNorm1d, False), (nn.LayerNorm, True)):
        whole, cut = (simulate(gradient, m, norm, network=uniform(1, 1e-6, 1e9)).values[0]
                      for m in (1, 4))
        assert torch.allclose(whole, cut, atol=1e-6) == alike


def test_the_picture_shows_what_the_schedule_takes() -> None:
    plan = one_f_one_b(3, 4)
    picture: Picture = schedule(plan, F=1, B=2)
    grid = picture.axes[0]
    blocks = [bar for bar in grid.patches if 0 < bar.get_width() < 18]
    assert sorted(round(bar.get_x(), 6) for bar in blocks) == sorted(
        begin for row in plan.time(1, 2).spans for _, begin, _ in row)
    trace = Trace(3, spans=[(rank, "compute", 1.0 + begin, 1.0 + end, str(action))
                            for rank, row in enumerate(plan.time(1, 2).spans)
                            for action, begin, end in row])
    assert spans_of(trace, plan) == [list(row) for row in plan.time(1, 2).spans]
