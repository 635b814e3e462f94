"""Right and wrong answers to the exercises of chapter 07."""

from __future__ import annotations

import zlib

import pytest
import torch

from dtlab.collectives import all_reduce, broadcast, reduce
from dtlab.comm import Recv, Send
from tests.exercises.answers import first_hint, judged, lost, solutions

STORE = {"weights", "any servers", "uneven keys", "any order", "balance", "traffic", "time", "real"}
LEVELS = {"weights", "uneven machines", "any layout", "any dtype", "between machines", "real"}
COSTS = {"balance", "traffic", "time", "real"}


# ---- sharded-store -----------------------------------------------------------------------------


def everything(tensors, server, servers):
    return [tensors[key].tensor_split(servers)[server] for key in sorted(tensors)]


def store(comm, weights, grads, servers, lr, *, part=everything, divide=True, sign=-1, room=None):
    """A right answer, with places to break it. part: what a server holds."""
    workers = range(servers, comm.size)
    if comm.rank in workers:
        comm.exchange(*(Send(g, s) for s in range(servers) for g in part(grads, s, servers)))
        comm.exchange(*(Recv(w, s) for s in range(servers) for w in part(weights, s, servers)))
        return weights
    mine = part(weights, comm.rank, servers)
    pushed = {w: [(room or torch.empty_like)(x) for x in mine] for w in workers}
    comm.exchange(*(Recv(g, w) for w in workers for g in pushed[w]))
    for gradients in pushed.values():
        for w, g in zip(mine, gradients, strict=True):
            w.add_(g, alpha=sign * lr / (len(workers) if divide else 1))
    comm.exchange(*(Send(w, worker) for worker in workers for w in mine))
    return weights


def end_to_end(comm, weights, grads, servers, lr):  # right: all keys as one vector, in objects
    keys = sorted(weights)
    flat = torch.cat([(grads or weights)[key] for key in keys]).tensor_split(servers)
    if comm.rank >= servers:
        first = comm.rank % servers  # whom to begin with: each worker another
        order = [(first + i) % servers for i in range(servers)]
        works = [comm.isend(flat[s], s) for s in order]
        for work in works:
            work.wait()
        answers = [torch.empty_like(piece) for piece in flat]
        works = [comm.irecv(answers[s], s) for s in order]
        for work in works:
            work.wait()
        for key, new in zip(keys, torch.cat(answers).split([len(weights[k]) for k in keys]),
                            strict=True):
            weights[key].copy_(new)
        return weights
    workers = range(servers, comm.size)
    mine = flat[comm.rank].clone()
    inboxes = [torch.empty_like(mine) for _ in workers]
    comm.exchange(*(Recv(inbox, w) for inbox, w in zip(inboxes, workers, strict=True)))
    mine -= lr * torch.stack(inboxes).mean(0)
    comm.exchange(*(Send(mine, w) for w in workers))
    return weights


def hash_places_whole_keys(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr, part=lambda tensors, s, n: [
        tensors[key] for key in sorted(tensors) if zlib.crc32(key.encode()) % n == s])


def round_robin_over_keys(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr,
                 part=lambda tensors, s, n: [tensors[key] for key in sorted(tensors)][s::n])


def server_0_gets_all(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr, part=lambda tensors, s, n: [
        tensors[key] for key in sorted(tensors) if s == 0])


def forgets_the_average(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr, divide=False)


def averages_over_all_ranks(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr * (comm.size - servers) / comm.size)


def uphill(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr, sign=1)


def own_gradient_only(comm, weights, grads, servers, lr):
    for key, g in grads.items():
        weights[key].sub_(g, alpha=lr)
    return weights


def new_dictionary(comm, weights, grads, servers, lr):
    return store(comm, {key: w.clone() for key, w in weights.items()}, grads, servers, lr)


def order_of_the_dictionary(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr, part=lambda tensors, s, n: [
        tensor.tensor_split(n)[s] for tensor in tensors.values()])


