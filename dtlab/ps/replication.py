"""Copies of servers: how an update reaches all of them, and which of them answers.

A server is a state machine: equal requests in equal order give equal weights, bit for bit. So
copies need not send weights to each other; they need to agree on one order of requests, the *log*.
`Chain` and `Leader` say what a copy does on an update, on an acknowledgement, and when its
neighbours change. Elections, leases and what a copy does with messages: `master` and `replica`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dtlab.checks import check_flag
from dtlab.errors import DtlabError


class Unavailable(DtlabError):
    """The server can't answer without breaking its promise: its leader is cut off from the master,
    all of its copies are gone, or a link that it needs carries nothing any more."""


class View(NamedTuple):
    """The live copies of one server, head first, as the configuration master has announced them."""

    epoch: int
    members: tuple[int, ...]

    @property
    def head(self) -> int:
        """The copy that takes workers' requests: the leader."""
        return self.members[0]

    @property
    def tail(self) -> int:
        """The copy that is last to have a request, in a chain."""
        return self.members[-1]

    def before(self, rank: int) -> tuple[int, ...]:
        """The predecessor of `rank`, if it has one."""
        place = self.members.index(rank)
        return self.members[max(place - 1, 0) : place]

    def after(self, rank: int) -> tuple[int, ...]:
        """The successor of `rank`, if it has one."""
        place = self.members.index(rank)
        return self.members[place + 1 : place + 2]


class ServerCopy(Protocol):
    """The copy on this rank, as a rule sees it. Requests are numbered from 1, in their order."""

    me: int
    view: View  # in which this copy is a member
    had: int  # how many requests it has received
    stable: int  # how many every copy has
    log: dict[int, Any]  # by number, the requests that some copy may not have yet
    acknowledged: dict[int, int]  # by rank of a copy, how many it has said that it has

    def forward(self, number: int, dst: int) -> None:
        """Send request `number` of the log to the copy on rank `dst`."""

    def carry_out(self, number: int) -> None:
        """Carry out all requests up to `number`; the copy that `answers` replies to workers."""

    def forget(self, number: int) -> None:
        """Every copy has the requests up to `number`: they need not stay in the log."""

    def acknowledge(self, dst: int, number: int) -> None:
        """Tell the copy on rank `dst` that requests up to `number` are here, and behind here."""


@dataclass(frozen=True)
class Replication:
    """A rule by which copies keep up with each other."""

    @property
    def strong(self) -> bool:
        """Is an answered push on every live copy, and does a leader without a lease refuse?"""
        return True

    def following(self, view: View, me: int) -> tuple[int, ...]:
        """The successors of `me`: the copies to which it forwards requests."""
        raise NotImplementedError

    def answers(self, view: View) -> int:
        """Return the copy that answers."""
        raise NotImplementedError

    def order(self, members: tuple[int, ...], had: Mapping[int, int]) -> tuple[int, ...]:
        """The live copies in their new order, head first; `had`: how much of the log each has."""
        return members

    def updated(self, copy: ServerCopy, push: bool) -> None:
        """Request `copy.had` is new in the log: at the head from a worker, elsewhere from the copy
        before. push: a worker waits for nothing but the answer."""
        raise NotImplementedError

    def acknowledged(self, copy: ServerCopy) -> None:
        """A copy that follows has said how many requests it has, see `Copy.acknowledged`."""
        raise NotImplementedError

    def reconfigured(self, copy: ServerCopy) -> None:
        """`copy.view` is new: a successor may lack anything that is in the log, and what a copy has
        said to one that is gone is said again."""
        for successor in self.following(copy.view, copy.me):
            for number in copy.log:
                copy.forward(number, successor)
        self.acknowledged(copy)


@dataclass(frozen=True)
class Chain(Replication):
    """Chain replication: requests enter at the head and go down in order; answers leave at the
    tail, which is the last to have them. Of t copies, t − 1 may crash.

    Each copy keeps what the tail has not acknowledged. Head dies: its successor leads. Tail dies:
    its predecessor is the tail. One in the middle dies: its predecessor forwards what it has kept
    to the next. Source: van Renesse & Schneider, Chain replication for supporting high throughput
    and availability, OSDI 2004.
    """

    def following(self, view: View, me: int) -> tuple[int, ...]:
        return view.after(me)

    def answers(self, view: View) -> int:
        return view.tail

    def updated(self, copy: ServerCopy, push: bool) -> None:
        for successor in copy.view.after(copy.me):
            copy.forward(copy.had, successor)
        copy.carry_out(copy.had)  # the tail's answer goes to the worker
        self.acknowledged(copy)

    def acknowledged(self, copy: ServerCopy) -> None:
        """Note what all copies have: the tail says what it has, and the chain passes that on."""
        for successor in copy.view.after(copy.me):
            copy.stable = max(copy.stable, copy.acknowledged.get(successor, 0))
        if copy.me == copy.view.tail:
            copy.stable = copy.had
        copy.forget(copy.stable)
        for predecessor in copy.view.before(copy.me):
            copy.acknowledge(predecessor, copy.stable)


@dataclass(frozen=True)
class Leader(Replication):
    """A leader and its followers: it forwards every request to all of them.

    sync: it answers once all have it. Otherwise at once: sooner, but if it dies then, what it has
    answered last may be lost; and if it is cut off, it goes on alone.
    """

    sync: bool = True

    def __post_init__(self) -> None:
        check_flag("Leader's sync", self.sync)

    @property
    def strong(self) -> bool:
        return self.sync

    def following(self, view: View, me: int) -> tuple[int, ...]:
        return view.members[1:] if me == view.head else ()

    def answers(self, view: View) -> int:
        return view.head

    def order(self, members: tuple[int, ...], had: Mapping[int, int]) -> tuple[int, ...]:
        """The copy that has most leads: what a follower has beyond its leader's log would be lost,
        or stand in the place of another request. Each had it from the same leader, in order."""
        return tuple(sorted(members, key=lambda member: -had[member]))

    def updated(self, copy: ServerCopy, push: bool) -> None:
        answers_first = push and not self.sync
        if answers_first:
            self.acknowledged(copy)
        for follower in self.following(copy.view, copy.me):
            copy.forward(copy.had, follower)
        if not answers_first:
            self.acknowledged(copy)

    def acknowledged(self, copy: ServerCopy) -> None:
        if copy.me == copy.view.head:
            followers = copy.view.members[1:]
            known = [copy.acknowledged.get(follower, 0) for follower in followers]
            copy.stable = max(copy.stable, min(known, default=copy.had))
            copy.carry_out(copy.stable if self.sync else copy.had)
        else:
            copy.carry_out(copy.had)
            copy.acknowledge(copy.view.head, copy.had)
        copy.forget(copy.stable)
