"""The time of a layout's step, term by term, and the layout that takes the least."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from dtlab.checks import (
    check_amount,
    check_flag,
    check_name,
    check_number,
    check_positive,
    check_whole,
    short,
)
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.models.shapes import Shape, check_shape
from dtlab.parallel.mesh import check_axes
from dtlab.parallel.planner.device import A100, EAGER, Device, Software
from dtlab.parallel.planner.layout import AXES, Layout, impossible, layouts, orders
from dtlab.parallel.planner.schedules import HALVED, TWO_CHUNKS, bubble_s_of, messages_s_of
from dtlab.parallel.planner.step import PlannedStep
from dtlab.parallel.planner.wires import Wires, hop_of, wire_of, wires
from dtlab.parallel.planner.work import RECIPES, RankWork, Recipe, work_of
from dtlab.topology import Topology
from dtlab.units import count_text

HEADROOM = 0.08  # of a device's memory, for its context, communicators and fragmentation
TIE = 0.10  # plans this close can't be told apart: so far off is the median of measured steps


@dataclass(frozen=True)
class Plan:
    """A layout and what it is predicted to take: `step_s` seconds, the sum of `terms`, and on the
    fullest rank `memory_bytes`, the sum of `memory`. why_not: why it was rejected, or empty.
    efficiency: the share of the device's peak that goes into the model (MFU).
    device_flops: a second and device, with what is computed again, as Megatron's papers count.
    idle_s: seconds, forward and backward, for which a layer's kernels wait to be started."""

    layout: Layout
    step_s: float = math.inf
    memory_bytes: float = math.inf
    terms: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    why_not: str = ""
    efficiency: float = 0.0
    device_flops: float = 0.0
    idle_s: tuple[float, float] = (0.0, 0.0)
    work: RankWork | None = field(default=None, repr=False)
    topology: Topology | None = field(default=None, repr=False)

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.layout}: {self.why_not}"
        return (f"{self.layout}: {self.step_s:.3g} s, {self.memory_bytes / 1e9:.1f} GB, "
                f"{self.efficiency:.0%}")

    def step(self, comm: Comm) -> None:
        """Take one step as this rank's messages and computations, on tensors without data: simulate
        it, `simulate(plan.step, network=topology).elapsed_s`, beside `step_s`."""
        if self.work is None or self.topology is None:
            raise ConfigError(f"this layout can't run: {self.why_not}")
        PlannedStep(comm, self.layout, self.work, self.idle_s, self.topology.host_of).run()


def predict(shape: Shape, topology: Topology, layout: Layout, *, device: Device = A100,
            precision: str | Recipe = "bf16", software: Software = EAGER,
            memory_bytes: float | None = None, headroom: float = HEADROOM,
            masked: bool = True, wire: Wires | None = None) -> Plan:
    """Predict one step with `layout`: its terms are seconds of the step, by name.

    precision: a name in `RECIPES`, or a recipe. software: how much of the device's rates it
    reaches. memory_bytes: what a rank has, by default the device's, of which it leaves the share
    `headroom` free. masked: do the model's operations count attention's scores that a causal mask
    hides, as in PaLM's and torchtitan's utilization? wire: of `wires(topology)`, if you have it
    already. Raises `ConfigError` for a mesh that isn't the topology's size; whatever else doesn't
    fit is in `why_not`.
    """
    if not isinstance(layout, Layout):
        raise ConfigError(f"predict takes a Layout, not {short(layout)}")
    recipe, software, limit = _checked(shape, topology, device, precision, software, memory_bytes,
                                       headroom, masked)
    check_axes(layout.mesh, topology.ranks, topology.name)
    if unknown := set(layout.mesh) - {*AXES}:
        raise ConfigError(f"the planner knows the axes {', '.join(AXES)}, not "
                          f"{', '.join(map(str, unknown))}")
    if wire is not None and not callable(wire):
        raise ConfigError(f"wire is what wires(topology) returns, not {short(wire)}")
    if why_not := impossible(shape, layout):
        return Plan(layout, why_not=why_not)
    return _predict(layout, device, limit, wire or wires(topology),
                    work_of(shape, layout, device, recipe, software, masked), topology)


class MessageTimes(NamedTuple):
    """Seconds that the messages of one layer's forward and of its backward take."""

    tensor_s: Sequence[float]
    context_s: Sequence[float]
    experts_s: Sequence[float]


