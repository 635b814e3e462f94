"""A rank's side of the ledger: refuse a message that does not fit, before a byte of it moves.

Gloo compares nothing: a message larger than its buffer aborts the process, a smaller one fills a
part of it in silence. So before a message is handed to Gloo, its side looks on the board whether
the other side has announced message k of this pair and context. If so, it compares headers, and
raises `ShapeMismatch` if they differ. If not, it leaves its own header there for the other.

Only the last few headers of a pair are kept: with more messages outstanding than that, the check
is skipped, never wrong.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dtlab.matching import Header, check_match
from dtlab.processes.board import COUNT_BITS, DEPTH, Board

_LABEL = 80  # letters of a label that are written down
_ROOM = 240  # bytes of text that fit beside a header's stamp and digest
_COUNTS = 1 << COUNT_BITS


class Announced(NamedTuple):
    """A header as it stands on the ledger. Equal digests: equal texts. Digest 0: don't compare."""

    text: bytes = b""
    digest: int = 0


NO_HEADER = Announced()
_lock = threading.Lock()


def _fence() -> None:
    """What I have written before, others see before I read what comes after: a lock does that."""
    with _lock:
        pass


def announced(header: Header) -> Announced:
    """`header` for the ledger."""
    text = encode(header)
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return Announced(text, int.from_bytes(digest) or 1) if text else NO_HEADER


def encode(header: Header) -> bytes:
    """`header` as text, zero-terminated; empty if it does not fit (then nothing is compared). Long
    labels are cut; what tells them apart stays."""
    label = header.label
    if len(label) > _LABEL:
        label = f"{label[:_LABEL]}... ({zlib.crc32(label.encode()):x})"
    text = json.dumps(header._replace(label=label), ensure_ascii=False).encode() + b"\0"
    return text if len(text) <= _ROOM else b""


def decode(text: bytes) -> Header:
    """The header that `encode` wrote."""
    kind, dtype, shape, nbytes, label = json.loads(text[: text.index(b"\0")])
    return Header(kind, dtype, tuple(shape), nbytes, label)


class Pair:
    """The messages src → dst of one context, seen from one of the two (`receiving`: from dst).

    Ranks are those of the run. `announce` is called for every message: where four ranks share two
    cores, each microsecond here costs a ring many, hence the positions worked out beforehand.
    """

    def __init__(self, board: Board, src: int, dst: int, receiving: bool, context: int):
        self._src, self._dst, self._receiving = src, dst, receiving
        self._bytes, self._words = board.bytes, board.words
        self._mine = board.count_at(src, dst, receiving, context)
        self._theirs = board.count_at(src, dst, not receiving, context)
        self._my_stamps = [board.header_at(src, dst, receiving, n) >> 3 for n in range(DEPTH)]
        self._their_digests = [
            (board.header_at(src, dst, not receiving, n) >> 3) + 1 for n in range(DEPTH)
        ]
        self._anyone = board.anyone_at(dst, context)
        self._base = (context + 1) << COUNT_BITS
        self._read = lambda number: board.header(src, dst, not receiving, context, number)

    def announce(self, number: int, header: Announced) -> bool:
        """Message `number` is about to be handed to Gloo. Raises `ShapeMismatch` if it can't fit.

        Returns whether the other side had announced it before. `NO_HEADER`: don't compare.
        """
        words, base = self._words, self._base
        stamp = base + number + 1
        if number < words[self._theirs] - base < _COUNTS:
            self._compare(number, header)
            words[self._mine] = stamp
            return True
        if header.digest:
            self._write(number % DEPTH, stamp, header)
        words[self._mine] = stamp
        _fence()  # else both might look too early, in vain
        if number < words[self._theirs] - base < _COUNTS:
            try:
                self._compare(number, header)
            except Exception:
                self.withdraw(number)
                raise
            return True
        return False

    def count(self, number: int) -> None:
        """Message `number` is about to be handed to Gloo; whether it fits is known."""
        self._words[self._mine] = self._base + number + 1

    def _write(self, place: int, stamp: int, header: Announced) -> None:
        """Leave `header` for the other side. As a rule it stands there already, from before."""
        at, words = self._my_stamps[place], self._words
        if words[at + 1] != header.digest:
            words[at] = 0  # whoever reads meanwhile shall not believe it
            text = 8 * at + 16
            self._bytes[text : text + len(header.text)] = header.text
            words[at + 1] = header.digest
        words[at] = stamp

    def anyone_waits(self) -> bool:
        """May the receiver wait for a message from anyone?"""
        return bool(self._words[self._anyone] & (_COUNTS - 1))

    def withdraw(self, number: int) -> None:
        """Message `number`, announced before, is not handed to Gloo after all."""
        self._words[self._mine] = self._base + number

    def _compare(self, number: int, header: Announced) -> None:
        if self._words[self._their_digests[number % DEPTH]] != header.digest:
            compare(header.text, lambda: self._read(number), self._src, self._dst, self._receiving)


