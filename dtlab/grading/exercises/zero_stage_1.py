"""Chapter 13: a step of ZeRO stage 1, judged by values, by the state a rank keeps, by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome, describe_case
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._standard import not_sent
from dtlab.grading.exercises._zero import close, places, too_many_bytes

F32, F64 = torch.float32, torch.float64
LR, MU = 0.25, 0.9  # no share of a few ranks
Grads = Sequence[Sequence[Tensor]]  # by step, then by rank


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


def reference(weights: Tensor, grads: Grads, rank: int = 0, *,
              factor: Callable[[int], float] = lambda p: 1.0, own: bool = False,
              mixed: bool = False, forgets: bool = False, keeps: bool = False,
              lost: bool = False, no_lr: bool = False) -> Tensor:
    """The weights after all steps; or those of `rank` if it makes a mistake. factor: by which
    the average of p gradients is multiplied."""
    p, n = len(grads[0]), len(weights)
    w, v = weights.double().clone(), torch.zeros(n, dtype=F64)
    for everyone in grads:
        g = everyone[rank].double() if own else torch.stack(list(everyone)).double().mean(0)
        if mixed:  # each rank's shard is of its own gradient
            g = torch.cat([h[-(-n // p) * r :][: -(-n // p)] for r, h in enumerate(everyone)])
        v = factor(p) * g + (0 if forgets else MU * v)
        new = w - (1 if no_lr else LR) * v
        each = -(-n // p)
        if keeps:  # its own shard only
            new[: rank * each], new[(rank + 1) * each :] = (
                w[: rank * each], w[(rank + 1) * each :])
        if lost:
            new[n // p * p :] = w[n // p * p :]
        w = new
    return w


_MISTAKES: dict[str, dict[str, Any]] = {
    "The gradients are summed, but not averaged: divide by the number of ranks, or op=\"avg\".":
        {"factor": lambda p: p},
    "The gradients are divided by the number of ranks twice.": {"factor": lambda p: 1 / p},
    "Each rank steps with its own gradient: the gradients of all ranks were never averaged.":
        {"own": True},
    "Each rank steps its shard with its own gradient: reduce-scatter the gradients first.":
        {"mixed": True},
    "Each rank has stepped its own shard, but the others never got it: gather the new shards.":
        {"keeps": True},
    "The momentum begins at zero in every step: keep it in `state` from one step to the next.":
        {"forgets": True},
    "The last n mod N elements never change: the last shard is shorter, so pad the vector with "
    "zeros to a multiple of N, and cut the padding off in the end.": {"lost": True},
    "The learning rate is missing.": {"no_lr": True},
}


def _values(case: Case, outcome: Outcome) -> Verdict:
    weights, grads = case.facts["weights"], case.facts["grads"]
    right = reference(weights, grads)
    for rank, (after, *_) in enumerate(outcome.after):
        if close(after, right, case.facts["rtol"]):
            continue
        clue = "The update is v ← μ·v + mean of the gradients; weights ← weights − lr·v."
        if all(torch.equal(mine, weights) for mine, *_ in outcome.after):
            clue = "The weights are as they were: write the new ones into `weights` itself."
        elif close(after, right, 1e-5):
            clue = ("The values are right, but rounded to fewer digits: keep the momentum and all "
                    "buffers in the dtype of the weights.")
        for hint, options in _MISTAKES.items():
            if all(close(mine, reference(weights, grads, r, **options), case.facts["rtol"])
                   for r, (mine, *_) in enumerate(outcome.after)):
                clue = hint
                break
        return Verdict(False, f"rank {rank}: {places(after, right)}", "weights − lr·v",
                       clue=clue, sure=clue in _MISTAKES)
    least = 2 * (case.ranks - 1) * weights.nbytes * len(grads)
    return not_sent(outcome, least) or Verdict(True, "the new weights, on every rank",
                                               "weights − lr·v")


def _state(case: Case, outcome: Outcome) -> Verdict:
    item, n = case.facts["weights"].itemsize, len(case.facts["weights"])
    allowed = -(-n // case.ranks) * item
    rank, (kept, shown) = max(enumerate(outcome.values), key=lambda each: each[1][0])
    text = f"{kept:,} / {allowed:,}"
    if kept > allowed:
        clue = ("A view keeps the whole vector alive: what `state` holds is a part of a longer "
                "one; .clone() it." if shown <= allowed else
                "Every rank keeps the momentum of all weights: nothing is sharded. Keep that of "
                "this rank's N-th only." if shown >= n * item and case.ranks > 1 else
                "`state` holds more than a shard of the momentum.")
        return Verdict(False, f"rank {rank} keeps {kept:,} B", f"≤ {allowed:,} B", text, clue=clue)
    if min(kept for kept, _ in outcome.values) < (n // case.ranks) * item // 2:
        return Verdict(False, "`state` is empty", f"{allowed:,} B of momentum", text,
                       clue="Keep the shard of the momentum in `state`; nothing else lasts from "
                            "step to step.")
    return Verdict(True, "a shard of the momentum", "⌈n/N⌉ elements", text)


def _traffic(case: Case, outcome: Outcome) -> Verdict:
    steps, p = len(case.facts["grads"]), case.ranks
    shard = -(-len(case.facts["weights"]) // p) * case.facts["weights"].itemsize
    return too_many_bytes(outcome, p, steps * 2 * (p - 1) * shard, "2(N−1)/N·n a step",
                          "A reduce-scatter of the gradients and an all-gather of the weights are "
                          "enough: an all-reduce sends the sums of all shards to every rank.")


def _real(case: Case, outcome: Outcome) -> Verdict:
    verdict = _values(case, outcome)
    return _traffic(case, outcome) if verdict.passed else verdict


def _build(seed: int) -> list[Check]:
    def case(ranks: int, n: int, dtype: torch.dtype = F64, steps: int = 3, **options: Any) -> Case:
        random = torch.Generator().manual_seed(7919 * seed + 100 * ranks + n)
        weights = torch.randn(n, generator=random, dtype=F64).to(dtype)
        grads = [[torch.randn(n, generator=random, dtype=F64).to(dtype) for _ in range(ranks)]
                 for _ in range(steps)]
        return Case(describe_case(ranks, n, dtype),
                    [(weights.clone(), [g[rank] for g in grads]) for rank in range(ranks)],
                    harness=train, library=True, latency_s=1e-6, bandwidth_Bps=1e9,
                    facts={"weights": weights, "grads": grads,
                           "rtol": 1e-12 if dtype == F64 else 1e-5}, **options)

    k = seed % 3
    even = [case(2, 8), case(1, 5), case(3, 12), case(4, 40 + 4 * k)]
    uneven = [case(2, 7), case(3, 10 + 3 * k), case(4, 3), case(5, 1), case(4, 1001, F32)]
    large = [case(2, 4000), case(4, 4000 + 400 * k), case(3, 3001)]
    return [
        Check("weights", 3, "1 to 4 ranks, 3 steps", even, _values),
        Check("any length", 2, "lengths that N does not divide, float32", uneven, _values,
              "It fails where N does not divide n: pad the vector with zeros to a multiple of N."),
        Check("state", 2, "what a rank keeps", large, _state, provided=_values),
        Check("traffic", 2, "bytes that a rank sends", large, _traffic, provided=_values),
        Check("real", 1, "3 ranks over Gloo", [case(3, 100 + k, gloo=True)], _real,
              "It works in the simulator, but not on real processes over Gloo."),
    ]


EXERCISE = Exercise("zero-stage-1", "ZeRO, stage 1", "13", 1, "stage_1_step", _build)
