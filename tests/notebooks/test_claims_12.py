"""What chapter 12 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import pytest

from dtlab.models import GPT, GPTConfig
from dtlab.parallel.pipeline import (
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
from dtlab.trace import Trace

near = pytest.approx


def test_the_guess(prose: str) -> None:
    assert "A rank waits for 9 s of 33 s" in prose
    for generate in (gpipe, one_f_one_b):
        timing = generate(4, 8).time(1, 2)
        assert (timing.bubble, timing.longest) == (9, 33)


def test_what_interleaving_costs(prose: str) -> None:
    assert "1F1B's times 1 + (p−1)/(pv)" in prose
    for p, v in ((4, 2), (4, 4), (3, 2), (8, 2)):
        assert interleaved(p, 4 * p, v).time().held[0] == near(p * (1 + (p - 1) / (p * v)))
    assert "it is 1.5/9.5, that is 15.8 %" in prose
    assert interleaved(4, 8, 2).time().bubble_fraction == near(1.5 / 9.5)
    assert "The same bubble, GPipe's memory" in prose
    assert looped_bfs(4, 8, 2).time().bubble == interleaved(4, 8, 2).time().bubble
    assert looped_bfs(4, 8, 2).time().held[0] == 8


def test_backward_in_two(prose: str) -> None:
    assert "ZB-H1 holds what 1F1B holds, and its bubble is (p−1)(F+B−2W), here 3 s" in prose
    assert zb_h1(4, 8).time().bubble == 3
    assert max(zb_h1(4, 8).time().held) == max(one_f_one_b(4, 8).time().held)
    assert "(p−1)(F+B−3W), here nothing, for about twice the memory" in prose
    assert (zb_h2(4, 8).time().bubble, max(zb_h2(4, 12).time().held)) == (0, 7)
    assert "gets there with 1F1B's memory" in prose
    assert (zb_v(4, 8).time().bubble, max(zb_v(4, 8).time().held)) == (0, 4)
    assert "that costs it a little bubble" in prose
    assert dualpipe_v(4, 12).time().bubble == 1.5


def test_which_is_best_depends_on_the_times(prose: str) -> None:
    def all_times(*costs: float) -> dict[str, Timing]:
        return {generate.__name__: generate(4, 12).time(*costs)
                for generate in (one_f_one_b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v)}

    assert "ZB-V stays ahead here" in prose
    times = all_times(1.0, 1.8, 0.6, 0.1)
    assert min(times, key=lambda name: times[name].longest) == "zb_v"
    assert "ZB-H2 is ahead, 43.5 s against 47.75 s, for nearly twice the memory" in prose
    times = all_times(1.0, 2.0, 0.5, 0.5)
    assert min(times, key=lambda name: times[name].longest) == "zb_h2"
    assert (times["zb_h2"].longest, times["zb_v"].longest) == (43.5, 47.75)


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "7/(m+7) < 0.1 needs m > 63, so 64" in prose
    enough, too_few = (one_f_one_b(8, m).time().bubble_fraction for m in (64, 63))
    assert enough < 0.1 <= too_few
    assert "the output layer over a large vocabulary costs as much as several blocks" in prose
    gpt = GPT(GPTConfig(layers=12, hidden=768, heads=12, vocab=50257, tied=False), device="meta")
    block = sum(p.numel() for p in gpt.blocks[0].parameters())
    assert gpt.head.weight.numel() > 4 * block


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
