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
_UNANSWERED = ("clock", "shards", "lose")
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
        self.log: dict[int, Request] = {}  # by number, what successors may not have yet
        self.had = self.done = self.stable = 0  # last received, carried out, on all successors
        self.promised = 0  # the epoch of the last election in which this copy has voted
        self.acknowledged: dict[int, int] = {}
        self._snapshot_at: int | None = None  # keep the log from here: see `adopt`
        self._last_ack = -1
        self._last: dict[int, int] = {}  # worker → the number of its last request in the log
        self._last_done: dict[int, int] = {}  # the same of those carried out
        self._peeks: list[tuple[int, tuple[Any, ...]]] = []  # for keys that are not here yet
        # Messages of a later epoch; and requests while this copy does not lead, in order.
        self._deferred: list[tuple[int, tuple[Any, ...], Payload]] = []
        self._beats_without_lease = 0  # a suspended process sends none, so that time does not count
        self._last_refused: dict[int, int] = {}  # worker → the number of its last request refused

    # ---- what the server sends, see `server.Outbox` ---------------------------------------------

    def send(self, dst: int, body: tuple[Any, ...], payload: Sequence[torch.Tensor] = ()) -> None:
        """Send a message of the state machine, if this copy answers for the server."""
        if body[0] == "shards":
            self.transfers.sent[dst] = body, payload
            if self.answers:
                self.transfers.send(dst)
        elif self.answers:
            self.endpoint.send(dst, body, payload)

    def is_sending(self, x: torch.Tensor) -> bool:
        """See `Endpoint.is_sending`."""
        return self.endpoint.is_sending(x)

    # ---- roles ----------------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        """Is this copy among the live ones?"""
        return self.me in self.view.members

    @property
    def answers(self) -> bool:
        """Does this copy answer workers?"""
        return self.is_member and self.rule.answers(self.view) == self.me

    @property
    def following(self) -> tuple[int, ...]:
        """The copies to which this one forwards requests."""
        return self.rule.following(self.view, self.me) if self.is_member else ()

    def may_lead(self) -> bool:
        """Does this copy hold a lease? Weak rules need none."""
        return not self.rule.strong or self.comm.now() < self.lease_end_s

    @property
    def is_head(self) -> bool:
        """Is this copy the head, as far as it knows?"""
        return self.is_member and self.view.head == self.me

    @property
    def leads(self) -> bool:
        """Does this copy append requests to the log? Not between an election and its outcome, as
        the master relies on the length of the log that the copy has reported."""
        return self.is_head and self.may_lead() and self.promised <= self.view.epoch

    # ---- messages -------------------------------------------------------------------------------

    def request(self, worker: int, body: tuple[Any, ...], payload: Payload) -> None:
        """Take a request from a worker, or from another server: (what, number, …)."""
        if body[0] == "peek":
            self._peeks.append((worker, body))
            self._answer_peeks()
            return
        if not self.leads:  # perhaps it soon will
            self._deferred.append((worker, body, payload))
        elif body[1] <= self._last.get(worker, 0):
            self._again(worker, body, payload)
        else:
            if body[0] == "init":  # all copies must go on from one checkpoint
                body = (*body, failures.newest(self.policy))
            self._append(Request(worker, body, payload))

    def handle(self, src: int, body: tuple[Any, ...], payload: Payload) -> None:
        """Take from another copy ("op", epoch, number, stable, worker, request), ("ack", epoch,
        number) or ("again", epoch, worker, request)."""
        epoch = body[1]
        if epoch > self.view.epoch:
            self._deferred.append((src, body, payload))
        elif epoch < self.view.epoch or epoch < self.promised or not self.is_member:
            return  # from a former leader
        elif body[0] == "op":
            _, _, number, stable, worker, request = body
            self.stable = max(self.stable, min(stable, self.had))
            if number == self.had + 1:
                self._append(Request(worker, request, payload))
            else:  # received before: acknowledge it again
                self._last_ack = -1
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
        self.view, self._last_refused = view, {}
        if self.is_member:
            self.acknowledged, self._last_ack, self._snapshot_at = {}, -1, None
            self.rule.reconfigured(self)
        if self.answers:
            self.transfers.send_again()
        self._process_deferred()

    def granted(self, until_s: float) -> None:
        """The master has granted this copy a lease until `until_s`."""
        led, self.lease_end_s = self.leads, max(until_s, self.lease_end_s)
        if self.may_lead():
            self._beats_without_lease = 0
        if not led:
            self._process_deferred()

    def adopt(self, rank: int | None, number: int) -> None:
        """Send `rank`, which was declared dead, snapshot `number`, and keep the log from here until
        the master announces it as a live copy. None: it has fallen silent again."""
        self._snapshot_at = None if rank is None else self.done
        if rank is not None:
            state = self.server.snapshot(), self._last_done, self.transfers.sent
            self.endpoint.send(rank, ("snapshot", number, self.view.epoch, self.done, state))

    def install(self, epoch: int, number: int, state: tuple[Any, ...]) -> bool:
        """Replace the state by another copy's snapshot, unless that is out of date. Returns whether
        it was replaced."""
        if epoch < max(self.view.epoch, self.promised):
            return False
        seen = self.server.statistics
        seen.rejoined += 1
        seen.lost += sum(entry.body[0] == "push" for at, entry in self.log.items()
                         if self.stable < at <= self.done)
        snapshot, self._last_done, self.transfers.sent = state
        self._last = dict(self._last_done)  # requests after `number` will come with the log
        self.server.restore(snapshot)
        self.view = View(epoch, tuple(m for m in self.policy.copies[self.shard] if m != self.me))
        self.log, self.had, self.done, self.stable = {}, number, number, number
        return True

    def lapse(self) -> None:
        """Count a beat without a lease. After `grace_s` of them a head refuses its requests."""
        if not self.is_head or self.may_lead() or self.lease_end_s < 0:
            self._beats_without_lease = 0
            return
        if self._beats_without_lease * self.policy.lease_s / BEATS >= self.policy.grace_s:
            self.refuse()
        self._beats_without_lease += 1

    def refuse(self) -> None:
        """Refuse all requests that are not answered. They stay in the log, as the workers' next
        requests must not overtake them."""
        for src, (what, number, *_), _ in (*self.log.values(), *self._deferred):
            answered = what not in (*_AMONG_COPIES, *_UNANSWERED)
            if answered and number > self._last_refused.get(src, 0):
                self._last_refused[src] = number
                self.endpoint.send(src, ("reply", number, NO_LEASE))

    def _process_deferred(self) -> None:
        early, self._deferred = self._deferred, []
        for src, body, payload in early:
            self.dispatch(src, body, payload)

    def dispatch(self, src: int, body: tuple[Any, ...], payload: Payload) -> None:
        """Take a message of either kind."""
        if body[0] in _AMONG_COPIES:
            self.handle(src, body, payload)
        elif body[0] == "alive":
            self.server.unheard[src] = 0
        else:
            self.request(body[2] if body[0] == "shards" else src, body, payload)

    def give_up_silent(self) -> None:
        """If this copy leads, give up silent workers, through the log; called now and then."""
        if self.leads:
            for worker in failures.silent_workers(self.server, self.endpoint):
                self._append(Request(worker, ("lose", math.inf), []))

    @property
    def ended_workers(self) -> tuple[int, ...]:
        """The workers that have finished or are lost."""
        return tuple(sorted(self.server.clocks.finished))

    def awaited(self) -> dict[int, tuple[int, int]]:
        """The copies without which this one can't go on, see `Watch.check`: successors that lack a
        part of the log, and the heads of servers to which keys move."""
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
            self._last_done[worker] = body[1]
            self.transfers.request_done(body[0])
            # The log's tensors stay as they are, for copies that may need them yet.
            self.server.handle(worker, body, [x.clone() for x in payload])
        if self._peeks:
            self._answer_peeks()

    def forget(self, number: int) -> None:
        """Drop the requests up to `number`, which every copy has, but none that follows a snapshot
        that was sent."""
        until = min(number, self.done, math.inf if self._snapshot_at is None else self._snapshot_at)
        while self.log and (first := next(iter(self.log))) <= until:
            del self.log[first]

    def acknowledge(self, dst: int, number: int) -> None:
        """Acknowledge the requests up to `number` to `dst`, once."""
        if number > self._last_ack:
            self._last_ack = number
            self.endpoint.send(dst, ("ack", self.view.epoch, number))

    def _again(self, worker: int, body: tuple[Any, ...], payload: Payload) -> None:
        """`worker` has repeated a request of the log: the copy that answers does so again."""
        if self.answers:
            if body[1] <= self._last_done.get(worker, 0):
                self.server.answer_again(worker, body, payload)
        else:
            for dst in self.following:
                self.endpoint.send(dst, ("again", self.view.epoch, worker, body), payload)

    def _answer_peeks(self) -> None:
        """Answer the peeks whose keys are here."""
        waiting, self._peeks = self._peeks, []
        for worker, body in waiting:
            asked, here = body[4], self.server.migration.moves
            if asked == here and all(
                    last <= len(self.server.store.index.keys) for _, last in body[2]):
                self.server.peek(self.endpoint, worker, body)
            elif asked >= here:  # else it has been answered by another
                self._peeks.append((worker, body))
