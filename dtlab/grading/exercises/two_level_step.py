"""Chapter 07: first add inside each machine, then between them; judged by the bytes that cross."""

from __future__ import annotations

from functools import cache
from typing import Any

import networkx as nx
import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._server_step import judge_vector, numbers, same, step_clue, wanted
from dtlab.grading.exercises._standard import not_sent
from dtlab.topology import Topology, from_graph, link_bytes
from dtlab.topology.graphs import join

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
LR = 0.3  # no share of a few ranks
SLACK = 1.02
Machines = tuple[tuple[int, ...], ...]


def _case(machines: list[list[int]], n: int, seed: int, dtype: torch.dtype = F32,
          **options: Any) -> Case:
    """Rank 0 serves, on a machine of its own; `machines`: the workers by machine."""
    random = torch.Generator().manual_seed(7919 * seed + 10 * n + len(machines))
    ranks = 1 + sum(map(len, machines))
    weights = numbers(n, dtype, random)
    args: list[tuple[Any, ...]] = []
    for rank in range(ranks):
        grad = numbers(n, dtype, random) if rank else None
        args.append((machines, weights.clone(), grad, LR))
    text = (f"{len(machines)} machine{'s' * (len(machines) > 1)} of "
            f"{', '.join(str(len(machine)) for machine in machines)}, {n} × {str(dtype)[6:]}")
    facts = {"machines": tuple(map(tuple, machines)), "weights": weights,
             "nbytes": n * dtype.itemsize}
    return Case(text, args, facts=facts, library=True, **options)


@cache
def cluster_of(machines: Machines) -> Topology:
    """Each machine's ranks behind its network card, the server behind one of its own."""
    graph = nx.DiGraph()
    for host, members in enumerate(((0,), *machines)):
        for rank in members:
            graph.add_node(rank, kind="gpu", host=host)
            join(graph, rank, f"nic{host}", 0.0, 1e9)
        join(graph, f"nic{host}", "switch", 0.0, 1e9)
    return from_graph(graph, f"{len(machines)} machines and a server")


# ---- judging -----------------------------------------------------------------------------------


def _values(case: Case, outcome: Outcome) -> Verdict:
    before, grads = case.facts["weights"], [args[2] for args in case.args[1:]]
    right = wanted(before, grads, LR)
    for rank in range(1, case.ranks):
        x = outcome.after[rank][1]
        bad = judge_vector(f"rank {rank}: weights", x, right)
        if bad is not None:
            return bad if bad.clue else bad._replace(clue=_clue(case, outcome, grads))
    return not_sent(outcome, 2 * (len(grads) - 1) * case.facts["nbytes"]) or Verdict(
        True, "the new weights, on every worker", "weights − lr · mean")


def _clue(case: Case, outcome: Outcome, grads: list[torch.Tensor]) -> str:
    before, machines = case.facts["weights"], case.facts["machines"]
    after = [args[1] for args in outcome.after[1:]]
    means = [torch.stack([grads[r - 1].double() for r in machine]).mean(0) for machine in machines]
    if len({len(machine) for machine in machines}) > 1 and all(
            same(x, wanted(before, means, LR)) for x in after):
        return ("That is the mean of the machines' means, in which a worker of a small machine "
                "counts for more. Send sums, and divide by the number of all workers at the end.")
    sums = [means[i] * len(machine) for i, machine in enumerate(machines)]
    if all(same(x, wanted(before, sums, LR)) for x in after):
        return ("The sum is divided by the number of machines: divide it by the number of all "
                "workers.")
    if len(machines) > 1 and all(same(after[r - 1], wanted(before, [grads[i - 1] for i in machine],
                                                           LR))
                                 for machine in machines for r in machine):
        return ("The machines were never averaged: each aggregator must push the sum to the "
                "server, and pull the new weights.")
    right = wanted(before, grads, LR)
    if [r + 1 for r, x in enumerate(after) if same(x, right)] == sorted(m[0] for m in machines):
        return ("Only the aggregators have the new weights: each must send them to the ranks of "
                "its machine.")
    return step_clue(after, before, grads, LR, case.ranks) or (
        "Some gradients are missing, or counted twice. Which ranks are in a machine is what "
        "`machines` says; their numbers need not follow each other.")


