"""The bare traffic of a parameter server, as two SPMD functions: who sends which bytes where.

`ps.join` is the whole thing, with keys, clocks and update rules. Here are only its two messages, on
one vector: enough to ask where the servers should live, and what that costs. Piece i of a vector x
is x.tensor_split(n)[i], and belongs to the i-th of the n servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dtlab.comm import Comm, Recv, Send
from dtlab.errors import ConfigError

Update = Callable[[torch.Tensor], object]  # of a server's piece, in place


def push_pull(comm: Comm, x: torch.Tensor, servers: Sequence[int],
              workers: Sequence[int] | None = None, update: Update | None = None) -> torch.Tensor:
    """In place: one round trip. Every rank that is in either list calls it. Returns x.

    Before: worker w holds x_w, a contiguous tensor. After: every worker holds Σ x_w, or what
    `update` has made of it: each server calls it on its piece of the sum, to change it in place.
    servers, workers: ranks; None: all work. A rank may be both. A server that is no worker gives an
    x of the same size, to be written on.
    Cost: `push_pull_s`. Source: Li et al., OSDI 2014. Chapter: 07.
    Raises `ConfigError` for ranks that don't exist or stand twice in a list.
    """
    workers = range(comm.size) if workers is None else workers
    push(comm, x, servers, workers)
    if update is not None and comm.rank in servers:
        update(pieces_of(x, servers)[comm.rank])
    return pull(comm, x, servers, workers)


def push(comm: Comm, x: torch.Tensor, servers: Sequence[int],
         workers: Sequence[int]) -> torch.Tensor:
    """In place: each server's piece of x becomes the sum of that piece over the workers.

    A server adds up its own, if it works too, then the others' in the order of `workers`.
    """
    check(comm, servers, workers)
    me, pieces = comm.rank, pieces_of(x, servers)
    others = [worker for worker in workers if worker != me] if me in pieces else []
    inboxes = [torch.empty_like(pieces[me]) for _ in others]
    outgoing = [(server, piece) for server, piece in pieces.items() if server != me]
    with comm.labelled(comm.label or "push"):
        comm.exchange(*(Send(piece, server) for server, piece in outgoing if me in workers),
                      *(Recv(inbox, worker) for inbox, worker in zip(inboxes, others, strict=True)))
    if inboxes and me not in workers:
        pieces[me].copy_(inboxes.pop(0))
    for gradient in inboxes:
        comm.accumulate_(pieces[me], gradient)
    return x


def pull(comm: Comm, x: torch.Tensor, servers: Sequence[int],
         workers: Sequence[int]) -> torch.Tensor:
    """In place: each worker's x becomes what the servers hold, each its piece."""
    check(comm, servers, workers)
    me, pieces = comm.rank, pieces_of(x, servers)
    others = [worker for worker in workers if worker != me] if me in pieces else []
    incoming = [(server, piece) for server, piece in pieces.items() if server != me]
    with comm.labelled(comm.label or "pull"):
        comm.exchange(*(Send(pieces[me], worker) for worker in others),
                      *(Recv(piece, server) for server, piece in incoming if me in workers))
    return x


def pieces_of(x: torch.Tensor, servers: Sequence[int]) -> dict[int, torch.Tensor]:
    """server → its piece of x, a view. Sizes differ by one element at most."""
    return dict(zip(servers, x.view(-1).tensor_split(len(servers)), strict=True))


def push_pull_s(nbytes: float, workers: int, servers: int, worker_Bps: float,
                server_Bps: float | None = None, colocated: bool = False) -> float:
    """Seconds of one `push_pull` where only the ports count, latency and addition cost nothing.

    Each way takes max(mS/(n·B_server), S/B_worker): the servers' ports share mS bytes, and no
    worker is faster than its own port. So one server costs O(m), n servers O(m/n), down to a floor
    of S/B_worker that is reached once n ≥ m (equal ports).
    colocated: the servers are n of the m workers, on the same ports. What a server would send to
    itself stays where it is; a worker that does not serve still sends all of S.

    >>> [push_pull_s(160e6, 4, n, 16e9, colocated=True) for n in (1, 4)]
    [0.06, 0.015]
    >>> push_pull_s(160e6, workers=4, servers=1, worker_Bps=16e9)  # a server apart, say the CPU
    0.08
    """
    if min(workers, servers) < 1 or (colocated and servers > workers):
        raise ConfigError(f"{servers} servers for {workers} workers: give at least one of each, "
                          f"and no more servers than workers where the workers serve")
    piece = nbytes / servers
    if not colocated:
        return 2 * max(workers * piece / (server_Bps or worker_Bps), nbytes / worker_Bps)
    busiest = max((workers - 1) * piece, (servers - 1) * piece,
                  nbytes if servers < workers else 0.0)
    return 2 * busiest / worker_Bps


def check(comm: Comm, *lists: Sequence[int]) -> None:
    """Raise `ConfigError` unless each list holds ranks, at least one, and each once."""
    for name, ranks in zip(("servers", "workers"), lists, strict=False):
        known = all(isinstance(rank, int) and 0 <= rank < comm.size for rank in ranks)
        if not ranks or not known or len(set(ranks)) < len(ranks):
            raise ConfigError(f"rank {comm.rank}: {name} must be different ranks, of 0 to "
                              f"{comm.size - 1}, and at least one; got {list(ranks)}")
