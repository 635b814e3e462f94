"""The course's own answers, out of solutions/; a way to judge wrong ones; and those that learners
submit most."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab import Send, collectives
from dtlab.collectives.registry import IMPLEMENTATIONS
from dtlab.grading import Report, check
from dtlab.ps.consistency import SSP
from dtlab.simulator.network import fair_rates
from dtlab.topology import edge_disjoint_cycles

ROOT = Path(__file__).resolve().parents[2]


@cache
def solutions() -> dict[str, Callable[..., Any]]:
    """Every function that the solutions define, by name."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for path in sorted((ROOT / "solutions").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            mark = cell["metadata"].get("nbgrader", {})
            if mark.get("solution") or "setup" in cell["metadata"].get("tags", []):
                exec("".join(cell["source"]), space)
    return {name: value for name, value in space.items() if callable(value)}


def judged(exercise_id: str, answer: Callable[..., Any], seed: int = 0) -> Report:
    """The report on `answer`; its points agree with its rows, whatever it is."""
    report = check(exercise_id, answer, show=False, seed=seed)
    text = report.to_text()
    for row in report.rows:
        assert row.points == (row.max_points if row.passed else 0)
        assert row.name in text
    return report


def lost(report: Report) -> set[str]:
    """The checks that failed."""
    return {row.name for row in report.rows if not row.passed}


def first_hint(report: Report) -> str:
    """The hint that a learner reads first."""
    return report.hints[0] if report.hints else ""


# ---- shortcuts and mistakes that learners submit ------------------------------------------------


class Submitted(NamedTuple):
    """A wrong answer: what it earns, and what the learner must read first."""

    exercise: str
    answer: Callable[..., Any]
    points: float
    hint: str


WRONG: list[Submitted] = []


def submitted(exercise: str, points: float, hint: str) -> Callable[[Callable], Callable]:
    """Add the decorated function to `WRONG`."""
    def add(answer):
        WRONG.append(Submitted(exercise, answer, points, hint))
        return answer
    return add


def neighbours(comm):
    return comm.size, comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


# Somebody else's work


@submitted("ring-all-reduce", 0, "calls dtlab.collectives.all_reduce, which is the library's own")
def the_librarys_ring(comm, x):
    return collectives.all_reduce(comm, x, algorithm="ring")


@submitted("ring-all-reduce", 0, "calls dtlab.collectives.all_reduce, which is the library's own")
def the_librarys_ring_on_a_stream(comm, x):
    return comm.begin(collectives.all_reduce, x, algorithm="ring").wait()


@submitted("halving-doubling", 0, "calls dtlab.collectives.all_reduce, which is the library's own")
def the_registered_algorithm(comm, x):
    return collectives.ALGORITHMS["all_reduce"]["halving_doubling"](comm, x)


@submitted("halving-doubling", 0, "halving_doubling, which is the library's own")
def the_bare_algorithm(comm, x):
    return IMPLEMENTATIONS["all_reduce"]["halving_doubling"](comm, x, "sum")


@submitted("binomial-broadcast", 0, "calls dtlab.collectives.broadcast, which is")
def the_librarys_broadcast(comm, x, root):
    return collectives.broadcast(comm, x, root, algorithm="binomial")


@submitted("pipelined-chain", 0, "calls dtlab.collectives.broadcast, which is")
def the_librarys_chain(comm, x, root, segments):
    return collectives.broadcast(comm, x, root, algorithm="chain", segments=segments)


@submitted("bruck-all-to-all", 0, "calls dtlab.collectives.all_to_all, which is")
def the_librarys_all_to_all(comm, parts):
    return torch.stack(list(collectives.all_to_all(comm, parts, algorithm="bruck")))


@submitted("hierarchical", 0, "algorithm=hierarchical, which does just what the exercise asks")
def the_forbidden_algorithm(comm, x, group):
    return collectives.all_reduce(comm, x, algorithm="hierarchical", group=group)


