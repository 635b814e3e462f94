"""The handle of a request that is under way."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps import slices
from dtlab.ps.replication import Unavailable
from dtlab.ps.slices import Slices


class Requester(Protocol):
    """The node that has made a request."""

    comm: Comm
    finished: bool

    def process_message(self) -> None:
        """Wait for the next message and do what it asks for."""

    def unavailable(self) -> None:
        """A call of this node raises `Unavailable`."""


class Handle:
    """A request under way. `wait` returns what the blocking call would."""

    def __init__(self, node: Requester, result: Any = None):
        self._node, self._result = node, result
        self.refused = ""  # why, if a server may not answer
        self.remark: Any = None  # of the last reply
        # Number of the request → the server asked, and where the reply goes.
        self.open: dict[int, tuple[int, Slices]] = {}

    def on_reply(self, number: int, remark: Any, payload: list[torch.Tensor]) -> None:
        """The reply to request `number` is here."""
        _, wanted = self.open.pop(number)
        self.remark = remark
        if isinstance(remark, str):
            self.refused = remark
        else:
            slices.write_all(wanted, payload)

    def wait(self) -> Any:
        """Block until every server that was asked has answered, and all of it is in its place.
        Raises `Unavailable` if one may not, see `Replication`."""
        if self.open and self._node.finished:
            raise ConfigError(f"rank {self._node.comm.rank}: a handle's wait() after finish(); "
                              f"call it before")
        try:
            while self.open:
                self._node.process_message()
            if self.refused:
                raise Unavailable(f"rank {self._node.comm.rank}: {self.refused}")
        except Unavailable:
            self._node.unavailable()
            raise
        return self._result
