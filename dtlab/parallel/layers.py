"""The layers that travel one by one, and the parameters that belong to each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from dtlab.checks import short
from dtlab.errors import ConfigError


def layers_of(module: nn.Module, layers: Iterable[nn.Module] | None = None) -> list[nn.Module]:
    """Return `layers`; if None, the elements of the outermost lists and sequences of modules in
    `module`."""
    if layers is not None:
        layers = list(layers) if isinstance(layers, Iterable) else [layers]
        for layer in layers:
            if layer not in module.modules():
                raise ConfigError(f"layers is a list of modules that belong to the one that zero "
                                  f"wraps; {short(layer)} doesn't")
        return with_forward(layers)
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return with_forward(module)
    return [layer for child in module.children() for layer in layers_of(child)]


def with_forward(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Replace modules without a forward, such as lists within lists, by what they hold."""
    return [layer for m in modules for layer in (
        with_forward(m.children()) if getattr(m.forward, "__func__", 0) is nn.Module.forward
        else [m])]


def parameters_by_layer(layers: Sequence[nn.Module]) -> list[dict[nn.Parameter, str]]:
    """The trained parameters of each layer that have elements, in order, with their names; the
    first layer, which is the root, has those that belong to none of the others, or not to one
    alone."""
    root, *others = layers
    names = {p: name for name, p in root.named_parameters() if p.requires_grad and p.numel()}
    uses = Counter(p for _, p in root.named_parameters(remove_duplicate=False))
    owners = Counter(p for layer in others for p in layer.parameters())
    owned = []
    for layer in others:
        inside = Counter(p for _, p in layer.named_parameters(remove_duplicate=False))
        owned.append({p: names[p] for p in inside
                      if p in names and inside[p] == uses[p] and owners[p] == 1})
    elsewhere = {p for layer in owned for p in layer}
    return [{p: name for p, name in names.items() if p not in elsewhere}, *owned]


def is_compiled(module: nn.Module) -> bool:
    """Is it compiled, by torch.compile, which makes a module of its own, or by its `compile`?"""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
