"""The work of one rank in a step: what it computes, sends and holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dtlab.models.shapes import Shape
from dtlab.parallel.planner.device import Device, Software
from dtlab.parallel.planner.layout import Layout
from dtlab.parallel.planner.schedules import HALVED, TWO_CHUNKS, in_flight, stages_of

OPTIMIZER_TRAFFIC = 28  # bytes a parameter that a step of Adam reads and writes, of 4 each:
# parameter, mean, variance both ways, and the gradient once


class Recipe(NamedTuple):
    """Precision of matrix products, and bytes: of an activation, and for each parameter of its own,
    of its gradient, of the optimizer's state, and of what is sent to reduce the gradient. loss: of
    what it keeps beside each logit: three times 4 if the logits are copied to float32, with their
    logarithms of probabilities and their gradient; 0 if a fused kernel puts this in their place."""

    products: str = "bf16"
    activation: int = 2
    parameter: int = 2
    gradient: int = 2
    optimizer: int = 12
    reduced: int = 2
    loss: int = 12


RECIPES = {
    "bf16": Recipe(),
    "bf16, float32 gradients": Recipe(gradient=4, reduced=4),
    "float32 parameters, bf16 copies": Recipe(parameter=4, gradient=4, optimizer=8, reduced=4),
    "fp8": Recipe("fp8", gradient=4, reduced=4),
    "float32": Recipe("float32", 4, 4, 4, 8, 4),
}


class Parameters(NamedTuple):
    """The numbers of one rank's parameters."""

    layer: float  # of an average layer without its routed experts
    experts: float  # of these
    ends: float  # of the embedding, or of the output layer
    dense: float  # all without routed experts
    routed: float  # all of routed experts


class RankWork(NamedTuple):
    """The work of one rank of the fullest stage for one micro-batch; times without any messages,
    of an average layer. Pairs are of forward and backward."""

    stages: list[int]  # layers of each stage of the pipeline
    layers: int  # on this rank
    last_layers: int  # on the rank that has the output layer
    products_s: float  # of a layer forward, and half of its backward
    attention_s: float  # of scores and weighted sums forward
    again: float  # how many times as long they take in backward
    traffic_s: float  # memory traffic beside them forward, and half of its backward
    recompute_s: float  # of a layer, before its backward
    weights_s: float  # the part of a layer's backward for the weights' gradients
    floor_s: float  # the least that a layer's forward takes
    output_s: float  # the output layer forward, on the last rank; backward takes twice that
    tp_bytes: float  # of an activation that tensor-parallel ranks gather or reduce and scatter
    tp_halves: tuple[float, float]  # how often in a layer; an all-reduce is two
    cp_bytes: float  # of keys and values of the whole context
    ep_bytes: float  # that a rank sends to experts, its own among them
    ep_exchanges: tuple[float, float]  # all-to-alls in an average layer
    message_bytes: float  # to the next stage
    parameters: Parameters
    recipe: Recipe
    optimizer_s: float  # once a step
    memory: dict[str, float]  # bytes by name
    model_flops: float  # of the whole step on all ranks, without and
    hardware_flops: float  # with what is computed again

    @property
    def forward_s(self) -> float:
        return self.products_s + self.attention_s + self.traffic_s

    @property
    def backward_s(self) -> float:
        return (2 * (self.products_s + self.traffic_s) + self.again * self.attention_s
                + self.recompute_s)

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    def too_large(self, available: float) -> str:
        """Say what the rank needs, if that is more than the `available` bytes; else ""."""
        if self.memory_bytes <= available:
            return ""
        return f"needs {self.memory_bytes / 1e9:.4g} GB of {available / 1e9:.4g} GB"


def stage_layers(shape: Shape, layout: Layout) -> list[int]:
    """Return the number of layers of each stage: equal, or one more for the first ones.
    With `layout.balanced` the output layer takes the place of as many as it has parameters for, if
    that makes the largest stage smaller."""
    stages, output = layout.pp * layout.chunks, shape.vocab * shape.hidden / _used_parameters(shape)
    each, more = divmod(shape.layers, stages)
    even = [each + (number < more) for number in range(stages)]
    if not layout.balanced:
        return even
    each = math.ceil((shape.layers + output) / stages - 1e-9)
    filled = [max(0, min(each, shape.layers - number * each)) for number in range(stages)]
    return min(even, filled, key=lambda layers: max(layers[0], layers[-1] + output))


