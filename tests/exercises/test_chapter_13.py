"""Chapter 13: what the graders say of right answers that differ, and of likely mistakes."""

from __future__ import annotations

import pytest
import torch

from dtlab.collectives import all_gather, all_reduce, reduce_scatter
from tests.exercises.answers import first_hint, judged, lost, solutions

ALL = {"weights", "any length", "state", "traffic", "real"}
GRADIENTS = {"gradients", "any size", "peak", "traffic", "real"}


# ---- stage 1 -----------------------------------------------------------------------------------


def rows(comm, x):
    return torch.cat([x, x.new_zeros(-len(x) % comm.size)]).view(comm.size, -1)


def a_step(comm, weights, grad, state, lr, mu, *, op="avg", divide=1, remember=True, send=True,
           reduce=reduce_scatter):
    mean = reduce(comm, rows(comm, grad), op=op) / divide
    v = state.get("v", torch.zeros_like(mean)) * mu + mean
    if remember:
        state["v"] = v
    shard = rows(comm, weights)[comm.rank] - lr * v
    mine = rows(comm, weights).clone()
    mine[comm.rank] = shard
    everyone = all_gather(comm, shard) if send else mine
    weights.copy_(everyone.flatten()[: len(weights)])


def sums(*args):
    a_step(*args, op="sum")


def averages_averages(comm, *args):
    a_step(comm, *args, divide=comm.size)


def does_not_send_back(*args):
    a_step(*args, send=False)


def forgets_the_momentum(*args):
    a_step(*args, remember=False)


def reduces_everything(*args):
    a_step(*args, reduce=lambda comm, x, op: all_reduce(comm, x.clone(), op)[comm.rank].clone())


def never_reduces(*args):
    a_step(*args, reduce=lambda comm, x, op: x[comm.rank].clone())


def loses_the_last_shard(comm, weights, grad, state, lr, mu):
    whole = len(weights) // comm.size * comm.size
    a_step(comm, weights[:whole], grad[:whole], state, lr, mu)


def shards_nothing(comm, weights, grad, state, lr, mu):
    mean = all_reduce(comm, grad, "avg")
    state["v"] = state.get("v", torch.zeros_like(mean)) * mu + mean
    weights.sub_(state["v"], alpha=lr)


