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
        looks = math.ceil(policy.give_up_s / (policy.look_s or math.inf))
        self._watch = Watch(endpoint, policy.master, looks)
        self._away = False  # the last call was not answered: see `leave`
        self.views = {server: View(0, copies) for server, copies in policy.copies.items()}
        self._open: dict[int, dict[int, tuple[tuple[Any, ...], Sequence[torch.Tensor]]]] = {
            server: {} for server in policy.copies}
        self.retries = 0
        # Server → since which epoch no copy answers for it, and why; a copy that was given up long
        # ago may say so, too, and not know of the others.
        self._gone: dict[int, tuple[int, str]] = {}

    def send(self, server: int, body: tuple[Any, ...], payload: Sequence[torch.Tensor]) -> None:
        """Ask `server`: the copy that leads; with ("peek", …) any, to share the load."""
        if self._away:
            self._away = False
            self._endpoint.send(self._policy.master, ("back",))
        self._open[server][body[1]] = body, payload
        self._endpoint.send(self._whom(server, body), body, payload)

    def answered(self, src: int, server: int, body: tuple[Any, ...]) -> bool:
        """Forget a request, whose answer has come from `src`; unless that is a refusal by one that
        leads no more, for another has been asked since. Returns whether it counts."""
        self._watch.heard(src)
        if isinstance(body[2], str) and src != self.views[server].head:
            return False
        del self._open[server][body[1]]
        return True

    def hear(self, src: int, body: tuple[Any, ...]) -> None:
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
            self._endpoint.send(self._whom(server, body), body, payload)

    def check(self) -> None:
        """No message is left to process. Raises `Unavailable` if no copy is there to answer, or
        neither a copy nor the master can be reached."""
        for server, (_, why) in self._gone.items():
            if self._open[server]:
                raise Unavailable(f"rank {self._endpoint.comm.rank}: {why.format(server)}")
        silent = self._watch.look(self._awaited())
        if silent is not None:
            raise Unavailable(
                f"rank {self._endpoint.comm.rank}: neither rank {silent}, for whose answer it "
                f"waits, nor rank {self._policy.master}, the master, has said anything for "
                f"{2 * self._policy.give_up_s:g} s; they have died, or the links to them carry "
                f"nothing any more")

    def leave(self) -> None:
        """`Unavailable` is raised: perhaps the worker ends. The master waits for it no longer than
        for any rank that is silent, unless it asks for something else."""
        self._away = True
        self._endpoint.send(self._policy.master, ("leave",))
        self._endpoint.let_go()

    def _awaited(self) -> dict[int, tuple[int, int]]:
        """The copies without which requests stay open: who takes them, and who answers them."""
        awaited = {}
        for server, requests in self._open.items():
            view = self.views[server]
            for body, _ in requests.values():
                rule = self._policy.replication
                assert rule is not None
                for rank in (self._whom(server, body), rule.answers(view)):
                    awaited[rank] = server, view.epoch
        return awaited

    def _whom(self, server: int, body: tuple[Any, ...]) -> int:
        view = self.views[server]
        if body[0] == "peek":
            number: int = body[1]
            return view.members[(self._endpoint.comm.rank + number) % len(view.members)]
        return view.head
