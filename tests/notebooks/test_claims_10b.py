"""What chapter 10b says in prose is true: each sentence is looked up there, then compared with what
the chapter prints, which nbval has computed again, or recomputed.
"""

from __future__ import annotations

import importlib
import re
from itertools import pairwise

import pytest
import torch

from dtlab import cost
from dtlab.widgets import CriticalBatchExplorer
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("10b")
printed = CHAPTER.printed


def numbers(cell_id: str, pattern: str) -> list[tuple[float, ...]]:
    """The groups of each line that fits, as numbers."""
    return [tuple(float(each.replace(",", "")) for each in found)
            for found in re.findall(pattern, printed(cell_id), re.M)]


def needed() -> dict[int, float]:
    return {int(batch): steps for batch, steps in numbers(
        "steps-run", r"^batch +(\d+): +([\d.]+) steps")}


def test_the_guess(prose: str) -> None:
    assert "it takes 52 steps until its loss is below 0.35" in prose
    assert "C 29: a little more than half." in prose
    assert (needed()[16], needed()[256]) == (52, 29)


def test_four_times_the_batch_is_half_the_noise(prose: str) -> None:
    assert "Four times the batch, half the noise" in prose
    noise = [float(x) for x in re.findall(r"noise of (\d+)%", printed("average-run"))]
    assert [a / b for a, b in pairwise(noise)] == pytest.approx([2] * 3, rel=0.1)
    assert "(A bit less than half at the end" in prose
    assert noise[3] / noise[2] < 0.5
    assert "The noise of 16 images was longer than the gradient, that of 64 shorter" in prose
    assert noise[1] > 100 > noise[2]


def test_steps_and_samples(prose: str) -> None:
    steps = needed()
    saved = {batch: 1 - steps[2 * batch] / steps[batch] for batch in (4, 8, 16, 32, 64, 128)}
    assert "up to which batch does doubling it save a quarter of the steps or more?" in prose
    assert "Up to 16: there more ranks make training faster" in prose
    assert {batch for batch, share in saved.items() if share >= 0.25} == {4, 8}
    assert "a batch twice as large, and such a step is seldom worth two" in prose
    assert max(saved.values()) < 0.5
    assert "with twice the learning rate, are worth nearly two steps" in prose
    least, critical = cost.fit_critical_batch(steps)
    one, two = (cost.steps_to_loss(batch, least, critical) for batch in (critical / 20,
                                                                         critical / 10))
    assert 1.9 < one / two < 2
    assert "256 takes two thirds of the steps of 32, and more than five times the samples" in prose
    assert steps[256] / steps[32] == pytest.approx(2 / 3, abs=0.02)
    assert 5 < steps[256] * 8 / steps[32] < 5.5


def test_the_curve_misses_no_count_by_more_than_a_tenth(prose: str) -> None:
    assert "The curve misses no count by more than a tenth" in prose
    least, critical = cost.fit_critical_batch(needed())
    for batch, steps in needed().items():
        assert cost.steps_to_loss(batch, least, critical) == pytest.approx(steps, rel=0.1)
    assert f"S_min = {least:.0f} steps, B_crit = {critical:.0f}" in printed("critical-fit")


def test_what_the_explorer_answers(prose: str) -> None:
    assert "At 2, wherever the critical batch lies. 8,192: as large as the batch" in prose
    widget = CriticalBatchExplorer(devices=1024, samples=8, critical=8192)
    assert "a batch of 8,192" in widget.static().alt
    assert widget.static().alt.count(" 2 times the least") == 2
    widget.critical.value = 4096
    assert "3 times the least. The critical" in widget.static().alt


def test_the_noise_scale_from_ranks_is_that_from_all_images(prose: str) -> None:
    (ranks, images) = numbers("noise-run", r"tr Σ = ([\d.]+), \|G\|² = ([\d.]+), noise scale (\d+)")
    assert ranks == pytest.approx(images, rel=0.05)
    assert "The scale lies three to four times above the critical batch that we counted" in prose
    _, critical = cost.fit_critical_batch(needed())
    assert 3 < images[2] / critical < 4


def test_noise_shrinks_more_slowly_than_the_square_of_the_gradient(prose: str) -> None:
    rows = numbers("noise-grows", r"tr Σ +([\d.]+), \|G\|² +([\d.]+), noise scale +(\d+)")
    first, last = rows[0], rows[-1]
    assert [scale for *_, scale in rows] == sorted(scale for *_, scale in rows)
    assert "to less than a half here" in prose
    assert first[0] / last[0] == pytest.approx(17.4 / 7.5, rel=0.05)
    assert "The square of the gradient shrinks more, to an eighth" in prose
    assert first[1] / last[1] == pytest.approx(8, abs=0.5)


def test_what_is_equal_is_the_noise_scale_and_not_the_noise_of_a_step(prose: str) -> None:
    assert "not the noise of a single step: that falls to a quarter with the rate" in prose
    scales = re.findall(r"εN/B: (\[.*?\])", printed("grow-schedule"))
    steps = [[float(x) for x in row.split(", ")]
             for row in re.findall(r"ε/√B: \[(.*?)\]", printed("grow-schedule"))]
    assert scales[0] == scales[1]
    shrinks, grows = steps
    assert shrinks[1] / shrinks[0] == pytest.approx(1 / 4, rel=0.02)
    assert grows[1] / grows[0] == pytest.approx(1 / 2, rel=0.02)
    assert "a quarter of the steps make up for it: noise adds up like a random walk" in prose
    assert shrinks[1] * 60**0.5 == pytest.approx(grows[1] * 15**0.5, rel=0.01)


