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


class Cluster(NamedTuple):
    """A cluster and its free hosts, in the order in which a scheduler lists them: one of each rack
    in turn."""

    racks: int
    hosts: int  # in each rack
    numbers: tuple[int, ...]  # of the hosts, rack by rack
    free: tuple[int, ...]  # numbers of hosts

    def rack_of(self, host: int) -> int:
        """The rack of this host."""
        return self.numbers.index(host) // self.hosts


class Cost(NamedTuple):
    """The cost of one all-reduce of the job."""

    elapsed_s: float
    spine_bytes: int


def draw_cluster(racks: int, hosts: int, taken: tuple[int, ...], seed: int) -> Cluster:
    """Draw a cluster with host numbers in random order. `taken[r]` hosts of rack r are in use."""
    numbers = generator(seed, racks, hosts, taken).permutation(racks * hosts).tolist()
    offered = [numbers[rack * hosts + slot] for slot in range(hosts) for rack in range(racks)
               if slot < hosts - taken[rack]]
    return Cluster(racks, hosts, tuple(numbers), tuple(offered))


@cache
def cost_of(where: Cluster, placed: tuple[int, ...]) -> Cost:
    """Simulate the job on the hosts `placed`, whose order is the ring's. A rack's uplink is as fast
    as one host."""
    order = {where.numbers.index(host): position for position, host in enumerate(placed)}

    def job(comm: Comm) -> None:
        ring = comm.split(0 if comm.rank in order else None, key=order.get(comm.rank, 0))
        if ring is not None:
            all_reduce(ring, torch.empty(VECTOR_BYTES // 4, device="meta"), algorithm="ring")

    cluster = racks(where.racks, where.hosts, oversubscription=where.hosts)
    result = simulate(job, network=cluster, echo=False)
    crossed = link_bytes(cluster, result.trace)
    return Cost(result.elapsed_s, sum(n for (_, to), n in crossed.items() if to == "spine"))


def compact(where: Cluster, ranks: int) -> tuple[int, ...]:
    """Place a job in as few racks as possible, those with most free hosts first, rack by rack."""
    free: dict[int, list[int]] = {}
    for host in where.free:
        free.setdefault(where.rack_of(host), []).append(host)
    largest_first = sorted(free.values(), key=len, reverse=True)
    return tuple([host for hosts in largest_first for host in hosts][:ranks])


def _case(where: Cluster, ranks: int) -> Case:
    every = range(len(where.numbers))
    busy = len(every) - len(where.free)
    text = f"{ranks} ranks, {where.racks} racks of {where.hosts}" + f", {busy} taken" * bool(busy)
    return Case(text, [(list(map(where.rack_of, every)), list(where.free), ranks)], comm=False,
                facts={"cluster": where, "ranks": ranks})


def _valid(case: Case, outcome: Outcome) -> Verdict:
    value, where, ranks = outcome.values[0], case.facts["cluster"], case.facts["ranks"]
    wanted = f"{ranks} different free hosts"
    if taken := [host for host in value if host not in where.free]:
        return Verdict(False, f"host {taken[0]}", wanted, evidence=value)
    return Verdict(len(value) == ranks == len(set(value)),
                   f"{len(value)} hosts, {len(set(value))} different", wanted, evidence=value)


def _time(case: Case, outcome: Outcome) -> Verdict:
    where = case.facts["cluster"]
    offered = cost_of(where, where.free[: case.facts["ranks"]]).elapsed_s
    mine = cost_of(where, tuple(outcome.values[0])).elapsed_s
    return Verdict(mine <= offered / 2, f"{mine * 1e3:.4g} ms",
                   f"≤ {offered / 2 * 1e3:.4g} ms: half of what the list's order takes",
                   evidence=_faults(case, outcome))


def _spine(case: Case, outcome: Outcome) -> Verdict:
    where, ranks = case.facts["cluster"], case.facts["ranks"]
    least = cost_of(where, compact(where, ranks)).spine_bytes
    mine = cost_of(where, tuple(outcome.values[0])).spine_bytes
    # Pieces of a vector differ by an element.
    return Verdict(mine <= 1.01 * least, f"{mine:,} B over the spine", f"{least:,} B",
                   f"{mine:,} / {least:,}", evidence=_faults(case, outcome))


def _faults(case: Case, outcome: Outcome) -> str:
    """Tell whether the ring comes back to a rack, and whether it uses too many racks."""
    where, ranks = case.facts["cluster"], case.facts["ranks"]
    visited = list(map(where.rack_of, outcome.values[0]))
    hops = sum(a != b for a, b in zip(visited, visited[1:] + visited[:1], strict=True))
    fewest = set(map(where.rack_of, compact(where, ranks)))
    comes_back, too_many = hops > len(set(visited)), len(set(visited)) > len(fewest)
    return f"comes back to a rack: {comes_back}, too many racks: {too_many}"


def _build(seed: int) -> list[Check]:
    def turned(*taken: int) -> tuple[int, ...]:
        first = varied(seed, len(taken), taken)
        return (*taken[first:], *taken[:first])

    empty = [_case(draw_cluster(4, 4, turned(0, 0, 0, 0), seed), 16 - varied(seed, 2, 4)),
             _case(draw_cluster(3, 6, turned(0, 0, 0), seed), 12 - varied(seed, 4, 3))]
    busy = [_case(draw_cluster(4, 6, turned(4, 1, 3, 2), seed), 10 + varied(seed, 3, 6)),
            _case(draw_cluster(5, 4, turned(2, 0, 3, 1, 0), seed), 11 + varied(seed, 3, 5))]
    small = [_case(draw_cluster(4, 6, turned(*taken), seed), ranks)
             for taken, ranks in (((3, 2, 0, 4), 6), ((4, 3, 2, 1), 5))]
    return [
        Check("a placement", 1, "free hosts, each once", [*empty, *busy, *small], _valid),
        Check("time, empty racks", 2, "all hosts are free", empty, _time, _valid),
        Check("time, busy racks", 2, "some hosts are taken", busy, _time, _valid),
        Check("bytes over the spine", 2, "4 placements", [*empty, *busy], _spine, _valid),
        Check("small jobs", 1, "a rack has room for all", small, _spine, _valid),
    ]


EXERCISE = Exercise("place-job", "Place a job", "place", _build)
