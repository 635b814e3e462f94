"""Chapter 06: all-reduce in groups, judged by what crosses the slow links between the racks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, counted
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._all_reduce import (
    DTYPES,
    F32,
    judge_sums,
    summing_case,
    too_large,
)
from dtlab.topology import Node, link_bytes, racks
from dtlab.wires import enter

NO_LEADER = ("comm.split returns None to a rank whose colour is None: only the leaders may use the "
             "communicator of the leaders (`if leaders is not None: …`).")
ERRORS = {
    "'NoneType' object has no attribute": NO_LEADER,
    "all_reduce(comm, …) takes a communicator, not None": NO_LEADER,
    "has no root": "In a communicator that comm.split returns, ranks are numbered anew, from 0: "
    "the first rank of every group is 0 there, and so is the root.",
    "  split  ": "Some ranks wait in comm.split, which all ranks of comm must call: those that "
    "shall be in no group give the colour None.",
}
SLACK = 1.02  # of the time: uneven chunks


def _case(ranks: int, group: int, n: int, seed: int, dtype: torch.dtype = F32, *,
          in_racks: bool = False, **options: Any) -> Case:
    """Groups of `group` ranks; in_racks: each in a rack of its own, whose uplink is as fast as
    one rank's port, and nothing takes time but bytes."""
    case = summing_case(ranks, n, dtype, seed, library=True, errors=ERRORS, **options)
    cluster = racks(ranks // group, group, oversubscription=group, latency_s=0.0,
                    bandwidth_Bps=1e6) if in_racks else None
    return replace(case, tried=f"{case.tried}, groups of {group}", cluster=cluster,
                   args=[(x, group) for (x,) in case.args], facts={**case.facts, "group": group})


# ---- values ------------------------------------------------------------------------------------


def _values(case: Case, outcome: Outcome) -> Verdict:
    for message in outcome.trace.transfers:
        if found := re.search(r"algorithm=(hierarchical|torus)", message.label):
            return Verdict(False, found[0], "an algorithm of your own",
                           clue=f"The answer calls the library's own, {found[0]}, which does just "
                                "what the exercise asks for: build it out of others.")
    return judge_sums(case, outcome, _clue)


