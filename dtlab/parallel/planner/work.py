"""What one rank computes, sends and holds in a step, from the device and the model's shape."""

from __future__ import annotations

import math
from typing import NamedTuple

from dtlab import cost
from dtlab.models.shapes import Shape
from dtlab.parallel.planner.device import Device
from dtlab.parallel.planner.layout import Layout

EFFICIENCY = 0.83  # the share of a device's benchmarked rates that training reaches; our one
# constant, chosen so that Korthikanti et al. 2022, table 5, comes out right on average
PRECISIONS = {"bf16": (2, 2, 12), "float32": (4, 4, 8)}  # bytes of parameter, gradient, Adam
OPTIMIZER_TRAFFIC = 28  # bytes a parameter that a step of Adam reads and writes, of 4 each:
# parameter, mean, variance both ways, and the gradient once


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
    # The loss holds four float32 a logit: it, shifted, its exponential, its gradient. The last of
    # several stages holds fewer activations instead.
    held += 16 * b * s * shape.vocab / tp if pp == 1 else 0
    return RankWork(
        layers, forward_s, memory_s, again[0],
        products_s(2 * b * s * per_layer, per_layer / (4 * h)),
        products_s(output_flops, shape.vocab) + traffic_s(8 * b * s * shape.vocab / tp),
        activation if tp > 1 else 0.0, (2, 4 if layout.recompute == "full" else 2),
        activation / (tp if layout.sequence else 1), per_layer / tp * gradient_bytes,
        table / tp * gradient_bytes,
        traffic_s(OPTIMIZER_TRAFFIC * parameters / (dp if layout.stage else 1)),
        state + held, model_flops, model_flops + steps * shape.layers * again[1])
