"""The shared status: memory in which every rank writes what it does and which messages it posts.

It is how a hang gets a name. Each strand of a rank (the rank itself, and each stream that it has
begun) keeps one record, rewritten before each wait, so that the launcher can say who waits for
whom even of a rank that no longer answers. And for each ordered pair of ranks, each side counts the
messages that it has posted in each context, and leaves their headers for the other side.

No locks: each word has one writer. Layout, for p ranks:

    p · STRANDS records          what a strand does now
    p · CONTEXTS words           the contexts of a rank, in the order in which it formed them
    p · CONTEXTS wildcards       its pending receives from any source
    p · p · 2 · CONTEXTS counts  src → dst, sends and receives: a count, and the last headers
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from dtlab.errors import Waiting

DOING = ("starting", "running", "send", "recv", "exchange", "compute", "returned", "raised",
         "idle", "wait", "wait_any")
(STARTING, RUNNING, SEND, RECV, EXCHANGE, COMPUTE, RETURNED, RAISED,
 IDLE, WAIT, WAIT_ANY) = range(len(DOING))
ANY_SOURCE = -1

STRANDS = 16  # that have a record: a rank and its first streams
CONTEXTS = 64  # of a rank that can be watched
DEPTH = 8  # headers kept of each direction of a pair and context
HEADER_BYTES = 256  # of which a stamp and a digest take 8 each
# A record: numbers in the order of `State`, then texts, which change less often.
_NUMBERS = struct.Struct("=QB?x?qqqq")
PEERS_BYTES = 192
_TEXTS = struct.Struct(f"={PEERS_BYTES}s124s84s")
_RECORD = 448
_WILDCARD = 16 + HEADER_BYTES
_COUNT = HEADER_BYTES * (1 + DEPTH)  # the count has the place of a header to itself


class Awaited(NamedTuple):
    """A message that a strand waits for, as in `State`."""

    sends: bool
    context: int
    peer: int
    number: int


class State(NamedTuple):
    """One record, read: what a strand does, and for which message it waits."""

    events: int  # grows with every change
    doing: int
    certain: bool  # no thread unknown to dtlab could end its wait
    sends: bool  # it waits for a message that it sends …
    context: int  # … in the context of this index,
    nbytes: int
    peer: int  # … to this rank of the run, or receives from it (or from ANY_SOURCE);
    number: int  # the number-th of this pair and context; from ANY_SOURCE: so many such receives
    # are older. WAIT: for the stream of this number
    peers: str = ""  # WAIT_ANY: the messages, as `pack_messages` wrote them
    label: str = ""
    line: str = ""  # of a stream: the line that began what it runs; then `errors.after_error`


class SharedStatus:
    """The shared memory, seen from the launcher or from a rank."""

    def __init__(self, fd: int, ranks: int):
        self.ranks = ranks
        self._contexts = _RECORD * STRANDS * ranks
        self._wildcards = self._contexts + 8 * CONTEXTS * ranks
        self._counts = -(-(self._wildcards + _WILDCARD * CONTEXTS * ranks) // 4096) * 4096
        size = self._counts + 2 * CONTEXTS * _COUNT * ranks * ranks
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)  # untouched pages take no memory
        self.bytes = mmap.mmap(fd, size)
        self.words = memoryview(self.bytes).cast("Q")

    def clear(self) -> None:
        """Begin anew, while no rank runs: forget all contexts and what was counted in them."""
        blank = bytes(4096)
        for at in range(self._contexts, len(self.bytes), 4096):
            if self.bytes[at : at + 4096] != blank[: len(self.bytes) - at]:
                self.bytes[at : at + 4096] = blank[: len(self.bytes) - at]

    def clear_rank(self, rank: int) -> None:
        """Forget the contexts of `rank` and what it has counted in them, while it takes part in
        none."""
        for first, length in ((self._contexts + 8 * CONTEXTS * rank, 8 * CONTEXTS),
                              (self._wildcards + _WILDCARD * CONTEXTS * rank,
                               _WILDCARD * CONTEXTS)):
            self.bytes[first : first + length] = bytes(length)
        for peer in range(self.ranks):
            for side in (2 * (rank * self.ranks + peer), 2 * (peer * self.ranks + rank) + 1):
                first = self._counts + _COUNT * CONTEXTS * side
                for at in range(first, first + _COUNT * CONTEXTS, _COUNT):
                    if self.words[at >> 3]:
                        self.bytes[at : at + _COUNT] = bytes(_COUNT)

    def part(self, rank: int) -> dict[int, bytes]:
        """Copy what `rank` has written, by place, without headers: for hosts with other memory."""
        places = [(_RECORD * STRANDS * rank, _RECORD * STRANDS),
                  (self._contexts + 8 * CONTEXTS * rank, 8 * CONTEXTS),
                  (self._wildcards + _WILDCARD * CONTEXTS * rank, _WILDCARD * CONTEXTS)]
        first = (self._contexts >> 3) + CONTEXTS * rank
        used = sum(map(bool, self.words[first : first + CONTEXTS].tolist()))
        places += [(8 * self.count_at(*pair, index), 8) for peer in range(self.ranks)
                   for pair in ((rank, peer, False), (peer, rank, True)) for index in range(used)]
        return {at: self.bytes[at : at + length] for at, length in places}

    def write_part(self, part: dict[int, bytes]) -> None:
        """Write what `part` gave on another host."""
        for at, data in part.items():
            self.bytes[at : at + len(data)] = data

    # ---- records --------------------------------------------------------------------------------

    def write(
        self, rank: int, strand: int, events: int, doing: int, certain: bool = True,
        sends: bool = False, context: int = 0, nbytes: int = 0, peer: int = 0, number: int = 0,
    ) -> None:
        """Rewrite the numbers of a record, see `State`."""
        _NUMBERS.pack_into(self.bytes, _RECORD * (STRANDS * rank + strand), events, doing, certain,
                           sends, context, nbytes, peer, number)

    def write_texts(self, rank: int, strand: int, peers: str, label: str, line: str) -> None:
        """Rewrite the texts of a record."""
        at = _RECORD * (STRANDS * rank + strand) + _NUMBERS.size
        self.bytes[at : at + _TEXTS.size] = _packed_texts(peers, label, line)

    def set_running(self, rank: int, strand: int) -> None:
        """The strand no longer waits."""
        self.bytes[_RECORD * (STRANDS * rank + strand) + 8] = RUNNING

    def state(self, rank: int, strand: int = 0) -> State:
        """Return the state that the strand wrote last."""
        at = _RECORD * (STRANDS * rank + strand)
        texts = _TEXTS.unpack_from(self.bytes, at + _NUMBERS.size)
        return State(*_NUMBERS.unpack_from(self.bytes, at),
                     *(raw.rstrip(b"\0").decode(errors="replace") for raw in texts))

    def streams(self, rank: int) -> list[tuple[int, State]]:
        """(number, state) of the streams of `rank` that have something to do."""
        states = [(strand, self.state(rank, strand)) for strand in range(1, STRANDS)]
        return [(strand, state) for strand, state in states
                if state.events and state.doing != IDLE]

    # ---- contexts -------------------------------------------------------------------------------

    def add_context(self, rank: int, index: int, context: int) -> None:
        """`rank` has formed `context` (not 0), the index-th of its contexts."""
        self.words[(self._contexts >> 3) + CONTEXTS * rank + index] = context

    def context_index(self, rank: int, context: int) -> int | None:
        """The index under which `rank` counts `context`; None: it has not formed it (yet)."""
        first = (self._contexts >> 3) + CONTEXTS * rank
        words = self.words[first : first + CONTEXTS].tolist()
        return words.index(context) if context in words else None

    def is_full(self, rank: int) -> bool:
        """Might `rank` have formed contexts that had no place here?"""
        return self.words[(self._contexts >> 3) + CONTEXTS * (rank + 1) - 1] != 0

    # ---- counts and headers ---------------------------------------------------------------------

    def count_at(self, src: int, dst: int, receiving: bool, index: int) -> int:
        """The word in which one side of src → dst counts the messages it has posted; index: of the
        context, at that side."""
        side = 2 * (src * self.ranks + dst) + receiving
        return (self._counts + _COUNT * (CONTEXTS * side + index)) >> 3

    def header_at(self, src: int, dst: int, receiving: bool, index: int, number: int) -> int:
        """The first of the words in which that side keeps the header of its number-th message:
        stamp (number + 1, written last), digest; then its text."""
        count = self.count_at(src, dst, receiving, index)
        return count + (HEADER_BYTES >> 3) * (1 + number % DEPTH)

    def posted(self, src: int, dst: int, receiving: bool, context: int) -> int | None:
        """Count the messages that the side has posted in `context`; None if that is unknown."""
        side = dst if receiving else src
        index = self.context_index(side, context)
        if index is None:
            return None if self.is_full(side) else 0
        return self.words[self.count_at(src, dst, receiving, index)]

    # ---- receives from any source ---------------------------------------------------------------

    def wildcard_at(self, rank: int, index: int) -> int:
        """The first word of what `rank` says of its receives from any source in a context: how many
        are pending; bytes of the header that they have in common; then that header's text."""
        return (self._wildcards + _WILDCARD * (CONTEXTS * rank + index)) >> 3

    def pending_wildcards(self, rank: int, context: int) -> int | None:
        """Count the pending receives of `rank` from any source; None if that is unknown."""
        index = self.context_index(rank, context)
        if index is None:
            return None if self.is_full(rank) else 0
        return self.words[self.wildcard_at(rank, index)]

    def unmet(self, rank: int, context: int) -> float:
        """Count the messages sent to `rank` for which it has posted no receive that names their
        sender, and that none from any source has met; infinite if that is unknown."""
        unmet = 0
        for src in range(self.ranks):
            sent = self.posted(src, rank, False, context)
            taken = self.posted(src, rank, True, context)
            if sent is None or taken is None:
                return math.inf
            unmet += sent - taken
        return unmet

    # ---- what the launcher asks -----------------------------------------------------------------

    def stuck(self, rank: int) -> bool:
        """Do the rank and its streams all wait for messages whose other side has not been posted,
        or for each other?"""
        states = [self.state(rank), *(state for _, state in self.streams(rank))]
        waits = [state.doing == WAIT or self._is_unmet(rank, state) for state in states]
        return all(waits) and not all(state.doing == WAIT for state in states)

    def _is_unmet(self, rank: int, state: State) -> bool:
        """Has the other side of the message that the strand waits for surely not been posted, or
        of none of those that it waits for together?"""
        if state.doing not in (SEND, RECV, EXCHANGE, WAIT_ANY) or not state.certain:
            return False
        messages = _unpack_messages(state.peers) if state.doing == WAIT_ANY else [
            Awaited(state.sends, state.context, state.peer, state.number)]
        return all(self._is_alone(rank, message) for message in messages)

    def _is_alone(self, rank: int, message: Awaited) -> bool:
        sends, index, peer, number = message
        context = self.words[(self._contexts >> 3) + CONTEXTS * rank + index]
        if sends:
            there = self.posted(rank, peer, True, context)
            pending = self.pending_wildcards(peer, context)
            return there is not None and pending is not None and there + pending <= number
        if peer != ANY_SOURCE:
            there = self.posted(peer, rank, False, context)
            return there is not None and there <= number
        return self.unmet(rank, context) <= number

    def table(self, rank: int, line: str) -> list[Waiting]:
        """The rows of `rank` in the table of a `Deadlock` or `RunTimeout`; line: where it is."""
        main = self.state(rank)
        rows = [_row(rank, main, line + main.line)]
        return rows + [_row(rank, state, state.line, f" (stream {number})")
                       for number, state in self.streams(rank)]


