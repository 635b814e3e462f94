"""Chapter 12: 1F1B, judged as data: complete, free of deadlock, its bubble and its memory."""

from __future__ import annotations

import torch
from torch import nn

from dtlab.comm import Comm
from dtlab.grading.case import Case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._pipeline import of_plan
from dtlab.parallel.pipeline import Pipeline, Schedule
from dtlab.simulator import simulate
from dtlab.topology import uniform


@of_plan
def _runs(case: Case, plan: Schedule) -> Verdict:
    return Verdict(True, "it can run", "complete, no deadlock")


@of_plan
def _held(case: Case, plan: Schedule) -> Verdict:
    p, m = case.args[0]
    allowed, held = [min(m, p - i) for i in range(p)], plan.time().held
    for rank, (came, most) in enumerate(zip(held, allowed, strict=True)):
        if came > most:
            clue = ("All forwards come first: that is GPipe. Begin with p − i forwards on rank i, "
                    "then backward and forward in turn." if held == [m] * p else
                    "One forward too many: rank i begins with p − i of them, and the next waits "
                    "for the first backward." if all(c <= a + 1 for c, a in zip(
                        held, allowed, strict=True)) else
                    "Rank i begins with p − i forwards: the last rank with one, the first with p.")
            return Verdict(False, f"rank {rank} holds {came:g}", f"≤ min(m, p − i) = {most}",
                           clue=clue)
    return Verdict(True, f"rank 0 holds {held[0]:g}", "≤ min(m, p − i)")


@of_plan
def _bubble(case: Case, plan: Schedule) -> Verdict:
    p, _ = case.args[0]
    for forward, backward in ((1.0, 2.0), (2.0, 3.0), (1.0, 1.0)):
        came, allowed = plan.time(forward, backward).bubble, (p - 1) * (forward + backward)
        if came > allowed + 1e-9:
            clue = ("Rank i begins with p − i forwards; with fewer it waits again and again." if
                    came < 10 * allowed else "The ranks work one after the other.")
            return Verdict(False, f"a bubble of {came:g} s", f"(p−1)(F+B) = {allowed:g} s",
                           clue=clue)
    return Verdict(True, "(p−1)(F+B)", "(p−1)(F+B)")


@of_plan
def _gradients(case: Case, plan: Schedule) -> Verdict:
    """Run it, on a small model with real numbers."""
    p, m = case.args[0]
    x = torch.randn(2 * m, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def layers() -> list[nn.Linear]:
        torch.manual_seed(2)
        return [nn.Linear(3, 3, dtype=torch.float64) for _ in range(p)]

    def step(comm: Comm, plan: Schedule) -> torch.Tensor | None:
        stage = layers()[comm.rank]
        Pipeline(stage, plan, comm).step(x, x, nn.functional.mse_loss)
        return stage.weight.grad

    found = simulate(step, plan, network=uniform(p, 1e-6, 1e9)).values
    whole = layers()
    nn.functional.mse_loss(nn.Sequential(*whole)(x), x).backward()
    right_ones = [layer.weight.grad for layer in whole if layer.weight.grad is not None]
    off = max(float((grad - mine).abs().max() / grad.abs().max())
              for grad, mine in zip(right_ones, found, strict=True))
    right = off < 1e-10
    return Verdict(right, "equal to one device" if right else f"off by {off:.2g}",
                   "the gradients of one device")


def _build(seed: int) -> list[Check]:
    def cases(*sizes: tuple[int, int]) -> list[Case]:
        return [Case(f"p = {p}, m = {m}", [(p, m)], comm=False) for p, m in sizes]

    k = seed % 3
    plain = cases((2, 4), (4, 8 + k), (3, 7 + k), (8, 16))
    few = cases((4, 2), (5, 1), (1, 3 + k), (6, 6), (7, 5), (1, 1))
    return [
        Check("runs", 2, "2 to 8 ranks", plain, _runs),
        Check("any p, any m", 2, "m < p, m = 1, p = 1", few, _runs,
              "It fails where there are fewer micro-batches than a rank wants to begin with: begin "
              "with min(m, p − i)."),
        Check("memory", 2, "held on each rank", [*plain, *few], _held, provided=_runs),
        Check("bubble", 3, "three pairs of F and B", [*plain, *few], _bubble, provided=_runs),
        Check("gradients", 1, "run, with real numbers", cases((3, 5 + k)), _gradients,
              provided=_runs),
    ]


EXERCISE = Exercise("one-f-one-b", "1F1B", "12", 1, "one_f_one_b", _build)
