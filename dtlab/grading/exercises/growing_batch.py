"""Chapter 10b: a schedule of learning rates made one of batches, with its noise and its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, Wanted
from dtlab.grading.draws import scale, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import F64, always, items, values
from dtlab.models import MLP, digits

RATES, BATCHES, STEPS = ITEMS = "rates", "batches", "steps"
SAME = 1.1  # losses that differ by less are the same
Schedule = Sequence[tuple[float, int]]  # (rate, steps) of each stage


def _right(schedule: Schedule, batch: int, most: int) -> tuple[list[float], list[int], list[int]]:
    """Each batch as large as the noise scale allows at the first rate, cut at `most`; then the rate
    that keeps the noise scale, and as many steps as the samples take."""
    first = schedule[0][0]
    batches = [min(most, math.floor(batch * first / rate + 1e-9)) for rate, _ in schedule]
    rates = [rate * b / batch for (rate, _), b in zip(schedule, batches, strict=True)]
    steps = [-(-batch * count // b) for (_, count), b in zip(schedule, batches, strict=True)]
    return rates, batches, steps


def train(rates: Sequence[float], batches: Sequence[int], steps: Sequence[int]
          ) -> dict[str, torch.Tensor]:
    """The weights after these stages."""
    model, (data, _) = MLP((64, 32, 10)), digits(F64)
    weights = model.parameters(dtype=F64)
    done = 0
    for rate, size, count in zip(rates, batches, steps, strict=True):
        for _ in range(count):
            _, gradients = model.gradients(weights, *data.batch(done, size))
            for key, w in weights.items():
                w -= rate * gradients[key]
            done += 1
    return weights


def _loss(case: Case, outcome: Outcome) -> Verdict:
    """Does training with the answer reach the loss of the given schedule, in as many samples, and
    in fewer steps?"""
    schedule, batch, most = case.args[0]
    _, sizes, counts = _right(schedule, batch, most)
    model, (data, _) = MLP((64, 32, 10)), digits(F64)

    def loss_of(*stages: Any) -> float:
        return model.loss(train(*stages), *data)

    least = loss_of([rate for rate, _ in schedule], [batch] * len(schedule),
                    [count for _, count in schedule])
    rates, batches, steps = ([kind(x) for x in row] for kind, row in zip(
        (float, int, int), outcome.values[0], strict=True))
    done, samples = sum(steps), sum(b * s for b, s in zip(batches, steps, strict=True))
    # Each stage ends with a whole batch.
    allowed = batch * sum(count for _, count in schedule) + sum(sizes)
    within = samples <= allowed and done <= sum(counts) and min(batches) > 0 <= min(steps)
    reached = loss_of(rates, batches, steps) if within else math.inf
    return Verdict(reached <= SAME * least, f"loss {reached:.3g} after {samples:,} samples, "
                   f"{done:,} steps", f"≤ {SAME * least:.3g}, {allowed:,}, {sum(counts):,}")


def _build(seed: int) -> list[Check]:
    def case(tried: str, schedule: Schedule, batch: int, limit: float = 1e5) -> Case:
        """limit: of a batch, in first batches."""
        batch += varied(seed, batch, tried)
        most, faster = int(limit * batch), scale(seed, tried)
        schedule = [(faster * rate, steps + varied(seed, 50, tried, stage) * (steps > 0))
                    for stage, (rate, steps) in enumerate(schedule)]
        return Case(tried, [(schedule, batch, most)], comm=False, wanted=Wanted(
            [_right(schedule, batch, most)], items=ITEMS, what="by the rule", rtol=1e-9))

    powers = [case("divided by 2", [(0.8, 60), (0.4, 60), (0.2, 30)], 16),
              case("divided by 4", [(0.5, 60), (0.125, 60), (0.03125, 64)], 16),
              case("divided by 10", [(1.0, 100), (0.1, 200)], 8)]
    odd = [case("samples that don't divide", [(0.4, 7), (0.1, 10), (0.05, 3)], 12),
           case("divided by 3", [(0.3, 30), (0.1, 31), (0.3 / 9, 10)], 12),
           case("divided by 1.7", [(0.17, 20), (0.1, 20), (0.06, 20)], 15),
           case("no two stages alike", [(0.9, 11), (0.7, 13), (0.2, 17), (0.11, 19)], 9)]
    limited = [case("limit between stages", [(0.5, 60), (0.125, 60), (0.03125, 64)], 16, 6.25),
               case("limit at once", [(0.4, 10), (0.2, 10), (0.1, 20)], 32, 1),
               case("limit reached", [(0.8, 20), (0.2, 20), (0.05, 21)], 8, 4)]
    edges = [case("one stage", [(0.3, 25)], 10), case("a stage of no steps",
                                                      [(0.4, 5), (0.2, 0), (0.1, 8)], 4)]
    divided = [(rate, 60 + varied(seed, 10, rate)) for rate in (0.5, 0.125, 0.03125)]
    trained = [Case(f"digits, at most {most}", [(divided, 16, most)], comm=False)
               for most in (256, 64 + varied(seed, 32))]
    return [
        Check("batches", 2, "rates divided by 2, 4, 10", powers, items(BATCHES, RATES)),
        Check("samples", 2, "the same number of samples", [*powers, *odd], items(STEPS)),
        Check("noise scale", 1, "batches that must be rounded", odd, items(BATCHES, RATES)),
        Check("limit", 1, "no batch above the largest", limited, values),
        Check("edges", 1, "one stage, no steps", edges, values),
        Check("loss", 1, "digits trained with it", trained, _loss, requires=always),
    ]


EXERCISE = Exercise("growing-batch", "Growing batch", "grow", _build)
