"""Chapter 08: DC-ASGD, the server's half: what it stores at a pull, what it does at a push."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.models import MLP, digits

F64 = torch.float64
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


def _mistake(term: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, whose: Any = None,
             pulls: str = "every", pushes: bool = False) -> Answer:
    """DC-ASGD with another `term(g, difference)`, backup, or time of making one."""
    def answer(request: str, worker: int, w: torch.Tensor, g: torch.Tensor | None,
               backups: dict[Any, torch.Tensor], lr: float, lam: float) -> torch.Tensor:
        key = worker if whose is None else whose
        if request == "pull":
            if pulls == "every" or key not in backups:
                backups[key] = w if pulls == "alias" else w.clone()
        else:
            assert g is not None
            w -= lr * (g + lam * term(g, w - backups[key]))
            if pushes:
                backups[key] = w.clone()
        return w

    return answer


def _compensate(g: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    return g * g * difference


OTHERS: dict[str, Answer] = {
    "The sign is wrong: the gradient is corrected towards where the weights are now, w − w_bak, "
    "not back to where they were.": _mistake(lambda g, d: -g * g * d),
    "g ⊙ g ⊙ (w − w_bak) is element by element: g * g * (w - backup). Yours sums over all elements "
    "(an outer product, or a dot product).": _mistake(lambda g, d: g * (g * d).sum()),
    "g is squared as a whole: yours multiplies by the number g·g. Element by element: g * g.":
        _mistake(lambda g, d: (g * g).sum() * d),
    "g is there only once: the correction is g ⊙ g ⊙ (w − w_bak).": _mistake(lambda g, d: g * d),
    "That is plain SGD: w − w_bak is zero, or is missing. A backup has to be a copy, w.clone(), "
    "for `backups[worker] = w` is the same tensor and moves with w; and it is made anew at a pull, "
    "not at a push.": _mistake(lambda g, d: 0 * g),
    "λ is divided by √(mean of g²): that is the adaptive variant; the exercise uses λ as it "
    "is.": _mistake(lambda g, d: g * g * d / (0.05 * g * g + 1e-7).sqrt()),
    "One backup for all workers: each worker's pull overwrites the others'. Keep one for each: "
    "backups[worker].": _mistake(_compensate, whose="all"),
    "The backup is made anew at a push. It is what the worker pulled, and stays until its next "
    "pull.": _mistake(_compensate, pushes=True),
    "The backup is made once and never again. Make it anew at each pull of that worker.":
        _mistake(_compensate, pulls="first"),
}


# ---- scripts of pulls and pushes ---------------------------------------------------------------


def replay(function: Answer, w: torch.Tensor, script: Script, lr: float, lam: float
         ) -> list[tuple[Any, torch.Tensor | None]]:
    """In the sandbox: for each request, the weights that the worker was given, or that the push
    left; and the gradient afterwards."""
    backups: dict[Any, torch.Tensor] = {}
    seen: list[tuple[Any, torch.Tensor | None]] = []
    for request, worker, g in script:
        mine = None if g is None else g.clone()
        given = function(request, worker, w, mine, backups, lr, lam)
        left = given if request == "pull" else w
        # Weights change later: here they are copied. What else was returned is only named.
        seen.append((left.clone() if isinstance(left, torch.Tensor) else type(left).__name__, mine))
    return seen


def _weights(seen: Sequence[tuple[Any, torch.Tensor | None]], script: Script
             ) -> list[torch.Tensor | str]:
    """Of what `replay` saw: the weights; or a sentence where the function did what it must not."""
    found: list[torch.Tensor | str] = []
    for (weights, mine), (_, _, g) in zip(seen, script, strict=True):
        if not isinstance(weights, torch.Tensor):
            found.append(f"A pull must return the weights, not {weights}.")
        elif g is not None and not (isinstance(mine, torch.Tensor) and torch.equal(mine, g)):
            found.append("The gradient g was changed: it belongs to the worker. Compute with "
                         "copies.")
        else:
            found.append(weights)
    return found


def _case(name: str, requests: str, seed: int, shape: tuple[int, ...] = (5,), lr: float = 0.1,
          lam: float = 0.7) -> Case:
    """`requests`: "p0 g1" is a pull of worker 0, then a gradient of worker 1."""
    random = torch.Generator().manual_seed(100 * seed + len(requests))
    script = [("pull" if r[0] == "p" else "push", int(r[1:]),
               None if r[0] == "p" else torch.randn(*shape, generator=random, dtype=F64))
              for r in requests.split()]
    w = torch.randn(*shape, generator=random, dtype=F64)
    return Case(f"{name}: {requests}", [(w, script, lr, lam)], comm=False, harness=replay,
                facts={"w": w.clone(), "script": script, "lr": lr, "lam": lam})


def _replayed(case: Case, function: Answer) -> list[torch.Tensor | str]:
    facts = case.facts
    seen = replay(function, facts["w"].clone(), facts["script"], facts["lr"], facts["lam"])
    return _weights(seen, facts["script"])


def _values(case: Case, outcome: Outcome) -> Verdict:
    wanted, found = _replayed(case, right), _weights(outcome.values[0], case.facts["script"])
    told = "w − lr·[g + λ·g⊙g⊙(w − w_bak)], to 1e-12"
    for number, (came, should) in enumerate(zip(found, wanted, strict=True)):
        if not _close(came, should):
            request, worker, _ = case.facts["script"][number]
            which = f"request {number + 1}, a {request} of worker {worker}"
            if isinstance(came, str):
                return Verdict(False, which, told, clue=came)
            return Verdict(False, f"{which}: {_difference(came, should)}", told,
                           clue=_clue(case, found))
    return Verdict(True, "equal to 1e-12", told)


def _close(one: torch.Tensor | str, other: torch.Tensor | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return False
    return one.shape == other.shape and torch.allclose(one.to(F64), other, rtol=1e-12, atol=1e-12)


def _difference(came: torch.Tensor, should: torch.Tensor | str) -> str:
    if isinstance(should, str) or came.shape != should.shape:
        return f"shape {tuple(came.shape)}"
    return f"off by {(came - should).abs().max():.1e}"


def _clue(case: Case, found: list[torch.Tensor | str]) -> str:
    """Which mistake makes just these weights?"""
    if all(_close(x, case.facts["w"]) for x in found):
        return "w never changes: a push changes w in place, with w -= … or w.sub_(…)."
    for hint, mistaken in OTHERS.items():
        try:
            came = _replayed(case, mistaken)
        except KeyError:
            continue
        if all(map(_close, found, came)):
            return hint
    return "The update is w ← w − lr·[g + λ·g⊙g⊙(w − w_bak)], w_bak what that worker pulled last."


# ---- training under delay ----------------------------------------------------------------------


def train(function: Answer, seed: int) -> list[torch.Tensor]:
    """In the sandbox: the weights after 8 workers have trained in turns, so that each gradient is 7
    updates old."""
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
    """What the referee says that weights are worth; ∞ if they are not those of the model."""
    model, (data, _) = MLP((64, 32, 10)), digits(F64)
    like = model.parameters(seed, F64)
    if len(weights) != len(like) or not all(
            isinstance(w, torch.Tensor) and w.shape == own.shape
            for w, own in zip(weights, like.values(), strict=True)):
        return math.inf
    return float(model.loss(dict(zip(like, (w.to(F64) for w in weights), strict=True)), *data))


def _loss(case: Case, outcome: Outcome) -> Verdict:
    """As low as the reference's, which plain SGD is far from."""
    seed = case.facts["seed"]
    reached, least = loss_of(outcome.values[0], seed), loss_of(train(right, seed), seed)
    came, wanted = f"loss {reached:.4g}", f"≤ {least * 1.01:.3f}"
    clue = "Training with your update ends at a higher loss than DC-ASGD does."
    return Verdict(reached <= least * 1.01, came, wanted, clue=clue)


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
    loss = [Case(f"digits, {WORKERS} workers in turn", [(seed,)], comm=False, harness=train,
                 facts={"seed": seed})]
    return [
        Check("equation", 3, "unseen tensors, float64", delayed, _values, "A pull keeps a copy in "
              "backups[worker]; a push reads it, and leaves it there: more pushes may follow."),
        Check("own backup", 2, "2 and 3 workers", own, _values),
        Check("a pull makes it anew", 1, "pulls between pushes", again, _values),
        Check("loss under delay", 2, f"digits, {WORKERS} workers in turn, {GRADIENTS} gradients",
              loss, _loss),
    ]


EXERCISE = Exercise("dc-asgd", "DC-ASGD", "08", 2, "dc_asgd", _build)
