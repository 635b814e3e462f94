"""One message after another from rank to rank, as round a ring. A ring needs no more than this.

Whoever knows what comes next can make room for it while the caller still works on the last one:
processes over Gloo do (`dtlab.processes.lane`). Elsewhere it is the plain loop below, or as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from dtlab.comm import Comm

Moves = Iterable[tuple[torch.Tensor, torch.Tensor]]


def relay(comm: Comm, moves: Moves, dst: int, src: int) -> Iterator[torch.Tensor]:
    """For each (out, into) of `moves`: `comm.sendrecv(out, dst, into, src)`, then yield `into`.

    Walk it to its end. Moves that follow each other must receive into different memory, for the
    next message may come in before you are done with the last. They belong together, so over Gloo
    only the first is compared with what its peer wants (`ShapeMismatch`). Cost: as the loop below.
    """
    looks_ahead = getattr(comm, "relay", None)
    if looks_ahead is not None:
        return looks_ahead(moves, dst, src)  # type: ignore[no-any-return]
    return one_by_one(comm, moves, dst, src)


def one_by_one(comm: Comm, moves: Moves, dst: int, src: int) -> Iterator[torch.Tensor]:
    """`relay` on any communicator."""
    for out, into in moves:
        comm.sendrecv(out, dst, into, src)
        yield into
