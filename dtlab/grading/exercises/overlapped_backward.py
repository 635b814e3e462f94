"""Chapter 10: reductions beside backward, judged by the communication that is exposed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from dtlab import cost
from dtlab.comm import Comm, Work
from dtlab.errors import ConfigError
from dtlab.grading.case import Case, Outcome, Wanted, counted
from dtlab.grading.draws import normals, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise, Verdict
from dtlab.grading.standard import on_gloo, sum_bytes, values

ALPHA, BETA = 1e-5, 1e-8
TURN_S = 1e-12  # in which a reduction that begins sends its first chunk
LAYER_S = 1e-4  # of a layer's backward, times its factor


class TimedLayer:
    """A layer for the learner's function: `backward()` computes the gradient, once, and takes time;
    the layer after must have computed its own before."""

    def __init__(self, compute: Callable[[int], Tensor], number: int):
        self._compute, self._number = compute, number
        self.grad: Tensor | None = None

    def backward(self) -> None:
        """Compute `grad`."""
        self.grad = self._compute(self._number)


def oracle(gradients: list[list[Tensor]], seconds: list[float], rank: int
           ) -> Callable[..., Tensor | None]:
    """Return the referee's function: a layer's gradient, once the time that it takes has passed; of
    no layer, a moment passes."""
    begun: list[int] = []
    ended: list[int] = []

    def compute(comm: Comm, number: int | None = None) -> Tensor | None:
        if number is None:
            with comm.compute("begin", TURN_S):
                return None
        if number != -len(begun) - 1 or len(ended) < len(begun):
            raise ConfigError(f"backward of layer {number} (counted from the end) came out of "
                              f"turn; begin with the last layer, and call each once")
        begun.append(number)
        with comm.compute("backward", seconds[number]):
            pass
        ended.append(number)
        return gradients[rank][number]

    return compute


def run_layers(backward: Callable[..., Any], comm: Comm, compute: Callable[..., Any], count: int
               ) -> list[Any]:
    """In the sandbox, return the layers' gradients after the learner's function has run."""
    layers = [TimedLayer(compute, number) for number in range(-count, 0)]
    backward(_begins_at_once(comm, compute), layers)
    return [layer.grad for layer in layers]


def _begins_at_once(comm: Any, compute: Callable[..., Any]) -> Any:
    """Return `comm`; what it and its groups begin is under way when `begin` returns: who changes a
    gradient then finds that others have its old values."""
    comm_begin, make_group = comm.begin, comm._make_group

    def begin(*args: Any, **options: Any) -> Work:
        work: Work = comm_begin(*args, **options)
        compute()
        return work

    comm.begin = begin
    comm._make_group = lambda *of: _begins_at_once(make_group(*of), compute)
    return comm


def _exposed(case: Case, outcome: Outcome) -> Verdict:
    """Compare exposed time with reductions begun once their gradients are there, one at a time."""
    gradients, seconds = case.facts["gradients"], case.facts["seconds"]
    computed = reduced = 0.0
    for gradient, layer_s in zip(reversed(gradients), reversed(seconds), strict=True):
        computed += layer_s
        reduced = max(reduced, computed) + cost.time_s(
            "all_reduce", "ring", case.ranks, gradient.nbytes, ALPHA, BETA)
    sent, each = len(outcome.trace.transfers), 2 * (case.ranks - 1) * case.ranks
    if sent != each * len(gradients):
        return Verdict(False, f"{counted(sent, 'message')}", f"{each} of a ring for each of "
                       f"{counted(len(gradients), 'layer')}, by itself", evidence=sent)
    actual, allowed = outcome.elapsed_s - computed, reduced - computed
    return Verdict(actual <= 1.02 * allowed + 1e-9, f"{actual * 1e6:.0f} µs exposed",
                   f"≤ {allowed * 1e6:.0f} µs, what can't hide", evidence=actual)


def _build(seed: int) -> list[Check]:
    def case(ranks: int, sizes: list[int], factors: list[float], **options: Any) -> Case:
        """factors: of the layers' times, from the first on, repeated."""
        more = varied(seed, 8, ranks, sizes)
        sizes = [size + ranks * more for size in sizes]
        grads = [normals((seed, sizes, rank), *sizes) for rank in range(ranks)]
        mean = [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]
        seconds = [LAYER_S * factor for factor in islice(cycle(factors), len(sizes))]
        return Case(f"{counted(ranks, 'rank')}, {len(sizes)} layers", [(len(sizes),)] * ranks,
                    library=True, latency_s=ALPHA, bandwidth_Bps=1 / BETA, harness=run_layers,
                    oracle=partial(oracle, grads, seconds),
                    facts={"gradients": grads[0], "seconds": seconds},
                    wanted=Wanted([mean] * ranks, what="the average", rtol=1e-12,
                                  least_bytes=sum_bytes(ranks, 8 * sum(sizes))), **options)

    plain = [case(2, [8] * 3, [1]), case(4, [16] * 4, [1, 2]), case(3, [9] * 5, [2, 1])]
    odd = [case(1, [4] * 3, [1]), case(4, [8], [1]), case(5, [10] * 6, [1])]
    hidden = [case(2, [200] * 8, [1]), case(4, [400] * 6, [1, 3]),  # reductions are quicker
              case(3, [120, 60, 600, 120, 60, 600, 120, 900], [3, 1])]  # but for the large ones
    queued = [case(4, [4000] * 6, [1]), case(2, [5000] * 5, [1, 3, 2])]  # and slower
    return [
        Check("averages", 2, "2 to 4 ranks", plain, values),
        Check("any number", 1, "1 rank, 1 layer, 5 ranks", odd, values),
        Check("fast network", 2, "reductions shorter than a layer's backward", hidden, _exposed,
              values),
        Check("slow network", 2, "reductions longer than a layer's backward", queued, _exposed,
              values),
        on_gloo(case(3, [50] * 4, [0.0], gloo=True)),
    ]


EXERCISE = Exercise("overlapped-backward", "Overlap", "overlapped_backward", _build,
                    library=WITH_COLLECTIVES)
