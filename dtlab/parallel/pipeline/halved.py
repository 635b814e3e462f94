"""Backward in two halves: of the inputs (I), and later of the weights (W).

A node of autograd's graph *splits* if one way from it leads to an input and another to parameters
only, as that of x @ w does. The first half goes to the inputs, and keeps the gradients that arrive
at nodes that split. The second half begins there, and goes to the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dtlab.errors import ConfigError
from dtlab.parallel.model_check import is_compiled
from dtlab.parallel.zero import Stage3

Gradients = tuple[Tensor | None, ...]  # of a node's outputs


class Kept(NamedTuple):
    """The parameters to which each node that splits leads past the inputs; what arrived at it."""

    parameters: Mapping[Node, list[nn.Parameter]]
    arrived: dict[Node, Gradients]


def check_halved(stage: nn.Module) -> None:
    """Raise `ConfigError` if backward of `stage` has no halves."""
    for module in stage.modules():
        if is_compiled(module) or isinstance(module, Stage3):
            what = "compiled layers" if is_compiled(module) else "ZeRO 3"
            raise ConfigError(f"backward of {what} can't be halved; take a schedule without W, "
                              f"such as one_f_one_b")


def backward_of_inputs(ends: Sequence[Tensor], gradients: Sequence[Tensor] | None,
                       inputs: Sequence[Tensor]) -> Kept:
    """Add to `grad` of the inputs; returns what `backward_of_weights` goes on with. What leads to
    no input goes to the parameters at once."""
    before = _graph(ends)
    to_inputs = _above(inputs, before)
    for number, end in enumerate(ends):
        if get_gradient_edge(end).node not in to_inputs:
            torch.autograd.backward(end, gradients and gradients[number], retain_graph=True)
    kept = Kept(defaultdict(list), {})
    leaf: Any
    for leaf in before:  # those of a loss function are in no module
        if type(leaf).__name__ == "AccumulateGrad" and leaf not in to_inputs:
            for node in _above([leaf.variable], before, stop=to_inputs) & to_inputs:
                kept.parameters[node].append(leaf.variable)
    hooks = [node.register_prehook(partial(kept.arrived.__setitem__, node))
             for node in kept.parameters]
    torch.autograd.backward(ends, gradients, retain_graph=True, inputs=inputs)
    for hook in hooks:
        hook.remove()
    return kept


def backward_of_weights(kept: Kept) -> None:
    """Add to `grad` of the parameters."""
    def end_elsewhere(node: Node, gradients: Gradients) -> Gradients | None:
        return None if node is begin else (None,) * len(gradients)

    # From one node that splits, a way leads to another one if they share a parameter. It ends
    # there: what arrived at the other node counts by itself.
    hooks = [node.register_prehook(partial(end_elsewhere, node)) for node in kept.parameters]
    for begin, parameters in kept.parameters.items():
        arrived = {GradientEdge(begin, number): gradient
                   for number, gradient in enumerate(kept.arrived[begin]) if gradient is not None}
        if arrived:
            torch.autograd.backward([*arrived], [*arrived.values()], retain_graph=True,
                                    inputs=parameters)
    for hook in hooks:
        hook.remove()


def _graph(ends: Iterable[Tensor]) -> dict[Node, list[Node]]:
    """The nodes of the graph behind `ends`, each with those that backward comes from to it."""
    waiting = [get_gradient_edge(end).node for end in ends]
    before: dict[Node, list[Node]] = {node: [] for node in waiting}
    while waiting:
        node = waiting.pop()
        for after, _ in node.next_functions:
            if after is not None:
                if after not in before:
                    waiting.append(after)
                before.setdefault(after, []).append(node)
    return before


def _above(leaves: Iterable[Tensor], before: Mapping[Node, list[Node]],
           stop: Set[Node] = frozenset()) -> set[Node]:
    """The nodes from which a way leads to `leaves`; of those in `stop`, the last on each way."""
    found, waiting = set[Node](), [get_gradient_edge(leaf).node for leaf in leaves]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                waiting += before.get(node, ())
    return found