def even_pieces_only(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr, part=lambda tensors, s, n: [
        tensors[key].view(n, -1)[s] for key in sorted(tensors)])


def forgets_the_remainder(comm, weights, grads, servers, lr):
    def part(tensors, s, n):
        sizes = {key: len(x) // n for key, x in tensors.items()}
        return [tensors[key][s * sizes[key] : (s + 1) * sizes[key]] for key in sorted(tensors)]

    return store(comm, weights, grads, servers, lr, part=part)


def float32_only(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, lr, room=lambda x: torch.empty(len(x)))


def whole_gradient_to_every_server(comm, weights, grads, servers, lr):
    keys = sorted(weights)
    if comm.rank >= servers:
        comm.exchange(*(Send(grads[key], s) for s in range(servers) for key in keys))
        comm.exchange(*(Recv(piece, s) for s in range(servers)
                        for piece in everything(weights, s, servers)))
        return weights
    workers = range(servers, comm.size)
    pushed = {w: {key: torch.empty_like(weights[key]) for key in keys} for w in workers}
    comm.exchange(*(Recv(pushed[w][key], w) for w in workers for key in keys))
    mine = everything(weights, comm.rank, servers)
    for gradients in pushed.values():
        for w, g in zip(mine, everything(gradients, comm.rank, servers), strict=True):
            w.sub_(g, alpha=lr / len(workers))
    comm.exchange(*(Send(w, worker) for worker in workers for w in mine))
    return weights


def server_0_first(comm, weights, grads, servers, lr):
    workers = range(servers, comm.size)
    if comm.rank >= servers:
        for s in range(servers):
            for g in everything(grads, s, servers):
                comm.send(g, s)
        for s in range(servers):
            for w in everything(weights, s, servers):
                comm.recv(w, s)
        return weights
    mine = everything(weights, comm.rank, servers)
    for worker in workers:
        for w in mine:
            comm.recv(g := torch.empty_like(w), worker)
            w.sub_(g, alpha=lr / len(workers))
    for worker in workers:
        for w in mine:
            comm.send(w, worker)
    return weights


def all_reduce_among_workers(comm, weights, grads, servers, lr):
    team = comm.split(None if comm.rank < servers else 0)
    for key in sorted(grads):
        solutions()["ring_all_reduce"](team, grads[key])
        weights[key].sub_(grads[key], alpha=lr / team.size)
    return weights


def one_server_only(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, 1, lr)


def waits_for_answers_first(comm, weights, grads, servers, lr):
    if comm.rank >= servers:
        for s in range(servers):
            for w in everything(weights, s, servers):
                comm.recv(w, s)
    return store(comm, weights, grads, servers, lr)


def forgets_the_rate(comm, weights, grads, servers, lr):
    return store(comm, weights, grads, servers, 1)


def new_tensors_in_the_dictionary(comm, weights, grads, servers, lr):
    own = {key: w.clone() for key, w in weights.items()}
    store(comm, own, grads, servers, lr)
    weights.update(own)


WRONG_STORES = [
    (new_tensors_in_the_dictionary, STORE, "write the new ones into the tensors"),
    (forgets_the_rate, STORE, "The learning rate is missing"),
    (hash_places_whole_keys, {"balance", "time"}, "no hash can cut a huge key"),
    (round_robin_over_keys, {"balance", "time"}, "no hash can cut a huge key"),
    (server_0_gets_all, {"balance", "time"}, "gets everything"),
    (forgets_the_average, STORE, "divide by the number of workers"),
    (averages_over_all_ranks, STORE, ""),
    (uphill, STORE, "uphill"),
    (own_gradient_only, STORE, "its own gradient"),
    (new_dictionary, STORE, "write the new ones into the tensors"),
    (order_of_the_dictionary, {"any order"}, "sorted(weights)"),
    (even_pieces_only, STORE - {"weights", "any servers"}, "tensor_split"),
    (forgets_the_remainder, STORE - {"weights", "any servers"}, "tensor_split"),
    (float32_only, {"any servers"}, "float32 only"),
    (whole_gradient_to_every_server, {"balance", "traffic", "time"}, "only its own part"),
    (server_0_first, {"time"}, "Ports are idle"),
    (all_reduce_among_workers, STORE - {"any servers", "uneven keys", "any order", "weights"},
     "come from them"),
    (one_server_only, STORE, ""),
    (waits_for_answers_first, STORE, ""),
]


@pytest.mark.parametrize(("answer", "rows", "hint"), WRONG_STORES,
                         ids=[w[0].__name__ for w in WRONG_STORES])
def test_a_wrong_store_loses_the_right_points_and_is_told_why(answer, rows, hint):
    report = judged("sharded-store", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), first_hint(report)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("answer", [store, end_to_end])
def test_right_stores_get_all_points(answer, seed):
    report = judged("sharded-store", answer, seed)
    assert report.points == report.max_points == 10, str(report)
    assert report.hints == []


def test_a_store_fitted_to_the_shown_sizes_fails_the_hidden_test():
    shown = {*range(13), 20, 24, 60, 64, 100, 120, 180, 240, 360, 1_000, 40_000}

    def fitted(comm, weights, grads, servers, lr):
        if not {len(w) for w in weights.values()} <= shown:
            raise ValueError("never seen")
        return store(comm, weights, grads, servers, lr)

    assert judged("sharded-store", fitted).points == 10
    assert judged("sharded-store", fitted, seed=2).points < 8


# ---- two-level-step ----------------------------------------------------------------------------


def levels(comm, machines, weights, grad, lr, *, mean_inside=False, divide="workers", hand_out=True,
           answer_all=False):
    """A right answer, with places to break it."""
    count = {"workers": sum(map(len, machines)), "machines": len(machines), "nobody": 1}[divide]
    inbox = torch.empty_like(weights)

    def add(total, senders):
        for sender in senders:
            comm.recv(inbox, sender)
            total += inbox

    if comm.rank == 0:
        add(total := torch.zeros_like(weights), [machine[0] for machine in machines])
        weights.sub_(total, alpha=lr / count)
        for machine in machines:
            for worker in machine if answer_all else machine[:1]:
                comm.send(weights, worker)
        return weights
    first, *others = next(machine for machine in machines if comm.rank in machine)
    if comm.rank != first:
        comm.send(grad, first)
        if hand_out:
            comm.recv(weights, 0 if answer_all else first)
        return weights
    add(total := grad.clone(), others)
    comm.send(total / (1 + len(others)) if mean_inside else total, 0)
    comm.recv(weights, 0)
    for other in others if hand_out and not answer_all else []:
        comm.send(weights, other)
    return weights


def by_collectives(comm, machines, weights, grad, lr):  # right: not one message of its own
    number = next((i for i, machine in enumerate(machines) if comm.rank in machine), None)
    inside = comm.split(number, 0 if number is None else machines[number].index(comm.rank))
    x = torch.zeros_like(weights) if grad is None else grad.clone()
    if inside:
        reduce(inside, x, algorithm="flat")
    top = comm.split(0 if inside is None or inside.rank == 0 else None)
    if top:
        reduce(top, x, algorithm="flat")
        if grad is None:
            weights.sub_(x, alpha=lr / sum(map(len, machines)))
        broadcast(top, weights, algorithm="flat")
    if inside:
        broadcast(inside, weights, algorithm="flat")
    return weights


def one_level(comm, machines, weights, grad, lr):
    return levels(comm, [[worker] for machine in machines for worker in machine], weights, grad, lr)


def server_answers_all(comm, machines, weights, grad, lr):
    return levels(comm, machines, weights, grad, lr, answer_all=True)


def mean_of_means(comm, machines, weights, grad, lr):
    return levels(comm, machines, weights, grad, lr, mean_inside=True, divide="machines")


def divides_by_machines(comm, machines, weights, grad, lr):
    return levels(comm, machines, weights, grad, lr, divide="machines")


def divides_by_nobody(comm, machines, weights, grad, lr):
    return levels(comm, machines, weights, grad, lr, divide="nobody")


def does_not_hand_out(comm, machines, weights, grad, lr):
    return levels(comm, machines, weights, grad, lr, hand_out=False)


def machines_alone(comm, machines, weights, grad, lr):
    mine = next((machine for machine in machines if comm.rank in machine), [0])
    team = comm.split(mine[0], mine.index(comm.rank))
    if grad is not None:
        weights.sub_(all_reduce(team, grad, op="avg"), alpha=lr)


def counts_ranks(comm, machines, weights, grad, lr):
    ranks, rebuilt = iter(range(1, comm.size)), []
    for machine in machines:
        rebuilt.append([next(ranks) for _ in machine])
    return levels(comm, rebuilt, weights, grad, lr)


def takes_machines_to_be_alike(comm, machines, weights, grad, lr):
    k = len(machines[0])
    alike = [machine[:k] for machine in machines]
    return levels(comm, alike, weights, grad, lr)


def float32_room(comm, machines, weights, grad, lr):
    x = weights.float()
    levels(comm, machines, x, None if grad is None else grad.float(), lr)
    if weights.dtype == torch.float32:
        weights.copy_(x)


def ring_of_all_workers(comm, machines, weights, grad, lr):
    team = comm.split(None if comm.rank == 0 else 0)
    if grad is not None:
        weights.sub_(all_reduce(team, grad, op="avg", algorithm="ring"), alpha=lr)


def around_the_aggregators(comm, machines, weights, grad, lr):
    """The sum is right, but comes from the first machine's aggregator."""
    levels(comm, machines, weights, grad, lr)
    first = [machine[0] for machine in machines]
    if comm.rank == first[0]:
        for other in first[1:]:
            comm.send(weights, other)
    elif comm.rank in first:
        comm.recv(weights, first[0])


def divides_by_every_rank(comm, machines, weights, grad, lr):
    return levels(comm, machines, weights, grad, lr * (comm.size - 1) / comm.size)


WRONG_LEVELS = [
    (divides_by_every_rank, LEVELS, "servers have no gradient"),
    (one_level, {"between machines"}, "Every worker's gradient crosses the network"),
    (server_answers_all, {"between machines"}, "the server answers every worker"),
    (around_the_aggregators, {"between machines"}, "past the server"),
    (ring_of_all_workers, {"between machines"}, "Through the server"),
    (mean_of_means, {"uneven machines", "between machines", "real"}, "mean of the machines' means"),
    (divides_by_machines, LEVELS, "divided by the number of machines"),
    (divides_by_nobody, LEVELS, "divide by the number of workers"),
    (does_not_hand_out, LEVELS, "Only the aggregators"),
    (machines_alone, LEVELS, "The machines were never averaged"),
    (counts_ranks, {"between machines"}, "past the server"),
    (takes_machines_to_be_alike, {"uneven machines", "real"}, "equally many workers"),
    (float32_room, {"any dtype"}, "float32 only"),
]


@pytest.mark.parametrize(("answer", "rows", "hint"), WRONG_LEVELS,
                         ids=[w[0].__name__ for w in WRONG_LEVELS])
def test_wrong_levels_lose_the_right_points_and_are_told_why(answer, rows, hint):
    report = judged("two-level-step", answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), first_hint(report)
    assert "works in the simulator" not in " ".join(report.hints)  # nor does it there


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("answer", [levels, by_collectives])
def test_right_levels_get_all_points(answer, seed):
    report = judged("two-level-step", answer, seed)
    assert report.points == report.max_points == 10, str(report)
    assert report.hints == []


def test_bytes_between_machines_stand_in_the_table_against_their_bound():
    rows = {row.name: row for row in judged("two-level-step", one_level).rows}
    bound = int(1.02 * 2 * 2 * 20_000)  # two machines, 5000 × float32, there and back
    assert rows["between machines"].nbytes == f"{2 * 8 * 20_000:,} / {bound:,}"
