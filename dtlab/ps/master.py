"""The configuration master: says which copies live, and which lead, by leases.

Every copy tells it now and then that it lives, and is granted a lease of `lease_s` seconds from the
moment at which it had said so. A copy that has not been heard of for longer than that can hold no
lease any more, so the master may declare it dead and name another head: there are never two.
Source: Gray & Cheriton, Leases, SOSP 1989.

A copy that was declared dead and is heard of again comes back, one at a time: the copy that answers
sends it a snapshot and keeps the log from there; then it is announced, gets the log, and counts as
one that has everything once it has what all others had when it was announced. If another dies
before that, it starts again: it is never the only one left to speak for what was answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dtlab.comm import Comm
from dtlab.ps.messages import Endpoint
from dtlab.ps.policy import Policy
from dtlab.ps.replication import Unavailable, View

PATIENCE = 1.25  # leases that a copy may be silent for
BEATS = 3  # signs of life a lease
ALL_GONE = "all copies of server {} have died, or had not caught up; its keys are gone with them"
LEFT = ("worker {} has neither asked again nor finished since its last call was refused, and no "
        "worker may be lost")


class Term(NamedTuple):
    """The time from which on a copy led, and until which it held a lease at most."""

    server: int
    epoch: int
    head: int
    from_s: float
    until_s: float


class Return(NamedTuple):
    """A copy that is being sent a snapshot."""

    rank: int
    epoch: int  # in which it was called back
    number: int  # of the snapshot: of an older one, not all is kept that follows it
    heard_s: float


@dataclass
class MasterLog:
    """The record of what the master has seen; `serve` returns it."""

    master: int
    terms: list[Term] = field(default_factory=list)
    dead: dict[int, float] = field(default_factory=dict)  # rank → when it was declared dead
    back: dict[int, float] = field(default_factory=dict)  # rank → when it was a copy again

    def overlaps(self) -> list[tuple[Term, Term]]:
        """Terms of two leaders of one server at the same time. There are none."""
        return [(one, two) for i, one in enumerate(self.terms) for two in self.terms[i + 1 :]
                if one.server == two.server and one.head != two.head
                and one.from_s < two.until_s and two.from_s < one.until_s]


class Master:
    """The loop of the master's rank."""

    def __init__(self, comm: Comm, endpoint: Endpoint, policy: Policy):
        self._comm, self._endpoint, self._policy = comm, endpoint, policy
        self._views = {server: View(0, copies) for server, copies in policy.copies.items()}
        self._server_of = {rank: s for s, copies in policy.copies.items() for rank in copies}
        self._heard_s = dict.fromkeys(self._server_of, comm.now())
        self._working = set(policy.workers)
        self._ended = dict.fromkeys(policy.copies, frozenset[int]())  # by server
        self._ended_s: dict[int, float] = {}  # worker → since when all servers say so
        self._refused_s: dict[int, float] = {}  # worker → since when it has been refused an answer
        self._reports: set[tuple[int, int, int, int]] = set()  # see `_check_links`
        self._over = False
        assert policy.replication is not None
        self._rule = policy.replication
        # Server → the view to announce, and the log's length by copy, as reported.
        self._elections: dict[int, tuple[View, dict[int, int]]] = {}
        self._returning: dict[int, Return] = {}  # by server
        self._snapshots = 0  # asked for so far
        self._catching_up: dict[int, int] = {}  # server → the copy that lacks a part of the log
        self._needed = dict.fromkeys(self._views, 0)  # server → log entries that were answered
        self.log = MasterLog(comm.rank)

    def serve(self) -> MasterLog:
        """Serve until every worker has finished, or none can. Raises `Unavailable` if a link has
        failed without which they can't."""
        while not self._over and self._working - self._gone_workers():
            message = self._endpoint.receive(self._policy.lease_s / BEATS)
            while message is not None:  # beats wait there if this process was suspended
                src, body, _ = message
                if src in self._heard_s:
                    self._heard_s[src] = self._comm.now()
                getattr(self, f"_{body[0]}")(src, body)
                message = self._endpoint.receive(0.0)
            self._find_silent()
            self._check_links()
            if self._policy.lost_worker == "stop" and (away := self._absent()):
                raise Unavailable(LEFT.format(min(away)))
        for rank in self._server_of:
            self._endpoint.send(rank, ("over",))
        return self.log

    def _gone_workers(self) -> set[int]:
        """Workers that the master no longer waits for: they have ended long ago without telling
        the master, or are `_absent`."""
        now_s = self._comm.now()
        patience_s = self._policy.patience_s or self._policy.give_up_s
        for worker in frozenset.intersection(*self._ended.values()):
            self._ended_s.setdefault(worker, now_s)
        return self._absent() | {worker for worker, at_s in self._ended_s.items()
                       if worker in self._endpoint.dead or now_s - at_s > patience_s}

    def _absent(self) -> set[int]:
        """Workers that were refused an answer long ago and have sent no request since."""
        return {worker for worker, at_s in self._refused_s.items() if worker in self._working
                and self._is_long_ago(at_s, self._policy.give_up_s)}

    def _find_silent(self) -> None:
        for rank in list(self._heard_s):
            if rank in self._heard_s and self._is_long_ago(self._heard_s[rank],
                                                           self._patience_s(rank)):
                self._declare_dead(rank)
        for server, returning in list(self._returning.items()):
            if self._is_long_ago(returning.heard_s, PATIENCE * self._policy.lease_s):
                self._give_up(server, returning)

    def _is_long_ago(self, heard_s: float, patience_s: float) -> bool:
        return self._comm.now() - heard_s > patience_s

    def _patience_s(self, rank: int) -> float:
        """Return how long `rank` may be silent: longer if no other copy has everything."""
        server = self._server_of[rank]
        old = self._views[server]
        now, _ = self._elections.get(server, (old, {}))
        others = set(now.members) & set(old.members) - {rank, self._catching_up.get(server)}
        gone, policy = self._endpoint.dead, self._policy
        return PATIENCE * policy.lease_s if others - gone or rank in gone else policy.give_up_s

    def _beat(self, src: int, body: tuple[Any, ...]) -> None:
        """("beat", when it was sent, how much of the log the copy has, workers that have left…)."""
        if src not in self._heard_s:
            self._endpoint.send(src, ("heard",))
            self._readmit(src)
            return
        server = self._server_of[src]
        self._ended[server] |= {*body[3:]}
        if self._catching_up.get(server) == src and body[2] >= self._needed[server]:
            del self._catching_up[server]
        view, until_s = self._views[server], body[1] + self._policy.lease_s
        if view.head == src and server not in self._elections:
            self._note(Term(server, view.epoch, src, body[1], until_s))
        self._endpoint.send(src, ("lease", until_s))

    def _readmit(self, rank: int) -> None:
        """A copy that was declared dead lives: have a snapshot sent to it. If an election is open,
        start it again with the copy."""
        server = self._server_of[rank]
        view, returning = self._views[server], self._returning.get(server)
        if server in self._elections:
            if rank in view.members:
                self._revive(server, rank)
            return
        if server in self._catching_up:
            return
        if returning is None or returning.epoch != view.epoch:
            self._snapshots += 1
            returning = Return(rank, view.epoch, self._snapshots, 0.0)
            self._endpoint.send(self._rule.answers(view), ("adopt", rank, self._snapshots))
        elif returning.rank != rank:
            return  # one copy at a time
        self._returning[server] = returning._replace(heard_s=self._comm.now())

    def _revive(self, server: int, rank: int) -> None:
        """`rank` was declared dead too soon: the election starts again with it."""
        now, _ = self._elections[server]
        if not now.members:
            return  # the workers have been told that all are gone
        self._heard_s[rank] = self.log.back[rank] = self._comm.now()
        old = self._views[server].members
        living = {*now.members, rank}
        members = tuple(member for member in (*old, *now.members) if member in living)
        self._elect(server, View(now.epoch + 1, tuple(dict.fromkeys(members))))

    def _give_up(self, server: int, returning: Return) -> None:
        """A returning copy has fallen silent again: the log need not be kept for it."""
        del self._returning[server]
        if returning.epoch == self._views[server].epoch:
            self._endpoint.send(self._rule.answers(self._views[server]), ("adopt", None, 0))

    def _ready(self, src: int, body: tuple[Any, ...]) -> None:
        """("ready", number): a copy has installed the snapshot of this number."""
        server = self._server_of[src]
        view, returning = self._views[server], self._returning.get(server)
        if returning and server not in self._elections and (returning.epoch, returning.number) == (
                view.epoch, body[1]):
            del self._returning[server]
            self._heard_s[src] = self.log.back[src] = self._comm.now()
            self._elect(server, View(view.epoch + 1, (*view.members, src)))

    def _finish(self, src: int, body: tuple[Any, ...]) -> None:
        """("finish",): a worker has."""
        self._working.discard(src)

    def _leave(self, src: int, body: tuple[Any, ...]) -> None:
        """("leave",): a worker was refused an answer."""
        self._refused_s[src] = self._comm.now()

    def _back(self, src: int, body: tuple[Any, ...]) -> None:
        """("back",): a refused worker sends requests again."""
        self._refused_s.pop(src, None)

    def _probe(self, src: int, body: tuple[Any, ...]) -> None:
        """("probe",): a rank tests its link to the master."""
        self._endpoint.send(src, ("alive",))

    def _unreachable(self, src: int, body: tuple[Any, ...]) -> None:
        """("unreachable", rank, its server, epoch of the reporter's view of that server)."""
        self._reports.add((src, *body[1:]))

    def _check_links(self) -> None:
        """End the run if a living copy was reported unreachable: it is cut off from the reporter
        only, and no other may replace it for that, so no rank would ever go on."""
        reports, self._reports = self._reports, set()
        for src, other, server, epoch in sorted(reports):
            if (epoch == self._views[server].epoch and server not in self._elections
                    and other in self._heard_s and (src in self._heard_s or src in self._working)
                    and not self._is_long_ago(self._heard_s[other],
                                              PATIENCE * self._policy.lease_s)):
                raise Unavailable(
                    f"the link between rank {src} and rank {other} carries nothing any more: rank "
                    f"{src} has waited for a message of rank {other} for "
                    f"{self._policy.give_up_s:g} s, though both still reach the master, rank "
                    f"{self._comm.rank}")

    def _had(self, src: int, body: tuple[Any, ...]) -> None:
        """("had", epoch, place): how much of the log a copy has."""
        server = self._server_of[src]
        if server in self._elections:
            view, had = self._elections[server]
            if body[1] == view.epoch:
                had[src] = body[2]
            if view.members and set(had) == set(view.members):
                self._announce(server, view, had)

    def _declare_dead(self, rank: int) -> None:
        """Declare `rank` dead, and start an election. A copy that was about to join must start
        again if `rank` kept the log for it."""
        del self._heard_s[rank]
        self.log.dead[rank] = self._comm.now()
        server = self._server_of[rank]
        now, _ = self._elections.get(server, (self._views[server], {}))
        members = tuple(member for member in now.members if member != rank)
        old = self._views[server]
        if rank == self._rule.answers(old):
            for joining in set(members) - set(old.members):
                del self._heard_s[joining]
            members = tuple(member for member in members if member in old.members)
        self._elect(server, View(now.epoch + 1, members))
        if not members:
            self._end(ALL_GONE.format(server))

    def _end(self, why: str) -> None:
        """End the run: all open requests raise `Unavailable`."""
        self._over = True
        for server, view in self._views.items():
            epoch = self._elections.get(server, (view,))[0].epoch
            for worker in self._policy.workers:
                self._endpoint.send(worker, ("lost", server, epoch, why))

    def _elect(self, server: int, view: View) -> None:
        """Ask the members of `view` how much of the log each has."""
        self._elections[server] = view, {}
        for member in view.members:
            self._endpoint.send(member, ("elect", view.epoch))

    def _announce(self, server: int, view: View, had: dict[int, int]) -> None:
        members = self._who_lives(server, view, had)
        if not members:
            self._elections[server] = View(view.epoch, ()), {}
            self._end(ALL_GONE.format(server))
            return
        del self._elections[server]
        view = View(view.epoch, self._rule.order(members, had))
        self._views[server] = view
        now_s = self._comm.now()
        self._note(Term(server, view.epoch, view.head, now_s, now_s))
        others = (rank for rank, its in self._server_of.items() if its != server)
        for rank in (*view.members, *others, *sorted(self._working)):
            self._endpoint.send(rank, ("view", server, view.epoch, view.members))

    def _who_lives(self, server: int, view: View, had: dict[int, int]) -> tuple[int, ...]:
        """The copies that have all answered requests, and the one that rejoins."""
        old, needed = self._views[server].members, self._needed[server]
        whole = tuple(m for m in view.members if m in old and had[m] >= needed)
        joining = tuple(m for m in view.members if m not in old)
        for behind in set(view.members) - {*whole, *joining}:
            del self._heard_s[behind]  # it must rejoin
        self._catching_up.pop(server, None)
        if joining:
            self._catching_up[server] = joining[0]
        self._needed[server] = min((had[member] for member in whole), default=needed)
        return whole + joining if whole else ()

    def _note(self, term: Term) -> None:
        """Note the term: one line a term, the last one growing with each lease."""
        terms = self.log.terms
        for place, old in enumerate(terms):
            if (old.server, old.epoch) == (term.server, term.epoch):
                terms[place] = old._replace(until_s=max(old.until_s, term.until_s))
                return
        terms.append(term)
