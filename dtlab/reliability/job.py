"""A job whose nodes fail, event by event.

Time is counted in whole microseconds, so that rank-seconds add up exactly. The job has *places*;
a place holds a node, or none. Between two events all nodes present do the same: they work, save,
load, or wait. Progress is counted in node-microseconds of work: work that is behind the furthest
progress so far is done again.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dtlab.reliability.failures import Failures

KINDS = ("productive", "redone", "blocked", "absent")
TICKS = 1_000_000  # a second
MOST_INTERVALS = 10_000  # of a timeline; a picture shows no more


class Interval(NamedTuple):
    """From `start_s` to `end_s`, the places `absent` are absent, all others are of this kind."""

    start_s: float
    end_s: float
    kind: str
    absent: frozenset[int]


@dataclass(frozen=True)
class Case:
    """The arguments of `goodput`, times in ticks."""

    nodes: int
    failures: Failures
    save: int
    restart: int
    interval: int
    answer: str
    duration: int
    spares: int
    repair: int
    copy: int | None  # None: no copies in memory
    copy_restart: int
    group: int
    seed: int


class Job:
    """`run` plays the whole duration; then `ticks`, `failures`, `restarts`, `timeline` hold."""

    def __init__(self, case: Case):
        self.case, self.draws, self.now = case, random.Random(case.seed), 0
        self.ticks = dict.fromkeys(KINDS, 0)
        self.failures = self.restarts = 0
        self.timeline: list[Interval] = []
        # Progress, in node-ticks, and ticks of work since the last save and the last copy.
        self.progress = self.furthest = self.saved = 0
        self.since_save = self.since_copy = 0
        # What the nodes present do: wait for nodes; else pause, because they load or save; or work.
        self.waiting = self.loading = self.saving = False
        self.pause = 0
        # Who is where.
        self.node_at: list[int | None] = [None] * case.nodes
        self.place_of: dict[int, int] = {}
        self.spares = deque(range(case.nodes + case.spares))
        self.empty = set(range(case.nodes))
        self.absent: frozenset[int] = frozenset()
        self.bad, self.strikes = set(range(case.failures.bad)), Counter[int]()
        # Where copies in memory are: places lost since the last recovery, and empty ones then.
        self.lost: set[int] = set()
        self.left_out: set[int] = set()
        self.from_disk = False
        self.down: dict[int, int | None] = {}  # group → when it is healed, if that is known
        # (time, number, what, which)
        self.events: list[tuple[int, int, str, int]] = []
        self.fails_at: dict[int, int] = {}  # node → time
        self._number = itertools.count()  # of two events at one time, the first planned is first
        self._fill(new=False)
        for rack in range(math.ceil((case.nodes + case.spares) / case.failures.rack)):
            self._plan_switch(rack)
        for number, (at_s, _) in enumerate(case.failures.at):
            self._plan(at_s, "given", number)

    def run(self) -> None:
        """Play all events."""
        act = {"fails": self._node_fails, "switch": self._switch_fails, "given": self._given_fails,
               "repaired": self._node_returns, "healed": self._group_is_healed}
        while self.events:
            at, _, what, which = heapq.heappop(self.events)
            self._go_on_until(at)
            act[what](which)
        self._go_on_until(self.case.duration)

    # ---- events --------------------------------------------------------------------------------

    def _plan(self, after_s: float, what: str, which: int) -> int:
        """Add an event so many seconds from now, if it comes before the end."""
        if after_s * TICKS >= self.case.duration - self.now:
            return -1
        at = self.now + round(after_s * TICKS)
        heapq.heappush(self.events, (at, next(self._number), what, which))
        return at

    def _node_fails(self, node: int) -> None:
        if self.fails_at.get(node) != self.now:  # it is not in place any more
            return
        self.strikes[node] += 1
        if self.strikes[node] == self.case.failures.exclude_after:
            self.bad.discard(node)  # another machine takes its number
        self._lose([node])

    def _switch_fails(self, rack: int) -> None:
        self._plan_switch(rack)
        size = self.case.failures.rack
        for node in [spare for spare in self.spares if spare // size == rack]:
            self.spares.remove(node)
            self._repair(node)
        self._lose([node for node in self.place_of if node // size == rack])

    def _plan_switch(self, rack: int) -> None:
        switch = Failures(self.case.failures.rack_per_day)
        self._plan(switch.lifetime_s(self.draws, bad=False), "switch", rack)

    def _given_fails(self, number: int) -> None:
        nodes = [self.node_at[place] for place in self.case.failures.at[number][1]]
        self._lose([node for node in nodes if node is not None])

    def _node_returns(self, node: int) -> None:
        """A repaired node takes an empty place, or is a spare."""
        self.spares.append(node)
        filled = self._fill()
        if self.case.answer == "replicas":
            self._heal()
        elif filled and (self.case.answer == "shrink" or not self.empty):
            self._load()

    # ---- the three answers ---------------------------------------------------------------------

    def _lose(self, nodes: Iterable[int]) -> None:
        """These nodes fail, in one event."""
        places = set()
        for node in nodes:
            place = self.place_of.pop(node)
            self.node_at[place] = None
            del self.fails_at[node]
            places.add(place)
            self._repair(node)
        if not places:
            return
        self.failures += 1
        self.empty |= places
        if self.case.answer == "replicas":
            self._lose_groups({place // self.case.group for place in places})
            return
        self.lost |= places
        self._roll_back()
        self._fill()
        self.waiting = self.saving = self.loading = False
        alone = len(self.empty) == self.case.nodes
        if alone or (self.case.answer == "restart" and self.empty):
            self.waiting = True
        else:
            self._load()

    def _lose_groups(self, groups: set[int]) -> None:
        """The groups leave. The step in which that happens counts for nobody: the others wait for
        its end, and do it again."""
        new = groups - self.down.keys()
        if new and not self.saving and self.case.copy:
            self.pause = max(self.pause, -self.since_copy % self.case.copy)
            self._roll_back()
        self.down.update(dict.fromkeys(groups))
        if len(self.down) * self.case.group == self.case.nodes:  # nobody holds the state
            self.from_disk, self.saving, self.pause = True, False, 0
            self._roll_back()
            self.from_disk = False
        self._fill()
        self._heal()

    def _heal(self) -> None:
        """Groups that are whole again take the state from a peer, beside the others' work."""
        size = self.case.group
        for group, healed in list(self.down.items()):
            if healed is None and self.empty.isdisjoint(range(group * size, (group + 1) * size)):
                self.down[group] = self._plan(self.case.restart / TICKS, "healed", group)
        self._note_absent()

    def _group_is_healed(self, group: int) -> None:
        if self.down.get(group) != self.now:  # it has failed again
            return
        del self.down[group]
        self.restarts += 1
        self.since_copy = 0  # it enters between two steps
        self._note_absent()

    def _roll_back(self) -> None:
        """Return to the newest state that somebody holds."""
        if self.case.answer != "replicas":
            self.from_disk |= self.case.copy is None or self._copy_is_lost()
        if self.from_disk:
            self.progress, self.since_save = self.saved, 0
        elif self.case.copy:
            undone = self.since_copy % self.case.copy
            self.progress -= undone * (self.case.nodes - len(self.absent))
            self.since_save -= undone
        self.since_copy = 0

    def _copy_is_lost(self) -> bool:
        """Has a lost node lost the holder of its copy, the next place in use, too?"""
        for place in self.lost - self.left_out:
            holder = (place + 1) % self.case.nodes
            while holder in self.left_out:
                holder = (holder + 1) % self.case.nodes
            if holder in self.lost:
                return True
        return False

    def _load(self) -> None:
        """Everyone present stops, and loads."""
        disk = self.from_disk or self.case.copy is None
        self.pause = self.case.restart if disk else self.case.copy_restart
        self.loading, self.saving, self.waiting = True, False, False
        self.since_copy = 0  # all have stopped at one state, which they copy first
        self.restarts += 1

    def _repair(self, node: int) -> None:
        if self.case.repair:
            self._plan(self.case.repair / TICKS, "repaired", node)
        else:
            self.spares.append(node)

    def _fill(self, new: bool = True) -> bool:
        """Put spare nodes into empty places; was there one?"""
        lasts_s = self.case.failures.lifetime_s if new else self.case.failures.residual_s
        places = sorted(self.empty)[: len(self.spares)]
        for place in places:
            node = self.spares.popleft()
            self.node_at[place], self.place_of[node] = node, place
            self.fails_at[node] = self._plan(lasts_s(self.draws, node in self.bad), "fails", node)
        self.empty.difference_update(places)
        self._note_absent()
        return bool(places)

    def _note_absent(self) -> None:
        size = self.case.group
        self.absent = frozenset(self.empty) if self.case.answer != "replicas" else frozenset(
            place for group in self.down for place in range(group * size, (group + 1) * size))

    # ---- between two events --------------------------------------------------------------------

    def _go_on_until(self, until: int) -> None:
        while self.now < until:
            present, rest = self.case.nodes - len(self.absent), until - self.now
            if self.waiting or not present:
                self._spend(rest, "blocked")
            elif self.pause or self.loading or self.saving:
                spent = min(rest, self.pause)
                self.pause -= spent
                self._spend(spent, "blocked")
                if not self.pause:
                    self._end_pause()
            else:
                self._work(min(rest, self.case.interval - self.since_save), present)
                if self.since_save == self.case.interval:
                    self.saving, self.pause = True, self.case.save

    def _end_pause(self) -> None:
        if self.saving:
            self.saved, self.since_save, self.since_copy = self.progress, 0, 0
        if self.loading:
            self.lost, self.left_out, self.from_disk = set(), set(self.empty), False
        self.saving = self.loading = False

    def _work(self, spent: int, present: int) -> None:
        again = max(0, min(self.furthest - self.progress, spent * present))
        redone = math.ceil(again / present)
        self.progress += spent * present
        self.furthest = max(self.furthest, self.progress)
        self.since_save += spent
        self.since_copy += spent
        self._spend(redone, "redone")
        self._spend(spent - redone, "productive")
        extra = redone * present - again  # a part of the last tick
        self.ticks["redone"] -= extra
        self.ticks["productive"] += extra

    def _spend(self, ticks: int, kind: str) -> None:
        if not ticks:
            return
        self.ticks[kind] += ticks * (self.case.nodes - len(self.absent))
        self.ticks["absent"] += ticks * len(self.absent)
        start_s, self.now = self.now / TICKS, self.now + ticks
        end_s, last = self.now / TICKS, self.timeline[-1] if self.timeline else None
        if last and (last.kind, last.absent, last.end_s) == (kind, self.absent, start_s):
            self.timeline[-1] = last._replace(end_s=end_s)
        elif len(self.timeline) < MOST_INTERVALS:
            self.timeline.append(Interval(start_s, end_s, kind, self.absent))
