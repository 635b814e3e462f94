"""Chapter 11: a row-parallel linear layer, forward and backward, judged by values and bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._tensor_parallel import judge_bytes, judge_part, normal, returned


def _parts(case: Case) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    xs, ws = [a[0] for a in case.args], [a[1] for a in case.args]
    return xs, ws, case.args[0][2], case.args[0][3]


def _forward(case: Case, outcome: Outcome) -> Verdict:
    values = returned(outcome, 4)
    if isinstance(values, Verdict):
        return values
    xs, ws, bias, _ = _parts(case)
    parts = [x @ w.T for x, w in zip(xs, ws, strict=True)]
    whole, t = torch.stack(parts).sum(0), case.ranks
    wrong = judge_part("y", [v[0] for v in values], [whole + bias] * t, [
        ("The bias is added on every rank before the sum, so it counts t times: add it after.",
         lambda r: whole + t * bias),
        ("y is a part of the sum: nothing was reduced over the ranks.", lambda r: parts[r] + bias),
        ("The parts were averaged: they are to be added up.", lambda r: whole / t + bias),
        ("The bias is missing.", lambda r: whole),
    ], "y is the sum over the ranks of x Wᵀ, each of its own part, in one all-reduce; then b.")
    return wrong or Verdict(True, "right on every rank", "x Wᵀ + b")


def _backward(case: Case, outcome: Outcome) -> Verdict:
    values = returned(outcome, 4)
    if isinstance(values, Verdict):
        return values
    xs, ws, _, dy = _parts(case)
    t = case.ranks
    many = "dy is the same on all ranks, and whole: don't reduce it, or what comes of it."
    right: list[tuple[str, int, list[Tensor]]] = [
        ("the gradient of x", 1, [dy @ w for w in ws]),
        ("the gradient of the weight", 2, [dy.T @ x for x in xs]),
        ("the gradient of the bias", 3, [dy.sum(0)] * t)]
    for name, place, expected in right:
        wrong = judge_part(name, [v[place] for v in values], expected, [
            (many, lambda r, e=expected: e[r] * t),  # type: ignore[misc]
            (many, lambda r, e=expected: _total(e)),  # type: ignore[misc]
            (f"{name.capitalize()} is averaged over the ranks: each keeps its own.",
             lambda r, e=expected: _total(e) / t),  # type: ignore[misc]
        ], "Backward each rank works alone, on its own x and W: dy W, dyᵀ x, and the sum of dy's "
            "rows.")
        if wrong:
            return wrong
    return Verdict(True, "right on every rank", "dy W, dyᵀ x, Σ dy")


def _total(parts: list[Tensor]) -> Tensor:
    """What an all-reduce of them would leave, if they are of one shape."""
    return torch.stack(parts).sum(0) if len({p.shape for p in parts}) == 1 else torch.empty(0)


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    t, (rows, out) = case.ranks, case.args[0][3].shape
    return judge_bytes(case, outcome, 2 * (t - 1) * -(-rows * out // t) * 8, "one all-reduce of y",
                       "More moves than one all-reduce of y: don't gather x or the weight, and "
                       "send nothing backward.")


def _build(seed: int) -> list[Check]:
    def case(rows: int, out: int, *widths: int, gloo: bool = False) -> Case:
        random = torch.Generator().manual_seed(97 * seed + rows + out)
        bias, dy = normal(random, out), normal(random, rows, out)
        args = [(normal(random, rows, n), normal(random, out, n), bias, dy) for n in widths]
        return Case(f"{len(widths)} ranks, {rows} × {sum(widths)} → {out}", args, library=True,
                    latency_s=1e-6, bandwidth_Bps=1e9, gloo=gloo)

    k = seed % 3
    even = [case(3, 4 + k, 2, 2), case(5, 6, 3, 3, 3), case(2, 8, 4, 4, 4, 4)]
    odd = [case(4, 5 + k, 3, 2), case(1, 1, 1, 2, 3), case(6, 3, 7)]
    large = [case(64, 100 + k, 8, 8, 8, 8), case(50, 60, 10, 10)]
    return [
        Check("forward", 2, "2 to 4 ranks", even, _forward),
        Check("gradients", 3, "2 to 4 ranks", even, _backward, provided=_forward),
        Check("uneven", 1, "inputs that t doesn't divide; one rank", odd, _backward,
              provided=_forward),
        Check("bytes", 1, "one all-reduce of y", large, _bytes, provided=_forward),
        Check("real", 1, "3 ranks over Gloo", [case(4, 6, 2, 2, 1, gloo=True)], _backward,
              provided=_forward),
    ]


EXERCISE = Exercise("row-parallel", "Row parallel", "11", 1, "row_parallel", _build)
