"""What chapter 15 says in prose is true; each sentence is looked up there, then recomputed. What
failures cost: test_claims_15b.py."""

from __future__ import annotations

import pytest
import torch

from dtlab import Deadlock, cost, simulate
from dtlab.collectives import all_reduce
from dtlab.published.failures import INTERRUPTIONS
from dtlab.topology import uniform
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("15")
printed, source = CHAPTER.printed, CHAPTER.source
PER_NODE_DAY = 6.5 / 1000


def hours(gpus: float) -> float:
    return cost.job_mttf_s(gpus / 8, PER_NODE_DAY) / 3600


def test_how_long_jobs_last(prose: str) -> None:
    assert f"{hours(16_384):.1f}" == "1.8"
    assert source("guess-compare").count("1.8 hours") == 5
    assert f"{hours(8) / 24:.0f}" == "154"  # days
    assert f"{hours(1_231):.1f}" == "24.0"
    assert round(16_384 / 1_231) == 13
    assert round(hours(131_072) * 60) == 14  # minutes
    assert "one in 3.09 hours. So the rule, with another cluster's r, is right" in prose
    assert f"{54 * 24 / 419:.2f}" == "3.09"
    assert 1 < 3.09 / hours(16_384) < 2
    assert "7.9 hours at 1,024 GPUs, where 1/N gives 28.85, and 47.7 days at 8, " \
        "where it gives 154" in prose
    assert f"{hours(1024):.2f}" == "28.85"


def test_the_first_picture_shows_what_the_text_says(prose: str) -> None:
    assert "Each fails 0.75 times a day, so one of them fails every four hours on average" in prose
    assert cost.job_mttf_s(8, 0.75) == 4 * 3600
    assert "save_s=120, restart_s=600, interval_s=1800, repair_s=3600" in source("opening-picture")
    assert "A save takes two minutes, after each half hour of work; a restart takes ten" in prose


def test_an_event_of_the_ring_is_an_exchange(prose: str) -> None:
    assert "after two events (here exchanges with its neighbours; computations count, too)" in prose

    def ring(events: int) -> None:
        simulate(lambda comm: all_reduce(comm, torch.ones(8), algorithm="ring"),
                 network=uniform(4, 1e-5, 1e9), crash={2: events})

    with pytest.raises(Deadlock):
        ring(2 * (4 - 1) - 1)
    ring(2 * (4 - 1))


def test_what_each_answer_does_again(prose: str) -> None:
    assert "rank 2 is killed when it has taken five" in prose
    assert "step == dies_in" in source("restart-body")
    assert "the second life began with step 4" in printed("restart-run")
    assert "The fifth step, number 4, was taken twice" in prose
    assert "step 2 was begun again without rank 2" in prose
    left_out = [line for line in printed("replicas").splitlines() if line.endswith("[0, 1, 3]")]
    assert left_out == ["step 2: samples of groups [0, 1, 3]"]


def test_silent_corruption_interrupted_llama_3_six_times(prose: str) -> None:
    assert "Six of Llama 3's 419 interruptions were silent data corruption" in prose
    assert INTERRUPTIONS["silent data corruption"] == 6
    assert sum(INTERRUPTIONS.values()) == 419
