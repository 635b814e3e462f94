"""ZeRO's optimizer: any that treats each element by itself, over the shards of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dtlab.checks import short
from dtlab.errors import ConfigError
from dtlab.parallel.large_batch import LAMB, LARS, Layerwise, whole_norms
from dtlab.parallel.sharded_parameter import ShardedParameter

ELEMENTWISE = (*(getattr(torch.optim, name) for name in (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD")), LARS, LAMB)  # the last two but for norms, which are added up over the ranks


def check_elementwise(optimizer: type[torch.optim.Optimizer]) -> None:
    """Raise `ConfigError` unless the class `optimizer` can step parts of parameters."""
    if not isinstance(optimizer, type) or not issubclass(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a class, such as torch.optim.AdamW, not "
                          f"{short(optimizer)}; give its options by name")
    if not getattr(optimizer, "elementwise", False) and optimizer not in ELEMENTWISE:
        raise ConfigError(f"{optimizer.__name__} may need whole parameters, and a rank has parts "
                          f"of them; use one of {', '.join(c.__name__ for c in ELEMENTWISE)}, or a "
                          f"class with elementwise = True whose step treats each element by itself")


def grouped(named: Iterable[tuple[str, Sequence[nn.Parameter]]],
            groups: Callable[[str], dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Parameter groups: one for all names of which `groups` says the same. named: each name, and
    what this rank steps of it, which may be nothing."""
    if groups is not None and not callable(groups):
        raise ConfigError(f"groups is a function of a parameter's name, not {short(groups)}")
    found: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for name, parameters in named:
        options = groups(name) if groups else {}
        if not isinstance(options, dict):
            raise ConfigError(f"groups({name!r}) returned {short(options)}, not a dict of options")
        if options not in said:
            said.append(options)
            found.append({"params": [], **options})
        found[said.index(options)]["params"] += parameters
    return found


def shard_optimizer(model: Any, optimizer: type[torch.optim.Optimizer],
                    groups: Callable[[str], dict[str, Any]] | None, names: Iterable[str],
                    options: dict[str, Any]) -> torch.optim.Optimizer:
    """An `optimizer` of this rank's pieces of `model`, what `zero` returns first."""
    own = (name for name, p in model.module.named_parameters() if p.requires_grad)
    pieces = {unit.names[p]: piece for unit in model.units for p, piece in unit.pieces.items()}
    held = [(name, piece.start, len(piece.master)) for name, piece in pieces.items()]
    masters = {piece.master for piece in pieces.values()}
    named = {name: [pieces[name].master] if name in pieces else [] for name in (*names, *own)}
    step_pieces: Any = optimizer.step
    if not hasattr(step_pieces, "hooked"):  # so that hooks run around this, once
        step_pieces = torch.optim.Optimizer.profile_hook_step(step_pieces)

    class ShardedOptimizer(optimizer):  # type: ignore[misc, valid-type]
        """The optimizer of this rank's pieces: see `zero`."""

        @torch._disable_dynamo  # it would trace parameters without values
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            def evaluate() -> Any:
                loss = closure() if closure is not None else None
                model.hand_gradients_to_optimizer()
                return loss

            if closure is None:
                evaluate()
            loss = step_pieces(self, evaluate if closure is not None else None)
            model.share_parameters()
            return loss

        step.hooked = True  # type: ignore[attr-defined]  # torch adds no hooks to those within

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if any(p not in masters for p in param_group["params"]):
                raise ConfigError("the optimizer that zero returned steps pieces of its model's "
                                  "parameters; nothing can be added to it")
            super().add_param_group(param_group)

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "pieces": held}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if state_dict.get("pieces") != held:
                raise ConfigError("this state is not of the pieces that this rank steps, but of "
                                  "another rank's or of whole parameters; save and load the "
                                  "optimizer with dtlab.parallel.save and load")
            super().load_state_dict(state_dict)

        def refuse_scaler(self) -> None:
            raise ConfigError("GradScaler would look for infinities in this rank's gradients only, "
                              "and ranks would disagree; use param_dtype=torch.bfloat16, which "
                              "needs no scaler, or GradScaler(enabled=False)")

        _step_supports_amp_scaling = property(refuse_scaler, lambda self, value: None)

        def zero_grad(self, set_to_none: bool = True) -> None:
            model.zero_grad(set_to_none)

    def on_all_ranks(swap: Callable[..., Any]) -> Callable[..., Any]:
        """Share its values: a schedule-free optimizer evaluates other values than it steps."""

        def swap_on_all_ranks(self: Any, *args: Any, **options: Any) -> Any:
            for unit in model.units:
                unit.take_writes()
            result = swap(self, *args, **options)
            model.share_parameters()
            return result
        return swap_on_all_ranks

    for name in {"eval", "train"} & {*dir(optimizer)}:
        setattr(ShardedOptimizer, name, on_all_ranks(getattr(optimizer, name)))
    ShardedOptimizer.__name__ = optimizer.__name__  # by which checkpoints know it
    sharded: torch.optim.Optimizer = ShardedOptimizer(grouped(named.items(), groups), **options)
    if isinstance(sharded, Layerwise):
        sharded.add_up = whole_norms(model, dict(model.module.named_parameters()))
    return sharded


def refuse_sharded(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `ConfigError` before a step of an optimizer made of parameters that ZeRO shards."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, ShardedParameter):
                raise ConfigError(f"this {type(optimizer).__name__} was made of parameters that "
                                  f"ZeRO shards, such as {p.unit.names[p]!r}; step the optimizer "
                                  f"that zero(…) returned")


register_optimizer_step_pre_hook(refuse_sharded)
