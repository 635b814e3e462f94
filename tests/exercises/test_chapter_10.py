"""Chapter 10: what the graders say of right answers, and of likely mistakes."""

from __future__ import annotations

import pytest
import torch

from dtlab.collectives import all_reduce
from tests.exercises.answers import first_hint, judged, lost

VALUES_1 = {"averages", "any sizes", "messages", "order", "real"}
VALUES_2 = {"averages", "any number", "fast network", "slow network", "real"}
VALUES_3 = {"equal", "unequal", "empty", "traffic", "real"}


# ---- buckets -------------------------------------------------------------------------------------


def buckets(comm, grads, least, *, op="avg", divide=1, forward=False, last=True, back=True,
            strictly=False):
    bucket, order = [], list(grads) if forward else list(reversed(grads))
    for number, grad in enumerate(order, 1):
        bucket.append(grad)
        held = sum(map(len, bucket))
        if (held > least if strictly else held >= least) or (last and number == len(grads)):
            vector = torch.cat(bucket)
            all_reduce(comm, vector, op, algorithm="ring")
            for g, piece in zip(bucket, vector.split([len(g) for g in bucket]),
                                strict=True):
                if back:
                    g.copy_(piece / divide)
            bucket = []


def sums(*args):
    buckets(*args, op="sum")


def averages_averages(comm, *args):
    buckets(comm, *args, divide=comm.size)


def loses_the_last(*args):
    buckets(*args, last=False)


def forgets_to_copy_back(*args):
    buckets(*args, back=False)


def fills_from_the_front(*args):
    buckets(*args, forward=True)


def one_by_one(comm, grads, least):
    buckets(comm, grads, 0)


def all_at_once(comm, grads, least):
    buckets(comm, grads, 10**9)


def closes_too_late(*args):
    buckets(*args, strictly=True)


def joins_forward_and_splits_backward(comm, grads, least):
    vector = torch.cat(grads)
    all_reduce(comm, vector, "avg", algorithm="ring")
    for g, piece in zip(reversed(grads), vector.split([len(g) for g in reversed(grads)]),
                        strict=True):
        g.copy_(piece)


def new_tensors_in_the_list(comm, grads, least):
    own = [g.clone() for g in grads]
    buckets(comm, own, least)
    grads[:] = own


WRONG_1 = [
    (new_tensors_in_the_list, VALUES_1, "copy the averages back"),
    (joins_forward_and_splits_backward, VALUES_1, "in the order in which they were joined"),
    (sums, VALUES_1, "summed, but not averaged"),
    (averages_averages, VALUES_1, "once more"),
    (loses_the_last, VALUES_1, "The last bucket is lost"),
    (forgets_to_copy_back, VALUES_1, "copy the averages back"),
    (fills_from_the_front, {"messages", "order"}, "at least `least` elements"),
    (one_by_one, {"messages", "order"}, "Each gradient travels alone"),
    (all_at_once, {"messages", "order"}, "Everything travels at once"),
    (closes_too_late, {"messages", "order"}, "at least `least` elements"),
]


# ---- overlap -------------------------------------------------------------------------------------


def overlapped(comm, layers, *, op="avg", at_once=False, after=False, skip=(), forward=False,
               wait=True):
    begun = []
    for layer in layers if forward else reversed(layers):
        layer.backward()
        if layer in [layers[i] for i in skip] or after:
            continue
        begun.append(comm.begin(all_reduce, layer.grad, op, algorithm="ring"))
        if at_once:
            begun.pop().wait()
    for layer in layers if after else ():
        all_reduce(comm, layer.grad, op, algorithm="ring")
    for work in begun if wait else ():
        work.wait()


def sums_layers(*args):
    overlapped(*args, op="sum")


def waits_for_each(*args):
    overlapped(*args, at_once=True)


def reduces_after_backward(*args):
    overlapped(*args, after=True)


def forgets_the_first_layer(*args):
    overlapped(*args, skip=[0])


def begins_with_the_first_layer(*args):
    overlapped(*args, forward=True)


def never_waits(*args):
    overlapped(*args, wait=False)


def reduces_nothing(comm, layers):
    for layer in reversed(layers):
        layer.backward()


def begins_a_call(comm, layers):
    works = []
    for layer in reversed(layers):
        layer.backward()
        works.append(comm.begin(all_reduce(comm, layer.grad, "avg")))
    for work in works:
        work.wait()


def begins_with_comm(comm, layers):
    works = []
    for layer in reversed(layers):
        layer.backward()
        works.append(comm.begin(all_reduce, comm, layer.grad, "avg"))
    for work in works:
        work.wait()