def _clue(case: Case, outcome: Outcome, after: list[torch.Tensor]) -> str:
    """Which rank holds the sum of which ranks?"""
    total, k = case.facts["total"], case.facts["group"]
    before = [args[0] for args in case.args]
    groups = [sum(before[first : first + k]) for first in range(0, case.ranks, k)]
    right = [torch.equal(x, total) for x in after]
    if too_large(after, total):
        return ("Some sums are too large: a contribution was added more than once. Between the "
                "groups, only the leaders' sums are added up; on the way back, the leader's sum "
                "overwrites what the others hold.")
    if all(torch.equal(x, groups[rank // k]) for rank, x in enumerate(after)):
        return ("Each rank holds the sum of its own group only: the leaders must add the sums of "
                "all groups before they send them out.")
    if right == [rank % k == 0 for rank in range(case.ranks)]:
        return ("Only the leaders hold the sum: each must send it to its group (a broadcast), "
                "once the leaders' all-reduce is done.")
    if all(torch.equal(x, groups[rank // k]) for rank, x in enumerate(after) if rank % k == 0):
        return ("The leaders hold the sums of their groups, and no more: now an all-reduce among "
                "the leaders, ranks 0, k, 2k, …")
    return ("Some contributions are missing. Do the groups end where `group` says? Rank r belongs "
            "to group r // group; its leader is the first rank of the group.")


# ---- cost --------------------------------------------------------------------------------------


def _slow_links(case: Case, outcome: Outcome) -> Verdict:
    """Out of each rack, and into it, as much as a ring of p/k leaders sends: 2(p/k−1)/(p/k)·n."""
    assert case.cluster is not None
    count = case.ranks // case.facts["group"]
    n = case.facts["n"] * case.facts["item"]
    allowed = 2 * (count - 1) * n // count
    crossed = {link: nbytes for link, nbytes in link_bytes(case.cluster, outcome.trace).items()
               if "spine" in link}
    worst = max(crossed, key=crossed.__getitem__)
    most, nbytes = crossed[worst], f"{crossed[worst]:,} / {allowed:,}"
    expected = "2(g−1)/g·n on each way to the spine, g = p/k"
    if most <= allowed:
        return Verdict(True, "as few as can be", expected, nbytes)
    return Verdict(False, f"{worst[0]} → {worst[1]}: {most:,} B", f"≤ {allowed:,} B", nbytes,
                   clue=_slow_clue(case, outcome, crossed))


def _too_early(case: Case, outcome: Outcome) -> str:
    """The hint if messages cross between groups before any group can have its sum."""
    k = case.facts["group"]
    if k == 1 or not any(m.start_s == 0 and m.src // k != m.dst // k
                         for m in outcome.trace.transfers):
        return ""
    return ("The first messages go from group to group already. First sum up inside each group, "
            "the `group` ranks that stand side by side: rank r belongs to group r // group.")


def _too_many_cross(case: Case, outcome: Outcome) -> str:
    """The hint if the leaders carry all between the groups, and other ranks carry something too."""
    k, n = case.facts["group"], case.facts["n"] * case.facts["item"]
    across = [m for m in outcome.trace.transfers if m.src // k != m.dst // k]
    leaders = sum(m.nbytes for m in across if m.src % k == m.dst % k == 0)
    if leaders < 2 * (case.ranks // k - 1) * n or not any(m.src % k and m.dst % k for m in across):
        return ""
    return ("The leaders all-reduce, and so do other ranks: in comm.split, give the colour None "
            "for every rank but the leaders; those get None back, and skip this step.")


def _slow_clue(case: Case, outcome: Outcome, crossed: dict[tuple[Node, Node], int]) -> str:
    p, k = case.ranks, case.facts["group"]
    n = case.facts["n"] * case.facts["item"]
    count = p // k
    most, least = max(crossed.values()), min(crossed.values())
    one_ring = abs(most - 2 * (p - 1) * n / p) < 0.02 * n
    if not one_ring and (clue := _too_early(case, outcome)):
        return clue
    if most > 1.2 * least:
        return ("One rack's way to the spine carries more than the others': a single rank collects "
                "from all leaders, or is the root of their tree. In a ring of leaders, all send "
                "equally much.")
    if one_ring:
        return ("That is what one ring over all ranks puts there, 2(p−1)/p·n: first sum up inside "
                "each group, so that only p/k sums take part in the ring between racks.")
    if most >= k * 2 * (count - 1) * n // count:
        return ("Every rank of a group sends its whole vector through the spine: that is k times "
                "too much. Let one leader do it, or give each rank a k-th part.")
    return _too_many_cross(case, outcome) or (
        "More crosses the spine than a ring of leaders needs. Rank r belongs to group r // group, "
        "of `group` ranks; only the groups' leaders all-reduce across the spine, by a ring (not a "
        "tree, nor recursive doubling).")


def _time(case: Case, outcome: Outcome) -> Verdict:
    """In racks, no latency: as fast as the course's own."""
    assert case.cluster is not None
    n = case.facts["n"] * case.facts["item"]
    ours_s = enter(case.cluster, n, "hierarchical", {"group": case.facts["group"]}).elapsed_s
    allowed, took = SLACK * ours_s, outcome.elapsed_s
    rounds = f"{took:.3g} s / {allowed:.3g} s"
    if took <= allowed:
        return Verdict(True, f"{took:.3g} s", f"≤ {allowed:.3g} s", rounds=rounds)
    clue = _too_early(case, outcome) or _too_many_cross(case, outcome) or (
        "The values are right, but inside the groups whole vectors travel one after the other, "
        "so the leader's port is the bottleneck. For long vectors: reduce-scatter the group, "
        "then gather the parts at the leader (collectives.reduce(…, algorithm='rabenseifner')); "
        "and back: scatter, all-gather (algorithm='scatter_allgather').")
    return Verdict(False, f"{took:.3g} s", f"≤ {allowed:.3g} s", rounds=rounds, clue=clue)


def _rounds(case: Case, outcome: Outcome) -> Verdict:
    """One second a message and infinite bandwidth: the virtual time counts the rounds."""
    k = case.facts["group"]
    allowed = 4 * (k - 1) + 2 * (case.ranks // k - 1)
    took = outcome.elapsed_s
    rounds, limit = f"{took:g} / {allowed}", f"≤ 4(k−1) + 2(p/k−1) = {allowed} rounds"
    if took <= allowed + 1e-9:
        return Verdict(True, counted(took, "round"), limit, rounds=rounds)
    many = took >= 2 * (case.ranks - 1)
    clue = _too_early(case, outcome) or _too_many_cross(case, outcome) or (
        "As many rounds as one ring over all ranks has, 2(p−1), or more. " * many +
        "Groups must work at the same time: 2(k−1) rounds to the leaders, 2(p/k−1) among them, "
        "2(k−1) back.")
    return Verdict(False, counted(took, "round"), limit, rounds=rounds, clue=clue)


def _build(seed: int) -> list[Check]:
    def cases(*what: tuple[int, int, int], in_racks: bool = False) -> list[Case]:
        more = seed % 3  # other sizes, but as divisible as before
        return [_case(p, k, n + more * p if n >= p else n, seed, in_racks=in_racks)
                for p, k, n in what]

    plain = cases((4, 2, 8), (8, 4, 32), (6, 3, 12))
    any_group = cases((8, 2, 16), (9, 3, 18), (5, 1, 10), (4, 4, 8), (1, 1, 5), (7, 7, 14),
                      (13, 1, 26), (2, 1, 4), (3, 3, 6), (10, 5, 20), (12, 4, 24))
    uneven = cases((4, 2, 10), (6, 3, 7), (8, 4, 3), (9, 3, 1), (6, 2, 0), (13, 13, 5))
    dtypes = [_case(4, 2, 8, seed, dtype) for dtype in DTYPES]
    slow = cases((8, 4, 1600), (12, 4, 1200), (9, 3, 900), (16, 4, 1600), in_racks=True)
    timed = cases((8, 4, 1600), (8, 2, 1600), (16, 4, 1600), in_racks=True)
    in_rounds = cases((16, 4, 32), (12, 3, 24), (12, 2, 24), (9, 3, 18))
    real = [_case(4, 2, 1_000, seed, gloo=True)]
    return [
        Check("sums", 2, "4, 6, 8 ranks", plain, _values),
        Check("any groups", 1, "1 to 13 ranks; groups of 1; one group", any_group, _values,
              "It works for some groups only: a group may have one rank, and there may be one "
              "group only. A rank that is alone has no rank to send to."),
        Check("any n", 1, "uneven; n < p; n = 0", uneven, _values,
              "It fails where the group does not divide n: x.tensor_split(k) cuts any n."),
        Check("any dtype", 1, "float64, bfloat16, complex, integers", dtypes, _values,
              "It works for float32 only: make the inbox with torch.empty_like, or dtype=x.dtype."),
        Check("slow links", 2, "2 to 4 racks of 3 or 4", slow, _slow_links, provided=_values),
        Check("time", 1, "in racks, simulated", timed, _time, provided=_values),
        Check("rounds", 1, "9 to 16 ranks", in_rounds, _rounds, provided=_values),
        Check("real", 1, "4 processes over Gloo", real, _values,
              "It works in the simulator, but not on real processes over Gloo."),
    ]


EXERCISE = Exercise("hierarchical", "Hierarchical all-reduce", "06", 1, "hierarchical_all_reduce",
                    _build)
