"""Chapter 10: gradients averaged in buckets, judged by values, messages and what is in a bucket."""

from __future__ import annotations

from typing import Any

import torch

from dtlab.collectives import all_reduce
from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome, Wanted, counted, describe_case
from dtlab.grading.draws import normals, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise, Verdict
from dtlab.grading.standard import COLLECTIVES, F32, F64, on_gloo, sum_bytes, values
from dtlab.simulator import simulate
from dtlab.topology import uniform


def _buckets(case: Case) -> list[int]:
    """Elements in each bucket: from the last tensor on, closed once it holds `least`."""
    (grads, least), closed, now = case.args[0], list[int](), 0
    for grad in reversed(grads):
        now += len(grad)
        if now >= least:
            closed.append(now)
            now = 0
    return closed + [now] * (now > 0)


def _rings(outcome: Outcome, ranks: int) -> list[int]:
    """Bytes that all ranks send in the first, second, … ring all-reduce."""
    each, rings = 2 * (ranks - 1), list[int]()
    for rank in range(ranks):
        sends = [m.nbytes for m in outcome.trace.transfers if m.src == rank]
        for number, first in enumerate(range(0, len(sends), each)):
            rings += [0] * (number == len(rings))
            rings[number] += sum(sends[first : first + each])
    return rings


def _messages(case: Case, outcome: Outcome) -> Verdict:
    allowed, rings = len(_buckets(case)), _rings(outcome, case.ranks)
    return Verdict(len(rings) == allowed, counted(len(rings), "all-reduce"),
                   f"{allowed}, one for each bucket", rounds=f"{len(rings)} / {allowed}",
                   evidence=rings)


def _order(case: Case, outcome: Outcome) -> Verdict:
    item, actual = case.args[0][0][0].itemsize, _rings(outcome, case.ranks)
    wanted = [2 * (case.ranks - 1) * n * item for n in _buckets(case)]
    good = actual == wanted
    return Verdict(good, "last gradients first" if good else "other buckets",
                   "from the last gradient to the first", evidence=actual)


def _alone(seed: int) -> Case:
    """Gradients that fill a bucket each, whose averages tell in which chunk of it every element
    was: ±B of two ranks leave nothing of the third one's small number, unless they meet first."""
    sizes = [n + varied(seed, 9, "alone", n) for n in (30, 12, 45)]
    huge, small = (normals((seed, "alone", rank), *sizes) for rank in (0, 2))
    grads = [[2.0**60 * x for x in huge], [-(2.0**60) * x for x in huge], small]

    def reduced(comm: Comm) -> list[torch.Tensor]:
        return [all_reduce(comm, x, "avg", algorithm="ring") for x in grads[comm.rank]]

    whole = simulate(reduced, network=uniform(3, 1e-6, 1e9), echo=False).values
    wanted = Wanted(args_after=[(mine,) for mine in whole], names=("grads",), rtol=1e-12,
                    what="the average of a bucket of its own",
                    least_bytes=sum_bytes(3, sum(sizes) * F64.itemsize))
    return Case(f"{describe_case(3, sum(sizes), F64)}, a bucket for each gradient",
                [(mine, 10) for mine in grads], wanted=wanted, **COLLECTIVES)


def _build(seed: int) -> list[Check]:
    def case(ranks: int, sizes: list[int], least: int, dtype: torch.dtype = F64, **more: Any
             ) -> Case:
        sizes = [n + varied(seed, 4, i, *sizes) * (n > 1) for i, n in enumerate(sizes)]
        grads = [normals((seed, sizes, rank), *sizes, dtype=dtype) for rank in range(ranks)]
        mean = [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]
        wanted = Wanted(args_after=[(mean,)] * ranks, names=("grads",), what="the average",
                        rtol=1e-5 if dtype == F32 else 1e-12,
                        least_bytes=sum_bytes(ranks, sum(sizes) * dtype.itemsize))
        return Case(describe_case(ranks, sum(sizes), dtype), [(mine, least) for mine in grads],
                    wanted=wanted, **COLLECTIVES, **more)

    plain = [case(2, [8, 4, 12, 6], 10), case(4, [16, 16, 16, 16], 32), case(3, [5, 40, 7, 3], 12)]
    odd = [case(3, [4, 4, 4], 5), case(5, [1, 2, 3, 4, 5], 6), case(4, [3], 100),
           case(2, [7, 1, 1, 1], 1), case(4, [30, 2, 9, 11], 13, F32)]
    return [
        Check("averages", 2, "2 to 4 ranks", plain, values),
        Check("any sizes", 1, "1 to 5 gradients, a bucket that is never full, float32", odd,
              values),
        Check("messages", 2, "one all-reduce for each bucket", [*plain, *odd], _messages, values),
        Check("order", 2, "what is in which bucket", [*plain, *odd, _alone(seed)], _order,
              values),
        on_gloo(case(3, [100, 20, 33], 50, gloo=True)),
    ]


EXERCISE = Exercise("bucketed-average", "Buckets", "average_in_buckets", _build,
                    library=WITH_COLLECTIVES)
