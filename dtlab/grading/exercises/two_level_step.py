"""Chapter 07: first add inside each machine, then between them; judged by the bytes that cross."""

from __future__ import annotations

from functools import cache
from typing import Any

import networkx as nx
import torch

from dtlab.grading.case import ANY, Case, Outcome, Wanted, counted
from dtlab.grading.draws import numbers, varied, widest
from dtlab.grading.exercise import WITH_COLLECTIVES, Check, Exercise, Verdict
from dtlab.grading.exercises._server_step import EXACT, LR, stepped
from dtlab.grading.standard import BF16, F32, F64, on_gloo, padded, sum_bytes, values
from dtlab.topology import Topology, from_graph, link_bytes
from dtlab.topology.graphs import join

SLACK = 1.02


def _case(machines: list[list[int]], n: int, seed: int, dtype: torch.dtype = F32,
          **options: Any) -> Case:
    """Rank 0 serves, on a machine of its own; `machines`: the workers by machine."""
    workers = sum(map(len, machines))
    weights, *grads = [numbers((seed, machines, n, dtype, rank), (n,), dtype,
                               widest(seed, dtype) if rank else 9)  # weights are no secret
                       for rank in range(1 + workers)]
    args = [(machines, weights.clone(), grad, LR) for grad in (None, *grads)]
    right = stepped(weights, grads)
    text = (f"{counted(len(machines), 'machine')} of "
            f"{', '.join(str(len(machine)) for machine in machines)}, {n} × {str(dtype)[6:]}")
    nbytes = n * dtype.itemsize
    wanted = Wanted(args_after=[(), *[(ANY, right)] * workers], names=("machines", "weights"),
                    what="weights − lr · mean", rtol=EXACT[dtype],
                    least_bytes=sum_bytes(workers, nbytes))
    return Case(text, args, wanted=wanted, library=True,
                facts={"machines": tuple(map(tuple, machines)), "nbytes": nbytes}, **options)


@cache
def cluster_of(machines: tuple[tuple[int, ...], ...]) -> Topology:
    """Each machine's ranks behind its network card, the server behind one of its own."""
    graph = nx.DiGraph()
    for host, members in enumerate(((0,), *machines)):
        for rank in members:
            graph.add_node(rank, kind="gpu", host=host)
            join(graph, rank, f"nic{host}", 0.0, 1e9)
        join(graph, f"nic{host}", "switch", 0.0, 1e9)
    return from_graph(graph, f"{len(machines)} machines and a server")


def _between(case: Case, outcome: Outcome) -> Verdict:
    """One vector out of each machine, one into it, all by way of the server, and no more."""
    machines, vector = case.facts["machines"], case.facts["nbytes"]
    crossed = link_bytes(cluster_of(machines), padded(outcome))
    into, out = crossed["switch", "nic0"], crossed["nic0", "switch"]
    total = sum(nbytes for (_, to), nbytes in crossed.items() if to == "switch")
    allowed = int(SLACK * 2 * len(machines) * vector)
    if total <= allowed and min(into, out) < len(machines) * vector:
        return Verdict(False, f"{into:,} B to the server, {out:,} B from it",
                       f"≥ {len(machines) * vector:,} B each way: from each machine's aggregator "
                       "one sum, to it the new weights", clue="Too little goes through the "
                       "server: each machine's sum goes to it, and the new weights come from it.")
    return Verdict(total <= allowed, f"{total:,} B between machines",
                   f"≤ {allowed:,} B: 2·S a machine", f"{total:,} / {allowed:,}",
                   evidence=(total, into, out))


def _build(seed: int) -> list[Check]:
    k = varied(seed, 6)
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
    return [
        Check("weights", 2, "2 or 3 machines, all alike", plain, values),
        Check("uneven machines", 2, "1 to 5 workers in a machine", uneven, values),
        Check("any layout", 1, "1 machine; 1 worker; ranks in any order", layouts, values),
        Check("any dtype", 1, "float64, bfloat16", dtypes, values),
        Check("between machines", 3, "2 to 4 machines, 20 kB", large, _between, values),
        on_gloo(_case([[1], [2, 3]], 1_000, seed, gloo=True)),
    ]


EXERCISE = Exercise("two-level-step", "Two levels", "two_level_step", _build,
                    library=WITH_COLLECTIVES)
