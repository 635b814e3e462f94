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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dtlab.reliability.failures import Failures

KINDS = ("productive", "redone", "blocked", "absent")
TICKS = 1_000_000  # a second
MOST_INTERVALS = 10_000  # of a timeline; a picture shows no more


class Interval(NamedTuple):
    """The time from `start_s` to `end_s`: places `absent` are absent, all others of this kind."""

    start_s: float
    end_s: float
    kind: str
    absent: frozenset[int]


@dataclass(frozen=True)
class GoodputOptions:
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


class SimulatedJob:
    """`run` plays the whole duration; then `ticks`, `failures`, `restarts`, `timeline` hold."""

    def __init__(self, options: GoodputOptions):
        self.options, self.draws, self.now = options, random.Random(int(options.seed)), 0
        self.ticks = dict.fromkeys(KINDS, 0)
        self.failures = self.restarts = 0
        self.timeline: list[Interval] = []
        # Progress, in node-ticks, and ticks of work since the last save and the last copy.
        self.progress = self.furthest = self.saved = 0
        self.since_save = self.since_copy = 0
        # The nodes present load or save for `pause` ticks, or else work.
        self.loading, self.saving, self.pause = False, False, 0
        # Place → its node, and when that fails; who else there is.
        self.node_at, self.fails_at = dict[int, int](), dict[int, int]()
        self.spares = deque(range(options.nodes + options.spares))
        self.empty = set(range(options.nodes))
        self.absent: frozenset[int] = frozenset()
        self.bad, self.strikes = set(range(options.failures.bad)), Counter[int]()
        # Where copies in memory are: places lost since the last recovery, and empty ones then.
        self.lost, self.left_out, self.from_disk = set[int](), set[int](), False
        self.down: dict[int, int | None] = {}  # group → when it is healed, if that is known
        # (time, number, handler, its argument); of two at one time, the first scheduled is first.
        self.events: list[tuple[int, int, Callable[[int], None], int]] = []
        self._number = itertools.count()
        self._fill(new=False)
        if options.failures.rack_per_day:
            for rack in range(math.ceil((options.nodes + options.spares) / options.failures.rack)):
                self._schedule_switch(rack)
        for number, (at_s, _) in enumerate(options.failures.at):
            self._schedule(at_s, self._given_fails, number)

    def run(self) -> None:
        """Play all events."""
        while self.events:
            at, _, handler, argument = heapq.heappop(self.events)
            self._go_on_until(at)
            handler(argument)
        self._go_on_until(self.options.duration)

    # ---- events --------------------------------------------------------------------------------

    def _schedule(self, after_s: float, handler: Callable[[int], None], argument: int) -> int:
        """Add an event `after_s` seconds from now, if it comes before the end. Returns its time, or
        -1."""
        if after_s * TICKS >= self.options.duration - self.now:
            return -1
        at = self.now + round(after_s * TICKS)
        heapq.heappush(self.events, (at, next(self._number), handler, argument))
        return at

    def _node_fails(self, place: int) -> None:
        if self.fails_at.get(place) != self.now:  # that node is not there any more
            return
        node = self.node_at[place]
        self.strikes[node] += 1
        if self.strikes[node] == self.options.failures.exclude_after:
            self.bad.discard(node)  # another machine takes its number
        self._lose([place])

    def _switch_fails(self, rack: int) -> None:
        self._schedule_switch(rack)
        size = self.options.failures.rack
        for node in [spare for spare in self.spares if spare // size == rack]:
            self.spares.remove(node)
            self._repair(node)
        self._lose([place for place, node in self.node_at.items() if node // size == rack])

    def _schedule_switch(self, rack: int) -> None:
        switch = Failures(self.options.failures.rack_per_day)
        self._schedule(switch.lifetime_s(self.draws, bad=False), self._switch_fails, rack)

    def _given_fails(self, number: int) -> None:
        self._lose(self.node_at.keys() & set(self.options.failures.at[number][1]))

    def _node_returns(self, node: int) -> None:
        """A repaired node takes an empty place, or is a spare."""
        self.spares.append(node)
        filled = self._fill()
        if self.options.answer == "replicas":
            self._heal()
        elif filled and not self._waiting():
            self._load()

    # ---- the three answers ---------------------------------------------------------------------

    def _lose(self, places: Iterable[int]) -> None:
        """The nodes in these places fail, in one event."""
        places = sorted(places)
        if not places:
            return
        for place in places:
            del self.fails_at[place]
            self._repair(self.node_at.pop(place))
        self.failures += 1
        self.empty.update(places)
        if self.options.answer == "replicas":
            self._lose_groups({place // self.options.group for place in places})
            return
        self.lost.update(places)
        self._roll_back()
        self._fill()
        self.saving, self.loading, self.pause = False, False, 0
        if not self._waiting():
            self._load()

    def _waiting(self) -> bool:
        """Can nobody go on, for want of nodes?"""
        most = 0 if self.options.answer == "restart" else self.options.nodes - 1
        return len(self.absent) > most

    def _lose_groups(self, groups: set[int]) -> None:
        """The groups leave. The step in which that happens counts for nobody: the others wait for
        its end, and do it again."""
        new = groups - self.down.keys()
        if new and not self.saving and self.options.copy:
            self.pause = max(self.pause, -self.since_copy % self.options.copy)
            self._roll_back()
        self.down.update(dict.fromkeys(groups))
        if len(self.down) * self.options.group == self.options.nodes:  # nobody holds the state
            self.from_disk, self.saving, self.pause = True, False, 0
            self._roll_back()
            self.from_disk = False
        self._fill()
        self._heal()

    def _heal(self) -> None:
        """Groups that are whole again take the state from a peer, beside the others' work."""
        size = self.options.group
        for group, healed in list(self.down.items()):
            if healed is None and self.empty.isdisjoint(range(group * size, (group + 1) * size)):
                self.down[group] = self._schedule(self.options.restart / TICKS,
                                                  self._group_is_healed, group)
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
        if self.options.answer != "replicas":
            self.from_disk |= self.options.copy is None or self._copy_is_lost()
        if self.from_disk:
            self.progress, self.since_save = self.saved, 0
        elif self.options.copy:
            undone = self.since_copy % self.options.copy
            self.progress -= undone * (self.options.nodes - len(self.absent))
            self.since_save -= undone
        self.since_copy = 0

    def _copy_is_lost(self) -> bool:
        """Has a lost node lost the holder of its copy, the next place in use, too?"""
        for place in self.lost - self.left_out:
            holder = (place + 1) % self.options.nodes
            while holder in self.left_out:
                holder = (holder + 1) % self.options.nodes
            if holder in self.lost:
                return True
        return False

    def _load(self) -> None:
        """Everyone present stops, and loads."""
        disk = self.from_disk or self.options.copy is None
        self.pause = self.options.restart if disk else self.options.copy_restart
        self.loading, self.saving = True, False
        self.since_copy = 0  # all have stopped at one state, which they copy first
        self.restarts += 1

    def _repair(self, node: int) -> None:
        if self.options.repair:
            self._schedule(self.options.repair / TICKS, self._node_returns, node)
        else:
            self.spares.append(node)

    def _fill(self, new: bool = True) -> bool:
        """Put spare nodes into empty places; was there one?"""
        lasts_s = self.options.failures.lifetime_s if new else self.options.failures.residual_s
        places = sorted(self.empty)[: len(self.spares)]
        for place in places:
            self.node_at[place] = node = self.spares.popleft()
            self.fails_at[place] = self._schedule(lasts_s(self.draws, node in self.bad),
                                              self._node_fails, place)
        self.empty.difference_update(places)
        self._note_absent()
        return bool(places)

    def _note_absent(self) -> None:
        size = self.options.group
        self.absent = frozenset(self.empty) if self.options.answer != "replicas" else frozenset(
            place for group in self.down for place in range(group * size, (group + 1) * size))

    # ---- between two events --------------------------------------------------------------------

    def _go_on_until(self, until: int) -> None:
        while self.now < until:
            present, rest = self.options.nodes - len(self.absent), until - self.now
            if self._waiting():
                self._spend(rest, "blocked")
            elif self.pause or self.loading or self.saving:
                spent = min(rest, self.pause)
                self.pause -= spent
                self._spend(spent, "blocked")
                if not self.pause:
                    self._end_pause()
            else:
                self._work(min(rest, self.options.interval - self.since_save), present)
                if self.since_save == self.options.interval:
                    self.saving, self.pause = True, self.options.save

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
        self.ticks[kind] += ticks * (self.options.nodes - len(self.absent))
        self.ticks["absent"] += ticks * len(self.absent)
        start_s, self.now = self.now / TICKS, self.now + ticks
        if len(self.timeline) < MOST_INTERVALS:
            self.timeline.append(Interval(start_s, self.now / TICKS, kind, self.absent))
