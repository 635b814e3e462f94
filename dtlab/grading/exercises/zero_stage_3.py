"""Chapter 13: forward and backward of ZeRO stage 3, judged by values, by peak memory, by bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._standard import not_sent
from dtlab.grading.exercises._zero import close, places, too_many_bytes

F64 = torch.float64
PEAK_LAYERS = 8  # of live memory: a layer and the next, a gradient and its copies, activations


class Layer:
    """y = tanh(x @ W) with a (width, width) matrix W that somebody else holds, as a flat vector."""

    def __init__(self, width: int):
        self.width, self.numel = width, width * width

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        """y (b, width) from w (numel,) and x (b, width)."""
        return (x @ w.view(self.width, -1)).tanh()

    def backward(self, w: Tensor, x: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss's gradients (grad_x, grad_w), shaped like x and w, from that with respect to y.
        """
        matrix = w.view(self.width, -1)
        grad = grad_y * (1 - (x @ matrix).tanh().square())
        return grad @ matrix.T, (x.T @ grad).flatten()


def call(step: Callable[..., Any], comm: Comm, widths: list[int], shards: list[Tensor], x: Tensor
         ) -> tuple[Any, bool]:
    """In the sandbox: what `step` returns, and whether it holds parts of larger vectors."""
    found = step(comm, [Layer(width) for width in widths], shards, x)
    tensors = [g for g in tree_leaves(found) if isinstance(g, Tensor)]
    return found, any(g.untyped_storage().nbytes() > g.nbytes for g in tensors)


def _cut(w: Tensor, ranks: int) -> list[Tensor]:
    padded = torch.cat([w, w.new_zeros(-len(w) % ranks)])
    return list(padded.view(ranks, -1).clone())


def gradients(layers: list[Layer], weights: list[Tensor], x: Tensor, *,
              backward: list[Tensor] | None = None) -> list[Tensor]:
    """On one rank, of whole weights. backward: other weights, for backward only."""
    inputs = [x]
    for layer, w in zip(layers, weights, strict=True):
        inputs.append(layer.forward(w, inputs[-1]))
    grad, found = inputs.pop(), []
    for layer, w in zip(layers[::-1], (backward or weights)[::-1], strict=True):
        grad, grad_w = layer.backward(w, inputs.pop(), grad)
        found.append(grad_w)
    return found[::-1]


def _mistakes(case: Case) -> dict[str, list[list[Tensor]]]:
    """Clue → the shards that the mistake gives, by rank."""
    layers, weights, xs, p = (case.facts[k] for k in ("layers", "weights", "xs", "ranks"))
    own = [gradients(layers, weights, x) for x in xs]
    total = [torch.stack(each).sum(0) for each in zip(*own, strict=True)]

    def shards(of: list[list[Tensor]]) -> list[list[Tensor]]:
        return [[_cut(g, p)[rank] for g in mine] for rank, mine in enumerate(of)]

    def partial(rank: int) -> list[Tensor]:
        kept = []
        for w in weights:
            parts = [part * (r == rank) for r, part in enumerate(_cut(w, p))]
            kept.append(torch.cat(parts)[: len(w)])
        return kept

    alone = [gradients(layers, weights, x, backward=partial(r)) for r, x in enumerate(xs)]
    mixed = [torch.stack(each).mean(0) for each in zip(*alone, strict=True)]
    return {
        "The gradients are summed, but not averaged: divide by the number of ranks, or op=\"avg\".":
            shards([total] * p),
        "The gradients are divided by the number of ranks twice.":
            shards([[g / p**2 for g in total]] * p),
        "Each rank returns its part of its own gradient: the gradients of all ranks were never "
        "averaged. Reduce-scatter them.": shards(own),
        "Backward ran with this rank's shard and zeros: forward has freed the weights, so gather "
        "the layer again before its backward.": shards([mixed] * p),
        "The list is in the order of backward: return the gradients in the order of the layers.":
            [each[::-1] for each in shards([[g / p for g in total]] * p)],
    }


def _right(case: Case) -> list[list[Tensor]]:
    layers, weights, xs, p = (case.facts[k] for k in ("layers", "weights", "xs", "ranks"))
    own = [gradients(layers, weights, x) for x in xs]
    mean = [torch.stack(each).mean(0) for each in zip(*own, strict=True)]
    return [[_cut(g, p)[rank] for g in mean] for rank in range(p)]


def _same(came: Any, right: list[Tensor]) -> bool:
    return (isinstance(came, (list, tuple)) and len(came) == len(right)
            and all(close(a, b, 1e-10) for a, b in zip(came, right, strict=True)))


_WHOLE = ("Return this rank's shard of each gradient, ⌈numel/N⌉ elements, not the whole "
          "gradient: reduce-scatter it.")
_LOSS = ("The loss is half the sum of the squares of the last layer's output, so backward begins "
         "with that output; each layer's backward takes the input that its forward had.")


