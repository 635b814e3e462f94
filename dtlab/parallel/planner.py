"""The planner: every way to lay a transformer on a cluster, what a step of it would take, and what
it would occupy.

A layout is predicted in three steps, each of which you can read by itself:

1. `wires`: what the groups of one mesh axis get from the topology, if all of them send at once;
2. `work_of`: what one rank computes, sends and holds, from the device and the model's shape;
3. `predict`: the times of these, added up, by name.

`plan` predicts all layouts, and sorts. `Plan.step` is the same step as a program of messages and
computation: simulate it to see whether the sum is right.

Not in it: what waits for a slow rank, what overlapping costs the computation, collectives with
more than one ring, load that differs between layers, reading data. Chapter: 14.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

from dtlab import cost
from dtlab.calls import check_whole
from dtlab.comm import Comm
from dtlab.cost.memory import RECOMPUTE
from dtlab.cost.pipeline import SCHEDULES
from dtlab.errors import ConfigError
from dtlab.models.shapes import Shape
from dtlab.parallel.device import A100, Device
from dtlab.parallel.mesh import check_axes
from dtlab.parallel.planned_step import PlannedStep
from dtlab.topology import Topology

EFFICIENCY = 0.83  # the share of a device's benchmarked rates that training reaches; our one
# constant, chosen so that Korthikanti et al. 2022, table 5, comes out right on average
PRECISIONS = {"bf16": (2, 2, 12), "float32": (4, 4, 8)}  # bytes of parameter, gradient, Adam
OPTIMIZER_TRAFFIC = 28  # bytes a parameter that a step of Adam reads and writes, of 4 each:
# parameter, mean, variance both ways, and the gradient once


class Layout(NamedTuple):
    """How a step is laid out. mesh: sizes of pp, dp and tp, the last axis varying fastest.
    A dp rank computes `micro_batches` of `micro_batch` samples each, with `schedule`, and `chunks`
    if it is interleaved. stage: of ZeRO. recompute: see `cost.activation_bytes`. sequence: sequence
    parallelism beside tensor parallelism."""

    mesh: dict[str, int]
    micro_batch: int = 1
    micro_batches: int = 1
    schedule: str = "1F1B"
    chunks: int = 1
    stage: int = 0
    recompute: str = "none"
    sequence: bool = False

    @property
    def pp(self) -> int:
        return self.mesh.get("pp", 1)

    @property
    def dp(self) -> int:
        return self.mesh.get("dp", 1)

    @property
    def tp(self) -> int:
        return self.mesh.get("tp", 1)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.dp * self.micro_batch * self.micro_batches

    def __str__(self) -> str:
        parts = [",".join(f"{name}={size}" for name, size in self.mesh.items()),
                 f"{self.micro_batches} × {self.micro_batch}"]
        if self.pp > 1:
            parts.append(self.schedule + (f" ×{self.chunks}" if self.chunks > 1 else ""))
        parts += [f"ZeRO {self.stage}"] if self.stage else []
        parts += [f"{self.recompute} recomputation"] if self.recompute != "none" else []
        parts += ["sequence"] if self.sequence else []
        return ", ".join(parts)


class Wire(NamedTuple):
    """What a message between neighbours of a group meets: α seconds, and β seconds a byte."""

    alpha: float
    beta: float

    def ring_s(self, ranks: int, nbytes: float) -> float:
        """A ring's reduce-scatter or all-gather of `nbytes`; an all-reduce takes two."""
        return (ranks - 1) * (self.alpha + nbytes / ranks * self.beta)


Wires = Callable[[int, int], Wire]


def wires(topology: Topology) -> Wires:
    """(size, stride) → what the groups of a mesh axis get, whose `size` ranks are `stride` apart,
    if every rank of every group sends to the next one of its ring at once.

    A link that k of these flows cross gives each a k-th; the slowest flow is the ring's. So an axis
    in the wrong place shows: eight groups that all cross one network card get an eighth of it.

    One ring a group, in the order of its ranks, leaves a host through one rank's card. NCCL makes
    more rings, through all cards; but what ZeRO 3 reached on such hosts (Narayanan et al. 2021,
    table 2) is near one ring, and far below eight.
    """

    @cache
    def wire(size: int, stride: int) -> Wire:
        latency_s, flows = topology.overhead_s, Counter[int]()
        for rank in range(topology.ranks if size > 1 else 0):
            place = rank // stride % size
            route_s, links = topology.route(rank, rank + ((place + 1) % size - place) * stride)
            latency_s = max(latency_s, route_s)
            flows.update(links)
        return Wire(latency_s, max((n / topology.capacity_Bps[link] for link, n in flows.items()),
                                   default=0.0))

    return wire


