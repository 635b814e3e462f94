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

CUT_OFF = "the leader of server {} has lost touch with the master for so long that it has ended"


def serve_copy(comm: Comm, mail: Mail, policy: Policy) -> Statistics:
    """Serve as one copy of a server until the master says that all is over, or this copy has been
    cut off for long."""
    shard = next(server for server, copies in policy.copies.items() if comm.rank in copies)
    assert policy.replication is not None
    replica = Replica(comm, mail, policy, shard, policy.replication)
    beat_s, unheard = comm.now(), 0  # beats since the master was heard of, however long they took
    over, give_up = False, BEATS * policy.give_up_s / policy.lease_s
    while not over and unheard < give_up:
        if comm.now() >= beat_s:
            mail.send(policy.master, ("beat", comm.now(), replica.had, *replica.left))
            beat_s = comm.now() + policy.lease_s / BEATS
            unheard += 1
            replica.lapse()
            replica.miss()
        letter = mail.receive_within(max(beat_s - comm.now(), 0.0))
        if letter is None:
            continue
        src, body, wires, *_ = letter
        if body[0] == "snapshot":
            if replica.install(*body[2:]):
                mail.send(policy.master, ("ready", body[1]))
        elif src == policy.master:
            unheard = 0
            over = _obey(replica, body, mail, policy)
        else:
            replica.dispatch(src, body, wires)
    for worker in () if over else policy.workers:
        mail.send(worker, ("lost", shard, replica.view.epoch, CUT_OFF))
    found = replica.server.account()
    found.cut_off = not over
    return found


def _obey(replica: Replica, body: tuple[Any, ...], mail: Mail, policy: Policy) -> bool:
    """A letter from the master. Returns whether all is over. "heard": no more than that."""
    if body[0] == "lease":
        replica.granted(body[1])
    elif body[0] == "elect":
        replica.promised = body[1]
        mail.send(policy.master, ("had", body[1], replica.had))
    elif body[0] == "adopt":
        replica.adopt(*body[1:])
    elif body[0] == "view":
        server, view = body[1], View(*body[2:])
        if server == replica.shard:
            replica.change(view)
        else:
            replica.handover.change(server, view, replica.answers)
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
        self._gone: dict[int, tuple[int, str]] = {}  # server → since which epoch nobody answers for
        # it, and why; a copy that was given up long ago may say so, too, and not know of the others

    def send(self, server: int, body: tuple[Any, ...], wires: Sequence[torch.Tensor]) -> None:
        """Ask `server`: the copy that leads; with ("peek", …) any, to share the load."""
        self._open[server][body[1]] = body, wires
        self._mail.send(self._whom(server, body), body, wires)

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
        for body, wires in list(self._open[server].values()):
            self.retries += 1
            self._mail.send(self._whom(server, body), body, wires)

    def check(self) -> None:
        """There is no letter left to read. Raises `Unavailable` if nobody is there to answer."""
        for server, (_, why) in self._gone.items():
            if self._open[server]:
                raise Unavailable(f"rank {self._mail.comm.rank}: {why.format(server)}")

    def _whom(self, server: int, body: tuple[Any, ...]) -> int:
        view = self.views[server]
        if body[0] == "peek":
            number: int = body[1]
            return view.members[(self._mail.comm.rank + number) % len(view.members)]
        return view.head
