"""Chapter 09: a chain of nodes, its network, a client and a master, simulated message by message.

A *schedule* (a seed) orders all that could happen at the same time, so it determines a run, and up
to a crash a run equals the one without the crash. Add number i adds 5ⁱ, so that the digits of a
value to base 5 tell how often each add is in it. (Their bits overlap, so that neither `|` nor `^`
gives their sum: in these, an add that comes twice would do no harm, or undo itself.)
"""

from __future__ import annotations

import math
import pickle
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, permutations
from typing import Any, NamedTuple

CLIENT, MASTER = "client", "master"
KEYS = ("w", "b")
ANSWERS = {"add": "done", "read": "value"}
ADDS = 6
BASE = 5
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


class Client:
    """Sends adds and reads, several at a time, and sends them again to a new head or tail."""

    def __init__(self, post: Callable[[Name, ChainMessage], None], chain: list[int], again: bool,
                 choice: random.Random):
        self._post, self.chain = post, chain
        self.adds: dict[int, ChainMessage] = {}  # all that were sent, by number
        self.open: dict[int, ChainMessage] = {}  # adds and reads without an answer
        self.certain: set[int] = set()  # adds that were acknowledged, or seen by a read
        self.guessed: set[int] = set()  # adds in a node's answer that no message had told the node
        # For each read: (its value; None: no number; the adds to its key that were certain when the
        # read was sent; the adds to its key that were sent before its answer).
        self.reads: list[tuple[int | None, set[int], set[int]]] = []
        self._before: dict[int, set[int]] = {}
        self._numbers = count(1)
        self._script: deque[str] = deque()
        for _ in range(ADDS):
            self._script += ["add", *["again"] * again, *["read"] * choice.randrange(2)]

    def can_act(self) -> bool:
        """Is there more to request, and may one more request be under way?"""
        under_way = sum(number in self.adds for number in self.open)
        return bool(self._script) and (self._script[0] != "add" or under_way < WINDOW)

    def act(self) -> None:
        """Make the next request of the script."""
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
        message = ("add", next(self._numbers), KEYS[place % 2], BASE**place)
        self.adds[message[1]] = self.open[message[1]] = message
        self._post(self.chain[0], message)

    def read(self, key: str) -> None:
        """Ask the tail for a value."""
        message = ("read", next(self._numbers), key)
        self.open[message[1]], self._before[message[1]] = message, set(self.certain)
        self._post(self.chain[-1], message)

    def receive(self, message: ChainMessage, known: set[int]) -> None:
        """Take an answer, or the master's list of the living nodes. known: the adds that messages
        had told the sender of."""
        if message[0] == "chain":
            old, self.chain = self.chain, message[1]
            if (old[0], old[-1]) != (self.chain[0], self.chain[-1]):
                for asked in list(self.open.values()):
                    self._post(self.chain[0 if asked[0] == "add" else -1], asked)
            return
        request = self.open.get(message[1])
        if request is None or message[0] != ANSWERS[request[0]]:
            return  # it was answered before, or this is no answer to it
        del self.open[message[1]]
        if message[0] == "done":
            self.certain.add(place_of(request))
        else:
            self._note(request, message[2], known)

    def _note(self, asked: ChainMessage, value: Any, known: set[int]) -> None:
        sent = {place for place, add in enumerate(self.adds.values()) if add[2] == asked[2]}
        number = value if isinstance(value, int) and value >= 0 else None
        self.reads.append((number, self._before[asked[1]] & sent, sent))
        seen = {place for place in sent if number is not None and number // BASE**place % BASE}
        self.certain |= seen
        self.guessed |= seen - known


class ChainRun:
    """One run. `receive(node, message)` is the learner's; `node` holds its state."""

    def __init__(self, receive: Receive, nodes: int, schedule: int,
                 crashes: Sequence[Crash] = (), again: bool = False):
        self._receive, self._random = receive, random.Random(f"{schedule} {nodes}")
        self.alive = list(range(nodes))
        self.states: dict[int, dict[str, Any]] = {
            n: {"me": n, "chain": list(range(nodes)), "values": {}} for n in range(nodes)}
        self._known: defaultdict[Name, set[int]] = defaultdict(set)  # adds that messages told of
        self._links: defaultdict[tuple[Name, Name], deque[Any]] = defaultdict(deque)
        # One link is slow: its messages come last. Each of successive schedules has another one.
        pairs = list(permutations(range(nodes), 2))
        self._slow = pairs[schedule % len(pairs)] if pairs else None
        self.crashes = {crash.node: crash for crash in crashes}
        # How many messages each node sent, by event.
        self.handled: dict[int, list[int]] = {n: [] for n in range(nodes)}
        self.delivered = 0
        self.flood = False  # True once there are `MOST_MESSAGES`
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
        """Take one step after the other, in the schedule's order, until none is possible."""
        while not self.flood and (moves := list(self._moves())):
            fast = [move for move in moves if move.args != self._slow] or moves
            self._random.choice(fast)()

    def kill(self, node: int) -> None:
        """Kill the node. All messages on their way to it are lost."""
        self.alive.remove(node)
        self._unannounced = True
        self._close(lambda src, dst: dst == node)
        for _, waiting in self._notices:
            waiting.discard(node)
        self._tell_client()

    def points(self, node: int) -> list[Crash]:
        """Every moment at which `node` could have died: during each event, after none, some or
        nearly all of the messages that it sent then."""
        return [Crash(node, event, messages) for event, sent in enumerate(self.handled[node])
                for messages in range(max(sent, 1))]

    def _close(self, closed: Callable[[Name, Name], bool]) -> None:
        """Lose what is under way on links from src to dst for which closed(src, dst)."""
        for ends in [ends for ends in self._links if closed(*ends)]:
            del self._links[ends]

    def _moves(self) -> Iterator[partial[None]]:
        for ends, link in self._links.items():
            if link:
                yield partial(self._deliver, *ends)
        if self.client.can_act():
            yield partial(self.client.act)
        if self._unannounced and self.alive:
            yield partial(self._announce)

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
            known = self._known[src]
            if src == CLIENT and message[0] == "add":
                known = {place_of(message)}
            self._links[src, dst].append((copied(message), set(known)))

    def _deliver(self, src: Name, dst: Name) -> None:
        self.delivered += 1
        self.flood = self.delivered == MOST_MESSAGES
        message, known = self._links[src, dst].popleft()
        if not isinstance(dst, int):
            self.client.receive(message, known)
            return
        self._known[dst] |= known
        if src == MASTER:  # links to nodes that it left out are closed
            self._close(lambda a, b: b == dst and a not in (*message[1], CLIENT, MASTER))
        sent = checked(self._receive(self.states[dst], message), len(self.states))
        crash = self.crashes.get(dst)
        dies = crash is not None and crash.event == len(self.handled[dst])
        self.handled[dst].append(len(sent))
        for to, own in sent[: crash.messages] if crash is not None and dies else sent:
            self._post(dst, to, own)
        if src == MASTER:
            next(w for members, w in self._notices if members == message[1]).discard(dst)
            self._tell_client()
        if dies:
            self.kill(dst)


def place_of(add: ChainMessage) -> int:
    """Return its number among the adds: i of ("add", number, key, BASEⁱ)."""
    return round(math.log(add[3], BASE))


def copied(sent: Any) -> Any:
    """Return `sent` as it would come to another process: it shares nothing with it."""
    return pickle.loads(pickle.dumps(sent))


def checked(sent: Any, nodes: int) -> list[tuple[Name, ChainMessage]]:
    """Return the messages of the learner's function, or raise `TypeError` in one sentence."""
    if not isinstance(sent, (list, tuple)):
        raise TypeError(f"the answer returned {type(sent).__name__}, not the list of (to, message) "
                        f"that it sends")
    for one in sent:
        match one:
            case ("client", ("done", _) | ("value", _, _)):
                continue
            case (int() as to, tuple((_, *_))) if to in range(nodes):
                continue
        raise TypeError(f"chain_node sends {one!r:.80}, which is no (to, message): a tuple to a "
                        f"node, 0 to {nodes - 1}, or (\"done\", number) or (\"value\", number, "
                        f"value) to \"client\"")
    return list(sent)
