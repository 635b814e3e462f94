"""Layers that take virtual time, so that the simulator shows what overlaps with what."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from dtlab.checks import check_amount, short
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.hooks import before_backward_of


def charge_compute(comm: Comm, layers: Mapping[nn.Module, float], backward: float = 2.0) -> None:
    """Have each of `layers` take this many virtual seconds whenever it runs forward, and `backward`
    times as many when it runs backward, before its gradients are there. The default is that of
    matrix products, which have two in backward for each one in forward.

    On real processes layers take the time that they take; the trace marks where each begins.
    """
    check_comm(comm, "charge_compute(comm, …)")
    if not isinstance(layers, Mapping) or not all(isinstance(one, nn.Module) for one in layers):
        raise ConfigError(f"charge_compute takes seconds by module, not {short(layers)}")
    for name, value in (("backward", backward), *(("its seconds", s) for s in layers.values())):
        check_amount(f"charge_compute: {name}", value)

    def charge(label: str, seconds: float, *_: object) -> None:
        with comm.compute(label, seconds):
            pass

    def charge_backward(seconds: float, _layer: nn.Module, _inputs: object, outputs: object
                        ) -> None:
        before_backward_of(outputs, partial(charge, "backward", seconds))

    for layer, seconds in layers.items():
        layer.register_forward_pre_hook(partial(charge, "forward", seconds))
        layer.register_forward_hook(partial(charge_backward, backward * seconds))
