"""Copies that elect a leader among themselves: the votes of Raft, without its log.

No master, no clock in common. Time is cut into numbered terms; a copy that hears no leader for a
while, drawn at random each time, begins a new term and asks for votes; it leads once a majority has
voted for it. Two leaders of one term can't be: a copy votes once in a term, and two majorities
share a copy. Two at the same *time* can: one that is cut off leads its old term until it hears of a
newer one. In Raft it can't commit anything meanwhile, for that takes a majority.
Source: Ongaro & Ousterhout, In search of an understandable consensus algorithm, USENIX ATC 2014,
§5.2; its log, and the vote that looks at it (§5.4), are left out. Chapter: 09b.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from dtlab.checks import short
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps.checks import amount
from dtlab.ps.messages import Endpoint


class Led(NamedTuple):
    """The time in which a copy led a term, as it saw it itself."""

    term: int
    from_s: float
    until_s: float


def elect(comm: Comm, until_s: float, seed: int = 0, wait_s: tuple[float, float] = (0.15, 0.30),
          beat_s: float = 0.05) -> list[Led]:
    """Take part in elections until `until_s`, as one of the copies that `comm` joins.

    wait_s: a copy waits for a sign of life from a leader for a time between these two, drawn anew
    each time from `seed` and its rank. beat_s: how often a leader gives one. Returns what terms
    this copy has led.
    """
    copy = Copy(comm, random.Random(f"{seed} {comm.rank}"), wait_s, beat_s)
    while (left_s := until_s - comm.now()) > 0:
        message = copy.endpoint.receive(min(left_s, max(copy.deadline_s - comm.now(), 0.0)))
        if message is not None:
            copy.hear(message.src, *message.body)
        elif comm.now() >= copy.deadline_s:
            copy.run_out()
    copy.step_down(copy.term)
    copy.endpoint.close()
    return copy.led


class Copy:
    """One copy's part in the elections."""

    def __init__(self, comm: Comm, draw: random.Random, wait_s: tuple[float, float], beat_s: float):
        check_comm(comm, "elect(comm, until_s)")
        if not isinstance(wait_s, (tuple, list)) or len(wait_s) != 2:
            raise ConfigError(f"wait_s is two times, the shortest and the longest, not "
                              f"{short(wait_s)}")
        for name, value in (("beat_s", beat_s), *(("each of wait_s", each) for each in wait_s)):
            amount(name, value)
        self.comm, self.draw, self.wait_s, self.beat_s = comm, draw, wait_s, beat_s
        self.endpoint = Endpoint(comm, range(comm.size), may_die=range(comm.size))
        self.term = 0
        self.vote: int | None = None  # whom it has voted for in this term
        self.votes: set[int] = set()  # whose votes it has in this term
        self.leads_since_s: float | None = None
        self.led: list[Led] = []
        self.be_patient()

    def be_patient(self) -> None:
        """A leader, or a candidate with my vote, is there: wait for it once more."""
        self.deadline_s = self.comm.now() + self.draw.uniform(*self.wait_s)

    def run_out(self) -> None:
        """The time is over: a leader's, until its next sign of life; any other's, for a leader."""
        if self.leads_since_s is not None:
            self.deadline_s = self.comm.now() + self.beat_s
            self.tell_all("beat")
            return
        self.step_down(self.term + 1)
        self.vote = self.comm.rank
        self.be_patient()
        self.tell_all("ask")
        self.count(self.comm.rank)

    def hear(self, src: int, verb: str, term: int) -> None:
        """A message: what `src` says in its term."""
        if term > self.term:  # a leader that hears of a later term steps down
            self.step_down(term)
        if term < self.term:
            if verb in ("ask", "beat"):  # from somebody who has missed something
                self.endpoint.send(src, ("late", self.term))
        elif verb == "ask" and self.vote in (None, src):
            self.vote = src
            self.be_patient()
            self.endpoint.send(src, ("vote", term))
        elif verb == "vote":
            self.count(src)
        elif verb == "beat":
            self.be_patient()

    def count(self, voter: int) -> None:
        """One vote more for me, in this term."""
        self.votes.add(voter)
        if self.leads_since_s is None and len(self.votes) > self.comm.size // 2:
            self.leads_since_s = self.comm.now()
            self.run_out()

    def step_down(self, term: int) -> None:
        """Enter this term, as nobody's leader and with a vote to give."""
        if self.leads_since_s is not None:
            self.led.append(Led(self.term, self.leads_since_s, self.comm.now()))
        self.term, self.vote, self.votes, self.leads_since_s = term, None, set(), None

    def tell_all(self, verb: str) -> None:
        """Send this to all others, with my term."""
        for peer in range(self.comm.size):
            if peer != self.comm.rank:
                self.endpoint.send(peer, (verb, self.term))
