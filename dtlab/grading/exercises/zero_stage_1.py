"""Chapter 13: a step of ZeRO stage 1, judged by values, by the state a rank keeps, by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome, Wanted, describe_case
from dtlab.grading.draws import normals
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise, Verdict
from dtlab.grading.standard import (
    COLLECTIVES,
    F32,
    F64,
    both,
    on_gloo,
    padded,
    sum_bytes,
    values,
)

Rates = Sequence[tuple[float, float]]  # (lr, mu) of each step
# No rate is another one divided by a few ranks: a sum in place of a mean shows.
RATES: Rates = (0.25, 0.9), (0.1875, 0.8), (0.375, 0.7)
SLACK = 1.02  # of bytes: counts and other small messages
PICKLED = 4096  # bytes of a pickled state beside its tensors


def train(step: Callable[..., Any], comm: Comm, weights: Tensor, grads: list[Tensor], rates: Rates
          ) -> None:
    """In the sandbox, take a step for each of `grads`, the state kept between them."""
    state: dict[str, Any] = {}
    for grad, (lr, mu) in zip(grads, rates, strict=True):
        step(comm, weights, grad.clone(), state, lr, mu)


def train_and_move(step: Callable[..., Any], comm: Comm, weights: Tensor, grads: list[Tensor],
                   rates: Rates) -> tuple[int, int]:
    """In the sandbox, train on the first half of the ranks, which send weights and state to the
    second half, which trains on. What a rank keeps outside of its state is lost so, and the bytes
    of the state are counted. Returns the bytes of the state's storages, and of its tensors, which
    may be views of a part of these."""
    half = comm.size // 2
    first = comm.rank < half
    state: dict[str, Any] = {}
    if not first:
        comm.recv(weights, comm.rank - half)
        state = comm.recv_object(comm.rank - half)
    group = comm.subgroup(range(half) if first else range(half, comm.size))
    for grad, (lr, mu) in zip(grads, rates, strict=True):
        step(group, weights, grad.clone(), state, lr, mu)
    if first:
        comm.send(weights, comm.rank + half)
        comm.send(state, comm.rank + half)
    tensors = [torch.as_tensor(x) for x in tree_leaves(list(state.values()))
               if isinstance(x, (Tensor, np.ndarray))]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()), sum(x.nbytes for x in tensors)


def _trained(weights: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """The weights after each step, by torch's own SGD, on one device. grads: by step, (ranks, n).
    """
    w = weights.double().clone().requires_grad_()
    optimizer = torch.optim.SGD([w], lr=1, momentum=1)
    found = []
    for step, (lr, mu) in zip(grads, RATES, strict=True):
        optimizer.param_groups[0].update(lr=lr, momentum=mu)
        w.grad = step.double().mean(0)
        optimizer.step()
        found.append(w.detach().clone().to(weights.dtype))
    return found


def _shard_bytes(case: Case) -> int:
    weights = case.args[0][0]
    return -(-len(weights) // int(case.facts["shards"])) * int(weights.itemsize)


def _inside(case: Case, outcome: Outcome) -> list[int]:
    """Count the bytes that each rank has sent to ranks of its own half."""
    n = case.facts["shards"]
    return [sum(m.nbytes for m in padded(outcome).transfers
                if m.src == rank and m.dst // n == rank // n) for rank in range(case.ranks)]


def _traffic(case: Case, outcome: Outcome) -> Verdict:
    """Allow a reduce-scatter and an all-gather a step, in both halves."""
    step = SLACK * 2 * (case.facts["shards"] - 1) * _shard_bytes(case)
    sent, allowed = _inside(case, outcome), [int(step * n) for n in case.facts["steps"]]
    rank = max(range(case.ranks), key=lambda rank: sent[rank] - allowed[rank])
    return Verdict(sent[rank] <= allowed[rank], f"rank {rank} sent {sent[rank]:,} B",
                   f"≤ 2(N−1)/N·n a step = {allowed[rank]:,} B",
                   f"{sent[rank]:,} / {allowed[rank]:,}", evidence=sent)


def _state(case: Case, outcome: Outcome) -> Verdict:
    """Does each rank's state hold a shard of the momentum: no view of more, and not nothing?"""
    allowed, half = _shard_bytes(case), case.facts["shards"]
    held = [storages for storages, _ in outcome.values]
    moved = [sum(m.nbytes for m in outcome.trace.transfers if m.src == rank and m.dst >= half)
             - case.args[0][0].nbytes for rank in range(half)]
    if max(moved) > allowed + PICKLED:
        held = [max(pair) for pair in zip(held, moved, strict=False)]
    inside, before = _inside(case, outcome), case.facts["steps"][0]
    if any(before * inside[rank + half] > SLACK * inside[rank] for rank in range(half)):
        return Verdict(False, "who goes on sends more than who began", "as many bytes a step: the "
                       "state is all that is kept", evidence="more was kept than the state")
    good = allowed // 2 <= min(held) and max(held) <= allowed
    rank = held.index(min(held) if max(held) <= allowed else max(held))
    sizes = max(held), outcome.values[rank][1]
    return Verdict(good, f"rank {rank} keeps {held[rank]:,} B", f"{allowed:,} B of momentum",
                   evidence=[round(size / allowed) for size in sizes])


