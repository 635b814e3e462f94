"""The memory meter: what a function takes beyond its input, whatever it takes it as."""

from __future__ import annotations

import pytest
import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.meter import SLACK_BYTES, Meter
from dtlab.grading.standard import held_at_most

N = 100_000  # float64 elements: 800 kB
NBYTES = 8 * N


def peak(function) -> int:
    x = torch.arange(N, dtype=torch.float64)
    meter = Meter((x,))
    with meter:
        function(x)
    return meter.peak_bytes


@pytest.mark.parametrize("free", [
    lambda x: x.add_(1),
    lambda x: x.view(10, -1)[3].mul_(2),
    lambda x: x.tensor_split(7),
    lambda x: torch.maximum(x, x, out=x),
    lambda x: x[:10].copy_(x[-10:]),
])
def test_views_and_work_in_place_cost_nothing(free):
    assert peak(free) == 0


@pytest.mark.parametrize(("copies", "costs"), [
    (lambda x: x.clone(), 1),
    (lambda x: x + 1, 1),
    (lambda x: torch.stack([x, x]), 2),
    (lambda x: torch.empty(1).resize_(2 * N), 1),  # float32: half the size, twice as many
    (lambda x: x.to(torch.float32), 0.5),
    (lambda x: torch.cat([x.clone(), x]), 3),  # the clone lives while cat runs
    (lambda x: x.numpy().copy(), 1),
    (lambda x: bytes(x.numpy()), 1),
])
def test_copies_cost_what_they_hold_at_once(copies, costs):
    assert peak(copies) == pytest.approx(costs * NBYTES, abs=SLACK_BYTES)


def test_the_peak_counts_not_the_total():
    def one_after_the_other(x):
        for _ in range(10):
            x.clone()

    assert peak(one_after_the_other) == NBYTES


def test_a_list_of_numbers_is_seen():
    assert peak(lambda x: x.tolist()) > NBYTES


def test_what_the_proxy_allocates_in_between_is_not_the_learners():
    x = torch.zeros(N, dtype=torch.float64)
    meter = Meter((x,))
    with meter:
        with meter.paused():
            bytes(8 * N)
            x.clone()
        x.add_(1)
    assert meter.peak_bytes == 0


def test_a_number_that_is_printed_is_no_part_of_what_is_held():
    judge = held_at_most(lambda case: 1000)
    for more, right in ((4, True), (1000, False)):
        outcome = Outcome(peak_bytes=[1000 + more])
        assert judge(Case("", [()]), outcome).passed is right
