"""One copy of a server: its log, its messages, its lease. What it does with them: `replication`.

Nothing is done twice: a request carries its worker's number, and each copy knows the last it has
had. Nothing that was answered is lost: a copy keeps a request until all that follow have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtlab.comm import Comm
from dtlab.ps import failures
from dtlab.ps.master import BEATS
from dtlab.ps.messages import Endpoint
from dtlab.ps.migration import ShardTransfers
from dtlab.ps.policy import Policy
from dtlab.ps.replication import Replication, View
from dtlab.ps.server import Server
from dtlab.ps.watch import Watch

Payload = list[torch.Tensor]
_AMONG_COPIES = ("op", "ack", "again")
_UNANSWERED = ("clock", "shards", "lose")  # they get no answer
NO_LEASE = ("the server's leader has lost touch with the master and may not answer; what you asked "
            "for may be done, or not")


class Request(NamedTuple):
    """A request in the log."""

    worker: int
    body: tuple[Any, ...]
    payload: Payload


class Replica:
    """The copy on this rank of server `shard`. `lease_end_s`: until when it may lead."""

    def __init__(self, comm: Comm, endpoint: Endpoint, policy: Policy, shard: int,
                 rule: Replication):
        self.comm, self.endpoint, self.policy = comm, endpoint, policy
        self.shard, self.rule, self.me = shard, rule, comm.rank
        self.view = View(0, policy.copies[shard])
        self.server = Server(comm, self, policy, shard)
        self.transfers = ShardTransfers(endpoint, policy, shard)
        self.watch = Watch(endpoint, policy.master,
                           math.ceil(BEATS * policy.give_up_s / policy.lease_s))
        self.lease_end_s = -1.0
        self.log: dict[int, Request] = {}  # by number, what those that follow may not have yet
        self.had = self.done = self.stable = 0  # received, carried out, on all that follow
        self.promised = 0  # the epoch of an election in which this copy has told what it has
        self.acknowledged: dict[int, int] = {}
        self._kept: int | None = None  # forget nothing after this request: see `adopt`
        self._told = -1  # what I acknowledged last
        self._last: dict[int, int] = {}  # worker → the number of its last request in the log
        self._carried: dict[int, int] = {}  # the same, of those carried out
        self._peeks: list[tuple[int, tuple[Any, ...]]] = []  # for keys that have not come yet
        # Messages of an epoch to come, and requests as long as I don't lead: whatever a worker asks
        # of me, all that it asked before is done or stands here too.
        self._early: list[tuple[int, tuple[Any, ...], Payload]] = []
        self._lapsed = 0  # signs of life given since my lease was over: time spent asleep is none
        self._refused: dict[int, int] = {}  # worker → the number of its last request refused

    # ---- what the server sends, see `server.Outbox` ---------------------------------------------

    def send(self, dst: int, body: tuple[Any, ...], payload: Sequence[torch.Tensor] = ()) -> None:
        """Send an answer of the state machine, or what another server is given: one copy does."""
        if body[0] == "shards":
            self.transfers.sent[dst] = body, payload
            if self.answers:
                self.transfers.send(dst)
        elif self.answers:
            self.endpoint.send(dst, body, payload)

    def lends(self, x: torch.Tensor) -> bool:
        """See `Endpoint.lends`."""
        return self.endpoint.lends(x)

    # ---- roles ----------------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        """Am I among the live copies?"""
        return self.me in self.view.members

    @property
    def answers(self) -> bool:
        """Do I answer workers?"""
        return self.is_member and self.rule.answers(self.view) == self.me

    @property
    def following(self) -> tuple[int, ...]:
        """The copies to which I forward requests."""
        return self.rule.following(self.view, self.me) if self.is_member else ()

    def may_lead(self) -> bool:
        """Have I a lease? Weak rules need none."""
        return not self.rule.strong or self.comm.now() < self.lease_end_s

    @property
    def is_head(self) -> bool:
        """Am I the head, as far as I know?"""
        return self.is_member and self.view.head == self.me

    @property
    def leads(self) -> bool:
        """Do I put requests into order now? Not between an election and its outcome: the master
        counts on what it was told."""
        return self.is_head and self.may_lead() and self.promised <= self.view.epoch

    # ---- messages -------------------------------------------------------------------------------

    def request(self, worker: int, body: tuple[Any, ...], payload: Payload) -> None:
        """Take a request from a worker, or from another server: (what, number, …)."""
        if body[0] == "peek":
            self._peeks.append((worker, body))
            self._answer_peeks()
            return
        if not self.leads:  # perhaps I shall soon
            self._early.append((worker, body, payload))
        elif body[1] <= self._last.get(worker, 0):
            self._again(worker, body, payload)
        else:
            if body[0] == "init":  # what the disk holds now, no copy may look up later
                body = (*body, failures.newest(self.policy))
            self._append(Request(worker, body, payload))

    def handle(self, src: int, body: tuple[Any, ...], payload: Payload) -> None:
        """Take from another copy ("op", epoch, number, stable, worker, request), ("ack", epoch,
        number) or ("again", epoch, worker, request)."""
        epoch = body[1]
        if epoch > self.view.epoch:
            self._early.append((src, body, payload))
        elif epoch < self.view.epoch or epoch < self.promised or not self.is_member:
            return  # from one that does not know yet that it leads no more
        elif body[0] == "op":
            _, _, number, stable, worker, request = body
            self.stable = max(self.stable, min(stable, self.had))
            if number == self.had + 1:
                self._append(Request(worker, request, payload))
            else:  # it has been here: say so once more
                self._told = -1
                self.rule.acknowledged(self)
        elif body[0] == "ack":
            self.acknowledged[src] = max(body[2], self.acknowledged.get(src, 0))
            self.rule.acknowledged(self)
        else:
            self._again(body[2], body[3], payload)

    def change(self, view: View) -> None:
        """The master has announced the live copies."""
        if view.epoch <= self.view.epoch:
            return
        self.view, self._refused = view, {}
        if self.is_member:
            self.acknowledged, self._told, self._kept = {}, -1, None
            self.rule.reconfigured(self)
        if self.answers:
            self.transfers.send_again()
        self._process_early()

    def granted(self, until_s: float) -> None:
        """The master lets me lead, if I am the head, until `until_s`."""
        led, self.lease_end_s = self.leads, max(until_s, self.lease_end_s)
        if self.may_lead():
            self._lapsed = 0
        if not led:
            self._process_early()

    def adopt(self, rank: int | None, number: int) -> None:
        """Send `rank`, which was declared dead, all that it needs to be a copy again, as snapshot
        `number`; once the master has announced it, it gets the log from here on. None: it is gone
        again."""
        self._kept = None if rank is None else self.done
        if rank is not None:
            state = self.server.snapshot(), self._carried, self.transfers.sent
            self.endpoint.send(rank, ("snapshot", number, self.view.epoch, self.done, state))

    def install(self, epoch: int, number: int, state: tuple[Any, ...]) -> bool:
        """Forget all that I had and go on from another copy's snapshot, unless it comes too late.
        Returns whether I do."""
        if epoch < max(self.view.epoch, self.promised):
            return False
        seen = self.server.statistics
        seen.rejoined += 1
        seen.lost += sum(entry.body[0] == "push" for at, entry in self.log.items()
                         if self.stable < at <= self.done)
        snapshot, self._carried, self.transfers.sent = state
        self._last = dict(self._carried)  # requests after `number` will come with the log
        self.server.restore(snapshot)
        self.view = View(epoch, tuple(m for m in self.policy.copies[self.shard] if m != self.me))
        self.log, self.had, self.done, self.stable = {}, number, number, number
        return True

    def lapse(self) -> None:
        """Count a sign of life. A head without a lease may get one again, or another may lead; if
        that takes longer than the workers want to wait, it tells them."""
        if not self.is_head or self.may_lead() or self.lease_end_s < 0:
            self._lapsed = 0
            return
        if self._lapsed * self.policy.lease_s / BEATS >= self.policy.grace_s:
            self.refuse()
        self._lapsed += 1

    def refuse(self) -> None:
        """Tell workers that what they asked for may be done, or not. It stays in line, for what
        they ask next must not overtake it. Not of a clock: that gets no answer."""
        for src, (what, number, *_), _ in (*self.log.values(), *self._early):
            if what not in (*_AMONG_COPIES, *_UNANSWERED) and number > self._refused.get(src, 0):
                self._refused[src] = number
                self.endpoint.send(src, ("reply", number, NO_LEASE))

    def _process_early(self) -> None:
        early, self._early = self._early, []
        for src, body, payload in early:
            self.dispatch(src, body, payload)

    def dispatch(self, src: int, body: tuple[Any, ...], payload: Payload) -> None:
        """Take a message of either kind."""
        if body[0] in _AMONG_COPIES:
            self.handle(src, body, payload)
        elif body[0] == "here":
            self.server.handle(src, body, payload)
        else:
            self.request(body[2] if body[0] == "shards" else src, body, payload)

    def give_up_silent(self) -> None:
        """If I lead, give lost workers up for all copies; called now and then."""
        if self.leads:
            for worker in failures.silent(self.server, self.endpoint):
                self._append(Request(worker, ("lose", math.inf), []))

    @property
    def left(self) -> tuple[int, ...]:
        """The workers that have finished or are lost."""
        return tuple(sorted(self.server.clocks.ended))

    def awaited(self) -> dict[int, tuple[int, int]]:
        """The copies without which my log can't go on, see `Watch.look`: those I forward to that
        lack some of it, and the heads of servers to which I give keys."""
        found = {rank: (self.shard, self.view.epoch) for rank in self.following
                 if self.acknowledged.get(rank, 0) < self.had}
        return found | (self.transfers.awaited() if self.answers else {})

    # ---- the log, see `replication.Copy` --------------------------------------------------------

    def _append(self, request: Request) -> None:
        """`request` is the next in the log."""
        self.had += 1
        self.log[self.had] = request
        self._last[request.worker] = request.body[1]
        self.rule.updated(self, request.body[0] == "push")

    def forward(self, number: int, dst: int) -> None:
        """Send request `number` to another copy."""
        worker, request, payload = self.log[number]
        body = ("op", self.view.epoch, number, self.stable, worker, request)
        self.endpoint.send(dst, body, payload)

    def carry_out(self, number: int) -> None:
        """Carry out all requests up to `number`."""
        while self.done < number:
            self.done += 1
            worker, body, payload = self.log[self.done]
            self._carried[worker] = body[1]
            self.transfers.goes_on(body[0])
            # The log's tensors stay as they are, for copies that may need them yet.
            self.server.handle(worker, body, [x.clone() for x in payload])
        if self._peeks:
            self._answer_peeks()

    def forget(self, number: int) -> None:
        """Every copy has the requests up to `number`. One that comes back will need what follows
        its snapshot."""
        until = min(number, self.done, math.inf if self._kept is None else self._kept)
        while self.log and (first := next(iter(self.log))) <= until:
            del self.log[first]

    def acknowledge(self, dst: int, number: int) -> None:
        """Tell the copy before me how far I, and all after me, have come, unless it knows."""
        if number > self._told:
            self._told = number
            self.endpoint.send(dst, ("ack", self.view.epoch, number))

    def _again(self, worker: int, body: tuple[Any, ...], payload: Payload) -> None:
        """`worker` asks again for what is in the log: the copy that answers does so once more."""
        if self.answers:
            if body[1] <= self._carried.get(worker, 0):
                self.server.answer_again(worker, body, payload)
        else:
            for dst in self.following:
                self.endpoint.send(dst, ("again", self.view.epoch, worker, body), payload)

    def _answer_peeks(self) -> None:
        """Answer peeks, as far as their keys are here."""
        waiting, self._peeks = self._peeks, []
        for worker, body in waiting:
            asked, here = body[4], self.server.migration.moves
            if asked == here and all(
                    last <= len(self.server.store.index.keys) for _, last in body[2]):
                self.server.peek(self.endpoint, worker, body)
            elif asked >= here:  # else it has been answered by another
                self._peeks.append((worker, body))
