"""Training with large batches: a step for each layer in proportion to its weights, and batches that
grow where the step would shrink.

A linear warm-up is torch.optim.lr_scheduler.LinearLR. Chapter: 10b.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dtlab.checks import check_amount, check_number, check_whole, is_real, short
from dtlab.collectives import all_reduce
from dtlab.errors import ConfigError
from dtlab.parallel.sharded import holders
from dtlab.parallel.synchronized import DistributedModule


class Layerwise(torch.optim.Optimizer):
    """A step on each layer in proportion to the norm of its weights. Where ranks have parts of a
    layer, in ZeRO or tensor parallelism, norms are those of the whole: an all-reduce of two numbers
    a layer."""

    add_up: Callable[[list[nn.Parameter], Tensor], Tensor] | None = None  # None: `add_up_parts`

    def update(self, group: dict[str, Any], w: nn.Parameter) -> Tensor:
        """The direction of the step of `w`."""
        raise NotImplementedError

    def apply(self, group: dict[str, Any], w: nn.Parameter, u: Tensor, ratio: float) -> None:
        """Step along `u`. ratio: ‖w‖/‖u‖; 1 if either is 0, and for biases and norms."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        steps = [(group, w, self.update(group, w)) for group in self.param_groups
                 for w in group["params"] if w.grad is not None]
        squares = torch.tensor(
            [[float(x.double().square().sum()) for x in (w, u)] for _, w, u in steps],
            dtype=torch.float64, device="cpu").view(-1, 2)
        add_up = self.add_up or add_up_parts
        norms = add_up([w for _, w, _ in steps], squares).sqrt().tolist()
        for (group, w, u), (of_w, of_u) in zip(steps, norms, strict=True):
            self.apply(group, w, u, of_w / of_u if is_layer(w) and of_w and of_u else 1.0)
        return loss


class LARS(Layerwise):
    """Momentum SGD whose step on each layer has a length in proportion to that of its weights.

    g ← g + λw; v ← μv + lr·η·‖w‖/‖g‖·g; w ← w − v. `trust` is η, `weight_decay` λ. Parameters of
    less than two dimensions, biases and norms, take the plain step, without decay.
    State: one number a parameter. Source: You, Gitman and Ginsburg 2017.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1, momentum: float = 0.9,
                 trust: float = 0.001, weight_decay: float = 0.0):
        _check(lr=lr, momentum=momentum, trust=trust, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust,
                                  "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], w: nn.Parameter) -> Tensor:
        assert w.grad is not None
        return w.grad + group["weight_decay"] * w if is_layer(w) else w.grad

    def apply(self, group: dict[str, Any], w: nn.Parameter, u: Tensor, ratio: float) -> None:
        scale = group["trust"] * ratio if is_layer(w) else 1.0
        v = self.state[w].setdefault("momentum", torch.zeros_like(w))
        v.mul_(group["momentum"]).add_(u, alpha=group["lr"] * scale)
        w.sub_(v)


class LAMB(Layerwise):
    """AdamW whose step on each layer has the length lr·‖w‖.

    u ← m̂/(√v̂ + ε) + λw; w ← w − lr·‖w‖/‖u‖·u, with Adam's corrected means m̂ and v̂. Parameters of
    less than two dimensions take AdamW's step, without decay.
    State: two numbers a parameter. Source: You et al. 2020.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
                 weight_decay: float = 0.01):
        _check(lr=lr, eps=eps, weight_decay=weight_decay)
        two = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not two or not all(is_real(beta) and 0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas are two numbers, 0 or more and below 1, not {short(betas)}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], w: nn.Parameter) -> Tensor:
        assert w.grad is not None
        (first, second), state = group["betas"], self.state[w]
        state["step"] = step = state.get("step", 0) + 1
        m = state.setdefault("mean", torch.zeros_like(w))
        v = state.setdefault("variance", torch.zeros_like(w))
        m.lerp_(w.grad, 1 - first)
        v.lerp_(w.grad.square(), 1 - second)
        u: Tensor = (m / (1 - first**step)) / ((v / (1 - second**step)).sqrt() + group["eps"])
        return u.add_(w, alpha=group["weight_decay"]) if is_layer(w) else u

    def apply(self, group: dict[str, Any], w: nn.Parameter, u: Tensor, ratio: float) -> None:
        w.sub_(u, alpha=group["lr"] * ratio)


def is_layer(w: Tensor) -> bool:
    """Is it a matrix, or a part of one?"""
    return len(getattr(w, "whole_shape", w.shape)) > 1


def add_up_parts(parameters: list[nn.Parameter], squares: Tensor) -> Tensor:
    """Sums of squares (k, 2) of the whole layers of which `parameters` are parts, in tensor
    parallelism."""
    rows: dict[Any, list[int]] = defaultdict(list)  # by whole: a rank may have several parts
    for row, p in enumerate(parameters):
        if p in holders:
            module, part = holders[p]
            rows[module.comm, module, part.whole].append(row)
            squares[row] *= part.original
    for comm in dict.fromkeys(comm for comm, *_ in rows):
        mine = [each for key, each in rows.items() if key[0] is comm]
        total = all_reduce(comm, torch.stack([squares[each].sum(0) for each in mine]))
        for each, of_whole in zip(mine, total, strict=True):
            squares[each] = of_whole
    return squares


def whole_norms(model: DistributedModule,
                held: Mapping[str, nn.Parameter] = MappingProxyType({})
                ) -> Callable[[list[nn.Parameter], Tensor], Tensor]:
    """The same for the optimizer of `model`, of `zero` or `hybrid`. All ranks call it.

    held: parameters of the model that may be parts of a layer, of which `model.comm` hasn't all.
    """
    parts = {part.tensor: part for part in model.stepped_parts()}
    for p, part in parts.items():
        p.whole_shape = part.shape  # type: ignore[attr-defined]
    everyone = model.comm._all_gather_objects({part.name for part in parts.values()})
    index = {name: row for row, name in enumerate(sorted(set().union(*everyone)))}
    names = [name for name in index if name in held]
    cut = [index[name] for name in names]

    def add_up(parameters: list[nn.Parameter], squares: Tensor) -> Tensor:
        rows = [index[parts[p].name] for p in parameters]
        total = torch.zeros(len(index), 2, dtype=torch.float64, device="cpu")
        for p, row, mine in zip(parameters, rows, squares, strict=True):
            total[row] += mine * parts[p].original
        all_reduce(model.comm, total)
        total[cut] = add_up_parts([held[name] for name in names], total[cut])
        return total[rows]

    return add_up


def growing_batch(step: int, batch: int, milestones: Sequence[int], factor: int) -> int:
    """The batch of `step`: `batch`, `factor` times as many from each of `milestones` on.

    Where a schedule would divide the learning rate by `factor`, this multiplies the batch: the
    noise of the gradient falls as much, in fewer steps an epoch. Source: Smith et al. 2018.

    >>> [growing_batch(step, 16, (100, 200), 4) for step in (0, 99, 100, 250)]
    [16, 16, 64, 256]
    """
    for name, value, least in (("step", step, 0), ("batch", batch, 1), ("factor", factor, 1)):
        check_whole(f"growing_batch: {name}", value, least)
    if not isinstance(milestones, Sequence):
        raise ConfigError(f"milestones is a list of steps, not {short(milestones)}")
    for milestone in milestones:
        check_number("growing_batch: a milestone", milestone)
    return int(batch * factor ** sum(step >= milestone for milestone in milestones))


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        check_amount(name, value)
