"""Chapter 06: all-reduce in groups, judged by what crosses the slow links between the racks."""

from __future__ import annotations

import re
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import varied
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise, Verdict
from dtlab.grading.standard import (
    F32,
    any_dtype,
    on_gloo,
    padded,
    rounds_at_most,
    summing_case,
    values,
)
from dtlab.topology import link_bytes, racks
from dtlab.wires import enter

SLACK = 1.02  # of the time: uneven chunks


def _case(ranks: int, group: int, n: int, seed: int, dtype: torch.dtype = F32, *,
          in_racks: bool = False, **options: Any) -> Case:
    """Groups of `group` ranks; in_racks: each in a rack of its own, whose uplink is as fast as
    one rank's port, and nothing takes time but bytes."""
    cluster = racks(ranks // group, group, oversubscription=group, latency_s=0.0,
                    bandwidth_Bps=1e6) if in_racks else None
    return summing_case(ranks, n, dtype, seed, group, said=f", groups of {group}", library=True,
                        cluster=cluster, **options)


def _own_sums(case: Case, outcome: Outcome) -> Verdict:
    """Judge the values; fail an answer that calls the library's algorithm for this exercise."""
    for message in outcome.trace.transfers:
        if found := re.search(r"algorithm=(hierarchical|torus)", message.label):
            return Verdict(False, found[0], "an algorithm of your own",
                           evidence="the library's own")
    return values(case, outcome)


def _slow_links(case: Case, outcome: Outcome) -> Verdict:
    """Out of each rack, and into it, as much as a ring of p/k leaders sends: 2(p/k−1)/(p/k)·n."""
    count = case.ranks // case.args[0][1]
    allowed = 2 * (count - 1) * case.facts["n"] * case.facts["item"] // count
    crossed = {link: nbytes for link, nbytes in link_bytes(case.network, padded(outcome)).items()
               if "spine" in link}
    worst = max(crossed, key=crossed.__getitem__)
    return Verdict(crossed[worst] <= allowed, f"{worst[0]} → {worst[1]}: {crossed[worst]:,} B",
                   "2(g−1)/g·n on each way to the spine, g = p/k",
                   f"{crossed[worst]:,} / {allowed:,}", evidence=sorted(crossed.values()))


def _time(case: Case, outcome: Outcome) -> Verdict:
    """In racks, without latency, is it about as fast as the course's own?"""
    n = case.facts["n"] * case.facts["item"]
    ours_s = enter(case.network, n, "hierarchical", {"group": case.args[0][1]}).elapsed_s
    allowed, took = SLACK * ours_s, outcome.elapsed_s
    return Verdict(took <= allowed, f"{took:.3g} s", f"≤ {allowed:.3g} s",
                   rounds=f"{took:.3g} s / {allowed:.3g} s", evidence=took)


def _build(seed: int) -> list[Check]:
    def cases(*what: tuple[int, int, int], in_racks: bool = False) -> list[Case]:
        """Return cases with other sizes for other seeds, but as divisible ones."""
        return [_case(p, k, n + varied(seed, 5, p, k, n) * p * (n >= p), seed, in_racks=in_racks)
                for p, k, n in what]

    def rounds(case: Case) -> int:
        k = case.args[0][1]
        return int(4 * (k - 1) + 2 * (case.ranks // k - 1))

    plain = cases((4, 2, 8), (8, 4, 32), (6, 3, 12))
    any_group = cases((8, 2, 16), (9, 3, 18), (5, 1, 10), (4, 4, 8), (1, 1, 5), (7, 7, 14),
                      (13, 1, 26), (2, 1, 4), (3, 3, 6), (10, 5, 20), (12, 4, 24))
    uneven = cases((4, 2, 10), (6, 3, 7), (8, 4, 3), (9, 3, 1), (6, 2, 0), (13, 13, 5))
    slow = cases((8, 4, 1600), (12, 4, 1200), (9, 3, 900), (16, 4, 1600), (16, 4, 48),
                 in_racks=True)
    timed = [slow[0], *cases((8, 2, 1600), in_racks=True), slow[3]]
    in_rounds = [*cases((16, 4, 32), (12, 3, 24), (12, 2, 24)), any_group[1]]
    return [
        Check("sums", 2, "4, 6, 8 ranks", plain, _own_sums),
        Check("any groups", 1, "1 to 13 ranks; groups of 1; one group", any_group, _own_sums),
        Check("any n", 1, "uneven; n < p; n = 0", uneven, _own_sums),
        any_dtype(lambda dtype: _case(4, 2, 8, seed, dtype), _own_sums),
        Check("slow links", 2, "2 to 4 racks of 3 or 4", slow, _slow_links, _own_sums),
        Check("time", 1, "in racks, simulated", timed, _time, _own_sums),
        Check("rounds", 1, "9 to 16 ranks", in_rounds, rounds_at_most(rounds, "4(k−1) + 2(p/k−1)"),
              _own_sums),
        on_gloo(_case(4, 2, 1_000, seed, gloo=True), _own_sums),
    ]


EXERCISE = Exercise("hierarchical", "Hierarchical all-reduce", "hierarchical_all_reduce", _build,
                    library=(*WITH_COLLECTIVES, "-collectives.all_reduce_topology"))