class Pairs:
    """The next messages of several pairs of one context at once: as `Pair.announce` for each, with
    one fence for all. It takes all from tables, as many ranks may share few cores."""

    def __init__(self, pairs: Sequence[Pair]):
        self._pairs = pairs
        self._table = [(p._mine, p._theirs, p._my_stamps, p._their_digests) for p in pairs]

    def announce(self, numbers: Sequence[int], headers: Sequence[Announced]) -> list[int]:
        """Returns the places of those that the other side had not announced before. If it raises,
        `ShapeMismatch`, whoever calls withdraws them all."""
        first, words, base = [], self._pairs[0]._words, self._pairs[0]._base
        for place, (mine, theirs, stamps, digests) in enumerate(self._table):
            number, header = numbers[place], headers[place]
            turn, stamp = number % DEPTH, base + number + 1
            if number < words[theirs] - base < _COUNTS:
                if words[digests[turn]] != header.digest:
                    self._pairs[place]._compare(number, header)
            else:
                first.append(place)
                if header.digest and words[stamps[turn] + 1] == header.digest:
                    words[stamps[turn]] = stamp  # the header stands there, from before
                elif header.digest:
                    self._pairs[place]._write(turn, stamp, header)
            words[mine] = stamp
        if first:
            _fence()
        for place in first:
            if numbers[place] < words[self._table[place][1]] - base < _COUNTS:
                self._pairs[place]._compare(numbers[place], headers[place])
        return first


def compare(
    mine: bytes, read: Callable[[], bytes | None], src: int, dst: int, receiving: bool
) -> None:
    """Raise `ShapeMismatch` if the header that `read` gives is there, and another than mine."""
    theirs = read()
    if not mine or not theirs or theirs.startswith(mine):
        return
    time.sleep(0.002)  # they may have been in the middle of writing it: look again
    theirs = read()
    if not theirs or theirs.startswith(mine):
        return
    sent, wanted = (theirs, mine) if receiving else (mine, theirs)
    check_match(decode(sent), src, decode(wanted), dst)


class Anyone:
    """The receives from anyone of rank `me` in one context: they have no number until they are met.

    Whoever has sent already is compared when such a receive is posted, whoever comes later
    compares itself.
    """

    def __init__(self, board: Board, me: int, context: int):
        self._board, self._me, self._context = board, me, context
        self._pending: dict[object, bytes] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def announce(
        self, message: object, header: Announced, taken: Iterator[tuple[int, int]]
    ) -> None:
        """About to post `message`; `taken`: (sender, its messages that we have accounted for)."""
        board, me, context = self._board, self._me, self._context
        self._pending[message] = text = header.text
        self._publish()
        try:
            for src, number in taken:
                posted = board.count(src, me, False, context) if src != me else 0
                if posted and posted > number:
                    sent = board.header(src, me, False, context, number)
                    compare(text, lambda sent=sent: sent, src, me, True)  # type: ignore[misc]
        except Exception:
            self.met(message)
            raise

    def met(self, message: object) -> None:
        """`message` has got its sender."""
        del self._pending[message]
        self._publish()

    def _publish(self) -> None:
        """How many are pending, and their header if all have the same."""
        texts = set(self._pending.values())
        text = texts.pop() if len(texts) == 1 else b""
        self._board.set_anyone(self._me, self._context, len(self._pending), text)