def _tables(shape: Shape) -> int:
    return shape.vocab * shape.hidden * (1 if shape.tied else 2)


def _used_parameters(shape: Shape) -> float:
    """Count the parameters of an average layer that a token meets."""
    unused: float = shape.expert_parameters
    if shape.experts:
        unused *= 1 - shape.experts.top / shape.experts.number
    return (shape.parameters - _tables(shape) - unused) / shape.layers


def _products_s(shape: Shape, layout: Layout, tokens: float,
                product_s: Callable[[float, float, float], float]) -> float:
    """Seconds of an average layer's matrix products forward, without attention's."""
    h, t, experts, latent = shape.hidden, layout.tp, shape.experts, shape.latent

    def mlp(rows: float, width: float) -> float:
        return (product_s(rows, h, (2 if shape.gated else 1) * width / t)
                + product_s(rows, width / t, h))

    if latent is None:
        keys = max(shape.keys / t, shape.query_width)
        attention_s = product_s(tokens, h, shape.queries / t + 2 * keys)
    else:
        attention_s = (product_s(tokens, h, latent.query_rank + latent.rank + latent.rotary)
                       + product_s(tokens, latent.query_rank, shape.queries / t)
                       + product_s(tokens, latent.rank, shape.heads / t
                                   * (latent.width + latent.value_width)))
    attention_s += product_s(tokens, shape.attended / t, h)
    if experts is None:
        return attention_s + mlp(tokens, shape.width)
    here, dense = experts.number / layout.ep, experts.dense_layers / shape.layers
    rows = tokens * experts.top * max(experts.capacity, 1) / here
    return attention_s + dense * mlp(tokens, shape.width) + (1 - dense) * (
        product_s(tokens, h, experts.number) + experts.shared * mlp(tokens, experts.width)
        + here * mlp(rows, experts.width))


def _mlp_width(shape: Shape) -> tuple[float, float]:
    """Elements of all hidden activations of an average layer's MLPs for one token, and the average
    number of experts to which it is sent."""
    experts = shape.experts
    if experts is None:
        return shape.width, 0.0
    dense, sent = experts.dense_layers / shape.layers, experts.top * max(experts.capacity, 1)
    return (dense * shape.width + (1 - dense) * (sent + experts.shared) * experts.width,
            (1 - dense) * sent)


