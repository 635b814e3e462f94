"""All-to-all: every rank has a part for every rank. A transpose of the matrix of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab import relay
from dtlab.collectives.call import call_for
from dtlab.collectives.registry import (
    algorithm,
    check_parts,
    room_for,
    rows_of,
)
from dtlab.comm import Comm

Rows = torch.Tensor | Sequence[torch.Tensor]  # a row for each rank

def all_to_all(
    comm: Comm, parts: torch.Tensor, algorithm: str = "pairwise", out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Before: rank r holds `parts`, of shape (p, *shape). After: it has a tensor of the same shape
    whose row s is rank s's parts[r]: in `out`, if given (not `parts` itself), else in a new one.
    Returns it. `parts` stays as it is.

    Shapes and dtypes are equal everywhere, else `ShapeMismatch`. Chapter: 04.
    """
    call = call_for(comm, "all_to_all", algorithm, options, parts)
    check_parts(comm, parts, "all_to_all")
    result = room_for(comm, out, tuple(parts.shape), parts, "all_to_all")
    call(comm, rows_of(parts), rows_of(result))
    return result


@algorithm("all_to_all", "linear")
def linear(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`: post everything at once and let the network sort it out.

    Cost on a network without contention inside: α + (p−1)/p·nβ; n bytes in a rank's rows together.
    """
    others = relay.others(comm.rank, comm.size)
    relay.rows(comm, rows, others, received, others)
    return received


@algorithm("all_to_all", "pairwise")
def pairwise(comm: Comm, rows: Rows, received: Rows) -> Rows:
    """Fill `received`: in step k, send to the rank k further on, receive from the one k back.

    Nobody ever receives from two at once. Cost: (p−1)α + (p−1)/p·nβ.
    """
    p, me = comm.size, comm.rank
    received[me].copy_(rows[me])
    for distance in range(1, p):
        to, source = (me + distance) % p, (me - distance) % p
        comm.sendrecv(rows[to], to, received[source], source)
    return received


@algorithm("all_to_all", "bruck")
def bruck(comm: Comm, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Fill `received`: a part that must go d ranks on hops 2^k ahead for each one-bit k of d.

    Few messages, but parts are forwarded: for small parts only. Cost: ⌈lg p⌉α + about
    (n/2)⌈lg p⌉β. Source: Bruck et al. 1997.
    """
    p, me = comm.size, comm.rank
    travelling = rows.roll(-me, dims=0)  # travelling[d] must go d ranks further on
    hop = 1
    while hop < p:
        moving = torch.tensor([d for d in range(p) if d & hop], device=rows.device)
        leaving = travelling.index_select(0, moving)
        arriving = comm.scratch(leaving)
        comm.sendrecv(leaving, (me + hop) % p, arriving, (me - hop) % p)
        travelling.index_copy_(0, moving, arriving)
        hop *= 2
    # travelling[d] has come from d ranks back: it is row me − d.
    return received.copy_(travelling.flip(0).roll(me + 1, dims=0))
