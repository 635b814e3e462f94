"""Chapter 13b: forward and backward of ZeRO stage 3, judged by values, by peak memory, by bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dtlab.comm import Comm
from dtlab.grading.case import ANY, Case, Outcome, Wanted, counted
from dtlab.grading.draws import normals, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise, Verdict
from dtlab.grading.standard import (
    COLLECTIVES,
    LARGE_N,
    both,
    grows_at_most,
    items,
    on_gloo,
    sent_at_most,
    sum_bytes,
)

# The most live memory, in layers: two layers' weights, a gradient and its copies, activations.
PEAK_LAYERS = 7.5
WIDE = 512  # columns of layers that are large against a process itself
SLACK = 1.02  # of bytes: counts and other small messages


class TanhLayer:
    """y = tanh(x @ W) with a (width, width) matrix W, held elsewhere as a flat vector."""

    def __init__(self, width: int, used: list[Any]):
        self.width, self.numel = width, width * width
        # [the most vectors alive, *weak references to the storages of all that layers were given]
        self._used = used

    def _note_alive(self, w: Tensor) -> None:
        """Count the vectors other than `w` that layers were given before and that are alive."""
        mine = w.untyped_storage()
        self._used[0] = max(self._used[0], sum(
            other() not in (None, mine) for other in self._used[1:]))
        self._used.append(weakref.ref(mine))

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        """y (b, width) from w (numel,) and x (b, width)."""
        self._note_alive(w)
        return (x @ w.view(self.width, -1)).tanh()

    def backward(self, w: Tensor, x: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss's gradients (grad_x, grad_w), shaped like x and w, from that with respect to y.
        """
        self._note_alive(w)
        matrix = w.view(self.width, -1)
        grad = grad_y * (1 - (x @ matrix).tanh().square())
        return grad @ matrix.T, (x.T @ grad).flatten()


def call(step: Callable[..., Any], comm: Comm, widths: list[int], shards: list[Tensor], x: Tensor
         ) -> tuple[Any, tuple[bool, int], list[Tensor]]:
    """In the sandbox, return what `step` returns; (whether that has views of larger vectors, how
    many weights of other layers were alive while one computed); and `shards` afterwards."""
    used: list[Any] = [0]
    found = step(comm, [TanhLayer(width, used) for width in widths], shards, x)
    tensors = [g for g in tree_leaves(found) if isinstance(g, Tensor)]
    views = any(g.untyped_storage().nbytes() > g.nbytes for g in tensors)
    return found, (views, used[0]), shards


def _cut(w: Tensor, ranks: int) -> list[Tensor]:
    """Cut `w` into copies: pickled, a view would bring the whole vector to each rank."""
    padded = torch.cat([w, w.new_zeros(-len(w) % ranks)])
    return [part.clone() for part in padded.chunk(ranks)]


def gradients(layers: list[TanhLayer], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return the gradients of whole weights, by autograd on one rank."""
    leaves = [w.clone().requires_grad_() for w in weights]
    for layer, w in zip(layers, leaves, strict=True):
        x = layer.forward(w, x)
    return list(torch.autograd.grad(x.square().sum() / 2, leaves))


def _peak(case: Case, outcome: Outcome) -> Verdict:
    layers = case.facts["layers"]
    shards = len(layers) / case.ranks
    most = max(outcome.peak_bytes) / (layers[0].numel * 8) - shards
    views = any(value[1][0] for value in outcome.values)
    late = max(value[1][1] for value in outcome.values)
    actual = f"{most:.1f} layers alive at once"
    if late:
        actual += f"; {late} of layers that had been used"
    return Verdict(most <= PEAK_LAYERS and not late, actual,
                   f"≤ {PEAK_LAYERS} layers' size, none used before", evidence=(views, late))


def _build(seed: int) -> list[Check]:
    def case(ranks: int, *widths: int, samples: int = 2, **options: Any) -> Case:
        layers = [TanhLayer(width, [0]) for width in widths]
        drawn = [normals((seed, ranks, widths, rank), (samples, widths[0]),
                         *(-(-la.numel // ranks) for la in layers)) for rank in range(ranks)]
        xs, *parts = zip(*drawn, strict=True)
        weights = [torch.cat(w)[: la.numel] / la.width**0.5
                   for w, la in zip(parts, layers, strict=True)]
        every = [gradients(layers, weights, x) for x in xs]
        mean = [_cut(torch.stack(g).mean(0), ranks) for g in zip(*every, strict=True)]
        cuts = [_cut(w, ranks) for w in weights]
        shards = [[cut[rank] for cut in cuts] for rank in range(ranks)]
        padded = sum(ranks * len(cut[0]) for cut in cuts) * 8
        wanted = Wanted(
            [([cut[rank] for cut in mean], ANY, [s.clone() for s in shards[rank]])
             for rank in range(ranks)], items=("the gradients", "held", "shards"),
            what="each layer's mean gradient, this rank's shard", rtol=1e-10,
            least_bytes=sum_bytes(ranks, 8 * sum(la.numel for la in layers)))
        return Case(f"{counted(ranks, 'rank')}, {len(widths)} layers of {widths[0]}²",
                    [(list(widths), *pair) for pair in zip(shards, xs, strict=True)],
                    harness=call, wanted=wanted, **COLLECTIVES, **options, facts={
                        "layers": layers, "nbytes": padded, "n": LARGE_N * (widths[0] == WIDE)})

    def allowed(case: Case) -> float:
        return float(SLACK * 3 * case.facts["nbytes"] * (case.ranks - 1) / case.ranks)

    k = 2 * varied(seed, 3)
    even = [case(3, 6, 6, samples=5), case(1, 3), case(4, *[8] * 3), case(2, *[6 + k] * 4)]
    uneven = [case(2, 3, 3), case(3, *[5 + 3 * (k // 2)] * 3), case(4, *[5] * 2), case(5, *[1] * 3)]
    deep = [case(2, *[128] * 14, meter=True), case(3, *[96 + 4 * k] * 14, meter=True)]
    # spare: the half of x that a process may grow by besides is the size of the gradients' shards.
    grows = grows_at_most(lambda case: (PEAK_LAYERS + 4) * 8 * WIDE**2, "a few layers", spare=2)
    right, traffic = items("the gradients", "shards"), sent_at_most(allowed, "3(N−1)/N·Ψ")
    return [
        Check("gradients", 3, "1 to 4 ranks, up to 4 layers", even, right),
        Check("any size", 2, "layers that N does not divide", uneven, right),
        Check("peak", 2, "14 layers, live memory", deep, _peak, right, metered=True),
        Check("traffic", 2, "14 layers, bytes sent", deep, traffic, right),
        on_gloo([case(3, *[10 + k] * 3, gloo=True), case(2, *[WIDE] * 32, gloo=True)],
             both(grows, traffic), right),
    ]


EXERCISE = Exercise("zero-stage-3", "ZeRO, stage 3", "stage_3_step", _build,
                    library=WITH_COLLECTIVES)
