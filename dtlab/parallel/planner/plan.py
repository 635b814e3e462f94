"""What a step of a layout takes, term by term, and which layout takes the least."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dtlab import cost
from dtlab.checks import check_positive, check_whole, short
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.models.shapes import Shape
from dtlab.parallel.mesh import check_axes
from dtlab.parallel.planner.device import A100, Device
from dtlab.parallel.planner.layout import Layout, impossible, layouts, orders
from dtlab.parallel.planner.step import PlannedStep
from dtlab.parallel.planner.wires import Wires, wire_of, wires
from dtlab.parallel.planner.work import PRECISIONS, RankWork, work_of
from dtlab.topology import Topology


@dataclass(frozen=True)
class Plan:
    """A layout and what it is predicted to take: `step_s` seconds, the sum of `terms`, and on the
    fullest rank `memory_bytes`. why_not: why it was rejected, or empty. efficiency: of the device's
    rate of matrix products, the share that goes into the model (MFU, against that benchmark).
    device_flops: a second and device, with what is computed again, as Megatron's papers count."""

    layout: Layout
    step_s: float = math.inf
    memory_bytes: float = math.inf
    terms: dict[str, float] = field(default_factory=dict)
    why_not: str = ""
    efficiency: float = 0.0
    device_flops: float = 0.0
    work: RankWork | None = field(default=None, repr=False)

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.layout}: {self.why_not}"
        return (f"{self.layout}: {self.step_s:.3g} s, {self.memory_bytes / 1e9:.1f} GB, "
                f"{self.efficiency:.0%}")

    def step(self, comm: Comm) -> None:
        """One step as this rank's messages and computations, on tensors without data: simulate it,
        `simulate(plan.step, network=topology).elapsed_s`, beside `step_s`."""
        if self.work is None:
            raise ConfigError(f"this layout can't run: {self.why_not}")
        PlannedStep(comm, self.layout, self.work).run()


def predict(shape: Shape, topology: Topology, layout: Layout, *, device: Device = A100,
            precision: str = "bf16", memory_bytes: float | None = None,
            wire: Wires | None = None) -> Plan:
    """What one step with `layout` takes: its terms are seconds of the step, by name.

    memory_bytes: what a rank may occupy, by default the device's. wire: of `wires(topology)`, if
    you have it already. Raises `ConfigError` for a mesh that isn't the topology's size; whatever
    else doesn't fit is in `why_not`.
    """
    if not isinstance(layout, Layout):
        raise ConfigError(f"predict takes a Layout, not {short(layout)}")
    _check(shape, topology, layout.mesh, precision, device)
    limit = device.memory_bytes if memory_bytes is None else memory_bytes
    check_positive("memory_bytes", limit)
    if why_not := impossible(shape, layout):
        return Plan(layout, why_not=why_not)
    return _predict(layout, device, precision, limit, wire or wires(topology),
                    work_of(shape, layout, device, precision))


def _predict(layout: Layout, device: Device, precision: str, memory_bytes: float,
             wire: Wires, work: RankWork) -> Plan:
    pp, dp, tp = (wire_of(layout.mesh, name, wire) for name in ("pp", "dp", "tp"))
    m, layers, d = layout.micro_batches, work.layers, layout.dp
    reduce_s = 2 * tp.ring_s(layout.tp, work.reduced_bytes)
    forward_s = work.forward_s + work.reduces[0] * reduce_s
    backward_s = work.backward_s + work.reduces[1] * reduce_s
    message_s = pp.alpha + work.message_bytes * pp.beta
    bubble_s, with_messages_s = (
        cost.pipeline_bubble_s(layout.schedule, layout.pp, m, layers * forward_s,
                               layers * backward_s, layers * work.weights_s, layout.chunks, c)
        for c in (0.0, message_s))
    layer_s = dp.ring_s(d, work.layer_bytes)
    whole_s = dp.ring_s(d, layers * work.layer_bytes + work.ends_bytes)
    ends_s, gather_s = dp.ring_s(d, work.ends_bytes), 0.0
    if layout.pp > 1 or (m > 1 and layout.stage < 2):
        gradients_s = 2 * whole_s  # once, after the last backward
    else:  # each layer's while the others compute: what outlasts them, at least the last one's
        halves = 2 if layout.stage == 0 else 1  # of an all-reduce
        each_s, last_s = halves * layer_s, halves * ends_s
        hidden_s = (m - 1) * layers * (forward_s + backward_s) + (layers - 1) * backward_s
        gradients_s = max(each_s + last_s, m * (layers * each_s + last_s) - hidden_s)
        gradients_s += whole_s if layout.stage in (1, 2) else 0.0  # the new parameters, gathered
    if layout.stage == 3:  # a layer's parameters are gathered while the one before computes; in
        # backward gradients leave beside them
        gather_s = m * (2 * (layer_s + ends_s) + (layers - 1) * max(0.0, layer_s - forward_s))
        gradients_s = layer_s + ends_s + m * (layers - 1) * max(0.0, 2 * layer_s - backward_s)
    terms = {
        "matrix products": 3 * m * layers * work.products_s,
        "memory traffic": 3 * m * layers * work.traffic_s,
        "output layer": 3 * m * work.output_s,
        "recomputation": m * layers * work.recompute_s,
        "tensor parallel": m * layers * sum(work.reduces) * reduce_s,
        "bubble": bubble_s,
        "pipeline messages": with_messages_s - bubble_s,
        "parameters": gather_s,
        "gradients": gradients_s,
        "optimizer": work.optimizer_s,
    }
    step_s = sum(terms.values())
    best = max(device.product_flops[precision].values()) * layout.pp * layout.dp * layout.tp
    why_not = "" if work.memory_bytes <= memory_bytes else (
        f"needs {work.memory_bytes / 1e9:.4g} GB of {memory_bytes / 1e9:.4g} GB")
    return Plan(layout, step_s, work.memory_bytes, terms, why_not,
                work.model_flops / step_s / best,
                work.hardware_flops / step_s / (layout.pp * layout.dp * layout.tp), work)