def _values(case: Case, outcome: Outcome) -> Verdict:
    told = "each layer's mean gradient, this rank's shard"
    right = _right(case)
    for rank, (given, after) in enumerate(zip(case.args, outcome.after, strict=True)):
        if not all(map(torch.equal, given[1], after[1])):
            return Verdict(False, f"rank {rank}: `shards` has changed", "the weights as they were",
                           clue="The shards are the model: gather them into a new tensor, and put "
                                "the gradients into new ones, too.", sure=True)
    everyone = [came for came, _ in outcome.values]
    for rank, came in enumerate(everyone):
        if _same(came, right[rank]):
            continue
        if not isinstance(came, (list, tuple)) or len(came) != len(right[rank]):
            return Verdict(False, f"rank {rank} returns {type(came).__name__}", told,
                           clue="Return a list with a tensor for each layer.")
        clue = next((hint for hint, wrong in _mistakes(case).items()
                     if all(map(_same, everyone, wrong))), "")
        bad = next(i for i, (a, b) in enumerate(zip(came, right[rank], strict=True))
                   if not close(a, b, 1e-10))
        return Verdict(False, f"rank {rank}, layer {bad}: {places(came[bad], right[rank][bad])}",
                       told, clue=clue or (_WHOLE if came[bad].numel() > right[rank][bad].numel()
                                           else _LOSS), sure=bool(clue))
    least = 2 * (case.ranks - 1) * case.facts["total"] * 8  # a gather, and the gradients
    return not_sent(outcome, least) or Verdict(True, "the shards of all gradients", told)


def _peak(case: Case, outcome: Outcome) -> Verdict:
    layer = case.facts["layers"][0].numel * 8
    count = len(case.facts["layers"])
    most = max(outcome.peak_bytes) / layer - count / case.ranks  # the gradients' shards
    came, allowed = f"{most:.1f} layers alive at once", f"≤ {PEAK_LAYERS} layers' size"
    if most <= PEAK_LAYERS:
        return Verdict(True, came, allowed)
    sent = outcome.trace.sent_bytes(0) / (case.facts["total"] * 8 * (case.ranks - 1) / case.ranks)
    clue = ("The layers stay gathered from forward to backward: free each after use, and gather it "
            "again." if sent < 2.5 else
            "The shards that you return are views, and a view keeps its whole vector alive: "
            ".clone() them."
            if any(views for _, views in outcome.values) else
            f"{most:.0f} layers' sizes are alive at once, of {count} layers. Are all layers "
            f"gathered before the first runs, is one that has been used still held, in a list or a "
            f"variable, or are whole gradients kept until the end? Gather one, use it, free it.")
    return Verdict(False, came, allowed, clue=clue)


def _traffic(case: Case, outcome: Outcome) -> Verdict:
    p = case.ranks
    psi = sum(-(-layer.numel // p) * p for layer in case.facts["layers"]) * 8
    return too_many_bytes(
        outcome, p, 3 * psi * (p - 1) / p, "3(N−1)/N·Ψ",
        "Two gathers and a reduce-scatter for each layer are enough. An all-reduce of the "
        "gradients sends every rank the sums of all shards, of which it needs one.")


def _real(case: Case, outcome: Outcome) -> Verdict:
    verdict = _values(case, outcome)
    return _traffic(case, outcome) if verdict.passed else verdict


def _build(seed: int) -> list[Check]:
    def case(ranks: int, *widths: int, samples: int = 2, **options: Any) -> Case:
        random = torch.Generator().manual_seed(7919 * seed + 100 * ranks + len(widths))
        layers = [Layer(width) for width in widths]
        weights = [torch.randn(la.numel, generator=random, dtype=F64) / la.width**0.5
                   for la in layers]
        xs = [torch.randn(samples, widths[0], generator=random, dtype=F64) for _ in range(ranks)]
        cuts = [_cut(w, ranks) for w in weights]
        text = f"{ranks} rank{'s' * (ranks > 1)}, {len(widths)} layers of {widths[0]}²"
        args = [(list(widths), [cut[rank] for cut in cuts], xs[rank]) for rank in range(ranks)]
        facts = {"layers": layers, "weights": weights, "xs": xs, "ranks": ranks,
                 "total": sum(la.numel for la in layers)}
        return Case(text, args, harness=call, library=True, latency_s=1e-6, bandwidth_Bps=1e9,
                    facts=facts, **options)

    k = 2 * (seed % 3)
    even = [case(3, 6, 6, samples=5), case(1, 3), case(4, *[8] * 3), case(2, *[6 + k] * 4)]
    uneven = [case(2, 3, 3), case(3, *[5 + 3 * (k // 2)] * 3), case(4, *[5] * 2), case(5, *[1] * 3)]
    deep = [case(2, *[128] * 14, meter=True), case(4, *[96 + 4 * k] * 14, meter=True)]
    return [
        Check("gradients", 3, "1 to 4 ranks, up to 4 layers", even, _values),
        Check("any size", 2, "layers that N does not divide", uneven, _values,
              "It fails where N does not divide a layer: its shards are padded with zeros. Cut the "
              "gathered vector to layer.numel, and pad the gradient again."),
        Check("peak", 2, "14 layers, live memory", deep, _peak, provided=_values),
        Check("traffic", 2, "14 layers, bytes sent", deep, _traffic, provided=_values),
        Check("real", 1, "3 ranks over Gloo", [case(3, *[10 + k] * 3, gloo=True)], _real,
              "It works in the simulator, but not on real processes over Gloo."),
    ]


EXERCISE = Exercise("zero-stage-3", "ZeRO, stage 3", "13", 2, "stage_3_step", _build)