def messages_of(layout: Layout, work: RankWork, wire: Wires) -> MessageTimes:
    """Time the messages of one layer, each with nothing beside it. Context parallelism gathers keys
    and values; backward does so again, and scatters their gradients."""
    tp, cp = (wire_of(layout.mesh, name, wire) for name in ("tp", "cp"))
    half_s, gather_s = tp.ring_s(layout.tp, work.tp_bytes), cp.ring_s(layout.cp, work.cp_bytes)
    exchange_s = wire_of(layout.mesh, "ep", wire, True).ring_s(layout.ep, work.ep_bytes) \
        if layout.ep > 1 else 0.0
    return MessageTimes([n * half_s for n in work.tp_halves], [gather_s, 2 * gather_s],
                        [n * exchange_s for n in work.ep_exchanges])


def exposed(messages: MessageTimes, layout: Layout, work: RankWork) -> MessageTimes:
    """Return the part that computation does not hide with `layout.overlap_tp`: tensor parallelism's
    messages hide behind matrix products, in backward behind those of the inputs' gradients alone
    if the weights' come later; context parallelism's behind attention; experts' behind all of
    another micro-batch's layer."""
    if not layout.overlap_tp:
        return messages
    later_s = work.weights_s if layout.schedule in HALVED else 0.0
    behind = ((work.products_s, 2 * work.products_s - later_s),
              (work.attention_s, work.again * work.attention_s),
              (work.forward_s, work.backward_s - later_s))
    return MessageTimes(*([max(0.0, a - b) for a, b in zip(sent, room, strict=True)]
                          for sent, room in zip(messages, behind, strict=True)))


def _predict(layout: Layout, device: Device, memory_bytes: float, wire: Wires, work: RankWork,
             topology: Topology) -> Plan:
    m, layers = layout.micro_batches, work.layers
    sent = messages_of(layout, work, wire)
    messages = exposed(sent, layout, work)
    busy = [compute_s + sum(each) for compute_s, each in zip(
        (work.forward_s, work.backward_s), zip(*messages, strict=True), strict=True)]
    idle_s = max(0.0, work.floor_s - busy[0]), max(0.0, layout.starts * work.floor_s - busy[1])
    forward_s, backward_s = (a + b for a, b in zip(busy, idle_s, strict=True))

    # A pipeline goes at the pace of its fullest stage; what passes before and after is the average.
    average = sum(work.stages) / layout.pp
    output_s = max(0.0, 3 * work.output_s - (layers - work.last_layers) * (forward_s + backward_s))
    pipeline = (layout.schedule, layout.pp, m, average * forward_s, average * backward_s,
                average * (work.weights_s + idle_s[1] / layout.starts), layout.chunks)
    in_rows = layout.chunks > 1 and layout.schedule not in TWO_CHUNKS
    hop = hop_of(topology, layout.mesh, in_rows)
    n = work.message_bytes
    hop_s = hop.alpha + n * hop.beta, *(layout.chunks * n * s for s in (hop.forward, hop.both))
    free_s = _free_s(layout, wire, sent, (forward_s, backward_s))
    gather_s, gradients_s, parameters_s = _data_parallel(layout, work, wire, output_s, *free_s)
    if layout.stage == 3 and not layout.gather_once:  # the bubble lasts for them, too
        gather_s *= 1 + (layout.pp - 1) / (m * layout.chunks)
    terms = {
        "matrix products": 3 * m * layers * work.products_s,
        "attention": (1 + work.again) * m * layers * work.attention_s,
        "memory traffic": 3 * m * layers * work.traffic_s,
        "output layer": m * output_s,
        "recomputation": m * layers * work.recompute_s,
        "launches": m * layers * sum(idle_s),
        "tensor parallel": m * layers * sum(messages.tensor_s),
        "context parallel": m * layers * sum(messages.context_s),
        "experts": m * layers * sum(messages.experts_s),
        "bubble": bubble_s_of(*pipeline, 0.0),
        "pipeline messages": messages_s_of(*pipeline, output_s, *hop_s),
        "parameters": gather_s + parameters_s,
        "gradients": gradients_s,
        "optimizer": work.optimizer_s,
    }
    step_s = sum(terms.values())
    return Plan(layout, step_s, work.memory_bytes, terms, work.memory, work.too_large(memory_bytes),
                work.model_flops / step_s / topology.ranks
                / device.peak_flops[work.recipe.products],
                work.hardware_flops / step_s / topology.ranks, idle_s, work, topology)


