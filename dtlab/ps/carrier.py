"""How letters get from node to node: as messages of the communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab.comm import Comm, Send, Work


class Carrier:
    """Sends letters and receives them, for one `Mail`.

    A communicator may bring a better one as its `letters`, which does the same: between processes
    of one host, see `dtlab.processes.post`.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        self._expected: dict[int, tuple[list[Any], Work]] = {}

    def send(self, letter: Any, dst: int, wires: Sequence[torch.Tensor] = ()) -> list[Work]:
        """Send `letter`, any object, with its wires behind it, and return at once: what to wait for
        until they have left."""
        if not wires:
            return [self._comm.isend(letter, dst)]
        return self._comm.post(Send(letter, dst), *(Send(wire, dst) for wire in wires))

    def expect(self, src: int) -> None:
        """Make room for the next letter from `src` before it is asked for: it comes sooner, for it
        need not be announced. To be had with `receive(src)`."""
        if src not in self._expected:
            inbox: list[Any] = []
            self._expected[src] = inbox, self._comm.irecv(inbox, src)

    def receive(self, src: int | None = None) -> tuple[int, Any]:
        """Wait for the next letter, of all or from `src`. Returns whose it is, and itself."""
        inbox: list[Any] = []
        if src is None:
            if self._comm.size > 2:
                return self._comm.recv(inbox), inbox[0]
            src = 1 - self._comm.rank  # who it is from need not be found out: that is sooner
        self.expect(src)
        inbox, work = self._expected.pop(src)
        work.wait()
        return src, inbox[0]

    def flush(self) -> None:
        """Wait until all letters are on their way, so that they arrive whatever I do next."""
