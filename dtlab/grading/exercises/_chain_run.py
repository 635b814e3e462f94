"""Chapter 09: a chain of nodes, its network, a client and a master, simulated message by message.

A random number puts everything that could happen at the same time into one order, so a *schedule*
(a seed) determines a run, and up to a crash the run is equal to the one without it. Add number i
adds 4ⁱ: the digits of a value to base 4 tell how often each add is in it.
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
MOST_MESSAGES = 3_000  # delivered in one run; a right answer needs about a hundred

ChainMessage = tuple[Any, ...]
Name = int | str
Receive = Callable[[dict[str, Any], ChainMessage], Any]  # (node, message) → what it sends


class Crash(NamedTuple):
    """`node` dies while it handles its message number `event`, after sending `messages` itself."""

    node: int
    event: int
    messages: int


class Flood(Exception):
    """The messages don't end. Its argument: the crashes of the run, if there are any."""


class Client:
    """Sends adds and reads, several at a time, and sends them again to a new head or tail."""

    def __init__(self, post: Callable[[Name, ChainMessage], None], chain: list[int], again: bool,
                 choice: random.Random):
        self._post, self.chain = post, chain
        self.adds: dict[int, ChainMessage] = {}  # all that were sent, by number
        self.open: dict[int, ChainMessage] = {}  # adds and reads without an answer
        self.certain = 0  # bit i: add i was acknowledged, or seen by a read
        self.guessed = 0  # bit i: a node has answered with add i, of which no message told it
        self.reads: list[list[Any]] = []  # [value, certain before, adds sent before the answer]
        self._before: dict[int, int] = {}
        self._numbers = 0
        self._script: deque[str] = deque()
        for _ in range(ADDS):
            self._script += ["add", *["again"] * again, *["read"] * choice.randrange(2)]

    def can_act(self) -> bool:
        """Is there more to request, and may one more request be under way?"""
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
        message = ("add", self._number(), KEYS[place % 2], 4**place)
        self.adds[message[1]] = self.open[message[1]] = message
        self._post(self.chain[0], message)

    def read(self, key: str) -> None:
        """Ask the tail for a value."""
        message = ("read", self._number(), key)
        self.open[message[1]], self._before[message[1]] = message, self.certain
        self._post(self.chain[-1], message)

    def receive(self, message: ChainMessage, known: int) -> None:
        """An answer, or the master's list of the nodes that live. known: bit i: messages have told
        the sender of add i."""
        if message[0] == "chain":
            old, self.chain = self.chain, message[1]
            if (old[0], old[-1]) != (self.chain[0], self.chain[-1]):
                for asked in list(self.open.values()):
                    self._post(self.chain[0 if asked[0] == "add" else -1], asked)
            return
        asked_for = self.open.pop(message[1], None)
        if asked_for is None:
            return  # answered before
        if message[0] == "done":
            self.certain |= 1 << list(self.adds).index(message[1])
        else:
            self._note(asked_for, message[2], known)

    def _note(self, asked: ChainMessage, value: Any, known: int) -> None:
        mine = sum(1 << place for place, add in enumerate(self.adds.values()) if add[2] == asked[2])
        number = value if isinstance(value, int) and value >= 0 else None
        self.reads.append([number, self._before[asked[1]] & mine, mine])
        for place in range(len(self.adds)):
            if number is not None and mine >> place & 1 and number // 4**place % 4:
                self.certain |= 1 << place
                self.guessed |= ~known & 1 << place

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