def keeps_a_view(comm, weights, grad, state, lr, mu):
    full = torch.zeros(comm.size * -(-len(weights) // comm.size), dtype=weights.dtype)
    v = full.view(comm.size, -1)[comm.rank]
    v += state.get("v", 0 * v) * mu + reduce_scatter(comm, rows(comm, grad), op="avg")
    state["v"] = v
    weights.copy_(all_gather(comm, rows(comm, weights)[comm.rank] - lr * v
                             ).flatten()[: len(weights)])


def wants_an_even_cut(comm, weights, grad, state, lr, mu):
    mean = reduce_scatter(comm, grad.view(comm.size, -1), op="avg")
    v = state.setdefault("v", torch.zeros_like(mean))
    v.mul_(mu).add_(mean)
    shard = weights.view(comm.size, -1)[comm.rank] - lr * v
    weights.copy_(all_gather(comm, shard).flatten())


def sends_nothing(comm, weights, grad, state, lr, mu):
    grads = torch.tensor(comm._agree(grad.tolist()), dtype=grad.dtype)
    mean = rows(comm, grads.mean(0))[comm.rank].clone()
    v = state["v"] = state.get("v", torch.zeros_like(mean)) * mu + mean
    shards = comm._agree((rows(comm, weights)[comm.rank] - lr * v).tolist())
    new = torch.tensor(shards, dtype=weights.dtype)
    weights.copy_(new.flatten()[: len(weights)])


def steps_on_a_copy(comm, weights, *args):
    a_step(comm, weights.clone(), *args)


def keeps_float32(comm, weights, grad, state, lr, mu):
    a_step(comm, weights, grad.float().to(weights.dtype), state, lr, mu)


WRONG_1 = [
    (steps_on_a_copy, ALL, "write the new ones into `weights` itself"),
    (keeps_float32, ALL, "rounded to fewer digits"),
    (sends_nothing, ALL, "did not come through comm"),
    (sums, ALL, "summed, but not averaged"),
    (averages_averages, ALL, "divided by the number of ranks twice"),
    (does_not_send_back, ALL, "the others never got it"),
    (forgets_the_momentum, ALL, "The momentum begins at zero in every step"),
    (never_reduces, ALL, "reduce-scatter the gradients first"),
    (loses_the_last_shard, ALL - {"weights"}, "The last n mod N elements"),
    (wants_an_even_cut, ALL - {"weights"}, "pad the vector with zeros"),
    (shards_nothing, {"state"}, "nothing is sharded"),
    (keeps_a_view, {"state"}, "A view keeps the whole vector alive"),
    (reduces_everything, {"traffic", "real"}, "A reduce-scatter of the gradients"),
]


@pytest.mark.parametrize(("answer", "rows", "hint"), WRONG_1, ids=[w[0].__name__ for w in WRONG_1])
def test_a_wrong_stage_1_loses_points_and_is_told_why(answer, rows, hint):
    report = judged("zero-stage-1", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), first_hint(report)


# ---- stage 3 -----------------------------------------------------------------------------------


def a_pass(comm, layers, shards, x, *, gather=None, op="avg", again=True, divide=1, early=False,
           reduce=reduce_scatter, backward=None, keep=False):
    def whole(i):
        return all_gather(comm, shards[i]).flatten()[: layers[i].numel]

    kept = {i: whole(i) for i in range(len(layers))} if early else {}
    inputs = []
    for i, layer in enumerate(layers):
        inputs.append(x)
        w = kept[i] if i in kept else whole(i)
        x = layer.forward(w, x)
        if keep:
            kept[i] = w
    grad, mine = x, [None] * len(layers)
    for i in reversed(range(len(layers))):
        w = (backward or (lambda i: kept[i] if i in kept and not again else whole(i)))(i)
        grad, grad_w = layers[i].backward(w, inputs.pop(), grad)
        padded = torch.cat([grad_w, grad_w.new_zeros(-len(grad_w) % comm.size)])
        mine[i] = reduce(comm, padded.view(comm.size, -1), op=op) / divide
    return mine


def with_prefetch(comm, layers, shards, x):
    """Right: the next layer is gathered while this one computes."""
    def run(order, use):
        coming = comm.begin(all_gather, shards[order[0]])
        for i, following in zip(order, [*order[1:], None], strict=True):
            w = coming.wait().flatten()[: layers[i].numel]
            coming = None if following is None else comm.begin(all_gather, shards[following])
            use(i, w)
            del w

    inputs, mine, order = [x], [None] * len(layers), list(range(len(layers)))
    run(order, lambda i, w: inputs.append(layers[i].forward(w, inputs[-1])))
    grad = [inputs.pop()]

    def back(i, w):
        grad[0], g = layers[i].backward(w, inputs.pop(), grad[0])
        padded = torch.cat([g, g.new_zeros(-len(g) % comm.size)])
        mine[i] = reduce_scatter(comm, padded.view(comm.size, -1), op="avg")

    run(order[::-1], back)
    return mine


def sums_gradients(*args):
    return a_pass(*args, op="sum")


def divides_twice(comm, *args):
    return a_pass(comm, *args, divide=comm.size)


def keeps_gradients_to_itself(*args):
    return a_pass(*args, reduce=lambda comm, x, op: x[comm.rank])


def uses_its_shard_in_backward(comm, layers, shards, x):
    def mine_only(i):
        w = torch.zeros(comm.size, len(shards[i]), dtype=torch.float64)
        w[comm.rank] = shards[i]
        return w.flatten()[: layers[i].numel]

    return a_pass(comm, layers, shards, x, backward=mine_only)


def never_frees(*args):
    return a_pass(*args, keep=True, again=False)


def gathers_again_but_never_frees(*args):
    return a_pass(*args, keep=True)


def gathers_all_at_once(*args):
    return a_pass(*args, early=True)


def all_reduces(*args):
    return a_pass(*args, reduce=lambda comm, x, op: all_reduce(comm, x.clone(), op)[comm.rank])


def returns_views(comm, layers, shards, x):
    mine = a_pass(comm, layers, shards, x)
    return [torch.cat([g] * comm.size)[: len(g)] for g in mine]


def reversed_list(*args):
    return a_pass(*args)[::-1]


def forgets_the_padding(comm, layers, shards, x):
    def whole(i):
        return all_gather(comm, shards[i]).flatten()

    inputs = []
    for i, layer in enumerate(layers):
        inputs.append(x)
        x = layer.forward(whole(i), x)
    grad, mine = x, [None] * len(layers)
    for i in reversed(range(len(layers))):
        grad, grad_w = layers[i].backward(whole(i), inputs.pop(), grad)
        mine[i] = reduce_scatter(comm, grad_w.view(comm.size, -1), op="avg")
    return mine


def returns_whole_gradients(*args):
    return a_pass(*args, reduce=lambda comm, x, op: all_reduce(comm, x.clone(), op).flatten())


def writes_into_the_shards(comm, layers, shards, x):
    mine = a_pass(comm, layers, shards, x)
    for shard, gradient in zip(shards, mine, strict=True):
        shard.copy_(gradient)
    return mine


def begins_backward_with_ones(comm, layers, shards, x):
    return [torch.ones_like(g) for g in a_pass(comm, layers, shards, x)]


WRONG_3 = [
    (returns_whole_gradients, GRADIENTS, "not the whole gradient"),
    (writes_into_the_shards, GRADIENTS, "The shards are the model"),
    (begins_backward_with_ones, GRADIENTS, "backward begins with that output"),
    (sums_gradients, GRADIENTS, "summed, but not averaged"),
    (divides_twice, GRADIENTS, "divided by the number of ranks twice"),
    (keeps_gradients_to_itself, GRADIENTS, "Reduce-scatter them"),
    (uses_its_shard_in_backward, GRADIENTS, "gather the layer again before its backward"),
    (reversed_list, GRADIENTS, "in the order of the layers"),
    (forgets_the_padding, {"any size", "real"}, "Cut the gathered vector to layer.numel"),
    (never_frees, {"peak"}, "The layers stay gathered from forward to backward"),
    (gathers_again_but_never_frees, {"peak"}, "still held, in a list"),
    (gathers_all_at_once, {"peak"}, "gathered before the first runs"),
    (returns_views, {"peak"}, "a view keeps its whole vector alive"),
    (all_reduces, {"traffic", "real"}, "An all-reduce of the gradients"),
]


@pytest.mark.parametrize(("answer", "rows", "hint"), WRONG_3, ids=[w[0].__name__ for w in WRONG_3])
def test_a_wrong_stage_3_loses_points_and_is_told_why(answer, rows, hint):
    report = judged("zero-stage-3", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), first_hint(report)


@pytest.mark.parametrize("answer", [with_prefetch, solutions()["stage_3_step"]])
def test_a_right_stage_3_earns_all_points_with_or_without_prefetch(answer):
    report = judged("zero-stage-3", answer)
    assert report.points == report.max_points == 10, str(report)
