"""One copy of a server: it puts requests into one order, hands them on, and carries them out.

Nothing is done twice: a request carries its worker's number, and each copy knows the last it has
had. Nothing that was answered is lost: a copy keeps a request until all that follow have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtlab.comm import Comm
from dtlab.ps import care
from dtlab.ps.handover import Handover
from dtlab.ps.mail import Mail
from dtlab.ps.master import BEATS
from dtlab.ps.policy import Policy
from dtlab.ps.replication import Replication, View
from dtlab.ps.server import Server

Wires = list[torch.Tensor]
_AMONG_COPIES = ("op", "ack", "again")
_UNANSWERED = ("clock", "pieces", "lose")  # nobody waits for their answer
NO_LEASE = ("the server's leader has lost touch with the master and may not answer; what you asked "
            "for may be done, or not")


class Logged(NamedTuple):
    """A request in the log."""

    worker: int
    body: tuple[Any, ...]
    wires: Wires


class Replica:
    """The copy on this rank of server `shard`. `lease_end_s`: until when it may lead."""

    def __init__(self, comm: Comm, mail: Mail, policy: Policy, shard: int, rule: Replication):
        self.comm, self.mail, self.policy, self.shard, self.rule = comm, mail, policy, shard, rule
        self.view = View(0, policy.copies[shard])
        self.server = Server(comm, self, policy, shard)
        self.handover = Handover(mail, policy, shard)
        self.lease_end_s = -1.0
        self.log: dict[int, Logged] = {}  # by place, what those that follow may not have yet
        self.had = self.done = self.stable = 0  # places: received, carried out, on all that follow
        self.promised = 0  # the epoch of an election in which this copy has told what it has
        self._acked: dict[int, int] = {}
        self._kept: int | None = None  # forget nothing after this place: see `adopt`
        self._told = -1  # the place that I acknowledged last
        self._last: dict[int, int] = {}  # worker → the number of its last request in the log
        self._carried: dict[int, int] = {}  # the same, of those carried out
        self._peeks: list[tuple[int, tuple[Any, ...]]] = []  # for keys that have not come yet
        # Letters of an epoch to come, and requests as long as I don't lead: whatever a worker asks
        # of me, all that it asked before is done or stands here too.
        self._early: list[tuple[int, tuple[Any, ...], Wires]] = []
        self._lapsed = 0  # signs of life given since my lease was over: time spent asleep is none
        self._refused: dict[int, int] = {}  # worker → the number of its last request refused

    # ---- what the server writes, as if it had the letter box to itself --------------------------

    def send(self, dst: int, body: tuple[Any, ...], wires: Sequence[torch.Tensor] = ()) -> None:
        """An answer of the state machine, or what another server is given: one copy sends it."""
        if body[0] == "pieces":
            self.handover.sent[dst] = body, wires
            if self.answers:
                self.handover.send(dst)
        elif self.answers:
            self.mail.send(dst, body, wires)

    def lends(self, x: torch.Tensor) -> bool:
        """See `Mail.lends`."""
        return self.mail.lends(x)

    def recycle(self, wire: torch.Tensor) -> None:
        """See `Mail.recycle`."""
        self.mail.recycle(wire)

    def borrows(self, x: torch.Tensor) -> bool:
        """What is in the log is ours."""
        return False

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """See `Mail.own`."""
        return self.mail.own(x)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """See `Mail`."""
        return self.mail.moved_bytes

    # ---- roles ----------------------------------------------------------------------------------

    @property
    def me(self) -> int:
        """My rank."""
        return self.comm.rank

    @property
    def is_member(self) -> bool:
        """Am I among the live copies?"""
        return self.me in self.view.members

    @property
    def answers(self) -> bool:
        """Is it me who answers workers?"""
        return self.is_member and self.rule.answers(self.view) == self.me

    @property
    def following(self) -> tuple[int, ...]:
        """To whom I hand requests on."""
        return self.rule.following(self.view, self.me) if self.is_member else ()

    def may_lead(self) -> bool:
        """Have I a lease? Weak rules don't ask for one."""
        return not self.rule.strong or self.comm.now() < self.lease_end_s

    @property
    def is_head(self) -> bool:
        """Am I the head, as far as I know?"""
        return self.is_member and self.view.head == self.me

    @property
    def leads(self) -> bool:
        """Is it me who puts requests into order now? Not between an election and its outcome: the
        master counts on what it was told."""
        return self.is_head and self.may_lead() and self.promised <= self.view.epoch

    # ---- letters --------------------------------------------------------------------------------

    def request(self, worker: int, body: tuple[Any, ...], wires: Wires) -> None:
        """From a worker, or from another server: (what, number, …)."""
        if body[0] == "peek":
            self._peeks.append((worker, body))
            self._show()
            return
        if not self.leads:  # perhaps I shall soon
            self._early.append((worker, body, wires))
        elif body[1] <= self._last.get(worker, 0):
            self._again(worker, body, wires)
        else:
            if body[0] == "init":  # what the disk holds now, no copy may look up later
                body = (*body, care.newest(self.policy))
            self._accept(Logged(worker, body, wires))

    def handle(self, src: int, body: tuple[Any, ...], wires: Wires) -> None:
        """From another copy: ("op", epoch, place, stable, worker, request), ("ack", epoch, place)
        or ("again", epoch, worker, request)."""
        epoch = body[1]
        if epoch > self.view.epoch:
            self._early.append((src, body, wires))
        elif epoch < self.view.epoch or epoch < self.promised:
            return  # from one that does not know yet that it leads no more
        elif body[0] == "op":
            _, _, place, stable, worker, request = body
            if place == self.had + 1:
                self._accept(Logged(worker, request, wires))
            elif src == self._before():
                self._acknowledge(even_so=True)
            if not self.following:
                self._forget(stable)
        elif body[0] == "ack":
            self._acked[src] = max(body[2], self._acked.get(src, 0))
            self._settle()
        else:
            self._again(body[2], body[3], wires)

    def change(self, view: View) -> None:
        """The master has announced who lives."""
        if view.epoch <= self.view.epoch:
            return
        self.view, self._refused = view, {}
        if self.is_member:
            self._acked, self._told, self._kept = {}, -1, None
            for place in sorted(self.log):
                self._hand_on(place)
            self._settle()
        if self.answers:
            self.handover.send_again()
        self._read_early()

    def granted(self, until_s: float) -> None:
        """The master lets me lead, if I am the head, until `until_s`."""
        led, self.lease_end_s = self.leads, max(until_s, self.lease_end_s)
        if self.may_lead():
            self._lapsed = 0
        if not led:
            self._read_early()

    def adopt(self, rank: int | None, number: int) -> None:
        """Give `rank`, which was declared dead, all that it needs to be a copy again, as snapshot
        `number`; from here on it will get the log, once the master has announced it. None: it is
        gone again."""
        self._kept = None if rank is None else self.done
        if rank is not None:
            state = self.server.snapshot(), self._carried, self.handover.sent
            self.mail.send(rank, ("snapshot", number, self.view.epoch, self.done, state))

    def install(self, epoch: int, place: int, state: tuple[Any, ...]) -> bool:
        """Forget all that I had and go on from another copy's snapshot, unless it comes too late.
        Returns whether I do."""
        if epoch < max(self.view.epoch, self.promised):
            return False
        seen = self.server.statistics
        seen.rejoined += 1
        seen.lost += sum(entry.body[0] == "push" for at, entry in self.log.items()
                         if self.stable < at <= self.done)
        snapshot, self._carried, self.handover.sent = state
        self._last = dict(self._carried)  # requests after `place` will come with the log
        self.server.restore(snapshot)
        self.view = View(epoch, tuple(m for m in self.policy.copies[self.shard] if m != self.me))
        self.log, self.had, self.done, self.stable = {}, place, place, place
        return True

    def lapse(self) -> None:
        """Called with each sign of life. A head without a lease may get one again, or another may
        lead; if that takes longer than the workers want to wait, it tells them."""
        if not self.is_head or self.may_lead() or self.lease_end_s < 0:
            self._lapsed = 0
            return
        if self._lapsed * self.policy.lease_s / BEATS >= self.policy.grace_s:
            self.refuse()
        self._lapsed += 1

    def refuse(self) -> None:
        """Tell workers that what they asked for may be done, or not. It stays in line, for what
        they ask next must not overtake it. Not of a clock: nobody waits for that."""
        for src, (what, number, *_), _ in (*self.log.values(), *self._early):
            if what not in (*_AMONG_COPIES, *_UNANSWERED) and number > self._refused.get(src, 0):
                self._refused[src] = number
                self.mail.send(src, ("reply", number, NO_LEASE))

    def _read_early(self) -> None:
        early, self._early = self._early, []
        for src, body, wires in early:
            self.dispatch(src, body, wires)

    def dispatch(self, src: int, body: tuple[Any, ...], wires: Wires) -> None:
        """A letter of either kind."""
        if body[0] in _AMONG_COPIES:
            self.handle(src, body, wires)
        elif body[0] == "here":
            self.server.handle(src, body, wires)
        else:
            self.request(body[2] if body[0] == "pieces" else src, body, wires)

    def miss(self) -> None:
        """Called now and then: if I lead, workers that are lost are so for all copies."""
        if self.leads:
            for worker in care.silent(self.server, self.mail):
                self._accept(Logged(worker, ("lose", math.inf), []))

    @property
    def left(self) -> tuple[int, ...]:
        """The workers that have finished or are lost, if any may be lost."""
        return tuple(sorted(self.server.clocks.ended)) if self.policy.patience_s else ()

    # ---- the log --------------------------------------------------------------------------------

    def _accept(self, entry: Logged) -> None:
        """`entry` is the next in the log."""
        self.had += 1
        self.log[self.had] = entry
        self._last[entry.worker] = entry.body[1]
        if self.rule.strong or entry.body[0] != "push":
            self._hand_on(self.had)
            self._settle()
        else:  # answer first: sooner, but what was answered may be lost
            self._settle()
            if self.following:
                self._hand_on(self.had)

    def _hand_on(self, place: int) -> None:
        entry = self.log[place]
        for dst in self.following:
            body = ("op", self.view.epoch, place, self.stable, entry.worker, entry.body)
            self.mail.send(dst, body, entry.wires)

    def _settle(self) -> None:
        """Carry out what may be, forget what all that follow have, and say how far that is."""
        if self.rule.strong and self.promised > self.view.epoch:
            return
        following = self.following
        if following:
            self.stable = max(self.stable, min(self._acked.get(dst, 0) for dst in following))
        elif self.answers:
            self.stable = self.had
        self._carry_out_until(self.stable if self.rule.waits(self.view, self.me) else self.had)
        self._forget(self.stable)
        self._acknowledge()

    def _carry_out_until(self, place: int) -> None:
        while self.done < place:
            self.done += 1
            worker, body, wires = self.log[self.done]
            self._carried[worker] = body[1]
            self.handover.goes_on(body[0])
            # The log's tensors stay as they are, for copies that may need them yet.
            self.server.handle(worker, body, [wire.clone() for wire in wires])
        if self._peeks:
            self._show()

    def _show(self) -> None:
        """Answer those who look at what is here, as far as it is here."""
        waiting, self._peeks = self._peeks, []
        for worker, body in waiting:
            asked, here = body[4], self.server.resizing.moves
            if asked == here and all(
                    last <= len(self.server.store.places.keys) for _, last in body[2]):
                self.server.peek(self.mail, worker, body)
            elif asked >= here:  # else it has been answered by another
                self._peeks.append((worker, body))

    def _forget(self, stable: int) -> None:
        # A copy that comes back will need what follows its snapshot.
        until = min(stable, self.done, math.inf if self._kept is None else self._kept)
        for place in [place for place in self.log if place <= until]:
            del self.log[place]

    def _before(self) -> int | None:
        """The copy that hands requests to me."""
        for other in self.view.members:
            if self.me in self.rule.following(self.view, other):
                return other
        return None

    def _acknowledge(self, even_so: bool = False) -> None:
        """Tell the copy before me how far I, and all after me, have come, unless it knows."""
        before, place = self._before(), self.stable if self.following else self.had
        if before is not None and (even_so or place > self._told):
            self._told = place
            self.mail.send(before, ("ack", self.view.epoch, place))

    def _again(self, worker: int, body: tuple[Any, ...], wires: Wires) -> None:
        """`worker` asks again for what is in the log: whoever answers does so once more."""
        if self.answers:
            if body[1] <= self._carried.get(worker, 0):
                self.server.answer_again(worker, body, wires)
        else:
            for dst in self.following:
                self.mail.send(dst, ("again", self.view.epoch, worker, body), wires)
