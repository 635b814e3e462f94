"""A worker's requests to servers that have copies: sent again when the copies change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtlab.ps.messages import Endpoint
from dtlab.ps.policy import Policy
from dtlab.ps.replication import Unavailable, View
from dtlab.ps.watch import Watch


class Requests:
    """A worker's requests that are not answered yet: when a server's copies change, they are sent
    again, in order and under their old numbers, so that none is lost and none counts twice."""

    def __init__(self, endpoint: Endpoint, policy: Policy):
        self._endpoint, self._policy = endpoint, policy
        looks = math.ceil(policy.give_up_s / (policy.check_interval_s or math.inf))
        self._watch = Watch(endpoint, policy.master, looks)
        self._away = False  # the last call raised `Unavailable`
        self.views = {server: View(0, copies) for server, copies in policy.copies.items()}
        self._open: dict[int, dict[int, tuple[tuple[Any, ...], Sequence[torch.Tensor]]]] = {
            server: {} for server in policy.copies}
        self.retries = 0
        # Server → since which epoch no copy answers for it, and why.
        self._gone: dict[int, tuple[int, str]] = {}

    def send(self, server: int, body: tuple[Any, ...], payload: Sequence[torch.Tensor]) -> None:
        """Send a request to the head of `server`; ("peek", …) to any copy, to share the load."""
        if self._away:
            self._away = False
            self._endpoint.send(self._policy.master, ("back",))
        self._open[server][body[1]] = body, payload
        self._endpoint.send(self._copy_to_ask(server, body), body, payload)

    def accept_reply(self, src: int, server: int, body: tuple[Any, ...]) -> bool:
        """Forget the request that `src` has answered. False: the reply is a refusal by a former
        leader, which does not count."""
        self._watch.heard(src)
        if isinstance(body[2], str) and src != self.views[server].head:
            return False
        del self._open[server][body[1]]
        return True

    def on_message(self, src: int, body: tuple[Any, ...]) -> None:
        """("view", server, epoch, members), ("lost", server, epoch, why) or ("alive",)."""
        self._watch.heard(src)
        if body[0] == "alive":
            return
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
            self._endpoint.send(self._copy_to_ask(server, body), body, payload)

    def check(self) -> None:
        """Raise `Unavailable` if no copy of a server is left, or if neither a copy that this worker
        waits for nor the master has answered for long."""
        for server, (_, why) in self._gone.items():
            if self._open[server]:
                raise Unavailable(f"rank {self._endpoint.comm.rank}: {why.format(server)}")
        silent = self._watch.check(self._awaited())
        if silent is not None:
            raise Unavailable(
                f"rank {self._endpoint.comm.rank}: neither rank {silent}, for whose answer it "
                f"waits, nor rank {self._policy.master}, the master, has said anything for "
                f"{2 * self._policy.give_up_s:g} s; they have died, or the links to them carry "
                f"nothing any more")

    def on_unavailable(self) -> None:
        """Tell the master that this worker raises `Unavailable`, so that it does not wait for the
        worker to finish, until the worker's next request."""
        self._away = True
        self._endpoint.send(self._policy.master, ("leave",))
        self._endpoint.detach_all()

    def _awaited(self) -> dict[int, tuple[int, int]]:
        """The copies that must take or answer the open requests, see `Watch.check`."""
        awaited = {}
        for server, requests in self._open.items():
            view = self.views[server]
            for body, _ in requests.values():
                rule = self._policy.replication
                assert rule is not None
                for rank in (self._copy_to_ask(server, body), rule.answers(view)):
                    awaited[rank] = server, view.epoch
        return awaited

    def _copy_to_ask(self, server: int, body: tuple[Any, ...]) -> int:
        view = self.views[server]
        if body[0] == "peek":
            number: int = body[1]
            return view.members[(self._endpoint.comm.rank + number) % len(view.members)]
        return view.head