def peer_names(peers: Iterable[int]) -> str:
    """Name these peers in a table."""
    return " and ".join("anyone" if peer == ANY_SOURCE else str(peer) for peer in peers)


def pack_messages(messages: Iterable[Awaited]) -> str:
    """Write messages into the text of a record."""
    return ",".join(" ".join(str(int(field)) for field in message) for message in messages)


def _unpack_messages(text: str) -> list[Awaited]:
    return [Awaited(bool(int(sends)), *map(int, others))
            for sends, *others in (one.split() for one in text.split(",") if one)]


@lru_cache(maxsize=1024)  # a collective writes the same few texts again and again
def _packed_texts(peers: str, label: str, line: str) -> bytes:
    return _TEXTS.pack(peers.encode(), label.encode(), line.encode())


def _row(rank: int, state: State, line: str, where: str = "") -> Waiting:
    doing = DOING[state.doing]
    if state.doing == WAIT:
        return Waiting(rank, f"wait for stream {state.number}{where}", line=line)
    if state.doing == WAIT_ANY:
        peers = peer_names(dict.fromkeys(message.peer for message in _unpack_messages(state.peers)))
        return Waiting(rank, doing + where, peers, line=line)
    if state.doing not in (SEND, RECV, EXCHANGE):
        label = f" in {state.label}" if state.doing == COMPUTE and state.label else ""
        return Waiting(rank, doing + label + where, line=line)
    label = f" in {state.label.split('(')[0]}" if state.label else ""
    return Waiting(rank, doing + label + where, state.peers, state.nbytes, line)
