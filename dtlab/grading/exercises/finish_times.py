"""Chapter 02: when does each of the flows that share the links of a cluster end?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise, permutations

from dtlab.grading.case import Case, Wanted, counted
from dtlab.grading.draws import generator, scale, varied
from dtlab.grading.exercise import Check, Exercise
from dtlab.grading.standard import values
from dtlab.simulator import simulate
from dtlab.topology import named, send_together

TOLERANCE = 0.01
MB = 1_000_000
Pairs = Mapping[tuple[int, int], int]  # (src, dst) → bytes
CLUSTERS = (  # of the unseen ones; without latency: only bandwidth counts here
    "racks:3x4,latency_s=0", "fat_tree:4,latency_s=0", "torus:3x4,latency_s=0",
    "pcie_server:8x2,latency_s=0", "v100_nvlink:latency_s=0",
    "racks:2x2,gpus=3,oversubscription=2,latency_s=0",
)


_cluster = cache(named)


def _case(name: str, pairs: Pairs, text: str = "") -> Case:
    """`pairs` on the cluster of that name. The learner sees sizes, routes and capacities only."""
    cluster = _cluster(name)
    routes = [[f"{a} → {b}" for a, b in pairwise(cluster.path(*pair))] for pair in pairs]
    capacity = {f"{a} → {b}": cluster.capacity_Bps[link]
                for link in range(len(cluster.capacity_Bps)) for a, b in [cluster.ends(link)]}
    sizes = list(pairs.values())
    short = name.replace(",latency_s=0", "").replace(":latency_s=0", "")
    trace = simulate(send_together, dict(pairs), network=cluster).trace
    ends_s = {(m.src, m.dst): m.end_s for m in trace.transfers}
    wanted = Wanted([[ends_s[pair] for pair in pairs]], what="the simulator's, ± 1 %",
                    rtol=TOLERANCE)
    return Case(text or f"{short}, {counted(len(pairs), 'flow')}", [(sizes, routes, capacity)],
                comm=False, wanted=wanted)


def _random_case(name: str, count: int, seed: int) -> Case:
    random = generator(seed, count, name)
    every = list(permutations(range(_cluster(name).ranks), 2))
    chosen = random.choice(len(every), count, replace=False)
    return _case(name, {every[i]: int(random.integers(1, 60)) * MB for i in chosen})


def _build(seed: int) -> list[Check]:
    a, b = int(3 * MB * scale(seed, "a")), int(7 * MB * scale(seed, "b", most=1.4))
    two = "racks:2x2,oversubscription=2,latency_s=0"
    line = "racks:3x2,oversubscription=2,latency_s=0"
    four = "racks:2x4,latency_s=0"
    lonely = [_case(two, {(0, 1): a}),
              _case("racks:2x1,oversubscription=4,latency_s=0", {(0, 1): b}),
              _case(two, {(0, 1): a, (3, 2): b})]
    shared = [_case(two, {(0, 2): b, (1, 3): b}),
              _case(four, {(rank, rank + 4): a for rank in range(4)})]
    uneven = [_case(two, {(0, 2): a, (1, 3): b}),
              _case(four, {(rank, rank + 4): a + rank * b for rank in range(4)})]
    # Three into host 2, one of them from the other rack, where it shares the way out with a fourth.
    held = [_case("racks:2x4,oversubscription=16,latency_s=0",
                  {(4, 0): b, (5, 1): b, (2, 0): 20 * b}),
            _case(line, {(0, 2): a, (1, 3): b, (4, 2): 2 * b, (4, 5): 10 * a})]
    unseen = [_random_case(name, 10 + 2 * number + varied(seed, 3, name), seed)
              for number, name in enumerate(CLUSTERS)]
    edges = [_case(two, {}, "no flows"), _case(two, {(0, 2): 0, (1, 3): b}, "a flow of 0 B")]
    return [
        Check("alone", 1, "nothing shared", lonely, values),
        Check("equal flows", 1, "one uplink, shared", shared, values),
        Check("one ends", 1, "unequal flows, one uplink", uneven, values),
        Check("held back elsewhere", 2, "unequal shares", held, values),
        Check("unseen clusters", 2, f"{len(unseen)} clusters, random flows", unseen, values),
        Check("edges", 1, "no flows; 0 bytes", edges, values),
    ]


EXERCISE = Exercise("finish-times", "Who ends when", "finish_times", _build)
