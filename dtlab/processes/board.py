"""The board: a page of shared memory on which every rank writes what it is doing.

It is how a hang gets a name. Each rank keeps one record, rewritten before each wait, so that the
launcher can say who waits for whom even of a rank that answers no more; and for each ordered pair
of ranks a *ledger* of the messages that each side has posted, so that a message that does not fit
is refused by whoever comes second, before a byte moves.

No locks: each word has one writer. Layout, for p ranks:

    p records            what a rank does now
    p any-boxes          its receives from anyone
    p·p ledgers          src → dst: counts and headers of sends, the same of receives
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dtlab.errors import Waiting

DOING = ("starting", "running", "send", "recv", "exchange", "compute", "returned", "raised")
STARTING, RUNNING, SEND, RECV, EXCHANGE, COMPUTE, RETURNED, RAISED = range(len(DOING))
ANYONE = -1
LATEST = -2  # of many messages that follow each other, the one that the ledger has counted last
ALL = -3  # many messages at once, each the `LATEST` of its pair: peers are sets, see `bit`
_BITS = 63

# A record: numbers first, in the order of `State`; then texts, which change less often.
_NUMBERS = struct.Struct("=QB?x?qqqq?7xqq")
_TEXTS = struct.Struct("=64s124s")
_RECORD_SIZE = 256
EPOCH = 1 << 22  # contexts from here on are a new beginning: what older ones left is void
COUNT_BITS = 40  # a count and its context share a word, so that they change together
_COUNT = (1 << COUNT_BITS) - 1
_SLOTS = 16  # contexts that can be told apart at one time
DEPTH = 8  # headers kept of each direction of a pair
_HEADER = 256  # a stamp and a digest of 8 bytes each, then the text of the header
_SIDE = _SLOTS * 8 + DEPTH * _HEADER
_ANY = _SLOTS * (16 + _HEADER)


def _is_blank(word: int, context: int) -> bool:
    """Was nothing written here since the epoch of `context` began? (See `EPOCH`.)"""
    return word == 0 or (word >> COUNT_BITS) - 1 < context - context % EPOCH


def bit(rank: int) -> int:
    """For a set of ranks as one number. Who doesn't fit is left out: if only such a rank does not
    come, the hang is found later, by its time limit."""
    return 1 << rank if rank < _BITS else 0


class State(NamedTuple):
    """One record, read: what a rank is doing, and for which message it waits, or which two."""

    events: int  # bumped at every wait
    doing: int
    certain: bool  # no other thread of this rank could end its wait
    sends: bool  # it waits for a message that it sends …
    context: int
    nbytes: int
    peer: int  # … to this rank of the run, or receives from it (or from ANYONE; ALL: from these),
    number: int  # the number-th of this pair and context (or the LATEST, or ALL);
    sends_2: bool  # in an exchange, a second one
    peer_2: int  # (number_2 < 0: none; ALL: it sends to these)
    number_2: int
    peers: str = ""
    label: str = ""

    def waiting(self, rank: int, line: str) -> Waiting:
        """As a row of the table in `RunTimeout` and `Deadlock`."""
        doing = DOING[self.doing]
        if self.doing not in (SEND, RECV, EXCHANGE):
            label = f" in {self.label}" if self.doing == COMPUTE and self.label else ""
            return Waiting(rank, doing + label, line=line)
        label = f" in {self.label.split('(')[0]}" if self.label else ""
        return Waiting(rank, doing + label, self.peers, self.nbytes, line)


class Board:
    """The shared page, seen from the launcher or from a rank."""

    def __init__(self, fd: int, ranks: int):
        self.ranks = ranks
        self._boxes = _RECORD_SIZE * ranks
        self._ledgers = self._boxes + _ANY * ranks
        size = self._ledgers + 2 * _SIDE * ranks * ranks
        self.nbytes = size
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)  # untouched pages take no memory
        self.bytes = mmap.mmap(fd, size)
        self.words = memoryview(self.bytes).cast("Q")

    # ---- records --------------------------------------------------------------------------------

    def writer(self, rank: int) -> Callable[..., None]:
        """`write` for this rank, with all arguments given."""
        return partial(_NUMBERS.pack_into, self.bytes, rank * _RECORD_SIZE)

    def write(
        self, rank: int, events: int, doing: int, certain: bool = True, sends: bool = False,
        context: int = 0, nbytes: int = 0, peer: int = 0, number: int = 0,
        sends_2: bool = False, peer_2: int = 0, number_2: int = -1,
    ) -> None:
        """Rewrite the numbers in the record of `rank`, see `State`."""
        _NUMBERS.pack_into(
            self.bytes, rank * _RECORD_SIZE, events, doing, certain, sends, context, nbytes,
            peer, number, sends_2, peer_2, number_2,
        )

    def write_texts(self, rank: int, peers: str, label: str) -> None:
        """Rewrite the texts in the record of `rank`."""
        at = rank * _RECORD_SIZE + _NUMBERS.size
        _TEXTS.pack_into(self.bytes, at, peers.encode(), label.encode())

    def runs(self, rank: int) -> None:
        """`rank` waits no more."""
        self.bytes[rank * _RECORD_SIZE + 8] = RUNNING

    def state(self, rank: int) -> State:
        """What `rank` wrote last."""
        numbers = _NUMBERS.unpack_from(self.bytes, rank * _RECORD_SIZE)
        texts = _TEXTS.unpack_from(self.bytes, rank * _RECORD_SIZE + _NUMBERS.size)
        state = State(*numbers, *(raw.rstrip(b"\0").decode(errors="replace") for raw in texts))
        if state.number != LATEST:
            return state
        return state._replace(number=self._latest(rank, state.sends, state.peer, state.context),
                              number_2=self._latest(rank, state.sends_2, state.peer_2,
                                                    state.context))

    def _latest(self, rank: int, sends: bool, peer: int, context: int) -> int:
        """The number of the last message that `rank` has posted to (`sends`) or from `peer`."""
        pair = (rank, peer) if sends else (peer, rank)
        return (self.count(*pair, not sends, context) or 0) - 1

    # ---- the ledger -----------------------------------------------------------------------------

    def _side(self, src: int, dst: int, receiving: bool) -> int:
        return self._ledgers + (2 * (src * self.ranks + dst) + receiving) * _SIDE

    def count_at(self, src: int, dst: int, receiving: bool, context: int) -> int:
        """The word of that side's count of this context: (context + 1) << COUNT_BITS | count."""
        return (self._side(src, dst, receiving) >> 3) + context % _SLOTS

    def count(self, src: int, dst: int, receiving: bool, context: int) -> int | None:
        """How many messages of this pair and context that side has posted (None: can't tell)."""
        word = self.words[self.count_at(src, dst, receiving, context)]
        if word >> COUNT_BITS == context + 1:
            return word & _COUNT
        return 0 if _is_blank(word, context) else None

    def set_count(self, src: int, dst: int, receiving: bool, context: int, count: int) -> None:
        """That side says it has posted `count` messages."""
        at = self.count_at(src, dst, receiving, context)
        self.words[at] = (context + 1) << COUNT_BITS | count

    def header_at(self, src: int, dst: int, receiving: bool, number: int) -> int:
        """Where that side keeps the header of its number-th message: stamp, digest, text.

        The stamp is that of the count once it is posted; it is written last.
        """
        return self._side(src, dst, receiving) + _SLOTS * 8 + number % DEPTH * _HEADER

    def header(
        self, src: int, dst: int, receiving: bool, context: int, number: int
    ) -> bytes | None:
        """The header that side wrote for its number-th message, None if it isn't there (now)."""
        at = self.header_at(src, dst, receiving, number)
        if self.words[at >> 3] != (context + 1) << COUNT_BITS | (number + 1):
            return None
        return self.bytes[at + 16 : at + _HEADER]

    # ---- receives from anyone -------------------------------------------------------------------

    def _box(self, rank: int, context: int) -> int:
        return self._boxes + rank * _ANY + context % _SLOTS * (16 + _HEADER)

    def anyone_at(self, rank: int, context: int) -> int:
        """The word that counts the receives from anyone that `rank` has pending."""
        return self._box(rank, context) >> 3

    def set_anyone(self, rank: int, context: int, pending: int, text: bytes) -> None:
        """`rank` has `pending` receives from anyone; `text`: their header, if all have the same."""
        at = self._box(rank, context)
        self.words[(at >> 3) + 1] = 0
        self.bytes[at + 16 : at + 16 + len(text)] = text
        self.words[(at >> 3) + 1] = len(text)
        self.words[at >> 3] = (context + 1) << COUNT_BITS | pending

    def anyone(self, rank: int, context: int) -> tuple[int | None, bytes]:
        """How many receives from anyone `rank` has pending (None: can't tell), their header."""
        at = self._box(rank, context)
        word, length = self.words[at >> 3], self.words[(at >> 3) + 1]
        if word >> COUNT_BITS != context + 1:
            return (0 if _is_blank(word, context) else None), b""
        return word & _COUNT, self.bytes[at + 16 : at + 16 + length]

    # ---- what the launcher asks -----------------------------------------------------------------

    def stuck(self, rank: int, state: State) -> bool:
        """Does `rank` wait for a message whose other side has not been posted?"""
        if state.doing not in (SEND, RECV, EXCHANGE) or not state.certain:
            return False
        if state.number == ALL:
            return any(
                peers >> peer & 1
                and self._alone(rank, sends, peer, state.context,
                                self._latest(rank, sends, peer, state.context))
                for sends, peers in ((False, state.peer), (True, state.peer_2))
                for peer in range(self.ranks)
            )
        if self._alone(rank, state.sends, state.peer, state.context, state.number):
            return True
        return state.number_2 >= 0 and self._alone(
            rank, state.sends_2, state.peer_2, state.context, state.number_2
        )

    def _alone(self, rank: int, sends: bool, peer: int, context: int, number: int) -> bool:
        """Has the other side of this message surely not been posted?"""
        if sends:
            there = self.count(rank, peer, True, context)
            pending, _ = self.anyone(peer, context)
            return there is not None and there <= number and pending == 0
        if peer != ANYONE:
            there = self.count(peer, rank, False, context)
            return there is not None and there <= number
        for src in range(self.ranks):
            sent = self.count(src, rank, False, context)
            taken = self.count(src, rank, True, context)
            if sent is None or taken is None or sent > taken:
                return False
        return True
