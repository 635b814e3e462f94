"""Chapter 02: when does each of the flows that share the links of a cluster end?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.simulator import simulate
from dtlab.topology import Topology, named, send_together

TOLERANCE = 0.01
MB = 1_000_000
Pairs = Mapping[tuple[int, int], int]  # (src, dst) → bytes
Rates = Callable[[list[list[str]], Mapping[str, float]], list[float]]
CLUSTERS = (  # of the unseen ones; without latency: only bandwidth counts here
    "racks:3x4,latency_s=0", "fat_tree:4,latency_s=0", "torus:3x4,latency_s=0",
    "pcie_server:8x2,latency_s=0", "v100_nvlink:latency_s=0",
    "racks:2x2,gpus=3,oversubscription=2,latency_s=0",
)


@cache
def _cluster(name: str) -> Topology:
    return named(name)


def _case(name: str, pairs: Pairs, text: str = "") -> Case:
    """`pairs` on the cluster of that name. The learner sees sizes, routes and capacities only."""
    cluster = _cluster(name)
    routes = [[f"{a} → {b}" for a, b in pairwise(cluster.path(*pair))] for pair in pairs]
    capacity = {f"{a} → {b}": cluster.capacity_Bps[link]
                for link in range(len(cluster.capacity_Bps)) for a, b in [cluster.ends(link)]}
    sizes = list(pairs.values())
    short = name.replace(",latency_s=0", "").replace(":latency_s=0", "")
    return Case(text or f"{short}, {counted(len(pairs), 'flow')}", [(sizes, routes, capacity)],
                comm=False, facts={"cluster": name, "pairs": pairs})


def _random_case(name: str, count: int, seed: int) -> Case:
    random = np.random.default_rng([seed, count, len(name)])
    ranks = _cluster(name).ranks
    pairs: dict[tuple[int, int], int] = {}
    while len(pairs) < count:
        src, dst = (int(rank) for rank in random.integers(ranks, size=2))
        if src != dst:
            pairs[src, dst] = int(random.integers(1, 60)) * MB
    return _case(name, pairs)


def _truth(case: Case) -> list[float]:
    """What the simulator says."""
    pairs = case.facts["pairs"]
    trace = simulate(send_together, pairs, network=_cluster(case.facts["cluster"])).trace
    ends_s = {(m.src, m.dst): m.end_s for m in trace.transfers}
    return [ends_s[pair] for pair in pairs]


def _judge(case: Case, outcome: Outcome) -> Verdict:
    wanted, value = _truth(case), outcome.values[0]
    shown = _shown(wanted)
    if not isinstance(value, (list, tuple)) or not all(map(_is_number, value)):
        return Verdict(False, f"returned {value!r}"[:80], shown,
                       clue="Return a list of numbers, the seconds at which each flow ends.")
    if len(value) != len(wanted):
        return Verdict(False, f"{len(value)} times", f"{len(wanted)} times",
                       clue="Return one time for each flow, in the order of `sizes`.")
    came = [float(v) for v in value]
    if _near(came, wanted):
        return Verdict(True, shown or "nothing", "the simulator's, ± 1 %")
    return Verdict(False, _shown(came), shown, clue=_clue(came, wanted, case))


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return isinstance(value, float) or abs(value) < 1e300  # larger ones are no floats


def _near(came: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * b + 1e-12 for a, b in zip(came, wanted, strict=True))


def _shown(times_s: Sequence[float]) -> str:
    first = ", ".join(f"{t * 1e3:.4g}" for t in times_s[:4])
    return f"{first}{', …' if len(times_s) > 4 else ''} ms" if times_s else "no times"


# ---- which mistake makes just these times? -----------------------------------------------------


def _alone(routes: list[list[str]], capacity: Mapping[str, float]) -> list[float]:
    """Each flow has its narrowest link to itself."""
    return [min(capacity[link] for link in route) for route in routes]


def _equal_shares(routes: list[list[str]], capacity: Mapping[str, float]) -> list[float]:
    """Each link is cut into equal parts; a flow gets the smallest of its parts."""
    crowd = {link: sum(link in route for route in routes) for link in capacity}
    return [min(capacity[link] / crowd[link] for link in route) for route in routes]


def _simulated(rates: Rates, sizes: list[int], routes: list[list[str]],
            capacity: Mapping[str, float]) -> list[float]:
    """When flows end, whose rates are worked out anew at each end."""
    left = {flow: float(size) for flow, size in enumerate(sizes)}
    ends_s, now_s = [0.0] * len(sizes), 0.0
    while left:
        order = list(left)
        speeds = dict(zip(order, rates([routes[flow] for flow in order], capacity), strict=True))
        step_s = min(left[flow] / speeds[flow] for flow in order)
        now_s += step_s
        for flow in order:
            left[flow] -= step_s * speeds[flow]
            if left[flow] <= 1e-6:
                ends_s[flow] = now_s
                del left[flow]
    return ends_s


def _last_stretches(ends_s: list[float]) -> list[float]:
    """From the end before each of these ends to it."""
    return [end - max((e for e in ends_s if e < end * (1 - 1e-6)), default=0.0) for end in ends_s]


def _clue(came: list[float], wanted: list[float], case: Case) -> str:
    if not came:
        return ""
    sizes, routes, capacity = case.args[0]
    if any(not math.isfinite(t) for t in came):
        return "A time is infinite or not a number: is a flow without bytes divided by a rate of 0?"
    no_bits = "Capacities are bytes per second, sizes are bytes: no factor of 8."
    for factor, text in ((8.0, no_bits), (1 / 8, no_bits),
                         (1e3, "The unit is seconds; yours look like milliseconds."),
                         (1e6, "The unit is seconds; yours look like microseconds.")):
        if _near([t / factor for t in came], wanted):
            return text
    if _near(came, [n / rate for n, rate in zip(sizes, _alone(routes, capacity), strict=True)]):
        return ("Each flow is timed as if it were alone on its narrowest link; those who share a "
                "link share its capacity.")
    if all(any(_near([t], [n / capacity[link]]) for link in route)
           for t, n, route in zip(came, sizes, routes, strict=True)):
        return ("Each flow is timed on a single link of its route, and not on the narrowest: look "
                "at all links of a route.")
    if _near(came, _last_stretches(wanted)):
        return ("These are the lengths of the last stretches, each from one end to the next, not "
                "the times at which flows end: add the stretches up, now += dt.")
    if _near(came, [sum(n / capacity[link] for link in route)
                    for n, route in zip(sizes, routes, strict=True)]):
        return ("The times on the links of a route don't add up: bytes cross all of them at once, "
                "and the narrowest sets the pace.")
    if _near(came, _simulated(_equal_shares, sizes, routes, capacity)):
        return ("Not every flow can use its equal share of a link: one that is held back elsewhere "
                "leaves the rest to the others. Fill up: fix the rates on the tightest link, take "
                "them off all other links, repeat.")
    if came and max(came) < max(wanted):
        return ("Too fast: is a link carrying more than it can? Fix the tightest link's flows "
                "first, and take what they use from every link that they cross.")
    return ("Too slow: when a flow ends, or is held back elsewhere, the others share what it "
            "leaves. Go from end to end: work out all rates, go on to the next end, take off what "
            "has moved, work out all rates again.")


def _build(seed: int) -> list[Check]:
    a, b = 3 + seed % 4, 7 + seed % 3  # MB
    two = "racks:2x2,oversubscription=2,latency_s=0"
    line = "racks:3x2,oversubscription=2,latency_s=0"
    four = "racks:2x4,latency_s=0"
    lonely = [_case(two, {(0, 1): a * MB}),
              _case("racks:2x1,oversubscription=4,latency_s=0", {(0, 1): b * MB}),
              _case(two, {(0, 1): a * MB, (3, 2): b * MB})]
    shared = [_case(two, {(0, 2): b * MB, (1, 3): b * MB}),
              _case(four, {(rank, rank + 4): a * MB for rank in range(4)})]
    uneven = [_case(two, {(0, 2): a * MB, (1, 3): b * MB}),
              _case(four, {(rank, rank + 4): (a + rank * b) * MB for rank in range(4)})]
    # Three into host 2, one of them from the other rack, where it shares the way out with a fourth.
    held = [_case("racks:2x4,oversubscription=16,latency_s=0",
                  {(4, 0): b * MB, (5, 1): b * MB, (2, 0): 20 * b * MB}),
            _case(line, {(0, 2): a * MB, (1, 3): b * MB, (4, 2): 2 * b * MB, (4, 5): 30 * MB})]
    unseen = [_random_case(name, 10 + 2 * number + seed % 3, seed)
              for number, name in enumerate(CLUSTERS)]
    edges = [_case(two, {}, "no flows"), _case(two, {(0, 2): 0, (1, 3): b * MB}, "a flow of 0 B")]
    return [
        Check("alone", 1, "nothing shared", lonely, _judge,
              "A flow that shares nothing takes its bytes over its narrowest link's capacity."),
        Check("equal flows", 1, "one uplink, shared", shared, _judge),
        Check("one ends", 1, "unequal flows, one uplink", uneven, _judge),
        Check("held back elsewhere", 2, "unequal shares", held, _judge),
        Check("unseen clusters", 2, f"{len(unseen)} clusters, random flows", unseen, _judge),
        Check("edges", 1, "no flows; 0 bytes", edges, _judge,
              "Without flows return an empty list; a flow of 0 bytes ends at 0 s, and slows "
              "down no other flow."),
    ]


EXERCISE = Exercise("finish-times", "Who ends when", "02", 1, "finish_times", _build)
