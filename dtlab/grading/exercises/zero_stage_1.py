"""Chapter 13: a step of ZeRO stage 1, judged by values, by the state a rank keeps, by bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome, Wanted, describe_case
from dtlab.grading.draws import normals
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise, Verdict
from dtlab.grading.standard import COLLECTIVES, F32, F64, real, sent_at_most, sum_bytes, values

LR, MU = 0.25, 0.9  # no share of a few ranks
SLACK = 1.02  # of bytes: counts and other small messages


def train(step: Callable[..., Any], comm: Comm, weights: Tensor, grads: list[Tensor]
          ) -> tuple[int, int]:
    """In the sandbox: a step for each of `grads`, the state kept between them. Returns the bytes of
    the state's memory, and those that its tensors show of it."""
    state: dict[str, Any] = {}
    for grad in grads:
        step(comm, weights, grad.clone(), state, LR, MU)
    tensors = [x for x in tree_leaves(list(state.values())) if isinstance(x, Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()), sum(x.nbytes for x in tensors)


def _trained(weights: Tensor, grads: list[Tensor]) -> Tensor:
    """By torch's own SGD, on one device. grads: by step, (ranks, n)."""
    w = weights.double().clone().requires_grad_()
    optimizer = torch.optim.SGD([w], lr=LR, momentum=MU)
    for step in grads:
        w.grad = step.double().mean(0)
        optimizer.step()
    return w.detach().to(weights.dtype)


def _shard_bytes(case: Case) -> int:
    weights = case.args[0][0]
    return -(-len(weights) // case.ranks) * int(weights.itemsize)


def _state(case: Case, outcome: Outcome) -> Verdict:
    """A shard of the momentum, no view of more, and not nothing."""
    allowed = _shard_bytes(case)
    kept = [memory for memory, _ in outcome.values]
    good = allowed // 2 <= min(kept) and max(kept) <= allowed
    rank = kept.index(min(kept) if max(kept) <= allowed else max(kept))
    return Verdict(good, f"rank {rank} keeps {kept[rank]:,} B", f"{allowed:,} B of momentum",
                   f"{kept[rank]:,} / {allowed:,}", shows=[
                       round(size / allowed) for size in (max(kept), outcome.values[rank][1])])


def _build(seed: int) -> list[Check]:
    def case(ranks: int, n: int, dtype: torch.dtype = F64, steps: int = 3, **options: Any) -> Case:
        (weights,) = normals((seed, ranks, n, "all"), n, dtype=dtype)
        mine = [normals((seed, ranks, n, rank), *[n] * steps, dtype=dtype) for rank in range(ranks)]
        grads = [torch.stack(step) for step in zip(*mine, strict=True)]
        wanted = Wanted(leaves=[(_trained(weights, grads),)] * ranks, names=("weights",),
                        what="weights − lr · v", rtol=1e-12 if dtype == F64 else 1e-5,
                        least_bytes=steps * sum_bytes(ranks, weights.nbytes))
        return Case(describe_case(ranks, n, dtype),
                    [(weights.clone(), g) for g in mine],
                    harness=train, wanted=wanted, facts={"steps": steps}, **COLLECTIVES, **options)

    def allowed(case: Case) -> float:
        return float(SLACK * case.facts["steps"] * 2 * (case.ranks - 1) * _shard_bytes(case))

    k, traffic = seed % 3, sent_at_most(allowed, "2(N−1)/N·n a step")
    even = [case(2, 8), case(1, 5), case(3, 12), case(4, 40 + 4 * k)]
    uneven = [case(2, 7), case(3, 10 + 3 * k), case(4, 3), case(5, 1), case(4, 1001, F32)]
    large = [case(2, 4000), case(4, 4000 + 400 * k), case(3, 3001)]
    return [
        Check("weights", 3, "1 to 4 ranks, 3 steps", even, values),
        Check("any length", 2, "lengths that N does not divide, float32", uneven, values),
        Check("state", 2, "what a rank keeps", large, _state, values),
        Check("traffic", 2, "bytes that a rank sends", large, traffic, values),
        real(case(3, 100 + k, gloo=True), traffic, values),
    ]


EXERCISE = Exercise("zero-stage-1", "ZeRO, stage 1", "stage_1_step", _build,
                    library=WITH_COLLECTIVES)