@submitted("sharded-store", 0, "calls dtlab.collectives.all_reduce, which is")
def all_reduces_each_key(comm, weights, grads, servers, lr):
    for key in sorted(weights):
        grad = grads[key].clone() if grads else torch.zeros_like(weights[key])
        weights[key].sub_(collectives.all_reduce(comm, grad), alpha=lr / (comm.size - servers))


@submitted("finish-times", 0, "calls dtlab.simulator.network.fair_rates, which is")
def the_simulators_rates(sizes, routes, capacity):
    return list(fair_rates([], list(capacity.values())))


@submitted("find-rings", 0, "calls dtlab.topology.cycles.edge_disjoint_cycles, which is")
def the_librarys_rings(ranks, links):
    return edge_disjoint_cycles(None, 2)


@submitted("ssp-rule", 0, "calls dtlab.ps.consistency.SSP")
def the_librarys_rule(request, clock, clocks, staleness):
    return SSP(staleness)


# Values that no message brought


@submitted("ring-all-reduce", 0, "Split is not for sending")
def sums_without_messages(comm, x):
    x.copy_(torch.tensor(comm._agree([float(v.real) for v in x])).sum(0))


@submitted("binomial-broadcast", 0, "Split is not for sending")
def broadcasts_without_messages(comm, x, root):
    x.copy_(torch.tensor(comm._agree(x.tolist())[root]))


@submitted("bruck-all-to-all", 0, "Split is not for sending")
def exchanges_without_messages(comm, parts):
    everyones = comm._agree(parts.tolist())
    return torch.tensor([theirs[comm.rank] for theirs in everyones], dtype=parts.dtype)


@submitted("shift", 0, "Split is not for sending")
def shifts_without_messages(comm, x):
    left = comm._agree(x.tolist())[(comm.rank - 1) % comm.size]
    return torch.tensor(left, dtype=x.dtype).reshape(x.shape)


@submitted("fix-deadlock", 1, "did not come through comm")  # a rank alone sends nothing
def agrees(comm, value):
    return comm._agree(value)[(comm.rank - 1) % comm.size]


# Checks that nothing could fail


@submitted("chain-replication", 0, "waits for an answer that never comes")
def does_nothing(node, message):
    return []


@submitted("chain-replication", 4, "no node sends them again")
def never_sends_again(node, message):
    chain, had = node["chain"], node.setdefault("had", set())
    if message[0] == "read":
        return [("client", ("value", message[1], node["values"].get(message[2], 0)))]
    if message[0] == "chain":
        node["chain"] = message[1]
        return []
    if message[1] not in had:
        had.add(message[1])
        node["values"][message[2]] = node["values"].get(message[2], 0) + message[3]
    place = chain.index(node["me"])
    return [("client", ("done", message[1])) if place + 1 == len(chain)
            else (chain[place + 1], message)]


@submitted("binomial-broadcast", 8, "One message follows the other")
def flat_in_one_exchange(comm, x, root):
    if comm.rank == root:
        comm.exchange(*(Send(x, rank) for rank in range(comm.size) if rank != root))
    else:
        comm.recv(x, root)


@submitted("shift", 5, "x itself: return a new tensor")
def returns_x_itself(comm, x):
    return x if comm.size == 1 else solutions()["shift"](comm, x)


# Mistakes


def a_ring(comm, x, add, *, to_the_right=1, store=None, send_recv=None):
    """The textbook's ring, but for how it adds, stores, and talks to its neighbours."""
    p, me = comm.size, comm.rank
    right, left = (me + to_the_right) % p, (me - to_the_right) % p
    chunks = x.tensor_split(p)
    chunks = list(chunks) if store else chunks
    move = send_recv or comm.sendrecv
    for step in range(p - 1):
        b = (me - step - 1) % p
        inbox = torch.empty_like(chunks[b])
        move(chunks[(me - step) % p], right, inbox, left)
        add(chunks, b, inbox)
    for step in range(p - 1):
        into = chunks[(me - step) % p]
        inbox = torch.empty_like(into) if store == "gather" else into
        move(chunks[(me + 1 - step) % p], right, inbox, left)
        if store == "gather":
            chunks[(me - step) % p] = inbox


