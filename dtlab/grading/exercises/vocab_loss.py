"""Chapter 11: the cross-entropy of logits of which each rank has some columns."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from dtlab.grading.case import Case, Wanted
from dtlab.grading.draws import normals, numbers, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise
from dtlab.grading.standard import (
    COLLECTIVES,
    I64,
    items,
    on_gloo,
    ring_bytes,
    sent_at_most,
    values,
)


def _build(seed: int) -> list[Check]:
    def case(rows: int, *widths: int, scale: float = 1.0, add: float = 0.0, gloo: bool = False
             ) -> Case:
        words = sum(widths)
        draw = (seed, rows, widths, scale)
        targets = numbers((draw, "all"), (rows,), I64, most=words) - 1
        logits = torch.cat([add + scale * normals((draw, rank), (rows, n))[0]
                            for rank, n in enumerate(widths)], 1)
        whole = logits.clone().requires_grad_()
        loss = cross_entropy(whole, targets)
        (gradient,) = torch.autograd.grad(loss, whole)
        parts, firsts = logits.split(widths, 1), [sum(widths[:r]) for r in range(len(widths))]
        wanted = Wanted([(loss.detach(), part) for part in gradient.split(widths, 1)],
                        items=("loss", "the gradient"), rtol=1e-9, what="that of one device",
                        # to one rank a number of each row, from it the loss
                        least_bytes=8 * (len(widths) - 1) * (rows + 1))
        return Case(f"{len(widths)} ranks, {rows} rows, {words} words",
                    [(part.clone(), targets, first) for part, first in zip(
                        parts, firsts, strict=True)],
                    wanted=wanted, gloo=gloo, facts={"rows": rows}, **COLLECTIVES)

    k, loss, gradient = varied(seed, 6), items("loss"), items("the gradient")
    even = [case(4, 3, 3), case(6 + k, 5, 5, 5), case(9, 2, 2, 2, 2)]
    odd = [case(5 + k, 4, 2, 1), case(1, 1, 1), case(7, 9)]
    stable = [case(4, 3, 3, scale=1e4), case(5, 4, 4, 4, add=1e3)]
    large = [case(20 + k, 300, 300, 300), case(16, 1000, 1000)]
    return [
        Check("loss", 2, "2 to 4 ranks", even, loss),
        Check("gradient", 3, "of each rank's own logits", even, gradient, loss),
        Check("uneven", 1, "columns that t doesn't divide; one rank", odd, gradient, requires=loss),
        Check("stable", 1, "logits of thousands", stable, loss),
        Check("bytes", 2, "three numbers a row", large, sent_at_most(
            lambda case: 3 * ring_bytes(case.ranks, case.facts["rows"] + case.ranks),
            "three numbers a row"), loss),
        on_gloo(case(8, 4, 3, 2, gloo=True), values, loss),
    ]


EXERCISE = Exercise("vocab-loss", "Cross-entropy over a cut vocabulary", "vocab_loss", _build,
                    library=WITH_COLLECTIVES)
