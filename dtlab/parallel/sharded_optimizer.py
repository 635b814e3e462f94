"""ZeRO's optimizer: any that treats each element by itself, over the shards of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlab.checks import short
from dtlab.errors import ConfigError

ELEMENTWISE = tuple(getattr(torch.optim, name) for name in (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD"))


def check_elementwise(optimizer: type[torch.optim.Optimizer]) -> None:
    """Raise `ConfigError` unless the class `optimizer` can step parts of parameters."""
    if not isinstance(optimizer, type) or not issubclass(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a class, such as torch.optim.AdamW, not "
                          f"{short(optimizer)}; give its options by name")
    says = getattr(optimizer, "elementwise", None)
    if says is False:
        raise ConfigError(f"{optimizer.__name__} needs the norms of whole layers, and a rank has "
                          f"parts of them; use an optimizer that treats each element by itself")
    if not says and optimizer not in ELEMENTWISE:
        raise ConfigError(f"{optimizer.__name__} may need whole parameters, and a rank has parts "
                          f"of them; use one of {', '.join(c.__name__ for c in ELEMENTWISE)}, or a "
                          f"class with elementwise = True whose step treats each element by itself")


def shard_optimizer(model: Any, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
                    ) -> torch.optim.Optimizer:
    """An `optimizer` of the shards of `model`, what `zero` returns first."""
    masters = {unit.master for unit in model.units}
    step_shards: Callable[..., Any] = optimizer.step
    if not hasattr(step_shards, "hooked"):  # so that hooks run around this, once
        step_shards = torch.optim.Optimizer.profile_hook_step(step_shards)

    class Sharded(optimizer):  # type: ignore[misc, valid-type]
        """The optimizer of this rank's shards: see `zero`."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            def evaluate() -> Any:
                loss = closure() if closure is not None else None
                model.hand_gradients_to_optimizer()
                for unit in model.units:
                    unit.gradient = unit.master.grad  # for hooks that clip
                return loss

            if closure is None:
                evaluate()
            loss = step_shards(self, evaluate if closure is not None else None)
            for unit in model.units:
                unit.gradient = None
            model.share_parameters()
            return loss

        step.hooked = True  # type: ignore[attr-defined]  # torch adds no hooks to those within

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if not isinstance(param_group["params"], list) or any(
                    p not in masters for p in param_group["params"]):
                raise ConfigError("the optimizer that zero returned steps shards of its model's "
                                  "parameters; nothing can be added to it")
            super().add_param_group(param_group)

        def refuse_scaler(self) -> None:
            raise ConfigError("GradScaler would look for infinities in this rank's gradients only, "
                              "and ranks would disagree; use param_dtype=torch.bfloat16, which "
                              "needs no scaler, or GradScaler(enabled=False)")

        _step_supports_amp_scaling = property(refuse_scaler, lambda self, value: None)

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            model.zero_grad()

    Sharded.__name__ = optimizer.__name__  # what a checkpoint says of which optimizer it is
    sharded: torch.optim.Optimizer = Sharded([unit.master for unit in model.units], **options)
    return sharded
