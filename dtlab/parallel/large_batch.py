"""What makes large batches train: a step for each layer in proportion to its weights, and batches
that grow where the step would shrink.

A linear warm-up is torch.optim.lr_scheduler.LinearLR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtlab.errors import ConfigError


class LARS(torch.optim.Optimizer):
    """Momentum SGD whose step on each layer has a length in proportion to that of its weights.

    g ← g + λw; v ← μv + lr·η·‖w‖/‖g‖·g; w ← w − v. `trust` is η, `weight_decay` λ. Parameters of
    less than two dimensions, biases and norms, take the plain step, without decay.
    State: one number a parameter. Source: You, Gitman and Ginsburg 2017.
    """

    elementwise = False  # it needs the norms of whole layers

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1, momentum: float = 0.9,
                 trust: float = 0.001, weight_decay: float = 0.0):
        _check(lr=lr, momentum=momentum, trust=trust, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust,
                                  "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                g, scale = w.grad, 1.0
                if w.dim() > 1:
                    g = g + group["weight_decay"] * w
                    scale = group["trust"] * _ratio(w, g)
                v = self.state[w].setdefault("momentum", torch.zeros_like(w))
                v.mul_(group["momentum"]).add_(g, alpha=group["lr"] * scale)
                w -= v
        return loss


class LAMB(torch.optim.Optimizer):
    """AdamW whose step on each layer has the length lr·‖w‖.

    u ← m̂/(√v̂ + ε) + λw; w ← w − lr·‖w‖/‖u‖·u, with Adam's corrected means m̂ and v̂. Parameters of
    less than two dimensions take AdamW's step, without decay.
    State: two numbers a parameter. Source: You et al. 2020.
    """

    elementwise = False

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
                 weight_decay: float = 0.01):
        _check(lr=lr, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            first, second = group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                state = self.state[w]
                state["step"] = step = state.get("step", 0) + 1
                m = state.setdefault("mean", torch.zeros_like(w))
                v = state.setdefault("variance", torch.zeros_like(w))
                m.lerp_(w.grad, 1 - first)
                v.lerp_(w.grad.square(), 1 - second)
                u = (m / (1 - first**step)) / ((v / (1 - second**step)).sqrt() + group["eps"])
                scale = 1.0
                if w.dim() > 1:
                    u += group["weight_decay"] * w
                    scale = _ratio(w, u)
                w.sub_(u, alpha=group["lr"] * scale)
        return loss


def growing_batch(step: int, batch: int, milestones: Sequence[int], factor: int) -> int:
    """The batch of `step`: `batch`, `factor` times as many from each of `milestones` on.

    Where a schedule would divide the learning rate by `factor`, this multiplies the batch: the
    noise of the gradient falls as much, in fewer steps an epoch. Source: Smith et al. 2018.

    >>> [growing_batch(step, 16, (100, 200), 4) for step in (0, 99, 100, 250)]
    [16, 16, 64, 256]
    """
    passed = sum(step >= milestone for milestone in milestones)
    grown: int = batch * factor**passed
    return grown


def _ratio(w: Tensor, step: Tensor) -> float:
    """‖w‖/‖step‖; 1 if either is 0."""
    norms = float(w.norm()), float(step.norm())
    return norms[0] / norms[1] if all(norms) else 1.0


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ConfigError(f"{name} must be a number of at least 0, not {value!r}")
