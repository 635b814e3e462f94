"""`goodput`, second by second, for failures that are given: no events, no arithmetic on spans."""

from __future__ import annotations

from collections import Counter
from typing import Any


class SecondBySecond:
    """Every second: what returns, what fails, then what each place does."""

    def __init__(self, nodes: int, at: list[tuple[int, list[int]]], save: int, restart: int,
                 interval: int, answer: str, duration: int, spares: int = 0, repair: int = 0,
                 copy: int | None = None, copy_restart: int = 0, group: int = 1):
        self.__dict__.update(locals())
        self.alive = [True] * nodes
        self.member = [True] * nodes  # of the job as it computes: a group that heals is none
        self.idle, self.repairs, self.heals = spares, list[int](), dict[int, int]()
        self.state = self.saved = self.copied = self.furthest = 0
        self.to_save, self.to_copy = interval, copy
        self.mode, self.left = "work", 0
        self.disk = False
        self.holder = self.copies()
        self.struck: set[int] = set()
        self.seconds: Counter[str] = Counter()
        self.failures = 0
        self.given: Any = at
        self.n: Any = nodes
        for now in range(duration):
            self.events(now)
            self.second()

    def copies(self) -> dict[int, int]:
        """Each place's copy lies in the next place that has a node."""
        there = [place for place in range(len(self.alive)) if self.alive[place]]
        return {place: there[(k + 1) % len(there)] for k, place in enumerate(there)}

    def events(self, now: int) -> None:
        for at, places in self.given:
            if at == now and (hit := [p for p in places if self.alive[p]]):
                self.failures += 1
                self.fail(now, hit)
        for _ in range(self.repairs.count(now)):
            self.idle += 1
            filled = self.fill(now)
            if filled and (self.answer == "shrink" or (
                    self.answer == "restart" and all(self.alive))):
                self.load()
        for group, at in list(self.heals.items()):
            if at == now:
                del self.heals[group]
                for place in self.places(group):
                    self.member[place] = True
                self.copied, self.to_copy = self.state, self.copy

    def places(self, group: int) -> range:
        return range(group * self.group, (group + 1) * self.group)

    def fail(self, now: int, hit: list[int]) -> None:
        fresh = {p // self.group for p in hit if self.member[p]}
        for place in hit:
            self.alive[place] = False
            if self.repair:
                self.repairs.append(now + self.repair)
            else:
                self.idle += 1
        if self.answer == "replicas":
            if fresh and self.mode != "save" and self.copy:
                if self.mode == "work" and self.to_copy != self.copy:
                    self.mode, self.left = "out", self.to_copy
                self.undo(self.copied)
            for group in {p // self.group for p in hit}:
                self.heals.pop(group, None)
                for place in self.places(group):
                    self.member[place] = False
            if not any(self.member):
                self.undo(self.saved)
                self.mode, self.left = "work", 0
            self.fill(now)
            return
        self.struck |= set(hit)
        lost_both = any(self.holder[p] in self.struck for p in self.struck if p in self.holder)
        self.disk = self.disk or self.copy is None or lost_both
        self.undo(self.saved if self.disk else self.copied)
        self.fill(now)
        self.member = list(self.alive)
        if not any(self.alive) or (self.answer == "restart" and not all(self.alive)):
            self.mode = "wait"
        else:
            self.load()

    def undo(self, state: int) -> None:
        if state == self.saved:
            self.to_save = self.interval
        elif self.copy and self.to_copy is not None:
            self.to_save += self.copy - self.to_copy
        self.state = state
        self.copied, self.to_copy = state, self.copy

    def fill(self, now: int) -> bool:
        filled = False
        for place in range(self.n):
            if not self.alive[place] and self.idle:
                self.idle -= 1
                self.alive[place] = filled = True
        if self.answer != "replicas":
            self.member = list(self.alive)
            return filled
        for group in range(self.n // self.group):
            places = self.places(group)
            if all(self.alive[p] for p in places) and not self.member[places[0]] and (
                    group not in self.heals):
                self.heals[group] = now + self.restart
                if not self.restart:
                    self.heals.pop(group)
                    for place in places:
                        self.member[place] = True
                    self.copied, self.to_copy = self.state, self.copy
        return filled

    def load(self) -> None:
        self.mode = "load"
        self.copied, self.to_copy = self.state, self.copy  # all stop: first of all they copy
        self.left = self.restart if self.disk or self.copy is None else self.copy_restart

    def second(self) -> None:
        there = sum(self.member)
        self.seconds["absent"] += self.n - there
        if not there:
            return
        if self.mode == "wait":
            self.seconds["blocked"] += there
            return
        if self.left:
            self.left -= 1
            self.seconds["blocked"] += there
            if not self.left:
                self.resume()
            return
        new = max(0, self.state + there - max(self.furthest, self.state))
        new = min(new, there)
        self.seconds["productive"] += new
        self.seconds["redone"] += there - new
        self.state += there
        self.furthest = max(self.furthest, self.state)
        self.to_save -= 1
        if self.to_copy is not None:
            self.to_copy -= 1
            if not self.to_copy:
                self.copied, self.to_copy = self.state, self.copy
        if not self.to_save:
            self.mode, self.left = "save", self.save

    def resume(self) -> None:
        if self.mode == "save":
            self.saved = self.copied = self.state
            self.to_save, self.to_copy = self.interval, self.copy
        if self.mode == "load":
            self.disk, self.struck, self.holder = False, set(), self.copies()
        self.mode = "work"
        if not self.to_save:  # a save that was cut off comes first
            self.mode, self.left = "save", self.save