class RankWork(NamedTuple):
    """What one rank of the fullest stage does for one micro-batch; times without any messages."""

    layers: int  # of the model, on this rank
    products_s: float  # of a layer forward, and half of its backward
    traffic_s: float  # memory traffic beside them, likewise
    recompute_s: float  # of a layer, before its backward
    weights_s: float  # the part of a layer's backward for the weights' gradients
    output_s: float  # the output layer forward, on the last rank; backward takes twice that
    reduced_bytes: float  # by each tensor-parallel all-reduce
    reduces: tuple[int, int]  # how many of them a layer has forward, backward
    message_bytes: float  # to the next stage
    layer_bytes: float  # of a layer's gradients, or parameters
    ends_bytes: float  # of the embedding's or the output layer's
    optimizer_s: float  # once a step
    memory_bytes: float
    model_flops: float  # of the whole step on all ranks, without and
    hardware_flops: float  # with what is computed again

    @property
    def forward_s(self) -> float:
        return self.products_s + self.traffic_s

    @property
    def backward_s(self) -> float:
        return 2 * self.forward_s + self.recompute_s


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


def work_of(shape: Shape, layout: Layout, device: Device, precision: str = "bf16") -> RankWork:
    """What one rank computes, sends and holds."""
    pp, dp, tp, b = layout.pp, layout.dp, layout.tp, layout.micro_batch
    s, h, a = shape.positions, shape.hidden, shape.heads
    itemsize, gradient_bytes, optimizer_bytes = PRECISIONS[precision]
    layers = math.ceil(shape.layers / (pp * layout.chunks)) * layout.chunks
    table = shape.vocab * h
    per_layer = (shape.parameters - table * (1 if shape.tied else 2)) / shape.layers

    def products_s(flops: float, columns: float) -> float:
        return device.product_s(flops / tp, b * s, h, max(columns / tp, 1), precision) / EFFICIENCY

    def traffic_s(nbytes: float) -> float:
        return nbytes / (device.memory_Bps * EFFICIENCY)

    flops = cost.matrix_product_flops(b, s, h, per_layer)
    forward_s = products_s(flops, per_layer / (4 * h))
    memory_s = traffic_s(cost.memory_traffic_bytes(b, s, h, a, tp, layout.sequence, itemsize))
    scores = cost.attention_flops(b, s, h)
    again = {"none": (0.0, 0.0), "full": (forward_s + memory_s, flops),
             "selective": (products_s(scores, h) + traffic_s(
                 cost.attention_traffic_bytes(b, s, a, tp, itemsize)), scores)}[layout.recompute]
    output_flops = 2 * b * s * table
    steps = layout.dp * layout.micro_batches
    model_flops = steps * 3 * (shape.layers * flops + output_flops)
    activation = b * s * h * itemsize
    parameters = (layers * per_layer + table) / tp
    # After a pipeline's last micro-batch only are gradients reduced, so they aren't sharded before.
    sharded = min(layout.stage, 1) if pp > 1 else layout.stage
    state = cost.model_state_bytes(parameters, dp, sharded, itemsize, gradient_bytes,
                                   optimizer_bytes)
    state += 2 * per_layer / tp * itemsize if sharded == 3 else 0  # gathered: this layer, the next
    whole, kept = (itemsize / 2 * cost.activation_bytes(
        b, s, h, a, tensor=tp, sequence=layout.sequence, recompute=recompute)
        for recompute in ("none", layout.recompute))
    held = kept * layers * cost.micro_batches_in_flight(
        layout.schedule, pp, layout.micro_batches, layout.chunks)
    held += whole if layout.recompute == "full" else 0  # one layer, while its backward runs
    held += 4 * b * s * shape.vocab / tp if pp == 1 else 0  # logits; other last ranks hold less
    return RankWork(
        layers, forward_s, memory_s, again[0],
        products_s(2 * b * s * per_layer, per_layer / (4 * h)),
        products_s(output_flops, shape.vocab) + traffic_s(8 * b * s * shape.vocab / tp),
        activation if tp > 1 else 0.0, (2, 4 if layout.recompute == "full" else 2),
        activation / (tp if layout.sequence else 1), per_layer / tp * gradient_bytes,
        table / tp * gradient_bytes,
        traffic_s(OPTIMIZER_TRAFFIC * parameters / (dp if layout.stage else 1)),
        state + held, model_flops, model_flops + steps * shape.layers * again[1])