def _between(case: Case, outcome: Outcome) -> Verdict:
    """One vector out of each machine, one into it, and no more."""
    machines, vector = case.facts["machines"], case.facts["nbytes"]
    crossed = link_bytes(cluster_of(machines), outcome.trace)
    count = len(machines)
    into, out = crossed["switch", "nic0"], crossed["nic0", "switch"]
    total = sum(nbytes for (_, to), nbytes in crossed.items() if to == "switch")
    allowed = int(SLACK * 2 * count * vector)
    nbytes = f"{total:,} / {allowed:,}"
    if total > allowed:
        return Verdict(False, f"{total:,} B between machines", f"≤ {allowed:,} B: 2·S a machine",
                       nbytes, clue=_between_clue(case, into, out))
    if min(into, out) < count * vector:
        clue = ("Through the server: each machine's aggregator sends it one sum and gets the new "
                "weights from it.")
        return Verdict(False, f"{into:,} B to the server, {out:,} B from it",
                       f"≥ {count * vector:,} B each way", nbytes, clue=clue)
    return Verdict(True, "one vector a machine, each way", "2·S a machine", nbytes)


def _between_clue(case: Case, into: int, out: int) -> str:
    machines, vector = case.facts["machines"], case.facts["nbytes"]
    workers = sum(map(len, machines))
    count = len(machines)
    if into >= workers * vector:
        return ("Every worker's gradient crosses the network. Let the first rank of each machine "
                "add up their gradients, and send that one sum.")
    if out >= workers * vector:
        return ("The sums come up as they should, but the server answers every worker. Answer the "
                "aggregators; they send them on inside their machines.")
    if max(into, out) <= SLACK * count * vector:
        return ("Bytes go from machine to machine past the server. An aggregator talks to the "
                "ranks of its own machine, and to the server.")
    return "More than one vector goes to the server, or comes from it, for each machine."


def _build(seed: int) -> list[Check]:
    k = seed % 3
    plain = [_case(machines, n + k, seed) for machines, n in (
        ([[1, 2], [3, 4]], 8), ([[1, 2, 3, 4], [5, 6, 7, 8]], 5), ([[1, 2], [3, 4], [5, 6]], 6))]
    uneven = [_case(machines, 6 + k, seed) for machines in (
        [[1], [2, 3, 4]], [[1, 2, 3, 4, 5], [6, 7]],
        [[1, 2], [3], [4, 5, 6, 7], [8, 9, 10, 11, 12]])]
    layouts = [_case(machines, n, seed) for machines, n in (
        ([[1]], 4), ([[1, 2, 3]], 5), ([[1], [2], [3]], 5), ([[4, 1], [3, 6], [2, 5]], 7),
        ([[3, 5], [4, 1], [2, 6]], 0))]
    dtypes = [_case([[1, 2], [3, 4]], 6, seed, dtype) for dtype in (F64, BF16)]
    large = [_case(machines, 5_000 + 96 * k, seed) for machines in (
        [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2], [3, 4], [5, 6], [7, 8]], [[3, 5, 1], [2], [4, 6]])]
    real = [_case([[1], [2, 3]], 1_000, seed, gloo=True)]
    return [
        Check("weights", 2, "2 or 3 machines, all alike", plain, _values),
        Check("uneven machines", 2, "1 to 5 workers in a machine", uneven, _values,
              "It works only where all machines hold equally many workers. The mean of the "
              "machines' means is not the mean: send sums, divide by the number of all workers."),
        Check("any layout", 1, "1 machine; 1 worker; ranks in any order", layouts, _values,
              "A machine's ranks need not follow each other, a machine may hold one worker, the "
              "vector may be empty: look it up in `machines`."),
        Check("any dtype", 1, "float64, bfloat16", dtypes, _values,
              "It works for float32 only: make room with torch.empty_like(weights)."),
        Check("between machines", 3, "2 to 4 machines, 20 kB", large, _between, provided=_values),
        Check("real", 1, "1 server, 3 workers over Gloo", real, _values,
              "It works in the simulator, but not on real processes over Gloo."),
    ]


EXERCISE = Exercise("two-level-step", "Two levels", "07", 2, "two_level_step", _build)
