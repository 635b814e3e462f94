"""What a worker gets for a request that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtlab.comm import Work
from dtlab.ps import parts
from dtlab.ps.parts import Part
from dtlab.ps.replication import Unavailable

if TYPE_CHECKING:
    from dtlab.ps.node import Node


class Handle:
    """A request under way. `wait` returns what the blocking call would."""

    def __init__(self, node: Node, result: Any = None):
        self._node, self._result = node, result
        self.refused = ""  # why, if a server may not answer
        self.more: Any = None  # the last answer's remark
        # Number of what was asked → whom, and where the answer goes.
        self.open: dict[int, tuple[int, list[Part]]] = {}
        self.coming: list[tuple[list[Part], list[torch.Tensor], list[Work]]] = []

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
            parts.place(places, wires)
        return self._result
