"""Chapter 11: a layer whose forward pass is right and whose gradients are wrong: which, and mended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._tensor_parallel import judge_bytes, judge_part, normal, returned
from dtlab.parallel.conversions import copy_to, reduce_from

NAMES = ("norm", "up", "scale", "down", "bias")
CUT = {"up": 0, "down": 1}  # along which dimension
WRONG = ["norm", "scale"]  # the gradients that the printed layer gets wrong
_PLACE_CLUES = {
    "up": "up and down are cut: each rank has the whole gradient of its own part.",
    "bias": "bias is added after the sum, to what is the same on all ranks: its gradient is right.",
    "norm": "One is missing: what lies before the region gets its gradient from all ranks' "
            "columns.",
    "scale": "One is missing: which other tensor is the same on all ranks, and meets columns that "
             "differ?",
}
_PLACE_CLUES["down"] = _PLACE_CLUES["up"]
_CLUES = {
    "norm": "The gradient of `norm` is wrong, which lies before the region: does h enter the "
            "region through copy_to?",
    "scale": "The gradient of `scale` is wrong: all ranks hold it, and each multiplies its own "
             "columns by it, so each has a part of its gradient.",
    "x": "The gradient of x is wrong, which the layers before this one would go on with: what "
         "enters the region through copy_to must be h, not `norm`.",
    "bias": "The gradient of `bias` is wrong: it is added after the sum, to what is the same on "
            "all ranks.",
}


def right(x: Tensor, norm: Tensor, up: Tensor, scale: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """On one device."""
    h = gelu((x * norm) @ up.T)
    h = (h.unflatten(-1, (-1, len(scale))) * scale).flatten(-2)
    y: Tensor = x + h @ down.T + bias
    return y


def run_layer(layer: Callable[..., Any], comm: Comm, x: Tensor, *parameters: Tensor) -> list[Any]:
    """In the sandbox: y, the gradients of its parameters, which ones the answer names, and the
    gradient of x."""
    x, *leaves = (p.clone().requires_grad_() for p in (x, *parameters))
    result = layer(comm, x, *leaves, copy_to, reduce_from)
    y, named = result if isinstance(result, tuple) and len(result) == 2 else (result, ())
    y.square().mean().backward()
    named = {named} if isinstance(named, str) else set(named)
    return [y.detach(), *(p.grad for p in leaves), sorted(map(str, named)), x.grad]


def _expected(case: Case) -> tuple[list[Tensor], list[list[Tensor]]]:
    t = case.ranks
    x, norm, _, scale, _, bias = case.args[0]
    up = torch.cat([a[2] for a in case.args])
    down = torch.cat([a[4] for a in case.args], 1)
    leaves = [p.clone().requires_grad_() for p in (norm, up, scale, down, bias)]
    x = x.clone().requires_grad_()
    y = right(x, *leaves)
    y.square().mean().backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in (*leaves, x)]
    return [y.detach()] * t, [list(g.chunk(t, CUT[name])) if name in CUT else [g] * t
                              for name, g in zip((*NAMES, "x"), gradients, strict=True)]


def _forward(case: Case, outcome: Outcome) -> Verdict:
    values = returned(outcome, 8)
    if isinstance(values, Verdict):
        return values
    wrong = judge_part("y", [v[0] for v in values], _expected(case)[0])
    return wrong or Verdict(True, "right, as before", "the same as before")


def _place(case: Case, outcome: Outcome) -> Verdict:
    values = returned(outcome, 8)
    if isinstance(values, Verdict):
        return values
    named = next((v[6] for v in values if v[6] != WRONG), WRONG)
    if named == WRONG:
        return Verdict(True, "both found", "the gradients that are wrong")
    clue = next((_PLACE_CLUES[name] for name in ("up", "down", "bias") if name in named),
                next((_PLACE_CLUES[name] for name in WRONG if name not in named), ""))
    if not set(named) <= set(NAMES):
        clue = f"Name them by the arguments, in a set of texts: {', '.join(NAMES)}."
    if not named:
        clue = "Return y and a set of names: the gradients that the layer above gets wrong."
    return Verdict(False, ", ".join(named)[:40] or "no names", "the gradients that are wrong",
                   clue=clue)


def _gradients(*names: str) -> Callable[[Case, Outcome], Verdict]:
    def judge(case: Case, outcome: Outcome) -> Verdict:
        values = returned(outcome, 8)
        if isinstance(values, Verdict):
            return values
        came = [[v[place] for v in values] for place in (1, 2, 3, 4, 5, 7)]
        for name, mine, expected in zip((*NAMES, "x"), came, _expected(case)[1], strict=True):
            if name not in names:
                continue
            wrong = judge_part(f"the gradient of {name}", mine, expected)
            if wrong:
                return wrong._replace(clue=_CLUES.get(name, ""))
        return Verdict(True, "right on every rank", "that of one device")

    return judge


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    t, (rows, hidden), scale = case.ranks, case.args[0][0].shape, len(case.args[0][3])
    allowed = 2 * (t - 1) * 8 * (2 * -(-rows * hidden // t) + -(-scale // t))
    return judge_bytes(case, outcome, allowed, "two all-reduces of x, one of scale",
                       "More is reduced than must be: one copy_to for each tensor that is the same "
                       "on all ranks and enters the region, and none for others.")


def _build(seed: int) -> list[Check]:
    def case(t: int, rows: int, hidden: int, gloo: bool = False) -> Case:
        random = torch.Generator().manual_seed(13 * seed + t + rows)
        wide, group = 6 * t, 2
        x, norm, bias = normal(random, rows, hidden), normal(random, hidden), normal(random, hidden)
        up, down = normal(random, wide, hidden), normal(random, hidden, wide)
        scale = normal(random, group)
        args = [(x, norm, u, scale, d, bias) for u, d in zip(
            up.chunk(t), down.chunk(t, 1), strict=True)]
        return Case(f"{t} ranks, {rows} rows, {hidden} columns", args, library=True,
                    latency_s=1e-6, bandwidth_Bps=1e9, harness=run_layer, gloo=gloo)

    k = seed % 3
    cases = [case(2, 3 + k, 4), case(3, 5, 6), case(4, 2, 8 + k)]
    return [
        Check("forward", 1, "2 to 4 ranks", cases, _forward),
        Check("place", 1, "which gradients were wrong", cases[:1], _place),
        Check("norm", 2, "its gradient", cases, _gradients("norm", "up", "down", "x"),
              provided=_forward),
        Check("scale", 1, "its gradient", cases, _gradients("scale"), provided=_forward),
        Check("bias", 1, "its gradient", cases, _gradients("bias"), provided=_forward),
        Check("bytes", 1, "no all-reduce too many", [case(4, 40, 60)], _bytes,
              provided=_gradients(*NAMES, "x")),
        Check("real", 1, "3 ranks over Gloo", [case(3, 4, 5, gloo=True)], _gradients(*NAMES, "x"),
              provided=_forward),
    ]


EXERCISE = Exercise("find-the-lie", "Find the lie", "11", 3, "layer", _build)
