"""Update rules, by which a server applies a gradient: w ← f(w, g, state).

A rule holds no state of its own; what it must remember of a key (momentum, backups) is in the
`state` that the server keeps beside the weights. All rules work element by element, so a key may
be cut anywhere; of complex numbers they are given the real and the imaginary parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dtlab.checks import check_flag, short
from dtlab.errors import ConfigError
from dtlab.ps.checks import MOST, amount

State = dict[Any, Any]  # name → tensor like w, or a number: nothing else could be cut as w is


@dataclass(frozen=True)
class Update:
    """A rule. It must work element by element: servers cut a key anywhere, and step once for many.

    `takes`: what workers push, "gradients" or "weights". `looks_back`: do `pulled` and `prepare`
    use weights or state? Else these may be of more rows than the gradient."""

    takes: ClassVar[str] = "gradients"
    looks_back: ClassVar[bool] = False

    def pulled(self, w: torch.Tensor, state: State, worker: int) -> None:
        """`worker` is given `w` now."""

    def prepare(self, g: torch.Tensor, w: torch.Tensor, state: State, worker: int,
                staleness: int) -> torch.Tensor:
        """Return what the push counts for; `staleness`: the key's updates since `worker` pulled."""
        return g

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: State, count: int) -> None:
        """Change `w` in place; `g`: the mean of `count` pushes, as `prepare` gave them. It may be a
        worker's own memory: neither change nor keep it."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Update):
    """v ← momentum·v + g; w ← w − lr·v. As torch.optim.SGD. Source: Polyak 1964."""

    lr: float = 0.1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check("SGD", lr=self.lr, momentum=self.momentum)

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: State, count: int) -> None:
        if self.momentum:
            if "momentum" in state:
                g = state["momentum"].mul_(self.momentum).add_(g)
            else:
                g = state["momentum"] = g.clone()
        w.sub_(g, alpha=self.lr)


@dataclass(frozen=True)
class Adam(Update):
    """m ← β₁m + (1−β₁)g; v ← β₂v + (1−β₂)g²; w ← w − lr·m̂/(√v̂ + ε), with m̂ = m/(1−β₁ᵗ) and
    v̂ = v/(1−β₂ᵗ). As torch.optim.Adam. Source: Kingma & Ba, ICLR 2015."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check("Adam", lr=self.lr, eps=self.eps)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ConfigError(f"Adam's betas are two numbers, not {short(self.betas)}")
        _check("Adam", most=1.0, beta1=self.betas[0], beta2=self.betas[1])

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: State, count: int) -> None:
        beta1, beta2 = self.betas
        if "m" not in state:
            state |= {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "t": 0}
        state["t"] += 1
        state["m"].lerp_(g, 1 - beta1)
        state["v"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        step = self.lr / (1 - beta1 ** state["t"])
        denominator = state["v"].sqrt() / math.sqrt(1 - beta2 ** state["t"]) + self.eps
        w.addcdiv_(state["m"], denominator, value=-step)


@dataclass(frozen=True)
class StalenessAwareSGD(Update):
    """w ← w − (lr/τ)·g, where τ is how many updates old the weights of g were (at least 1).

    Source: Zhang et al., Staleness-aware async-SGD for distributed deep learning, IJCAI 2016.
    """

    lr: float = 0.1

    def __post_init__(self) -> None:
        _check("StalenessAwareSGD", lr=self.lr)

    def prepare(self, g: torch.Tensor, w: torch.Tensor, state: State, worker: int,
                staleness: int) -> torch.Tensor:
        return g / staleness if staleness > 1 else g

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: State, count: int) -> None:
        w.sub_(g, alpha=self.lr)


@dataclass(frozen=True)
class DCASGD(Update):
    """Delay-compensated ASGD: w ← w − lr·[g + λ·g⊙g⊙(w − w_bak)], w_bak what that worker pulled.

    The term is a first-order guess at what the gradient would be at w. adaptive: λₜ = λ/√(MS + ε),
    MS ← decay·MS + (1−decay)·g². Memory: one copy of w a worker.
    Source: Zheng et al., Asynchronous stochastic gradient descent with delay compensation, ICML 17.
    """

    lr: float = 0.1
    lam: float = 0.04
    adaptive: bool = False
    decay: float = 0.95
    eps: float = 1e-7
    looks_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check("DCASGD", lr=self.lr, lam=self.lam, eps=self.eps)
        _check("DCASGD", most=1.0, decay=self.decay)
        check_flag("DCASGD's adaptive", self.adaptive)

    def pulled(self, w: torch.Tensor, state: State, worker: int) -> None:
        state["backup", worker] = w.clone()

    def prepare(self, g: torch.Tensor, w: torch.Tensor, state: State, worker: int,
                staleness: int) -> torch.Tensor:
        backup = state.get(("backup", worker))
        if backup is None:  # it never pulled
            return g
        term: torch.Tensor = g * g * (w - backup) * self.lam
        if self.adaptive:
            if "ms" not in state:
                state["ms"] = torch.zeros_like(w)
            state["ms"].mul_(self.decay).addcmul_(g, g, value=1 - self.decay)
            term /= (state["ms"] + self.eps).sqrt()
        return g + term

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: State, count: int) -> None:
        w.sub_(g, alpha=self.lr)


@dataclass(frozen=True)
class EASGD(Update):
    """Elastic averaging: workers train weights xᵢ of their own, tied to the server's x̃ by springs.

    Workers push xᵢ. Server: x̃ ← x̃ + α·Σᵢ(xᵢ − x̃). Worker (`local_`): xᵢ ← xᵢ − lr·gᵢ − α(xᵢ − x̃),
    with the x̃ that it pulled before it pushed.
    Source: Zhang, Choromanska & LeCun, Deep learning with elastic averaging SGD, NeurIPS 2015.
    """

    lr: float = 0.1
    alpha: float = 0.1
    takes: ClassVar[str] = "weights"

    def __post_init__(self) -> None:
        _check("EASGD", lr=self.lr, alpha=self.alpha)

    def local_(self, x: torch.Tensor, g: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        """The worker's step, in place. Returns `x`."""
        x -= g * self.lr + (x - center) * self.alpha
        return x

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: State, count: int) -> None:
        w.add_(g - w, alpha=self.alpha * count)


@dataclass(frozen=True)
class FedAvg(Update):
    """Federated averaging: w ← Σ (n_k/n)·w_k; worker k pushes the weights that it has after some
    local epochs, with `weight=n_k`, its number of examples.

    Source: McMahan et al., Communication-efficient learning from decentralized data, AISTATS 2017.
    """

    takes: ClassVar[str] = "weights"

    def step_(self, w: torch.Tensor, g: torch.Tensor, state: State, count: int) -> None:
        w.copy_(g)


def _check(rule: str, most: float = MOST, **numbers: float) -> None:
    """Raise `ConfigError` unless all are at least 0 and below `most`."""
    for name, value in numbers.items():
        amount(f"{rule}'s {name}", value, above=False, most=most)