def predict(shape: Shape, topology: Topology, layout: Layout, *, device: Device = A100,
            precision: str = "bf16", memory_bytes: float | None = None,
            wire: Wires | None = None) -> Plan:
    """What one step with `layout` takes: its terms are seconds of the step, by name.

    memory_bytes: what a rank may occupy, by default the device's. wire: of `wires(topology)`, if
    you have it already. Raises `ConfigError` for a mesh that isn't the topology's size; whatever
    else doesn't fit is in `why_not`.
    """
    _check(shape, topology, layout.mesh, precision, device)
    if why_not := _impossible(shape, layout):
        return Plan(layout, why_not=why_not)
    return _predict(layout, device, precision,
                    device.memory_bytes if memory_bytes is None else memory_bytes,
                    wire or wires(topology),
                    work_of(shape, layout, device, precision))


def _predict(layout: Layout, device: Device, precision: str, memory_bytes: float,
             wire: Wires, work: RankWork) -> Plan:
    pp, dp, tp = (_wire(layout.mesh, name, wire) for name in ("pp", "dp", "tp"))
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
    gather_s = 0.0
    if layout.pp > 1 or (m > 1 and layout.stage < 2):
        gradients_s = 2 * whole_s  # once, after the last backward
    elif layout.stage == 0:
        gradients_s = _exposed_s(2 * layer_s, backward_s, layers)
        gradients_s += 2 * dp.ring_s(d, work.ends_bytes)
    elif layout.stage < 3:
        gradients_s = m * _exposed_s(layer_s, backward_s, layers) + whole_s
        gradients_s += m * dp.ring_s(d, work.ends_bytes)
    else:  # each layer's parameters are gathered while the layer before computes
        gather_s = m * (2 * layer_s + (layers - 1) * max(0.0, layer_s - forward_s))
        gradients_s = m * _exposed_s(2 * layer_s, backward_s, layers)
        gradients_s += 3 * m * dp.ring_s(d, work.ends_bytes)
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


def _exposed_s(each_s: float, compute_s: float, count: int) -> float:
    """Of `count` messages that leave one after another, each while the next is computed: how long
    they outlast the computation. As `cost.exposed_s`."""
    return each_s + max(0.0, (count - 1) * (each_s - compute_s))


def _wire(mesh: dict[str, int], name: str, wire: Wires) -> Wire:
    stride = 1
    for axis, size in reversed(mesh.items()):
        if axis == name:
            return wire(size, stride)
        stride *= size
    return Wire(0.0, 0.0)


def _check(shape: Shape, topology: Topology, mesh: dict[str, int], precision: str, device: Device
           ) -> None:
    for value, kind in ((shape, Shape), (topology, Topology), (device, Device)):
        if not isinstance(value, kind):
            raise ConfigError(f"the planner needs a {kind.__name__}, not {value!r:.60}")
    if precision not in device.product_flops or precision not in PRECISIONS:
        raise ConfigError(f"precision is one of {', '.join(device.product_flops)}, not "
                          f"{precision!r:.60}")
    check_axes(mesh)
    if unknown := set(mesh) - {"pp", "dp", "tp"}:
        raise ConfigError(f"the planner knows the axes pp, dp and tp, not {', '.join(unknown)}")
    if math.prod(mesh.values()) != topology.ranks:
        raise ConfigError(f"a mesh of {' · '.join(f'{k}={v}' for k, v in mesh.items())} has "
                          f"{math.prod(mesh.values())} ranks, but {topology.name} has "
                          f"{topology.ranks}")


