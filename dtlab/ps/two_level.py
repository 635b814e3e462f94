"""Aggregation in two levels, and in any number: first where wires are fast, then where they aren't.

A machine's workers share one network card. If each of k workers pushes its own gradient to a server
elsewhere, the card carries k vectors; if they first add up inside, it carries one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps.push_pull import Update, pieces_of, pull, push

STEPS = ("1 gradients", "2 push inside", "3 add inside", "4 push to servers", "5 update",
         "6 pull from servers", "7 hand out inside")
Tree = Any  # a rank, or a list of trees: what one server gathers from


def two_level(comm: Comm, x: torch.Tensor, machines: Sequence[Sequence[int]],
              servers: Sequence[int], update: Update | None = None) -> torch.Tensor:
    """In place: `push_pull` in the steps 2 to 7 of `STEPS`. Returns x.

    Before: every worker has made its gradient x (step 1). It pushes it to its machine's aggregator
    (2), which adds up (3) and pushes the one sum to the servers (4); these add up and update (5);
    aggregators pull (6) and hand out inside their machine (7). After: as after `push_pull`.
    machines: the workers' ranks by machine; the first of each aggregates. servers: ranks, each with
    a piece of x; aggregators may serve, or ranks that are in no machine.
    Cost: M machines move 2M·S bytes over the network, less what stays where it is; with `push_pull`
    it would be each worker's: k times as much where machines hold k workers.
    Source: the two-level scheme of MXNet's KVStore; Chen et al., arXiv 1512.01274, 2015, §3.3.
    Raises `ConfigError` for a rank in two machines, or an empty machine.
    """
    workers = [rank for machine in machines for rank in machine]
    if len(set(workers)) < len(workers) or not all(machines) or not machines:
        raise ConfigError(f"machines must be lists of different ranks, none empty; got {machines}")
    mine = next((machine for machine in machines if comm.rank in machine), None)
    aggregators = [machine[0] for machine in machines]
    outside = comm.rank in aggregators or comm.rank in servers
    if mine:
        with comm.labelled(STEPS[1]):
            push(comm, x, mine[:1], mine)
    if outside:
        with comm.labelled(STEPS[3]):
            push(comm, x, servers, aggregators)
        if update is not None and comm.rank in servers:
            update(pieces_of(x, servers)[comm.rank])
        with comm.labelled(STEPS[5]):
            pull(comm, x, servers, aggregators)
    if mine:
        with comm.labelled(STEPS[6]):
            pull(comm, x, mine[:1], mine)
    return x


def through_tree(comm: Comm, x: torch.Tensor, tree: Tree,
                 update: Update | None = None) -> torch.Tensor:
    """In place: as many levels as `tree` has. Every worker's x becomes their sum, or what `update`
    makes of it at the top. Returns x.

    tree: nested lists of ranks; the first rank of each list, however deep, gathers from the others
    and answers them. [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]: machines of two, racks of two machines;
    rank 0 is the server of all, and nothing but one sum crosses from rack to rack.
    Cost: with fan-out f at every level and m workers, log_f(m) levels of 2(f−1)S each at the
    busiest port, where one server alone would take 2(m−1)S.

    >>> levels([[0, 1], [[2, 3], 4]])
    [[0, 1], [2, 3], [2, 4], [0, 2]]
    """
    groups = [members for members in levels(tree) if comm.rank in members]
    for members in groups:
        push(comm, x, members[:1], members)
    if update is not None and comm.rank == first_of(tree):
        update(x)
    for members in reversed(groups):
        pull(comm, x, members[:1], members)
    return x


def levels(tree: Tree) -> list[list[int]]:
    """The groups of a tree, the deepest first: each gathers at its first rank."""
    if isinstance(tree, int):
        return []
    return [*(group for child in tree for group in levels(child)), [first_of(c) for c in tree]]


def first_of(tree: Tree) -> int:
    """The rank that speaks for a tree: its first leaf."""
    while not isinstance(tree, int):
        if not tree:
            raise ConfigError("a tree of servers has an empty list in it; leave it out")
        tree = tree[0]
    return tree
