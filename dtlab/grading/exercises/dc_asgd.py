"""Chapter 08: DC-ASGD, the server's half: what it stores at a pull, what it does at a push."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, Wanted
from dtlab.grading.compare import difference
from dtlab.grading.draws import normals, scale, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.standard import F64, values
from dtlab.models import MLP, digits

WORKERS, GRADIENTS, LR, LAM = 8, 160, 0.24, 32.0  # of the training under delay
Answer = Callable[..., Any]  # (request, worker, w, g, backups, lr, lam)
Script = Sequence[tuple[str, int, torch.Tensor | None]]  # request, worker, gradient


def right(request: str, worker: int, w: torch.Tensor, g: torch.Tensor | None,
          backups: dict[Any, torch.Tensor], lr: float, lam: float) -> torch.Tensor:
    """The reference."""
    if request == "pull":
        backups[worker] = w.clone()
    else:
        assert g is not None
        w -= lr * (g + lam * g * g * (w - backups[worker]))
    return w


def replay(function: Answer, w: torch.Tensor, script: Script, lr: float, lam: float
           ) -> list[tuple[Any, torch.Tensor | None]]:
    """In the sandbox, return for each request the weights that a pull returned, or a push made, and
    the gradient afterwards."""
    backups: dict[Any, torch.Tensor] = {}
    seen: list[tuple[Any, torch.Tensor | None]] = []
    for request, worker, g in script:
        mine = None if g is None else g.clone()
        given = function(request, worker, w, mine, backups, lr, lam)
        weights = given if request == "pull" else w  # a later push changes them: copy
        seen.append((weights.clone() if isinstance(weights, torch.Tensor) else weights, mine))
    return seen


def _case(name: str, requests: str, seed: int, shape: tuple[int, ...] = (5,), lr: float = 0.1,
          lam: float = 0.7) -> Case:
    """`requests`: "p0 g1" is a pull of worker 0, then a gradient of worker 1."""
    w, *drawn = normals((seed, name), *[shape] * (1 + len(requests.split())))
    script = [("pull" if r[0] == "p" else "push", int(r[1:]), None if r[0] == "p" else g)
              for r, g in zip(requests.split(), drawn, strict=True)]
    lr, lam = lr * scale(seed, name, "lr"), lam * scale(seed, name, "λ")
    wanted = Wanted([replay(right, w.clone(), script, lr, lam)], rtol=1e-12,
                    what="w − lr·[g + λ·g⊙g⊙(w − w_bak)]; g as it was")
    return Case(f"{name}: {requests}", [(w, script, lr, lam)], comm=False, harness=replay,
                wanted=wanted)


def train(function: Answer, seed: int) -> list[torch.Tensor]:
    """Return the weights after 8 workers have trained in turns, so that each gradient is 7 updates
    old: in the sandbox, and in the judge for comparison."""
    model, (data, _) = MLP((64, 32, 10)), digits(F64)
    weights = model.parameters(seed, F64)
    backups: dict[str, dict[Any, torch.Tensor]] = {key: {} for key in weights}
    pulled: dict[int, dict[str, torch.Tensor]] = {}
    for number in range(GRADIENTS + WORKERS):
        worker = number % WORKERS
        if number >= WORKERS:
            _, g = model.gradients(pulled[worker], *data.batch(number, 32, seed))
            for key, w in weights.items():
                function("push", worker, w, g[key], backups[key], LR, LAM)
        pulled[worker] = {key: function("pull", worker, w, None, backups[key], LR, LAM).clone()
                          for key, w in weights.items()}
    return list(weights.values())


def loss_of(weights: Sequence[torch.Tensor], seed: int) -> float:
    """Return the loss of weights, for the referee; ∞ if they are not those of the model."""
    model, (data, _) = MLP((64, 32, 10)), digits(F64)
    like = model.parameters(seed, F64)
    if len(weights) != len(like) or not all(
            isinstance(w, torch.Tensor) and w.shape == own.shape
            for w, own in zip(weights, like.values(), strict=True)):
        return math.inf
    return float(model.loss(dict(zip(like, (w.to(F64) for w in weights), strict=True)), *data))


def _loss(case: Case, outcome: Outcome) -> Verdict:
    """Is the loss as low as the reference's, which plain SGD is far from, and by its weights?
    Another training reaches a low loss, too."""
    (seed,) = case.args[0]
    actual, trained = outcome.values[0], train(right, seed)
    reached, least = loss_of(actual, seed), loss_of(trained, seed)
    good = reached <= least * 1.01 and not difference("weights", actual, trained, 1e-6)
    return Verdict(good, f"loss {reached:.4g}", f"≤ {least * 1.01:.3f}, by DC-ASGD's weights",
                   evidence=reached)


def _build(seed: int) -> list[Check]:
    delayed = [
        _case("one worker", "p0 g0 g0 g0", seed),
        _case("a matrix", "p0 g0 g0", seed, (3, 4), lr=0.02, lam=2.0),
        _case("λ = 0", "p0 g0 g0", seed, lam=0.0),
    ]
    own = [_case("two workers", "p0 p1 g1 g0 g1", seed),
           _case("three workers", "p0 g0 p1 g0 p2 g1 g0 g2 g1", seed, (7,))]
    again = [_case("pulls again", "p0 g0 g0 p0 g0 g0", seed),
             _case("others pull", "p0 p3 g0 p3 g3 g0 p0 g3 g0", seed)]
    start = varied(seed, 10_000, "start")
    loss = [Case(f"digits, {WORKERS} workers in turn", [(start,)], comm=False, harness=train)]
    return [
        Check("equation", 3, "unseen tensors, float64", delayed, values),
        Check("own backup", 2, "2 and 3 workers", own, values),
        Check("a pull makes it anew", 1, "pulls between pushes", again, values),
        Check("loss under delay", 2, f"digits, {WORKERS} workers in turn, {GRADIENTS} gradients",
              loss, _loss),
    ]


EXERCISE = Exercise("dc-asgd", "DC-ASGD", "dc_asgd", _build, library=("models",))
