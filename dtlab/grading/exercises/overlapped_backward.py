"""Chapter 10: reductions beside backward, judged by the communication that is exposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dtlab import cost
from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._data_parallel import F64, judge_values, random_tensors, summed

ALPHA, BETA = 1e-5, 1e-8


class Layer:
    """What the learner's function gets: `backward()` computes the gradient, once, and takes time;
    the layer after must have computed its own before."""

    def __init__(self, comm: Comm, gradient: Tensor, seconds: float, number: int, done: list[int]):
        self._comm, self._gradient, self._seconds = comm, gradient, seconds
        self._number, self._done = number, done
        self.grad: Tensor | None = None

    def backward(self) -> None:
        """Compute `grad`."""
        if self._number != -len(self._done) - 1:
            raise ValueError(f"backward of layer {self._number} (counted from the end) came out of "
                             f"turn; begin with the last layer, and call each once")
        self._done.append(self._number)
        with self._comm.compute("backward", self._seconds):
            self.grad = self._gradient.clone()


def run_layers(backward: Callable[..., Any], comm: Comm, gradients: list[Tensor], seconds: float
               ) -> list[Any]:
    """In the sandbox: the layers' gradients after the learner's function has run."""
    done: list[int] = []
    layers = [Layer(comm, g, seconds, i, done) for i, g in enumerate(gradients, -len(gradients))]
    backward(comm, layers)
    return [layer.grad for layer in layers]


_HOW = ("From the last layer to the first: `layer.backward()`, then `comm.begin(all_reduce, "
        "layer.grad, \"avg\")`. `begin` takes the function and its arguments, but not comm, and "
        "calls it itself. Wait for all that began at the end.")


def _values(case: Case, outcome: Outcome) -> Verdict:
    p, mine = case.ranks, [args[0] for args in case.args]
    sums = summed(mine)
    averages = [s / p for s in sums]
    return judge_values(case, outcome.values, averages, "the average over all ranks", {
        "The gradients are summed, but not averaged: op=\"avg\", or divide.": lambda r: sums,
        "Each rank has its own gradients still: nothing was reduced.": lambda r: mine[r],
        "The first layer's gradient is not reduced: it comes last, and needs an all-reduce, too.":
            lambda r: [mine[r][0], *averages[1:]],
        "The last layer's gradient is not reduced, which is there first.":
            lambda r: [*averages[:-1], mine[r][-1]],
    }, _HOW)


def _exposed(case: Case, outcome: Outcome) -> Verdict:
    gradients, seconds = case.args[0]
    k, p, nbytes = len(gradients), case.ranks, sum(g.nbytes for g in gradients)
    allowed = cost.exposed_s(k * seconds, nbytes, k, p, ALPHA, BETA)
    came = outcome.elapsed_s - k * seconds
    alone = cost.exposed_s(k * seconds, nbytes, k, p, ALPHA, BETA, overlap=False)
    return Verdict(came <= 1.02 * allowed + 1e-9, f"{came * 1e6:.0f} µs exposed",
                   f"≤ {allowed * 1e6:.0f} µs, what can't hide",
                   rounds=f"{came * 1e6:.0f} / {allowed * 1e6:.0f} µs", clue=(
        "Nothing overlaps: each reduction is waited for before the next layer's backward, or "
        "all begin after the last. Begin it with comm.begin(all_reduce, …) as soon as its "
        "gradient is there, and wait for all at the end." if came > 0.9 * alone else
        "Some reductions hide, but not all that could: begin each as soon as its gradient is "
        "there, and wait for none before all layers have computed."))


def _build(seed: int) -> list[Check]:
    def case(ranks: int, layers: int, size: int, seconds: float = 1e-4, **more: Any) -> Case:
        size += ranks * (seed % 3)
        args = [(random_tensors([size] * layers, 100 * seed + r), seconds) for r in range(ranks)]
        return Case(f"{describe_case(ranks, size, F64)}, {layers} layers", args, library=True,
                    latency_s=ALPHA, bandwidth_Bps=1 / BETA, harness=run_layers, **more)

    plain = [case(2, 3, 8), case(4, 4, 16), case(3, 5, 9)]
    odd = [case(1, 3, 4), case(4, 1, 8), case(5, 6, 10)]
    hidden = [case(2, 8, 200), case(4, 6, 400), case(3, 12, 120)]  # reductions are quicker
    queued = [case(4, 6, 4000), case(2, 5, 5000)]  # and slower than a layer's backward
    return [
        Check("averages", 2, "2 to 4 ranks", plain, _values, _HOW),
        Check("any number", 1, "1 rank, 1 layer, 5 ranks", odd, _values),
        Check("fast network", 2, "reductions shorter than a layer's backward", hidden, _exposed,
              provided=_values),
        Check("slow network", 2, "reductions longer than a layer's backward", queued, _exposed,
              provided=_values),
        Check("real", 1, "3 ranks over Gloo", [case(3, 4, 50, 0.0, gloo=True)], _values),
    ]


EXERCISE = Exercise("overlapped-backward", "Overlap", "10", 2, "overlapped_backward", _build)