def test_at_equal_samples_the_losses_are_equal(prose: str) -> None:
    rate, batch, more, neither = numbers(
        "grow-run", r": +(\d+) steps, +([\d,]+) samples, loss ([\d.]+)")
    assert "the same loss, after as many samples but for 64" in prose
    assert ": 79 steps instead of 180" in prose
    assert (rate[0], batch[0]) == (180, 79)
    assert batch[1] - rate[1] == 64 == 4 * 256 - 60 * 16
    assert rate[2] == batch[2] == 0.251
    assert "it saw seven times the samples" in prose
    assert more[1] / rate[1] == pytest.approx(7)
    assert more[2] < rate[2]
    assert "here neither would have been needed yet" in prose
    assert neither[2] < rate[2]


def test_linear_scaling(prose: str) -> None:
    rows = re.findall(r"loss ([\d.]+) with rate 0.1, ([\d.]+|diverged) with", printed("linear"))
    assert "At 64, linear scaling gives the loss of the small batch in a quarter" in prose
    small, at_64, at_250, at_750 = rows
    assert float(at_64[1]) == pytest.approx(float(small[0]), abs=0.02)
    assert float(at_64[0]) > 3 * float(small[0])
    assert "At 250 the scaled rate falls behind, too, and at 750 it breaks" in prose
    assert 2 * float(small[0]) < float(at_250[1]) < float(at_250[0])
    assert at_750[1] == "diverged"
    assert round(750 / 16) == 47


def test_warm_up(prose: str) -> None:
    assert "with fifteen steps of warm-up the same rate trains it" in prose
    rows = dict(re.findall(r"^(\w+),? lr .*?(without.*)$", printed("warm-up"), re.M))
    assert "LinearLR(optimizer, 0.05 if warm_up else 1.0, 1.0, 15)" in CHAPTER.source("warm-up")
    p = torch.zeros(1, requires_grad=True)
    for start, first in ((0.05, 0.05), (1.0, 1.0)):
        optimizer = torch.optim.SGD([p], lr=1.0)
        torch.optim.lr_scheduler.LinearLR(optimizer, start, 1.0, 15)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(first)
    assert "without warm-up: diverged  with warm-up: 0.0" in rows["momentum"]
    assert "LARS and LAMB bound the first steps by themselves" in prose
    assert "diverged" not in rows["LARS"] + rows["LAMB"]


def test_accuracy_falls_with_the_number_of_steps(prose: str) -> None:
    def right(cell: str) -> dict[float, float]:
        return dict(numbers(cell, r"^batch +(\d+): .*, ([\d.]+)% right"))

    six, longer = right("accuracy-run"), right("accuracy-longer")
    assert "The same accuracy up to 150, hardly less at 250, and from there on less" in prose
    assert six[50] == six[150]
    assert 0 < six[150] - six[250] < 1
    assert six[250] - six[750] > 1
    assert six[750] - six[1500] > 5
    assert "With more steps, large batches come (nearly) as far" in prose
    assert min(longer.values()) > six[150] - 1.1
    assert "One image is 0.3 points" in prose
    assert round(100 / 297, 1) == 0.3


def test_the_records(prose: str) -> None:
    rows = numbers("records-run", r"([\d,]+) steps of (\d+) ms, (\d+) a GPU")
    assert "The last number is samples: each GPU has 32 samples in all three" in prose
    assert [samples for *_, samples in rows] == [32] * 3
    assert "Steps fell from 14,000 to 1,800, and a step takes about a quarter of a second" in prose
    assert round(rows[0][0], -3) == 14_000
    assert round(rows[2][0], -2) == 1_800
    assert all(ms == pytest.approx(250, rel=0.11) for _, ms, _ in rows)


def test_the_colleagues_speedup(prose: str) -> None:
    assert "They did quadruple; the time to a loss fell by a quarter" in prose
    assert 1 - needed()[64] / needed()[16] == pytest.approx(0.25, abs=0.03)
    assert "the rate now falls after four times as many samples" in prose


def test_single_estimates_may_be_negative(prose: str) -> None:
    assert "Single estimates are off by a factor, and may be negative" in prose
    singles = [float(x) for x in re.search(r"\[(.*)\]", printed("few-draws"))[1].split(", ")]
    assert min(singles) < 0
    assert max(singles) > 3 * 0.045


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "At B_crit it takes 2·S_min steps, at twice that 1.5·S_min: a third faster" in prose
    at, twice = (cost.steps_to_loss(batch, 30, 16) for batch in (16, 32))
    assert at / twice == pytest.approx(4 / 3)
    assert "for a half more samples" in prose
    assert 32 * twice / (16 * at) == pytest.approx(1.5)


def test_what_the_libraries_have_is_there(prose: str) -> None:
    for name in ("LinearLR", "SequentialLR"):
        assert name in prose
        assert hasattr(importlib.import_module("torch.optim.lr_scheduler"), name)
    assert "torch.optim has neither" in prose
    assert not {"LAMB", "LARS", "Lamb", "Lars"} & set(dir(torch.optim))
