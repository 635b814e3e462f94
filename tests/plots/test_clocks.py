"""The clock picture tells what the parameter server did: who waited, for whom, how far ahead."""

from __future__ import annotations

import re

import pytest

from dtlab import plots, ps, recording

RUN = recording.watch_clocks(ps.BSP(), lambda worker, _: (0.1, 0.7, 0.15)[worker - 1], 3, 1.2)


def test_the_words_say_who_waits_for_whom_at_a_moment() -> None:
    alt = plots.clocks(RUN, 0.2).alt
    assert "worker 1: clock 1, waits for 2" in alt
    assert "worker 2: clock 0, computes" in alt
    assert "worker 3: clock 1, waits for 2" in alt
    assert "worker 1: clock 0, waits" not in plots.clocks(RUN, 0.05).alt
    begun = plots.clocks(RUN, 0.0).alt
    assert "at its end" not in begun
    assert begun.count("clock 0, about to begin") == 3


def test_the_waits_of_the_lanes_make_up_the_share_that_waited() -> None:
    alt = plots.clocks(recording.watch_clocks(ps.SSP(3), recording.PACES["one slow worker"])).alt
    lanes_s = sum(map(float, re.findall(r"waited ([\d.]+) s", alt)))
    share, end_s = (float(re.search(mark, alt)[1]) for mark in (r"(\d+)% of", r"after ([\d.]+) s"))
    assert lanes_s / (5 * end_s) == pytest.approx(share / 100, abs=0.025)


def test_what_has_diverged_is_said_and_drawn_at_the_upper_edge() -> None:
    picture = plots.loss_sweep({"a": {0.1: [0.2, 0.3, 0.4], 1.0: [float("nan"), 50.0, 1.0]}},
                               "step size (learning rate)")
    assert "0.1 0.30, 1 diverged" in picture.alt


def test_the_thick_line_is_the_median_of_the_seeds() -> None:
    curves = [[(0.0, 4.0), (1.0, level)] for level in (1.0, 2.0, 9.0)]
    assert "x: 2 at 1" in plots.loss_curves({"x": curves}, "(s)").alt
