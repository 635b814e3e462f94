"""Some ranks of a communicator, renumbered, without asking anyone; those of a row, of a column."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.machine import Machine
from dtlab.reduction import Op
from dtlab.relay import relay


class View(Comm):
    """The ranks `members` of `whole`, which include the caller's, as a communicator.

    Unlike `Comm.split` it needs no agreement; but its messages travel among those of `whole`, so
    all ranks must be inside the same algorithm.
    """

    def __init__(self, whole: Comm, members: Sequence[int]):
        self.whole, self.members = whole, members
        self.rank, self.size = members.index(whole.rank), len(members)
        self.device, self.label = whole.device, whole.label

    def post(self, *ops: Send | Recv) -> list[Work]:
        return self.whole.post(*(
            Send(op.x, self.members[op.dst]) if isinstance(op, Send)
            else Recv(op.x, None if op.src is None else self.members[op.src])
            for op in ops
        ))

    def accumulate_(self, into: torch.Tensor, x: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        return self.whole.accumulate_(into, x, op)

    def send(self, x: Any, dst: int) -> None:
        self.whole.send(x, self.members[dst])

    def recv(self, x: Any, src: int | None = None) -> int:
        came = self.whole.recv(x, None if src is None else self.members[src])
        return self.members.index(came)

    def sendrecv(self, out: Any, dst: int, into: Any, src: int | None) -> None:
        origin = None if src is None else self.members[src]
        self.whole.sendrecv(out, self.members[dst], into, origin)

    def relay(
        self, chunks: Sequence[torch.Tensor], dst: int, src: int, op: Op, adding: int
    ) -> None:
        relay(self.whole, chunks, self.members[dst], self.members[src], op, adding)

    def scratch(self, like: torch.Tensor, use: str = "inbox", rows: int = 0) -> torch.Tensor:
        return self.whole.scratch(like, use, rows)

    def compute(self, label: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        return self.whole.compute(label, seconds)

    def now(self) -> float:
        return self.whole.now()

    @property
    def machine(self) -> Machine:
        return self.whole.machine

    def _agree(self, value: Any) -> list[Any]:
        raise NotImplementedError("split the whole communicator instead")

    def _subgroup(self, ranks: Sequence[int], context: int) -> Comm:
        raise NotImplementedError("split the whole communicator instead")

    def _next_context(self) -> int:
        raise NotImplementedError("split the whole communicator instead")


def lines(rank: int, columns: int, ranks: int) -> tuple[range, range]:
    """The row and the column of `rank` in a grid of all ranks, where rank = columns·row + column.

    >>> lines(5, 4, 8)
    (range(4, 8), range(1, 8, 4))
    """
    first = rank - rank % columns
    return range(first, first + columns), range(rank % columns, ranks, columns)
