"""Where gradients are added up: one push and one pull by everyone, as functions of a communicator.

These are a BSP clock of the parameter server with nothing left but its messages. Spread over the
workers, that is an all-reduce.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtlab.checks import check_choice, check_whole, short
from dtlab.collectives.registry import check_tensor, cut, flattened, write_back
from dtlab.comm import Comm, Recv, Send
from dtlab.errors import ConfigError
from dtlab.ps.checks import count
from dtlab.reduction import Op, check_op, finish_average_, named_op


def aggregate(comm: Comm, x: torch.Tensor, placement: str = "spread", op: Op = "sum",
              **options: Any) -> torch.Tensor:
    """In place. Before: each worker holds x_r. After: every rank holds their sum. Returns `x`.

    placement: a name in `PLACEMENTS`; `options` are that function's. Machines that add up but don't
    work (a CPU) give an `x` of the same shape, which doesn't count. op: "sum" or "avg".
    """
    check_choice("placement", placement, PLACEMENTS)
    op = named_op(op)
    if not isinstance(op, str) or op not in ("sum", "avg"):
        raise ConfigError(f"op is 'sum' or 'avg', not {short(op)}")
    check_tensor(comm, x, "aggregate")
    check_op(op, x.dtype)
    try:
        inspect.signature(PLACEMENTS[placement]).bind(comm, x, **options)
    except TypeError as misfit:
        raise ConfigError(f"placement {placement!r}: {misfit}") from None
    vector = flattened(x)
    workers = PLACEMENTS[placement](comm, vector, **options)
    finish_average_(vector, op, workers)
    return write_back(x, vector)


def on_one(comm: Comm, x: torch.Tensor, server: int = 0) -> int:
    """In place; all push to the device of one worker, and pull from it.

    Cost, for an x that takes m = nβ: α + (p−1)m + (p−1)nγ, for receiving has no overhead; then
    α + m + (p−2)·max(α, m) back. Returns how many worked: p.
    """
    check_whole("server", server, 0, comm.size - 1)
    _up_and_down(comm, x, server, [r for r in range(comm.size) if r != server], "")
    return comm.size


def on_cpu(comm: Comm, x: torch.Tensor, server: int = 0) -> int:
    """In place; as `on_one`, but rank `server` is a machine of its own, without a gradient.

    With as many workers, a worker's n more than `on_one` goes each way.
    """
    check_whole("server", server, 0, comm.size - 1)
    if comm.rank == server:
        x.zero_()
    _up_and_down(comm, x, server, [r for r in range(comm.size) if r != server], "")
    return comm.size - 1


def spread(comm: Comm, x: torch.Tensor) -> int:
    """In place; every worker serves an equal part: a push is a reduce-scatter, a pull an
    all-gather, and both together an all-reduce.

    Each rank begins with its next neighbour, so that no server hears from all of them at once.
    Cost, for parts that take m = nβ/p: 2(α + m + (p−2)·max(α, m)) + (p−1)/p·nγ. Memory: one more x.
    """
    me, p, parts = comm.rank, comm.size, cut(x, comm.size)
    others = [(me + distance) % p for distance in range(1, p)]
    inboxes = {r: torch.empty_like(parts[me]) for r in sorted(others)}
    comm.labelled("push").exchange(*(Send(parts[r], r) for r in others),
                                   *(Recv(inbox, r) for r, inbox in inboxes.items()))
    for inbox in inboxes.values():
        comm.accumulate_(parts[me], inbox)
    comm.labelled("pull").exchange(*(Send(parts[me], r) for r in others),
                                   *(Recv(parts[r], r) for r in others))
    return comm.size


def tree(comm: Comm, x: torch.Tensor, fanout: int = 2) -> int:
    """In place; servers in a tree, in which each adds up what its `fanout` children bring, and
    passes on what comes back.

    Every rank works, and serves if it has children. Cost of a full tree of depth d:
    (1 + fanout)·d·α + 2d·fanout·nβ.
    """
    fanout = min(count("fanout", fanout, 1), comm.size)
    children = [c for c in range(fanout * comm.rank + 1, fanout * comm.rank + fanout + 1)
                if c < comm.size]
    _gather(comm, x, children, "push")
    if comm.rank:
        parent = (comm.rank - 1) // fanout
        comm.labelled("push").send(x, parent)
        comm.labelled("pull").recv(x, parent)
    comm.labelled("pull").exchange(*(Send(x, child) for child in children))
    return comm.size


def two_level(comm: Comm, x: torch.Tensor, machines: Sequence[Sequence[int]]) -> int:
    """In place; inside each machine first, then between machines. The slow network carries one
    gradient a machine, not one a GPU.

    machines: of each its ranks: the CPU, which has no gradient, then the GPUs. Messages are
    labelled with their step:
    1 every GPU computes its gradient (before the call); 2 a machine's GPUs push to its first;
    3 that one to the CPU; 4 the CPUs to the first machine's, the server, which adds up;
    5 it sends the sum back to the CPUs; 6 these to their first GPU; 7 that one to the others.
    Source: Zhang et al., Dive into Deep Learning, "Parameter servers".
    """
    _check_machines(comm, machines)
    mine = next(machine for machine in machines if comm.rank in machine)
    cpu, lead, others = mine[0], mine[1], list(mine[2:])
    server, cpus = machines[0][0], [machine[0] for machine in machines[1:]]
    if comm.rank == cpu:
        x.zero_()
    if comm.rank in (lead, *others):
        _push(comm, x, lead, others, "2 GPUs to the first")
    if comm.rank in (cpu, lead):
        _push(comm, x, cpu, [lead], "3 to the CPU")
    if comm.rank == cpu:
        _up_and_down(comm, x, server, cpus, " between machines")
    if comm.rank in (cpu, lead):
        _pull(comm, x, cpu, [lead], "6 to the first GPU")
    if comm.rank in (lead, *others):
        _pull(comm, x, lead, others, "7 to all GPUs")
    return sum(len(machine) - 1 for machine in machines)


PLACEMENTS: dict[str, Callable[..., int]] = {
    "on_one": on_one, "on_cpu": on_cpu, "spread": spread, "tree": tree, "two_level": two_level,
}


def _up_and_down(comm: Comm, x: torch.Tensor, server: int, workers: list[int], where: str) -> None:
    """`workers` push to `server` and pull from it."""
    push, pull = ("4 push", "5 pull") if where else ("push", "pull")
    _push(comm, x, server, workers, push + where)
    _pull(comm, x, server, workers, pull + where)


def _push(comm: Comm, x: torch.Tensor, server: int, workers: list[int], label: str) -> None:
    if comm.rank == server:
        _gather(comm, x, workers, label)
    else:
        comm.labelled(label).send(x, server)


def _pull(comm: Comm, x: torch.Tensor, server: int, workers: list[int], label: str) -> None:
    if comm.rank == server:
        comm.labelled(label).exchange(*(Send(x, worker) for worker in workers))
    else:
        comm.labelled(label).recv(x, server)


def _gather(comm: Comm, x: torch.Tensor, workers: list[int], label: str) -> None:
    """x ← x + what each of `workers` sends, all at the same time; added in order of rank."""
    inboxes = [torch.empty_like(x) for _ in workers]
    comm.labelled(label).exchange(*map(Recv, inboxes, workers))
    for box in inboxes:
        comm.accumulate_(x, box)


def _check_machines(comm: Comm, machines: Sequence[Sequence[int]]) -> None:
    try:
        fits = all(len(machine) >= 2 for machine in machines) and sorted(
            rank for machine in machines for rank in machine) == list(range(comm.size))
    except (TypeError, RuntimeError):  # no lists of numbers
        fits = False
    if not fits:
        raise ConfigError(f"machines must name each of the {comm.size} ranks once, and in each "
                          f"machine the CPU and at least one GPU; got {short(machines)}")