def _impossible(shape: Shape, layout: Layout) -> str:
    """Why no device could run `layout`, or empty."""
    pp, tp, v, m = layout.pp, layout.tp, layout.chunks, layout.micro_batches
    for name in ("micro_batch", "micro_batches", "chunks"):
        check_whole(name, getattr(layout, name))
    if layout.schedule not in SCHEDULES:
        return f"the planner knows the schedules {', '.join(SCHEDULES)}, not {layout.schedule!r}"
    if layout.recompute not in RECOMPUTE:
        return f"recompute is one of {', '.join(RECOMPUTE)}, not {layout.recompute!r}"
    if layout.stage not in (0, 1, 2, 3):
        return f"ZeRO has the stages 1, 2 and 3 (0: none), not {layout.stage!r}"
    if shape.heads % tp:
        return f"{shape.heads} heads can't be shared equally by tp={tp}"
    if shape.hidden % tp:
        return f"a hidden size of {shape.hidden} can't be cut for tp={tp}"
    if pp * v > shape.layers:
        return f"{shape.layers} layers are fewer than {pp * v} stages"
    if layout.sequence and (tp == 1 or shape.positions % tp):
        return f"sequence parallelism can't cut {shape.positions} positions for tp={tp}" \
            if tp > 1 else "sequence parallelism needs tp"
    if layout.stage and layout.dp == 1:
        return "ZeRO shards over dp, which has one rank"
    if layout.stage == 3 and pp > 1:
        return "ZeRO 3 would gather the parameters anew for each micro-batch of a pipeline"
    if v > 1 and (layout.schedule != "interleaved" or m % pp):
        return f"chunks need the interleaved schedule, and micro-batches that pp={pp} divides"
    return ""


def plan(shape: Shape, topology: Topology, batch: int, memory_bytes: float | None = None, *,
         device: Device = A100, precision: str = "bf16",
         only: Callable[[Layout], bool] | None = None) -> list[Plan]:
    """All layouts of `shape` on `topology`, in steps of `batch` samples: first those that fit, the
    fastest first; then those that don't, with `why_not`, the nearest first.

    memory_bytes: what a rank may occupy, by default the device's. only: a function of a layout,
    which is left out if it returns False. Raises `ConfigError`, with the nearest miss, if nothing
    fits.
    """
    check_whole("batch", batch)
    _check(shape, topology, {"dp": topology.ranks}, precision, device)
    limit = device.memory_bytes if memory_bytes is None else memory_bytes
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ConfigError(f"memory_bytes must be a number above 0, not {limit!r}")
    wire, plans = wires(topology), []
    for layout in layouts(shape, topology.ranks, batch):
        if only is not None and not only(layout):
            continue
        why_not = _impossible(shape, layout)
        if layout.batch != batch:
            why_not = f"{batch} samples can't be shared equally by dp={layout.dp}"
        if why_not:
            plans.append(Plan(layout, why_not=why_not))
            continue
        work = work_of(shape, layout, device, precision)  # the same for all orders of the axes
        orders = _orders(layout) if work.memory_bytes <= limit else [layout]
        plans += [_predict(order, device, precision, limit, wire, work)
                  for order in orders]
    plans.sort(key=lambda p: (bool(p.why_not), not p.why_not and p.step_s, p.memory_bytes))
    if not plans or plans[0].why_not:
        nearest = f"the nearest is {plans[0]}" if plans else "there is no such layout"
        raise ConfigError(f"nothing fits {topology.ranks} devices of {limit / 1e9:.4g} GB in steps "
                          f"of {batch} samples; {nearest}")
    return plans


def layouts(shape: Shape, ranks: int, batch: int) -> Iterator[Layout]:
    """All that `plan` tries, in one order of the axes."""
    for pp, tp in product(_divisors(ranks), repeat=2):
        if ranks % (pp * tp):
            continue
        mesh = {"pp": pp, "dp": ranks // pp // tp, "tp": tp}
        if batch % mesh["dp"] or shape.heads % tp or pp > shape.layers:
            yield Layout(mesh)  # one, to say why not
            continue
        each = batch // mesh["dp"]
        for micro_batch in (b for b in _divisors(each) if b & (b - 1) == 0 and b <= 64):
            for schedule, chunks in _schedules(shape, pp, each // micro_batch):
                for stage in (0,) if mesh["dp"] == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3):
                    for recompute in RECOMPUTE:
                        for sequence in (False, True) if tp > 1 else (False,):
                            yield Layout(mesh, micro_batch, each // micro_batch, schedule, chunks,
                                         stage, recompute, sequence)


def _schedules(shape: Shape, pp: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1F1B", 1
        return
    yield from (("gpipe", 1), ("1F1B", 1))
    if micro_batches >= pp:
        yield "ZB-H1", 1
    if micro_batches % pp == 0:
        yield from (("interleaved", v) for v in range(2, 9) if shape.layers % (pp * v) == 0)


def _orders(layout: Layout) -> list[Layout]:
    """`layout` with its axes in each order; those of one rank are the same anywhere."""
    real = [name for name, size in layout.mesh.items() if size > 1]
    return [layout._replace(mesh={name: layout.mesh[name] for name in order} or {"dp": 1})
            for order in permutations(real)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