def _traffic_elements(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Elements that an average layer's forward reads and writes outside matrix products and
    FlashAttention, for one token; and those of them that selective recomputation repeats.

    Counted, if each kernel reads its inputs from memory and writes its output: two norms read and
    write 4h, two sums read 4h and write 2h; rotary positions read and write queries and keys;
    SwiGLU's silu and product read 3 and write 2 of an MLP's width, GELU 1 and 1; tokens are put in
    the order of their experts, and back. With stored scores, which selective recomputation repeats
    instead: two masks of dropout, h; heads transposed, 6h; of s scores a head products write and
    read 2, softmax reads and writes 2, dropout as many and half a mask.
    """
    h, (width, sent) = shape.hidden, _mlp_width(shape)
    everywhere = layout.tp if layout.sequence else 1
    inside = 2 * (shape.queries + shape.keys) + 5 * width if shape.gated else 2 * width
    again, sums = 4 * h / everywhere + inside / layout.tp, (6 * h + 4 * h * sent) / everywhere
    if shape.attention == "flash":
        return again + sums, again
    scores = 6.5 * shape.heads * shape.positions / layout.tp
    return again + sums + h / everywhere + 6 * h / layout.tp + scores, scores


def _kept_elements(shape: Shape, layout: Layout, recompute: str) -> float:
    """Elements of activations that an average layer keeps for backward, for one token: inputs and
    outputs of two norms; queries, keys and values, the first two also rotated; attention's output;
    an MLP's gate, up, silu and product, or its input and output of GELU; with stored scores also
    2.5 a head and position, and two masks of dropout.

    "selective" keeps what matrix products put out and the two sums; with stored scores all but
    these. Source: for stored scores Korthikanti et al. 2022, table 2; for others the same count.
    """
    h, t, (width, sent) = shape.hidden, layout.tp, _mlp_width(shape)
    everywhere, stored = t if layout.sequence else 1, shape.attention == "stored"
    if recompute == "full":
        return h / everywhere
    attention = shape.queries + shape.keys + shape.values + shape.attended
    if recompute == "selective" and not stored:
        return 2 * h / everywhere + (attention + (2 if shape.gated else 1) * width + sent * h) / t
    attention += shape.queries + shape.keys if shape.gated else 0
    kept = ((2 + stored) * h / everywhere + 2 * h / (everywhere if layout.regather else 1)
            + (attention + (4 if shape.gated else 2) * width + sent * h) / t)
    scores = 2.5 * shape.heads * shape.positions / t
    return kept + scores if stored and recompute == "none" else kept


def _parameters(shape: Shape, layout: Layout, layers: int) -> Parameters:
    tp, routed = layout.tp, shape.expert_parameters / shape.layers
    layer = ((shape.parameters - _tables(shape)) / shape.layers - routed) / tp
    both = layout.pp == 1 or layout.schedule in TWO_CHUNKS  # on one rank
    ends = shape.vocab * shape.hidden * (2 if both and not shape.tied else 1) / tp
    routed /= tp * layout.ep
    return Parameters(layer, routed, ends, layers * layer + ends, layers * routed)


def _sharded(held: Parameters, layout: Layout, sharded: bool) -> float:
    """Parameters for which a rank keeps something, if all data-parallel ranks share, or none."""
    if not sharded:
        return held.dense + held.routed
    return held.dense / (layout.dp * layout.ep * layout.cp) + held.routed / (layout.dp * layout.cp)


def _memory(shape: Shape, layout: Layout, recipe: Recipe, own: list[int], share: float
            ) -> dict[str, float]:
    """Bytes by name, of the first stage or of the last, which has the logits. own: layers of the
    first and the last rank; share: of them that are computed again."""
    stage, itemsize, held = layout.stage, recipe.activation, _parameters(shape, layout, max(own))
    gathers = stage == 3 and not layout.gather_once and layout.dp * layout.ep * layout.cp > 1
    early = layout.pp == 1 or layout.reduce_each  # are gradients sharded before the end of a step?
    parameters = recipe.parameter * _sharded(held, layout, gathers)
    if gathers:  # this layer's, the next one's
        parameters += 2 * (held.layer + held.experts) * itemsize
    tokens = layout.micro_batch * shape.positions / layout.cp
    whole, kept = (tokens * itemsize * _kept_elements(shape, layout, recompute)
                   for recompute in ("none", layout.recompute))
    kept = share * kept + (1 - share) * whole
    held_first, held_last = (in_flight(layout.schedule, layout.pp, layout.micro_batches,
                                       layout.chunks, last) for last in (False, True))
    # What waits for the output layer's backward keeps logits, logarithms; for W alone, gradients.
    waiting = 0 if layout.schedule in ("1F1B", "interleaved", *TWO_CHUNKS) else held_last - 1
    each, busy = (4 if layout.schedule in HALVED else 4 + itemsize), itemsize + recipe.loss
    logits = (busy + waiting * min(each, busy)) * tokens * shape.vocab / layout.tp
    first, last = kept * own[0] * held_first, kept * own[1] * held_last
    if layout.schedule in TWO_CHUNKS:  # the first rank has the last stage, too
        last = first
    elif layout.pp > 1 and first > last + logits:
        last, logits = first, 0.0
    return {
        "parameters": parameters,
        "gradients": recipe.gradient * _sharded(held, layout, stage > 1 and early),
        "optimizer": recipe.optimizer * _sharded(held, layout, stage > 0),
        "activations": last + (whole if layout.recompute == "full" else 0),
        "logits": logits,
    }


def work_of(shape: Shape, layout: Layout, device: Device, recipe: Recipe, software: Software,
            masked: bool = True) -> RankWork:
    """Return what one rank computes, sends and holds. masked: does the model's work count the half
    of attention's scores that a causal mask hides?"""
    pp, tp, cp, itemsize = layout.pp, layout.tp, layout.cp, recipe.activation
    stages, full = stage_layers(shape, layout), layout.recompute == "full"
    own = [sum(stages[number] for number in stages_of(layout.schedule, pp, layout.chunks, rank))
           for rank in (0, pp - 1)]
    layers = max(own)
    share = 1.0 if layout.recompute_layers is None else min(layout.recompute_layers / layers, 1)
    held = _parameters(shape, layout, layers)

    def product_s(rows: float, inner: float, columns: float) -> float:
        return device.product_s(rows, inner, columns, recipe.products) / software.efficiency

    def traffic_s(nbytes: float) -> float:
        return nbytes / (device.memory_Bps * software.efficiency)

    # ---- computation
    tokens = layout.micro_batch * shape.positions / cp
    products_s = _products_s(shape, layout, tokens, product_s)
    memory_s, again_s = (traffic_s(tokens * elements * itemsize)
                         for elements in _traffic_elements(shape, layout))
    scores = 2 * tokens * shape.positions * (shape.queries + shape.attended)  # operations
    again = {"none": 0.0, "selective": 0.0, "full": 1.0}[layout.recompute]
    if shape.attention == "flash":
        attention_s, factor = scores / 2 / tp / device.attention_flops, 2.5
    else:
        attention_s = scores / tp / device.product_flops[recipe.products] / software.efficiency
        again_s, factor = again_s + attention_s, 2.0
        again = 1.0 if layout.recompute == "selective" else again
    spared = shape.width if software.early_stop and shape.experts is None else 0
    spared_s = product_s(tokens, spared / tp, shape.hidden) if spared else 0.0
    recompute_s = share * {"none": 0.0, "selective": again_s, "full": products_s + attention_s
                           + memory_s - spared_s}[layout.recompute]
    flops = 2 * tokens * cp * _used_parameters(shape)
    counted = cp * scores * (1 if masked else 0.5)
    steps = layout.samplers * layout.micro_batches
    model_flops = steps * 3 * (shape.layers * (flops + counted)
                               + 2 * tokens * cp * shape.vocab * shape.hidden)
    repeated = share * (counted * again + (
        flops - 2 * tokens * cp * spared * shape.hidden if full else 0.0))

    # ---- what is sent
    activation = tokens * shape.hidden * itemsize
    everywhere, (_, sent) = tp if layout.sequence else 1, _mlp_width(shape)
    moe = sent / (shape.experts.top * max(shape.experts.capacity, 1)) if shape.experts else 0.0
    keys = shape.latent.rank + shape.latent.rotary if shape.latent \
        else 2 * max(shape.keys / tp, shape.query_width)
    regathered = 2 if layout.sequence and layout.regather else 0
    return RankWork(
        stages, layers, own[0 if layout.schedule in TWO_CHUNKS else 1], products_s, attention_s,
        factor, memory_s, recompute_s, weights_s=products_s,
        floor_s=software.layer_s + (software.stall_s * tp if pp > 1 and tp > 1 else 0.0),
        output_s=product_s(tokens, shape.hidden, shape.vocab / tp) + traffic_s(
            8 * tokens * shape.vocab / tp),
        tp_bytes=activation if tp > 1 else 0.0,
        tp_halves=(4.0, 4 + (4 * share if full else 0) + regathered),
        cp_bytes=tokens * cp * keys * itemsize if cp > 1 else 0.0,
        ep_bytes=activation * sent / moe / everywhere if layout.ep > 1 else 0.0,
        ep_exchanges=(2 * moe, (2 + (2 * share if full else 0)) * moe),
        message_bytes=activation / everywhere, parameters=held, recipe=recipe,
        optimizer_s=traffic_s(OPTIMIZER_TRAFFIC * _sharded(held, layout, layout.stage > 0)),
        memory=_memory(shape, layout, recipe, own, share), model_flops=model_flops,
        hardware_flops=model_flops + steps * shape.layers * repeated)