def _free_s(layout: Layout, wire: Wires, messages: MessageTimes, layer_s: tuple[float, float]
            ) -> Sequence[float]:
    """Return the seconds of a layer's forward and backward in which parameters and gradients can
    travel beside it: not while other messages do on wires of the same α."""
    alpha = wire_of(layout.mesh, ("dp", "ep", "cp"), wire).alpha
    busy = [seconds for name, seconds in zip(("tp", "cp", "ep"), messages, strict=True)
            if wire_of(layout.mesh, name, wire).alpha == alpha]
    return [max(0.0, all_s - sum(each[way] for each in busy)) for way, all_s in enumerate(layer_s)]


def _data_parallel(layout: Layout, work: RankWork, wire: Wires, output_s: float, forward_s: float,
                   backward_s: float) -> tuple[float, float, float]:
    """Seconds for which a step only gathers parameters for ZeRO 3, reduces gradients, gathers the
    optimizer's new parameters. What is free for that: output_s beside layers, the rest of each."""
    mesh, m, layers, stage = layout.mesh, layout.micro_batches, work.layers, layout.stage
    shard = wire_of(mesh, ("dp", "ep", "cp"), wire)
    copies = wire_of(mesh, "dp_replicate", wire)
    experts = wire_of(mesh, ("dp", "cp"), wire)
    ranks, expert_ranks = layout.dp * layout.ep * layout.cp, layout.dp * layout.cp
    sent, held = work.recipe.reduced, work.recipe.activation

    def half_s(dense: float, routed: float, size: float) -> float:
        """A reduce-scatter or an all-gather."""
        return (shard.ring_s(ranks, dense * size)
                + (experts.ring_s(expert_ranks, routed * size) if routed else 0.0))

    def reduce_s(dense: float, routed: float) -> float:
        """The seconds: scattered if the optimizer is sharded, with copies all-reduced as well."""
        scattered = half_s(dense, routed, sent) * (1 if stage else 2)
        return scattered + 2 * copies.ring_s(layout.replicas, sent * (dense / ranks
                                                                      + routed / expert_ranks))

    own = work.parameters
    one, ends, all_of_it = (own.layer, own.experts), (own.ends, 0.0), (own.dense, own.routed)
    parameters_s = half_s(*all_of_it, held) if stage in (1, 2) else 0.0
    layer_s, last_s = reduce_s(*one), reduce_s(*ends)
    if not layout.reduces_at_once:
        gradients_s = reduce_s(*all_of_it)
    elif not layout.overlap:
        gradients_s = m * (layers * layer_s + last_s)
    else:  # each layer's while the others compute: what outlasts them, at least the last one's
        hidden_s = ((m - 1) * (layers * (forward_s + backward_s) + output_s)
                    + (layers - 1) * backward_s)
        gradients_s = max(layer_s + last_s, m * (layers * layer_s + last_s) - hidden_s)
    if stage < 3:
        return 0.0, gradients_s, parameters_s
    gather_s, gather_ends_s = half_s(*one, held), half_s(*ends, held)
    if layout.gather_once:
        return layers * gather_s + gather_ends_s, gradients_s, 0.0
    if not layout.overlap:
        return 2 * m * (layers * gather_s + gather_ends_s), gradients_s, 0.0
    # A layer's parameters are gathered while the one before of its chunk computes; in backward
    # gradients leave beside them, on the same wire.
    leave_s = layer_s if layout.reduces_at_once else 0.0
    others = layers - layout.chunks
    exposed_s = m * (2 * (layout.chunks * gather_s + gather_ends_s)
                     + others * max(0.0, gather_s - forward_s))
    late_s = m * others * max(0.0, gather_s + leave_s - backward_s)
    if layout.reduces_at_once:
        return exposed_s, layer_s + last_s + late_s, 0.0
    return exposed_s + late_s, gradients_s, 0.0