def in_place(chunks, b, inbox):
    chunks[b].add_(inbox)


def renamed(chunks, b, inbox):
    chunks[b] = chunks[b] + inbox


@submitted("ring-all-reduce", 0, "gives a tuple")
def adds_to_an_item_of_the_tuple(comm, x):
    chunks = x.tensor_split(comm.size)
    chunks[0] += x[: len(chunks[0])]


@submitted("ring-all-reduce", 0, "the sums are in new tensors")
def adds_into_new_tensors(comm, x):
    a_ring(comm, x, renamed, store="reduce")


@submitted("ring-all-reduce", 0, "what arrived is not in x")
def gathers_into_new_tensors(comm, x):
    a_ring(comm, x, in_place, store="gather")


@submitted("ring-all-reduce", 0, "Every rank sends to its left")
def goes_to_the_left(comm, x):
    a_ring(comm, x, in_place, to_the_right=-1)


@submitted("ring-all-reduce", 0, "This line began it: answers.py:")
def forgets_to_wait_for_sends(comm, x):
    def move(out, right, inbox, left):
        comm.isend(out, right)
        comm.recv(inbox, left)

    a_ring(comm, x, in_place, send_recv=move)


@submitted("ring-all-reduce", 0, "This line began it: answers.py:")
def forgets_to_wait_for_receives(comm, x):
    def move(out, right, inbox, left):
        comm.irecv(inbox, left)
        comm.send(out, right)

    a_ring(comm, x, in_place, send_recv=move)


@submitted("ring-all-reduce", 0, "none has sent yet: receiving first")
def receives_first(comm, x):
    def move(out, right, inbox, left):
        comm.recv(inbox, left)
        comm.send(out, right)

    a_ring(comm, x, in_place, send_recv=move)


@submitted("ring-all-reduce", 0, "Some ranks have returned")
def one_rank_stops_early(comm, x):
    if comm.rank:
        comm.recv(x, comm.rank - 1)


@submitted("ring-all-reduce", 7, "Objects are sent")
def sends_lists(comm, x):
    p, _, right, left = neighbours(comm)
    passing = x.clone()
    for _ in range(p - 1):
        inbox = []
        comm.sendrecv(passing.tolist(), right, inbox, left)
        passing = torch.tensor(inbox[0], dtype=x.dtype)
        x += passing


@submitted("shift", 0, "One end sends a tensor and the other receives an object")
def receives_an_object(comm, x):
    inbox = []
    comm.sendrecv(x, (comm.rank + 1) % comm.size, inbox, (comm.rank - 1) % comm.size)
    return inbox[0]


def halved(comm, x, sent):
    """Halving and doubling among a power of two. `sent`: of (kept, given), which is sent?"""
    (low, high), distance, way = (0, len(x)), 1, []
    while distance < comm.size:
        middle, partner = (low + high + 1) // 2, comm.rank ^ distance
        halves = [slice(low, middle), slice(middle, high)]
        kept, given = reversed(halves) if comm.rank & distance else halves
        inbox = torch.empty_like(x[kept])
        comm.sendrecv(x[(kept, given)[sent]], partner, inbox, partner)
        x[kept] += inbox
        way.append((partner, kept, given))
        low, high, distance = kept.start, kept.stop, 2 * distance
    for partner, kept, given in reversed(way):
        comm.sendrecv(x[kept], partner, x[given], partner)


@submitted("halving-doubling", 5, "powers of two only")
def halves_powers_of_two(comm, x):
    halved(comm, x, 1)


@submitted("halving-doubling", 0, "a rank sends the half that it keeps")
def sends_the_wrong_half(comm, x):
    halved(comm, x, 0)


@submitted("fit-alpha-beta", 0, "slope of a line through the logarithms")
def fits_logarithms(sizes, times):
    beta, alpha = np.polyfit(np.log(sizes), np.log(times), 1)
    return float(np.exp(alpha)), float(beta)