def _build(seed: int) -> list[Check]:
    def case(ranks: int, n: int, dtype: torch.dtype = F64, moves: bool = False,
             **options: Any) -> Case:
        (weights,) = normals((seed, ranks, n, moves, "all"), n, dtype=dtype)
        steps = len(RATES)
        mine = [normals((seed, ranks, n, moves, rank), *[n] * steps, dtype=dtype)
                for rank in range(ranks)]
        trained = _trained(weights, [torch.stack(step) for step in zip(*mine, strict=True)])
        args = [(weights.clone(), g, RATES) for g in mine]
        leaves = [(trained[-1],)] * ranks
        if moves:  # after all steps but the last
            args = ([(w, g[:-1], rates[:-1]) for w, g, rates in args]
                    + [(torch.zeros_like(w), g[-1:], rates[-1:]) for w, g, rates in args])
            leaves = [(trained[-2],)] * ranks + leaves
        by_rank = [steps - 1] * ranks + [1] * ranks if moves else [steps] * ranks
        wanted = Wanted(args_after=leaves, names=("weights",), what="weights − lr · v",
                        rtol=1e-12 if dtype == F64 else 1e-5,
                        least_bytes=steps * sum_bytes(ranks, weights.nbytes))
        said = f"{describe_case(ranks, n, dtype)}{', and as many go on' * moves}"
        return Case(said, args, harness=train_and_move if moves else train, wanted=wanted,
                    facts={"shards": ranks, "steps": by_rank}, **COLLECTIVES, **options)

    k = seed % 3
    even = [case(2, 8), case(1, 5), case(3, 12), case(4, 40 + 4 * k)]
    uneven = [case(2, 7), case(3, 10 + 3 * k), case(4, 3), case(5, 1), case(4, 1001, F32)]
    sizes = (2, 4000, F64), (4, 4000 + 400 * k, F64), (3, 3001, F32)
    moved = [case(*size, moves=True) for size in sizes]
    return [
        Check("weights", 3, "1 to 4 ranks, 3 steps", even, values),
        Check("any length", 2, "lengths that N does not divide, float32", uneven, values),
        Check("state", 2, "what a rank keeps, and others go on with", moved,
              _state, values),
        Check("traffic", 2, "bytes that a rank sends", moved, _traffic,
              both(values, _state)),  # without shards, an all-reduce sends as much
        on_gloo(case(3, 100 + k, gloo=True), _traffic, values),
    ]


EXERCISE = Exercise("zero-stage-1", "ZeRO, stage 1", "stage_1_step", _build,
                    library=WITH_COLLECTIVES)