def _checked(shape: Shape, topology: Topology, device: Device, precision: str | Recipe,
             software: Software, memory_bytes: float | None, headroom: float, masked: bool
             ) -> tuple[Recipe, Software, float]:
    """Return the recipe, the software, which stalls nowhere if there is one host, and the bytes
    that a rank may fill."""
    check_flag("masked", masked)
    for value, kind in ((shape, Shape), (topology, Topology), (device, Device),
                        (software, Software)):
        if not isinstance(value, kind):
            raise ConfigError(f"the planner needs a {kind.__name__}, not {value!r:.60}")
    check_shape(shape)
    check_positive("software.efficiency", software.efficiency)
    for name in ("layer_s", "stall_s"):
        check_amount(f"software.{name}", getattr(software, name))
    check_flag("software.early_stop", software.early_stop)
    recipe = precision if isinstance(precision, Recipe) else \
        RECIPES.get(precision) if isinstance(precision, str) else None
    if recipe is None:
        raise ConfigError(f"precision is one of {', '.join(map(repr, RECIPES))}, or a Recipe; not "
                          f"{precision!r:.60}")
    check_name("recipe.products", recipe.products)
    for name in ("activation", "parameter", "gradient", "optimizer", "reduced", "loss"):
        check_amount(f"recipe.{name}", getattr(recipe, name))
    if recipe.products not in device.product_flops:
        raise ConfigError(f"{device.name} has no rate of matrix products in {recipe.products}, but "
                          f"in {', '.join(device.product_flops)}")
    limit = device.memory_bytes if memory_bytes is None else memory_bytes
    check_positive("memory_bytes", limit)
    check_number("headroom", headroom)
    if not 0 <= headroom < 1:
        raise ConfigError(f"headroom is a share of the memory, below 1, not {headroom!r}")
    if software.stall_s and len(topology.groups) == 1:
        software = software._replace(stall_s=0.0)
    return recipe, software, limit * (1 - headroom)


def plan(shape: Shape, topology: Topology, batch: int, memory_bytes: float | None = None, *,
         device: Device = A100, precision: str | Recipe = "bf16", software: Software = EAGER,
         headroom: float = HEADROOM, masked: bool = True,
         only: Callable[[Layout], bool] | None = None) -> list[Plan]:
    """All layouts of `shape` on `topology`, in steps of `batch` samples: first those that fit, the
    fastest first; then those that don't, with `why_not` and no times, the nearest first.

    only: a function of a layout, which is left out if it returns False. The rest: see `predict`.
    Raises `ConfigError`, with the nearest miss, if nothing fits.
    """
    check_whole("batch", batch, 1, 1_000_000)
    recipe, software, limit = _checked(shape, topology, device, precision, software, memory_bytes,
                                       headroom, masked)
    if only is not None and not callable(only):
        raise ConfigError(f"only is a function of a layout, not {short(only)}")
    wire, plans = wires(topology), list[Plan]()
    for layout in layouts(shape, topology.ranks, batch, len(topology.groups)):
        if only is not None and not only(layout):
            continue
        why_not = impossible(shape, layout)
        if not why_not and layout.batch != batch:
            why_not = f"{batch} samples can't be shared equally by {layout.samplers} ranks"
        if why_not:
            plans.append(Plan(layout, why_not=why_not))
            continue
        work = work_of(shape, layout, device, recipe, software, masked)  # in any order of axes
        if why_not := work.too_large(limit):
            plans.append(Plan(layout, memory_bytes=work.memory_bytes, memory=work.memory,
                              why_not=why_not))
        else:
            plans += [_predict(order, device, limit, wire, work, topology)
                      for order in orders(layout)]
    plans.sort(key=lambda p: (bool(p.why_not), not p.why_not and p.step_s, p.memory_bytes))
    if not plans or plans[0].why_not:
        nearest = f"the nearest is {plans[0]}{_remedy(plans[0])}" if plans \
            else "there is no such layout"
        raise ConfigError(f"nothing fits {count_text(topology.ranks, 'device')} of "
                          f"{limit / 1e9:.4g} GB in steps of {count_text(batch, 'sample')}; "
                          f"{nearest}")
    return plans


def _remedy(plan: Plan) -> str:
    """The largest part of what it needs, and what makes that smaller."""
    if not plan.memory:
        return ""
    name = max(plan.memory, key=lambda part: plan.memory[part])
    less = {"activations": "a longer pipeline doesn't help; recomputation, tp and cp do",
            "logits": "tp and cp cut them"}.get(name, "more devices share them")
    return f", {plan.memory[name] / 1e9:.4g} GB of it {name}: {less}"


def ties(plans: Sequence[Plan]) -> list[Plan]:
    """The first of `plans`, and those that follow within `TIE` of its time."""
    return list(takewhile(lambda p: not p.why_not and p.step_s <= (1 + TIE) * plans[0].step_s,
                          plans))