def _check(shape: Shape, topology: Topology, mesh: dict[str, int] | None, precision: str,
           device: Device) -> None:
    for value, kind in ((shape, Shape), (topology, Topology), (device, Device)):
        if not isinstance(value, kind):
            raise ConfigError(f"the planner needs a {kind.__name__}, not {value!r:.60}")
    if not isinstance(precision, str) or precision not in {*device.product_flops} & {*PRECISIONS}:
        raise ConfigError(f"precision is one of {', '.join(device.product_flops)}, not "
                          f"{precision!r:.60}")
    if mesh is None:
        return
    check_axes(mesh)
    if unknown := set(mesh) - {"pp", "dp", "tp"}:
        raise ConfigError(f"the planner knows the axes pp, dp and tp, not {', '.join(unknown)}")
    if math.prod(mesh.values()) != topology.ranks:
        raise ConfigError(f"a mesh of {' · '.join(f'{k}={v}' for k, v in mesh.items())} has "
                          f"{math.prod(mesh.values())} ranks, but {topology.name} has "
                          f"{topology.ranks}")


def plan(shape: Shape, topology: Topology, batch: int, memory_bytes: float | None = None, *,
         device: Device = A100, precision: str = "bf16",
         only: Callable[[Layout], bool] | None = None) -> list[Plan]:
    """All layouts of `shape` on `topology`, in steps of `batch` samples: first those that fit, the
    fastest first; then those that don't, with `why_not`, the nearest first.

    memory_bytes: what a rank may occupy, by default the device's. only: a function of a layout,
    which is left out if it returns False. Raises `ConfigError`, with the nearest miss, if nothing
    fits.
    """
    check_whole("batch", batch, 1, 1_000_000)
    _check(shape, topology, None, precision, device)
    limit = device.memory_bytes if memory_bytes is None else memory_bytes
    check_positive("memory_bytes", limit)
    wire, plans = wires(topology), []
    for layout in layouts(shape, topology.ranks, batch):
        if only is not None and not only(layout):
            continue
        why_not = impossible(shape, layout)
        if not why_not and layout.batch != batch:
            why_not = f"{batch} samples can't be shared equally by dp={layout.dp}"
        if why_not:
            plans.append(Plan(layout, why_not=why_not))
            continue
        work = work_of(shape, layout, device, precision)  # the same for all orders of the axes
        tried = orders(layout) if work.memory_bytes <= limit else [layout]
        plans += [_predict(order, device, precision, limit, wire, work)
                  for order in tried]
    plans.sort(key=lambda p: (bool(p.why_not), not p.why_not and p.step_s, p.memory_bytes))
    if not plans or plans[0].why_not:
        nearest = f"the nearest is {plans[0]}" if plans else "there is no such layout"
        raise ConfigError(f"nothing fits {topology.ranks} devices of {limit / 1e9:.4g} GB in steps "
                          f"of {batch} samples; {nearest}")
    return plans
