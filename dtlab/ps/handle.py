"""What a worker gets for a request that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtlab.comm import Work
from dtlab.ps import parts
from dtlab.ps.mail import Mail
from dtlab.ps.packing import Size
from dtlab.ps.parts import Parts
from dtlab.ps.replication import Unavailable

if TYPE_CHECKING:
    from dtlab.ps.node import Node


class Handle:
    """A request under way. `wait` returns what the blocking call would."""

    def __init__(self, node: Node, mail: Mail, result: Any = None):
        self._node, self._mail, self._result = node, mail, result
        self.refused = ""  # why, if a server may not answer
        self.more: Any = None  # the last answer's remark
        # Number of what was asked → whom, and where the answer goes.
        self.open: dict[int, tuple[int, Parts]] = {}
        self._made: list[torch.Tensor] = []  # memory for what is under way
        self.coming: list[tuple[Parts, list[torch.Tensor], list[Work]]] = []

    def room(self, size: Size) -> torch.Tensor:
        """Memory until all is answered."""
        self._made.append(self._mail.memory(size))
        return self._made[-1]

    def wait(self) -> Any:
        """Block until every server that was asked has answered, and all of it is in its place.
        Raises `Unavailable` if one may not, see `Replication`."""
        while self.open:
            self._node.read_letter(next(iter(self.open.values()))[0])
        if self.refused:
            raise Unavailable(f"rank {self._node.comm.rank}: {self.refused}")
        while self.coming:
            places, wires, works = self.coming.pop()
            for work in works:
                work.wait()
            self._made += parts.place(places, wires)
        while self._made:
            self._mail.recycle(self._made.pop())
        return self._result
