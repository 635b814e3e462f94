"""Chapter 11: a layer whose forward pass is right and whose gradients are wrong: which, and mended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from dtlab.comm import Comm
from dtlab.grading.case import Case, Wanted
from dtlab.grading.draws import normals, varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise
from dtlab.grading.standard import COLLECTIVES, items, on_gloo, ring_bytes, sent_at_most, sum_bytes
from dtlab.parallel.conversions import copy_to, reduce_from

NAMES = ("norm", "up", "scale", "down", "bias")
ITEMS = ("y", *(f"the gradient of {name}" for name in (*NAMES, "x")), "the names")


def right(x: Tensor, norm: Tensor, up: Tensor, scale: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """Compute the layer's y on one device."""
    h = gelu((x * norm) @ up.T)
    h = (h.unflatten(-1, (-1, len(scale))) * scale).flatten(-2)
    y: Tensor = x + h @ down.T + bias
    return y


def run_layer(layer: Callable[..., Any], comm: Comm, x: Tensor, *parameters: Tensor) -> list[Any]:
    """In the sandbox, return y, the gradients of its parameters and of x, and which ones the answer
    names."""
    x, *leaves = (p.clone().requires_grad_() for p in (x, *parameters))
    result = layer(comm, x, *leaves, copy_to, reduce_from)
    y, named = result if isinstance(result, tuple) and len(result) == 2 else (result, ())
    y.square().mean().backward()
    named = {named} if isinstance(named, str) else set(named)
    return [y.detach(), *(p.grad for p in (*leaves, x)), sorted(map(str, named))]


def _wanted(t: int, x: Tensor, *parameters: Tensor) -> Wanted:
    leaves = [p.clone().requires_grad_() for p in (*parameters, x)]
    y = right(leaves[-1], *leaves[:-1])
    norm, up, scale, down, bias, of_x = torch.autograd.grad(y.square().mean(), leaves)
    return Wanted([(y.detach(), norm, up_part, scale, down_part, bias, of_x, ["norm", "scale"])
                   for up_part, down_part in zip(up.chunk(t), down.chunk(t, 1), strict=True)],
                  items=ITEMS, rtol=1e-9, what="that of one device",
                  least_bytes=sum_bytes(t, x.nbytes))  # of y; the gradients need more


def _build(seed: int) -> list[Check]:
    def case(t: int, rows: int, hidden: int, gloo: bool = False, inner: int = 6) -> Case:
        draw = (seed, t, rows, hidden)
        x, norm, bias, scale = normals((draw, "all"), (rows, hidden), hidden, hidden, 2)
        parts = [normals((draw, rank), (inner, hidden), (hidden, inner)) for rank in range(t)]
        up, down = torch.cat([u for u, _ in parts]), torch.cat([d for _, d in parts], 1)
        args = [(x, norm, u, scale, d, bias) for u, d in parts]
        return Case(f"{t} ranks, {rows} rows, {hidden} columns", args, harness=run_layer, gloo=gloo,
                    wanted=_wanted(t, x, norm, up, scale, down, bias),
                    facts={"numel": rows * hidden}, **COLLECTIVES)

    def allowed(case: Case) -> int:
        return 2 * ring_bytes(case.ranks, case.facts["numel"]) + ring_bytes(case.ranks, 2)

    k, forward = varied(seed, 4), items("y")
    cases = [case(2, 3 + k, 4), case(3, 5 + k, 6), case(4, 2, 8 + k)]
    gradients = items(*ITEMS[1:-1])
    return [
        Check("forward", 1, "2 to 4 ranks", cases, forward),
        Check("place", 1, "which gradients were wrong", cases[:1], items("the names"), forward),
        Check("norm", 2, "its gradient", cases,
              items(*(f"the gradient of {name}" for name in ("norm", "up", "down", "x"))), forward),
        Check("scale", 1, "its gradient", cases, items("the gradient of scale"), forward),
        Check("bias", 1, "its gradient", cases, items("the gradient of bias"), forward),
        Check("bytes", 1, "no all-reduce too many", [case(4, 40, 60, inner=40)],
              sent_at_most(allowed, "two all-reduces of x, one of scale"), gradients),
        on_gloo(case(3, 4, 5, gloo=True), gradients, forward),
    ]


EXERCISE = Exercise("find-the-lie", "Find the lie", "layer", _build,
                    library=(*WITH_COLLECTIVES, "parallel"))
