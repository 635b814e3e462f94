"""Copies of servers: who holds them, in which order requests reach them, when they are answered.

A server is a state machine: equal requests in equal order give equal weights, bit for bit. So
copies need not send weights to each other; they need to agree on one order of requests, the *log*.
A rule here says how the log travels among the live copies of a server, head first:

- `following`: to whom a copy hands a request on;
- `answers`: which copy answers workers;
- `strong`: is a push answered only once every live copy has it?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dtlab.errors import DtlabError


class Unavailable(DtlabError):
    """The server can't answer without breaking its promise: its leader is cut off from the master,
    or all of its copies are gone."""


class View(NamedTuple):
    """The live copies of one server, head first, as the configuration master has announced them."""

    epoch: int
    members: tuple[int, ...]

    @property
    def head(self) -> int:
        """The copy that takes workers' requests: the leader."""
        return self.members[0]


@dataclass(frozen=True)
class Replication:
    """How copies keep up with each other."""

    @property
    def strong(self) -> bool:
        """Is an answered push on every live copy, and does a leader without a lease refuse?"""
        return True

    def following(self, view: View, me: int) -> tuple[int, ...]:
        """To whom `me` hands requests on."""
        raise NotImplementedError

    def answers(self, view: View) -> int:
        """Which copy answers."""
        raise NotImplementedError

    def order(self, members: tuple[int, ...], had: Mapping[int, int]) -> tuple[int, ...]:
        """The live copies in their new order, head first; `had`: how much of the log each has."""
        return members

    def waits(self, view: View, me: int) -> bool:
        """Does `me` carry a request out only once those that follow have it?"""
        return False


@dataclass(frozen=True)
class Chain(Replication):
    """Chain replication: requests enter at the head and go down in order; answers leave at the
    tail, which is the last to have them. Of t copies, t − 1 may crash.

    Each copy keeps what the tail has not acknowledged. Head dies: its successor leads. Tail dies:
    its predecessor is the tail. One in the middle dies: its predecessor hands what it has kept to
    the next. Source: van Renesse & Schneider, Chain replication for supporting high throughput and
    availability, OSDI 2004.
    """

    def following(self, view: View, me: int) -> tuple[int, ...]:
        place = view.members.index(me)
        return view.members[place + 1 : place + 2]

    def answers(self, view: View) -> int:
        return view.members[-1]


@dataclass(frozen=True)
class Leader(Replication):
    """A leader and its followers: it hands every request to all of them.

    sync: it answers once all have it. Otherwise at once: sooner, but if it dies then, what it has
    answered last may be lost; and if it is cut off, it goes on alone.
    """

    sync: bool = True

    @property
    def strong(self) -> bool:
        return self.sync

    def following(self, view: View, me: int) -> tuple[int, ...]:
        return view.members[1:] if me == view.head else ()

    def answers(self, view: View) -> int:
        return view.head

    def order(self, members: tuple[int, ...], had: Mapping[int, int]) -> tuple[int, ...]:
        """Who has most leads: what a follower has beyond its leader's log would be lost, or worse,
        stand in the place of something else. Each had it from the same leader, in order."""
        return tuple(sorted(members, key=lambda member: -had[member]))

    def waits(self, view: View, me: int) -> bool:
        return self.sync and me == view.head