WRONG_2 = [
    (begins_a_call, VALUES_2, "takes the function and its arguments, but not comm"),
    (begins_with_comm, VALUES_2, "takes the function and its arguments, but not comm"),
    (sums_layers, VALUES_2, "summed, but not averaged"),
    (waits_for_each, {"fast network", "slow network"}, "Nothing overlaps"),
    (reduces_after_backward, {"fast network", "slow network"}, "Nothing overlaps"),
    (forgets_the_first_layer, VALUES_2, "first layer's gradient is not reduced"),
    (begins_with_the_first_layer, VALUES_2, ""),
    (never_waits, VALUES_2, "Call wait()"),
    (reduces_nothing, VALUES_2, "nothing was reduced"),
]


# ---- accumulation --------------------------------------------------------------------------------


def average_of_averages(comm, batches, gradient, length):
    own = (torch.stack([gradient(b) for b in batches]).mean(0) if batches
           else torch.zeros(length, dtype=torch.float64))
    return all_reduce(comm, own.clone(), "avg", algorithm="ring")


def ranks_count_alike(comm, batches, gradient, length):
    own = (gradient(torch.cat(batches)) if batches else torch.zeros(length, dtype=torch.float64))
    return all_reduce(comm, own.clone(), "avg", algorithm="ring")


def accumulated(comm, batches, gradient, length, *, local=False, mean=True, by_ranks=False,
                only_last=False):
    total = torch.zeros(length + 1, dtype=torch.float64)
    for batch in batches:
        total[:-1] = (0 if only_last else total[:-1]) + len(batch) * gradient(batch)
        total[-1] += len(batch)
    mine = total[-1].item()
    all_reduce(comm, total, algorithm="ring")
    count = max(mine, 1) if local else total[-1]
    return total[:-1] / (count if mean else 1) / (comm.size if by_ranks else 1)


def sums_samples(*args):
    return accumulated(*args, mean=False)


def divides_by_its_own(*args):
    return accumulated(*args, local=True)


def divides_by_ranks_too(*args):
    return accumulated(*args, by_ranks=True)


def keeps_the_last_only(*args):
    return accumulated(*args, only_last=True)


def reduces_each(comm, batches, gradient, length):
    most = all_reduce(comm, torch.tensor(len(batches)), "max").item()
    total = torch.zeros(length + 1, dtype=torch.float64)
    for number in range(most):
        part = torch.zeros(length + 1, dtype=torch.float64)
        if number < len(batches):
            part[:-1] = len(batches[number]) * gradient(batches[number])
            part[-1] = len(batches[number])
        total += all_reduce(comm, part, algorithm="ring")
    return total[:-1] / total[-1]


def leaves_without_samples(comm, batches, gradient, length):
    if not batches:
        return torch.zeros(length, dtype=torch.float64)
    return accumulated(comm, batches, gradient, length)


def averages_the_weighted(comm, batches, gradient, length):
    own = sum((len(b) * gradient(b) for b in batches), torch.zeros(length, dtype=torch.float64))
    return all_reduce(comm, own / max(sum(map(len, batches)), 1) / 3, "sum", algorithm="ring")


WRONG_3 = [
    (averages_the_weighted, VALUES_3, "divide one by the other"),
    (average_of_averages, {"unequal", "empty", "traffic", "real"}, "An average of averages"),
    (ranks_count_alike, {"unequal", "empty", "traffic", "real"}, "counts as much as one with many"),
    (sums_samples, VALUES_3, "sum over all samples"),
    (divides_by_its_own, VALUES_3, "samples of this rank only"),
    (divides_by_ranks_too, VALUES_3, "divided by the number of ranks"),
    (keeps_the_last_only, VALUES_3, "Only the last micro-batch"),
    (reduces_each, {"traffic"}, "reduced more than once"),
    (leaves_without_samples, {"empty"}, "take part in the all-reduce"),
]


@pytest.mark.parametrize(("exercise", "answer", "rows", "hint"), [
    *(("bucketed-average", *wrong) for wrong in WRONG_1),
    *(("overlapped-backward", *wrong) for wrong in WRONG_2),
    *(("accumulated-average", *wrong) for wrong in WRONG_3),
], ids=[wrong[0].__name__ for wrong in (*WRONG_1, *WRONG_2, *WRONG_3)])
def test_a_wrong_answer_loses_points_and_is_told_why(exercise, answer, rows, hint):
    report = judged(exercise, answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), first_hint(report)
