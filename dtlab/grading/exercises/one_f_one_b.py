"""Chapter 12: 1F1B, judged as data: complete, free of deadlock, its bubble and its memory."""

from __future__ import annotations

import torch
from torch import nn

from dtlab.comm import Comm
from dtlab.grading.case import Case
from dtlab.grading.compare import difference
from dtlab.grading.draws import varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._pipeline import of_schedule
from dtlab.parallel.pipeline import Pipeline, Schedule
from dtlab.simulator import simulate
from dtlab.topology import uniform


@of_schedule
def _runs(case: Case, schedule: Schedule) -> Verdict:
    return Verdict(True, "it can run", "complete, no deadlock")


@of_schedule
def _held(case: Case, schedule: Schedule) -> Verdict:
    p, m = case.args[0]
    allowed, held = [min(m, p - i) for i in range(p)], schedule.time().held
    rank = max(range(p), key=lambda i: held[i] - allowed[i])
    return Verdict(held[rank] <= allowed[rank], f"rank {rank} holds {held[rank]:g} micro-batches",
                   f"≤ min(m, p − r) = {allowed[rank]}", evidence=held)


@of_schedule
def _bubble(case: Case, schedule: Schedule) -> Verdict:
    p, _ = case.args[0]
    times = [(1.0, 2.0), (2.0, 3.0), (1.0, 1.0)]
    actual = [schedule.time(F, B).bubble for F, B in times]
    allowed = [(p - 1) * (F + B) for F, B in times]
    worst = max(range(len(times)), key=lambda i: actual[i] - allowed[i])
    return Verdict(actual[worst] <= allowed[worst] + 1e-9, f"a bubble of {actual[worst]:g} s",
                   f"(p−1)(F+B) = {allowed[worst]:g} s", evidence=actual)


@of_schedule
def _gradients(case: Case, schedule: Schedule) -> Verdict:
    """Run it, on a small model with real numbers."""
    p, m = case.args[0]
    x = torch.randn(2 * m, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def layers() -> list[nn.Linear]:
        torch.manual_seed(2)
        return [nn.Linear(3, 3, dtype=torch.float64) for _ in range(p)]

    def step(comm: Comm, schedule: Schedule) -> torch.Tensor | None:
        stage = layers()[comm.rank]
        Pipeline(stage, schedule, comm).step(x, x, nn.functional.mse_loss)
        return stage.weight.grad

    actual = simulate(step, schedule, network=uniform(p, 1e-6, 1e9)).values
    whole = layers()
    nn.functional.mse_loss(nn.Sequential(*whole)(x), x).backward()
    wrong = difference("gradient of stage", actual, [la.weight.grad for la in whole], 1e-10)
    return Verdict(wrong is None, wrong[0] if wrong else "equal to one device",
                   "the gradients of one device")


def _build(seed: int) -> list[Check]:
    def cases(*sizes: tuple[int, int]) -> list[Case]:
        return [Case(f"p = {p}, m = {m}", [(p, m)], comm=False) for p, m in sizes]

    j, k = varied(seed, 4, "ranks"), varied(seed, 12, "micro-batches")
    plain = cases((2 + j, 4 + j + k), (4, 8 + k), (3 + j, 7 + k), (8, 16 + k))
    few = cases((4 + j, 2), (5 + j, 1), (1, 3 + k), (6 + j, 6 + j), (7 + j, 5 + j), (1, 1))
    return [
        Check("runs", 1, "2 to 8 ranks", plain, _runs),
        Check("any p, any m", 2, "m < p, m = 1, p = 1", few, _runs),
        Check("memory", 4, "held on each rank", [*plain, *few], _held, _runs),
        Check("bubble", 2, "three pairs of F and B", [*plain, *few], _bubble, _runs),
        Check("gradients", 1, "run, with real numbers", cases((3, 5 + k)), _gradients,
              requires=_runs),
    ]


EXERCISE = Exercise("one-f-one-b", "1F1B", "one_f_one_b", _build)
