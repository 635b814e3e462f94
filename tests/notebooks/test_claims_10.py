"""What chapter 10 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import pytest
import torch

from dtlab import cost, simulate
from dtlab.parallel.data import STRATEGIES
from dtlab.plots import step_of
from dtlab.topology import uniform
from dtlab.widgets.overlap import LAYER_BYTES, LAYERS, train_step

ALPHA, BETA, FORWARD_S = 10e-6, 1e-10, 100e-6
BACKWARD_S = 2 * FORWARD_S * LAYERS


def exposed_ms(strategy: str, buckets: int) -> float:
    network = uniform(4, ALPHA, 1 / BETA)
    return 1e3 * step_of(simulate(train_step, strategy, buckets, network=network).trace).exposed_s


def test_the_guess(prose: str) -> None:
    reduce_s = [k * cost.time_s("all_reduce", "ring", 4, LAYERS * LAYER_BYTES // k, ALPHA, BETA)
                for k in (1, 12)]
    assert "takes 1.9 ms, so backward and reduction take 4.3 ms" in prose
    assert reduce_s[0] == pytest.approx(1.9e-3, abs=5e-5)
    assert BACKWARD_S + reduce_s[0] == pytest.approx(4.3e-3, abs=5e-5)
    assert "twelve all-reduces take 2.6 ms rather than 1.9 ms" in prose
    assert reduce_s[1] == pytest.approx(2.6e-3, abs=5e-5)
    assert 1e3 * BACKWARD_S + exposed_ms("overlap", 12) == pytest.approx(2.8, abs=0.05)


def test_only_buckets_that_leave_early_gain(prose: str) -> None:
    assert "Buckets alone gain nothing. Buckets that leave early do: the same bytes" in prose
    by = {strategy: exposed_ms(strategy, 4) for strategy in STRATEGIES}
    assert by["parameter"] > by["bucket"] > by["flat"] > by["overlap"]
    assert "a quarter of the waiting" in prose
    assert by["overlap"] / by["flat"] == pytest.approx(0.25, abs=0.04)


def test_up_to_eight_buckets_only_the_last_is_exposed(prose: str) -> None:
    assert "with up to 8 buckets, a reduction is quicker than the gradients" in prose
    assert "With 12, latencies make c longer than b (217 and 200 µs)" in prose
    c = {k: cost.time_s("all_reduce", "ring", 4, LAYERS * LAYER_BYTES // k, ALPHA, BETA)
         for k in range(1, 13)}
    assert all(c[k] < BACKWARD_S / k for k in range(1, 9))
    assert c[12] == pytest.approx(217e-6, abs=5e-7)
    assert pytest.approx(200e-6) == BACKWARD_S / 12
    assert cost.best_buckets(BACKWARD_S, LAYERS * LAYER_BYTES, LAYERS, 4, ALPHA, BETA) == 9


def test_a_small_step_is_lost_in_bfloat16(prose: str) -> None:
    assert "a weight of 1.0 and a step of 0.001 would add up to 1.0 in bfloat16" in prose
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    assert (one + 0.001).item() == 1.0


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "so the best k moves up until the latencies" in prose
    assert "with more ranks that term grows, and k moves down" in prose

    def best(ranks: int, beta: float) -> int:
        return cost.best_buckets(BACKWARD_S, LAYERS * LAYER_BYTES, 48, ranks, ALPHA, beta)

    assert best(4, BETA / 2) > best(4, BETA)
    assert best(8, BETA) < best(4, BETA)
