"""A worker's requests to servers that have copies: sent again when the copies change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab.ps.messages import Endpoint
from dtlab.ps.policy import Policy
from dtlab.ps.replication import Unavailable, View


class Requests:
    """A worker's requests that are not answered yet: when a server's copies change, they are sent
    again, in order and under their old numbers, so that none is lost and none counts twice."""

    def __init__(self, endpoint: Endpoint, policy: Policy):
        self._endpoint = endpoint
        self.views = {server: View(0, copies) for server, copies in policy.copies.items()}
        self._open: dict[int, dict[int, tuple[tuple[Any, ...], Sequence[torch.Tensor]]]] = {
            server: {} for server in policy.copies}
        self.retries = 0
        # Server → since which epoch no copy answers for it, and why; a copy that was given up long
        # ago may say so, too, and not know of the others.
        self._gone: dict[int, tuple[int, str]] = {}

    def send(self, server: int, body: tuple[Any, ...], payload: Sequence[torch.Tensor]) -> None:
        """Ask `server`: the copy that leads; with ("peek", …) any, to share the load."""
        self._open[server][body[1]] = body, payload
        self._endpoint.send(self._whom(server, body), body, payload)

    def answered(self, src: int, server: int, body: tuple[Any, ...]) -> bool:
        """Forget a request, whose answer has come from `src`; unless that is a refusal by one that
        leads no more, for another has been asked since. Returns whether it counts."""
        if isinstance(body[2], str) and src != self.views[server].head:
            return False
        del self._open[server][body[1]]
        return True

    def hear(self, src: int, body: tuple[Any, ...]) -> None:
        """("view", server, epoch, members) or ("lost", server, epoch, why)."""
        what, server, epoch, more = body
        if what == "view":
            self._change(server, View(epoch, more))
        elif epoch >= self.views[server].epoch or src == self.views[server].head:
            self._gone[server] = epoch, more

    def _change(self, server: int, view: View) -> None:
        """The master has announced the live copies of `server`."""
        self.views[server] = view
        if server in self._gone and self._gone[server][0] < view.epoch:
            del self._gone[server]
        for body, payload in list(self._open[server].values()):
            self.retries += 1
            self._endpoint.send(self._whom(server, body), body, payload)

    def check(self) -> None:
        """No message is left to process. Raises `Unavailable` if no copy is there to answer."""
        for server, (_, why) in self._gone.items():
            if self._open[server]:
                raise Unavailable(f"rank {self._endpoint.comm.rank}: {why.format(server)}")

    def _whom(self, server: int, body: tuple[Any, ...]) -> int:
        view = self.views[server]
        if body[0] == "peek":
            number: int = body[1]
            return view.members[(self._endpoint.comm.rank + number) % len(view.members)]
        return view.head
