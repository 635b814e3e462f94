"""Backward in two halves, of inputs (I) and of weights (W), by torch's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dtlab.errors import ConfigError

Groups = list[dict[str, Any]]  # parameters, and where in autograd's graph their gradients come from


def backward_of_inputs(ends: list[Tensor], gradients: list[Tensor] | None, inputs: list[Tensor],
                       module: nn.Module, stage: int) -> Groups:
    """Add to `grad` of the inputs; returns what `backward_of_weights` goes on with."""
    if not all(depends_on(end, inputs) for end in ends):
        raise ConfigError(f"stage {stage} hands on a tensor that is trained but not computed from "
                          f"what stage {stage - 1} hands on; schedules that halve backward would "
                          f"lose its gradient: compute it where it is used")
    _, groups = _torch().stage_backward_input(ends, gradients, inputs, _trained(module))
    return disjoint(groups)


def backward_of_weights(module: nn.Module, groups: Groups) -> None:
    """Add to `grad` of the module's parameters."""
    _torch().stage_backward_weight(_trained(module), groups, retain_graph=True)  # for other groups


def depends_on(end: Tensor, inputs: list[Tensor]) -> bool:
    """Was `end` computed from one of `inputs`, which are leaves of autograd's graph?"""
    nodes, seen = [end.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            if any(getattr(node, "variable", None) is x for x in inputs):
                return True
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return False


def disjoint(groups: Groups) -> Groups:
    """Groups that have a parameter in common become one: torch would count it in each of them."""
    found: Groups = []
    for group in groups:
        for other in [other for other in found if other["params"] & group["params"]]:
            found.remove(other)
            grads = dict(zip([*other["intermediates"], *group["intermediates"]],  # sets before 2.13
                             other["grads"] + group["grads"], strict=True))
            group = {"params": other["params"] | group["params"],
                     "intermediates": list(grads), "grads": list(grads.values())}
        found.append(group)
    return found


def _torch() -> Any:
    """Imported when it is wanted: it brings all of torch's compiler, which takes a second."""
    from torch.distributed.pipelining import _backward

    return _backward


def _trained(module: nn.Module) -> Iterator[nn.Parameter]:
    return iter([p for p in module.parameters() if p.requires_grad])