class ChainRun:
    """One run. `receive(node, message)` is the learner's; `node` holds its state."""

    def __init__(self, receive: Receive, nodes: int, schedule: int,
                 crashes: Sequence[Crash] = (), again: bool = False):
        self._receive, self._random = receive, random.Random(f"{schedule} {nodes}")
        self.alive = list(range(nodes))
        self._states = {n: {"me": n, "chain": list(range(nodes)), "values": {}}
                        for n in range(nodes)}
        self._known: dict[Name, int] = {}  # bit i: messages have told the node of add i
        self._links: dict[tuple[Name, Name], deque[tuple[ChainMessage, int]]] = {}
        self._crashes = {crash.node: crash for crash in crashes}
        # How many messages each node sent, by event.
        self.handled: dict[int, list[int]] = {n: [] for n in range(nodes)}
        self.delivered = 0
        self._unannounced = False
        self._notices: list[tuple[list[int], set[int]]] = []  # members; nodes not yet notified
        self.client = Client(partial(self._post, CLIENT), list(range(nodes)), again,
                             random.Random(schedule))

    def run(self) -> ChainRun:
        """Run until nothing is under way, then read every key once more. Returns itself."""
        self.settle()
        for key in KEYS:
            self.client.read(key)
            self.settle()
        return self

    def settle(self) -> None:
        """Do what can happen, one step at a time in the schedule's order, until nothing is left."""
        while moves := list(self._moves()):
            self._random.choice(moves)()

    def kill(self, node: int) -> None:
        """The process dies, and all that was on its way to it is lost."""
        self.alive.remove(node)
        self._unannounced = True
        self._links = {ends: link for ends, link in self._links.items() if ends[1] != node}
        for _, waiting in self._notices:
            waiting.discard(node)
        self._tell_client()

    def facts(self) -> dict[str, Any]:
        """What the client knows at the end, as numbers."""
        open_adds = [place for place, number in enumerate(self.client.adds)
                     if number in self.client.open]
        silent = sum(number not in self.client.adds for number in self.client.open)
        return {"reads": self.client.reads, "unanswered": open_adds, "silent reads": silent,
                "guessed": self.client.guessed}

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
        """The master notifies the client once it has notified every node that lives."""
        while self._notices and not self._notices[0][1]:
            members, _ = self._notices.pop(0)
            self._post(MASTER, CLIENT, ("chain", members))

    def _post(self, src: Name, dst: Name, message: ChainMessage) -> None:
        if dst == CLIENT or dst in self.alive:
            known = self._known.get(src, 0)
            if src == CLIENT and message[0] == "add":
                known = 1 << list(self.client.adds).index(message[1])
            self._links.setdefault((src, dst), deque()).append((copied(message), known))

    def _deliver(self, src: Name, dst: Name) -> None:
        self.delivered += 1
        if self.delivered > MOST_MESSAGES:
            raise Flood
        message, known = self._links[src, dst].popleft()
        if not isinstance(dst, int):
            self.client.receive(message, known)
            return
        self._known[dst] = self._known.get(dst, 0) | known
        if src == MASTER:  # links to nodes that it left out are closed
            self._links = {ends: link for ends, link in self._links.items()
                           if ends[1] != dst or ends[0] in (*message[1], CLIENT, MASTER)}
        sent = checked(self._receive(self._states[dst], message), len(self._states))
        crash = self._crashes.get(dst)
        dies = crash is not None and crash.event == len(self.handled[dst])
        self.handled[dst].append(len(sent))
        for to, own in sent[: crash.messages] if crash is not None and dies else sent:
            self._post(dst, to, own)
        if src == MASTER:
            next(w for members, w in self._notices if members == message[1]).discard(dst)
            self._tell_client()
        if dies:
            self.kill(dst)


def copied(sent: Any) -> Any:
    """A copy that shares nothing with `sent` that could change."""
    return sent if _is_plain(sent) else copy.deepcopy(sent)


def _is_plain(value: Any) -> bool:
    """Numbers, texts and tuples of them, for which copy.deepcopy takes long."""
    return type(value) in (int, str) or (type(value) is tuple and all(map(_is_plain, value)))


def checked(sent: Any, nodes: int) -> list[tuple[Name, ChainMessage]]:
    """What the learner's function returned, or `TypeError` in one sentence."""
    if not isinstance(sent, (list, tuple)):
        raise TypeError(f"chain_node returned {type(sent).__name__}, not the list of (to, message) "
                        f"that it sends")
    for one in sent:
        if not (isinstance(one, (list, tuple)) and len(one) == 2):
            raise TypeError(f"chain_node sends {one!r:.60}, which is no pair (to, message)")
        to, message = one
        if to != CLIENT and (to not in range(nodes) or isinstance(to, bool)):
            raise TypeError(f"chain_node sends a message to {to!r:.20}; nodes are 0 to "
                            f"{nodes - 1}, and there is \"client\"")
        if not isinstance(message, tuple) or not message:
            raise TypeError(f"chain_node sends {message!r:.60}, and a message is a tuple")
        if to == CLIENT and (message[0], len(message)) not in (("done", 2), ("value", 3)):
            raise TypeError(f"chain_node sends the client {message!r:.60}; it understands "
                            f'("done", number) and ("value", number, value)')
    return list(sent)


def points(run: ChainRun, node: int) -> list[Crash]:
    """Every moment at which `node` could have died in `run`: during each event, after none, some
    or nearly all of the messages that it sent then."""
    return [Crash(node, event, messages) for event, sent in enumerate(run.handled[node])
            for messages in range(max(sent, 1))]
