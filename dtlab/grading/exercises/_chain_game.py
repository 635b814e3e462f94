"""Chapter 09: a chain of nodes, the network between them, a client and a master, letter by letter.

Everything that could happen at the same time is put into one order by a random number, so that a
*schedule* (a seed) says all, and a run up to a crash is the run without it. Add number i adds 4ⁱ:
the digits of a value to base 4 tell how often each add is in it.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

CLIENT, MASTER = "client", "master"
KEYS = ("w", "b")
ADDS = 6
WINDOW = 3  # adds that the client has under way at most
MOST_LETTERS = 3_000  # delivered in one game; a right answer needs about a hundred

Letter = tuple[Any, ...]
Name = int | str


class Crash(NamedTuple):
    """`node` dies while it handles its letter number `event`, having sent `letters` of its own."""

    node: int
    event: int
    letters: int


class Flood(Exception):
    """The letters don't end."""


class Client:
    """Adds and reads, as many under way as it likes, and asks again when head or tail is new."""

    def __init__(self, post: Callable[[Name, Letter], None], chain: list[int], again: bool,
                 choice: random.Random):
        self._post, self.chain = post, chain
        self.adds: dict[int, Letter] = {}  # all that were sent, by number
        self.open: dict[int, Letter] = {}  # adds and reads without an answer
        self.certain = 0  # bit i: add i was acknowledged, or seen by a read
        self.reads: list[list[Any]] = []  # [value, certain before, adds sent before the answer]
        self._before: dict[int, int] = {}
        self._numbers = 0
        self._script: deque[str] = deque()
        for _ in range(ADDS):
            self._script += ["add", *["again"] * again, *["read"] * choice.randrange(2)]

    def can_act(self) -> bool:
        """Is there more to ask for, and room for it?"""
        under_way = sum(number in self.adds for number in self.open)
        return bool(self._script) and (self._script[0] != "add" or under_way < WINDOW)

    def act(self) -> None:
        """The next line of the script."""
        what = self._script.popleft()
        if what == "again":
            self._post(self.chain[0], list(self.adds.values())[-1])
        elif what == "add":
            self.add()
        else:
            self.read(KEYS[len(self.reads) % 2])

    def add(self) -> None:
        """Send one more add to the head."""
        place = len(self.adds)
        letter = ("add", self._number(), KEYS[place % 2], 4**place)
        self.adds[letter[1]] = self.open[letter[1]] = letter
        self._post(self.chain[0], letter)

    def read(self, key: str) -> None:
        """Ask the tail for a value."""
        letter = ("read", self._number(), key)
        self.open[letter[1]], self._before[letter[1]] = letter, self.certain
        self._post(self.chain[-1], letter)

    def receive(self, letter: Letter) -> None:
        """An answer, or the master's word on who lives."""
        if letter[0] == "chain":
            old, self.chain = self.chain, letter[1]
            if (old[0], old[-1]) != (self.chain[0], self.chain[-1]):
                for asked in list(self.open.values()):
                    self._post(self.chain[0 if asked[0] == "add" else -1], asked)
            return
        asked_for = self.open.pop(letter[1], None)
        if asked_for is None:
            return  # answered before
        if letter[0] == "done":
            self.certain |= 1 << list(self.adds).index(letter[1])
        else:
            self._note(asked_for, letter[2])

    def _note(self, asked: Letter, value: Any) -> None:
        mine = sum(1 << place for place, add in enumerate(self.adds.values()) if add[2] == asked[2])
        number = value if isinstance(value, int) and value >= 0 else None
        self.reads.append([number, self._before[asked[1]] & mine, mine])
        for place in range(len(self.adds)):
            if number is not None and mine >> place & 1 and number // 4**place % 4:
                self.certain |= 1 << place

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


