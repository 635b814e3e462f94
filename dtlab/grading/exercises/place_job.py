"""Chapter 02: which hosts should a job get, and in which order should its ring visit them?"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from dtlab.collectives import all_reduce
from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import generator, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.simulator import simulate
from dtlab.topology import link_bytes, racks

VECTOR_BYTES = 64_000_000  # of the job's ring all-reduce


class Hall(NamedTuple):
    """A cluster, and what is free in it, in the order in which its scheduler offers it: one host of
    each rack in turn."""

    racks: int
    hosts: int  # in each
    numbers: tuple[int, ...]  # of the hosts, rack by rack
    free: tuple[int, ...]

    def rack_of(self, host: int) -> int:
        """The rack in which it stands."""
        return self.numbers.index(host) // self.hosts


class Cost(NamedTuple):
    """The cost of one all-reduce of the job."""

    elapsed_s: float
    spine_bytes: int


def hall(racks: int, hosts: int, taken: tuple[int, ...], seed: int) -> Hall:
    """`taken[r]` hosts of rack r are in use. Hosts have their numbers by chance."""
    numbers = generator(seed, racks, hosts, taken).permutation(racks * hosts).tolist()
    offered = [numbers[rack * hosts + slot] for slot in range(hosts) for rack in range(racks)
               if slot < hosts - taken[rack]]
    return Hall(racks, hosts, tuple(numbers), tuple(offered))


@cache
def cost_of(where: Hall, placed: tuple[int, ...]) -> Cost:
    """Simulate the job on the hosts `placed`, its ring going round in this order. A rack's uplink
    is as fast as one host."""
    order = {where.numbers.index(host): position for position, host in enumerate(placed)}

    def job(comm: Comm) -> None:
        ring = comm.split(0 if comm.rank in order else None, key=order.get(comm.rank, 0))
        if ring is not None:
            all_reduce(ring, torch.empty(VECTOR_BYTES // 4, device="meta"), algorithm="ring")

    cluster = racks(where.racks, where.hosts, oversubscription=where.hosts)
    result = simulate(job, network=cluster, echo=False)
    crossed = link_bytes(cluster, result.trace)
    return Cost(result.elapsed_s, sum(n for (_, to), n in crossed.items() if to == "spine"))


def compact(where: Hall, ranks: int) -> tuple[int, ...]:
    """Return hosts in as few racks as will do, each visited once: those with most room first."""
    room: dict[int, list[int]] = {}
    for host in where.free:
        room.setdefault(where.rack_of(host), []).append(host)
    fullest = sorted(room.values(), key=len, reverse=True)
    return tuple([host for hosts in fullest for host in hosts][:ranks])


def _case(where: Hall, ranks: int) -> Case:
    every = range(len(where.numbers))
    busy = len(every) - len(where.free)
    text = f"{ranks} ranks, {where.racks} racks of {where.hosts}" + f", {busy} taken" * bool(busy)
    return Case(text, [(list(map(where.rack_of, every)), list(where.free), ranks)], comm=False,
                facts={"hall": where, "ranks": ranks})


# ---- judging -----------------------------------------------------------------------------------


def _valid(case: Case, outcome: Outcome) -> Verdict:
    value, where, ranks = outcome.values[0], case.facts["hall"], case.facts["ranks"]
    wanted = f"{ranks} different free hosts"
    if taken := [host for host in value if host not in where.free]:
        return Verdict(False, f"host {taken[0]}", wanted)
    return Verdict(len(value) == ranks == len(set(value)),
                   f"{len(value)} hosts, {len(set(value))} different", wanted)


def _time(case: Case, outcome: Outcome) -> Verdict:
    where = case.facts["hall"]
    offered = cost_of(where, where.free[: case.facts["ranks"]]).elapsed_s
    mine = cost_of(where, tuple(outcome.values[0])).elapsed_s
    return Verdict(mine <= offered / 2, f"{mine * 1e3:.4g} ms",
                   f"≤ {offered / 2 * 1e3:.4g} ms: half of what the list's order takes",
                   shows=_lies(case, outcome))


def _spine(case: Case, outcome: Outcome) -> Verdict:
    where, ranks = case.facts["hall"], case.facts["ranks"]
    least = cost_of(where, compact(where, ranks)).spine_bytes
    mine = cost_of(where, tuple(outcome.values[0])).spine_bytes
    # Pieces of a vector differ by an element.
    return Verdict(mine <= 1.01 * least, f"{mine:,} B over the spine", f"{least:,} B",
                   f"{mine:,} / {least:,}", shows=_lies(case, outcome))


def _lies(case: Case, outcome: Outcome) -> str:
    """Does it visit racks again and again, or too many of them?"""
    where, ranks = case.facts["hall"], case.facts["ranks"]
    visited = list(map(where.rack_of, outcome.values[0]))
    hops = sum(a != b for a, b in zip(visited, visited[1:] + visited[:1], strict=True))
    few = set(map(where.rack_of, compact(where, ranks)))
    comes_back, too_many = hops > len(set(visited)), len(set(visited)) > len(few)
    return f"comes back to a rack: {comes_back}, too many racks: {too_many}"


def _build(seed: int) -> list[Check]:
    def turned(*taken: int) -> tuple[int, ...]:
        first = varied(seed, len(taken), taken)
        return (*taken[first:], *taken[:first])

    empty = [_case(hall(4, 4, turned(0, 0, 0, 0), seed), 16 - varied(seed, 2, 4)),
             _case(hall(3, 6, turned(0, 0, 0), seed), 12 - varied(seed, 4, 3))]
    busy = [_case(hall(4, 6, turned(4, 1, 3, 2), seed), 10 + varied(seed, 3, 6)),
            _case(hall(5, 4, turned(2, 0, 3, 1, 0), seed), 11 + varied(seed, 3, 5))]
    small = [_case(hall(4, 6, turned(*taken), seed), ranks)
             for taken, ranks in (((3, 2, 0, 4), 6), ((4, 3, 2, 1), 5))]
    return [
        Check("a placement", 1, "free hosts, each once", [*empty, *busy, *small], _valid),
        Check("time, empty racks", 2, "all hosts are free", empty, _time, _valid),
        Check("time, busy racks", 2, "some hosts are taken", busy, _time, _valid),
        Check("bytes over the spine", 2, "4 placements", [*empty, *busy], _spine, _valid),
        Check("small jobs", 1, "a rack has room for all", small, _spine, _valid),
    ]


EXERCISE = Exercise("place-job", "Place a job", "place", _build)
