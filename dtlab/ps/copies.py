"""Both ends of a replicated server: the loop of a copy, and what a worker keeps to ask again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.ps.mail import Mail
from dtlab.ps.master import BEATS
from dtlab.ps.policy import Policy
from dtlab.ps.replica import Replica
from dtlab.ps.replication import Unavailable, View
from dtlab.ps.statistics import Statistics

GIVE_UP = 20  # leases without one, after which a copy that is cut off ends


def serve_copy(comm: Comm, mail: Mail, policy: Policy) -> Statistics:
    """Serve as one copy of a server until the master says that all is over, or this copy has been
    cut off for long."""
    shard = next(server for server, copies in policy.copies.items() if comm.rank in copies)
    assert policy.replication is not None
    replica = Replica(comm, mail, policy, shard, policy.replication)
    beat_s, heard_s = comm.now(), comm.now()
    over = False
    while not over and comm.now() < heard_s + GIVE_UP * policy.lease_s:
        if comm.now() >= beat_s:
            mail.send(policy.master, ("beat", comm.now(), replica.had))
            beat_s = comm.now() + policy.lease_s / BEATS
            replica.lapse()
        letter = mail.receive_within(max(beat_s - comm.now(), 0.0))
        if letter is None:
            continue
        src, body, wires, _ = letter
        if body[0] == "snapshot":
            if replica.install(*body[1:]):
                mail.send(policy.master, ("ready", body[1]))
        elif src == policy.master:
            heard_s = comm.now()
            over = _obey(replica, body, mail, policy)
        else:
            replica.dispatch(src, body, wires)
    found = replica.server.account()
    found.cut_off = not over
    return found


def _obey(replica: Replica, body: tuple[Any, ...], mail: Mail, policy: Policy) -> bool:
    """A letter from the master. Returns whether all is over."""
    if body[0] == "lease":
        replica.granted(body[1])
    elif body[0] == "elect":
        replica.promised = body[1]
        mail.send(policy.master, ("had", body[1], replica.had))
    elif body[0] == "adopt":
        replica.adopt(body[1])
    elif body[0] == "view":
        replica.change(View(*body[2:]))
    return bool(body[0] == "over")


class Requests:
    """A worker's requests that are not answered yet: when a server's copies change, they are sent
    again, in order and under their old numbers, so that none is lost and none counts twice."""

    def __init__(self, mail: Mail, policy: Policy):
        self._mail = mail
        self.views = {server: View(0, copies) for server, copies in policy.copies.items()}
        self._open: dict[int, dict[int, tuple[tuple[Any, ...], Sequence[torch.Tensor]]]] = {
            server: {} for server in policy.copies}
        self.retries = 0
        self._gone: set[int] = set()  # servers

    def send(self, server: int, body: tuple[Any, ...], wires: Sequence[torch.Tensor]) -> None:
        """Ask `server`: the copy that leads; with ("peek", …) any, to share the load."""
        if server in self._gone:
            self.lost(server)
        self._open[server][body[1]] = body, wires
        self._mail.send(self._whom(server, body), body, wires)

    def answered(self, number: int) -> None:
        """Forget a request."""
        for requests in self._open.values():
            requests.pop(number, None)

    def change(self, server: int, epoch: int, members: tuple[int, ...]) -> None:
        """The master has announced the live copies of `server`."""
        self.views[server] = View(epoch, members)
        for body, wires in list(self._open[server].values()):
            self.retries += 1
            self._mail.send(self._whom(server, body), body, wires)

    def lost(self, server: int) -> None:
        """All copies are gone that had what was answered."""
        self._gone.add(server)
        raise Unavailable(f"rank {self._mail.comm.rank}: all copies of server {server} have died, "
                          f"or had not caught up; its keys are gone with them")

    def _whom(self, server: int, body: tuple[Any, ...]) -> int:
        view = self.views[server]
        if body[0] == "peek":
            number: int = body[1]
            return view.members[(self._mail.comm.rank + number) % len(view.members)]
        return view.head