class Game:
    """One run. `receive(node, letter)` is the learner's; `node` holds its state."""

    def __init__(self, receive: Callable[[dict[str, Any], Letter], Any], nodes: int, schedule: int,
                 crashes: Sequence[Crash] = (), again: bool = False):
        self._receive, self._random = receive, random.Random(f"{schedule} {nodes}")
        self.alive = list(range(nodes))
        self._states = {n: {"me": n, "chain": list(range(nodes)), "values": {}}
                        for n in range(nodes)}
        self._links: dict[tuple[Name, Name], deque[Letter]] = {}
        self._crashes = {crash.node: crash for crash in crashes}
        self.handled: dict[int, list[int]] = {n: [] for n in range(nodes)}  # letters sent, by event
        self.delivered = 0
        self._unannounced = False
        self._notices: list[tuple[list[int], set[int]]] = []  # members, and who has to hear of it
        self.client = Client(partial(self._post, CLIENT), list(range(nodes)), again,
                             random.Random(schedule))

    def play(self) -> Game:
        """Until nothing is under way; then read every key once more."""
        self.settle()
        for key in KEYS:
            self.client.read(key)
            self.settle()
        return self

    def settle(self) -> None:
        """Let things happen, one by one, in the schedule's order, until nothing more does."""
        while moves := list(self._moves()):
            self._random.choice(moves)()

    def kill(self, node: int) -> None:
        """The process is gone, with all that was on its way to it."""
        self.alive.remove(node)
        self._unannounced = True
        self._links = {ends: link for ends, link in self._links.items() if ends[1] != node}
        for _, waiting in self._notices:
            waiting.discard(node)
        self._tell_client()

    def facts(self) -> dict[str, Any]:
        """What the client knows in the end, as numbers."""
        open_adds = [place for place, number in enumerate(self.client.adds)
                     if number in self.client.open]
        silent = sum(number not in self.client.adds for number in self.client.open)
        return {"reads": self.client.reads, "unanswered": open_adds, "silent reads": silent}

    def _moves(self) -> Iterator[Callable[[], None]]:
        for ends, link in self._links.items():
            if link:
                yield partial(self._deliver, *ends)
        if self.client.can_act():
            yield self.client.act
        if self._unannounced and self.alive:
            yield self._announce

    def _announce(self) -> None:
        self._unannounced = False
        self._notices.append((list(self.alive), set(self.alive)))
        for node in self.alive:
            self._post(MASTER, node, ("chain", list(self.alive)))

    def _tell_client(self) -> None:
        """The master tells the client once every node that lives has heard of it."""
        while self._notices and not self._notices[0][1]:
            members, _ = self._notices.pop(0)
            self._post(MASTER, CLIENT, ("chain", members))

    def _post(self, src: Name, dst: Name, letter: Letter) -> None:
        if dst == CLIENT or dst in self.alive:
            self._links.setdefault((src, dst), deque()).append(copy.deepcopy(letter))

    def _deliver(self, src: Name, dst: Name) -> None:
        self.delivered += 1
        if self.delivered > MOST_LETTERS:
            raise Flood
        letter = self._links[src, dst].popleft()
        if not isinstance(dst, int):
            self.client.receive(letter)
            return
        if src == MASTER:  # the links to those that it has left out are closed
            self._links = {ends: link for ends, link in self._links.items()
                           if ends[1] != dst or ends[0] in (*letter[1], CLIENT, MASTER)}
        sent = checked(self._receive(self._states[dst], letter), len(self._states))
        crash = self._crashes.get(dst)
        dies = crash is not None and crash.event == len(self.handled[dst])
        self.handled[dst].append(len(sent))
        for to, own in sent[: crash.letters] if crash is not None and dies else sent:
            self._post(dst, to, own)
        if src == MASTER:
            next(w for members, w in self._notices if members == letter[1]).discard(dst)
            self._tell_client()
        if dies:
            self.kill(dst)


def checked(sent: Any, nodes: int) -> list[tuple[Name, Letter]]:
    """What the learner's function returned, or `TypeError` in one sentence."""
    if not isinstance(sent, (list, tuple)):
        raise TypeError(f"chain_node returned {type(sent).__name__}, not the list of (to, letter) "
                        f"that it sends")
    for one in sent:
        if not (isinstance(one, (list, tuple)) and len(one) == 2):
            raise TypeError(f"chain_node sends {one!r:.60}, which is no pair (to, letter)")
        to, letter = one
        if to != CLIENT and (to not in range(nodes) or isinstance(to, bool)):
            raise TypeError(f"chain_node sends a letter to {to!r:.20}; nodes are 0 to {nodes - 1}, "
                            f"and there is \"client\"")
        if not isinstance(letter, tuple) or not letter:
            raise TypeError(f"chain_node sends {letter!r:.60}, and a letter is a tuple")
        if to == CLIENT and (letter[0], len(letter)) not in (("done", 2), ("value", 3)):
            raise TypeError(f"chain_node sends the client {letter!r:.60}; it understands "
                            f'("done", number) and ("value", number, value)')
    return list(sent)


def points(game: Game, node: int) -> list[Crash]:
    """Every moment at which `node` could have died in `game`: during each event, after none, some
    or nearly all of the letters that it sent then."""
    return [Crash(node, event, letters) for event, sent in enumerate(game.handled[node])
            for letters in range(max(sent, 1))]
