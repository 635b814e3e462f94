"""Chapter 11: a row-parallel linear layer, forward and backward, judged by values and bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from dtlab.grading.case import Case, Wanted
from dtlab.grading.draws import normals, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise
from dtlab.grading.standard import (
    COLLECTIVES,
    items,
    on_gloo,
    ring_bytes,
    sent_at_most,
    sum_bytes,
    values,
)

GRADIENTS = "the gradient of x", "the gradient of the weight", "the gradient of the bias"


def _right(parts: list[list[Tensor]], bias: Tensor, dy: Tensor
           ) -> list[tuple[Tensor, ...]]:
    """Return for each rank y and the gradients of its x, its weight and the bias."""
    y = torch.stack([x @ w.T for x, w in parts]).sum(0) + bias
    return [(y, dy @ w, dy.T @ x, dy.sum(0)) for x, w in parts]


def _build(seed: int) -> list[Check]:
    def case(rows: int, out: int, *widths: int, gloo: bool = False) -> Case:
        draw = (seed, rows, out, widths)
        bias, dy = normals((draw, "all"), out, (rows, out))
        parts = [normals((draw, rank), (rows, n), (out, n)) for rank, n in enumerate(widths)]
        wanted = Wanted(_right(parts, bias, dy), items=("y", *GRADIENTS), rtol=1e-9,
                        what="that of one device",
                        least_bytes=sum_bytes(len(widths), dy.nbytes))
        return Case(f"{len(widths)} ranks, {rows} × {sum(widths)} → {out}",
                    [(*part, bias, dy) for part in parts], wanted=wanted, gloo=gloo,
                    facts={"n": rows * out}, **COLLECTIVES)

    k, gradients = varied(seed, 5), items(*GRADIENTS)
    even = [case(3, 4 + k, 2, 2), case(5, 6 + k, 3, 3, 3), case(2, 8, 4, 4, 4, 4)]
    odd = [case(4, 5 + k, 3, 2), case(1, 1, 1, 2, 3), case(6, 3, 7)]
    large = [case(64, 100 + k, *[80] * 4), case(50, 60, 80, 80)]
    forward = items("y")
    return [
        Check("forward", 2, "2 to 4 ranks", even, forward),
        Check("gradients", 3, "2 to 4 ranks", even, gradients, forward),
        Check("uneven", 1, "inputs that t doesn't divide; one rank", odd, gradients,
              requires=forward),
        Check("bytes", 1, "one all-reduce of y", large, sent_at_most(lambda case:
              ring_bytes(case.ranks, case.facts["n"]), "one all-reduce of y"), forward),
        on_gloo(case(4, 6, 2, 2, 1, gloo=True), values, forward),
    ]


EXERCISE = Exercise("row-parallel", "Row parallel", "row_parallel", _build,
                    library=WITH_COLLECTIVES)
