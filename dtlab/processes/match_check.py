"""Match checking: a message that does not fit its receive is refused before a byte of it moves.

Gloo compares nothing: a message larger than its buffer aborts the process, a smaller one fills a
part of it in silence. So before a message is handed to the transport, its side looks in the shared
status whether the other side has posted its number-th message of this pair and context. If so, it
compares headers, and raises `ShapeMismatch` if they differ. If not, it leaves its own header there
for the other side.

Only the last few headers of a pair are kept: with more messages outstanding than that, the check
is skipped, never wrong.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from dtlab.processes.shared_status import CONTEXTS, DEPTH, HEADER_BYTES, SharedStatus
from dtlab.ranks.matching import Header, check_match

_LABEL_CHARS = 80  # of a label that are written down
_TEXT_BYTES = HEADER_BYTES - 16  # beside a header's stamp and digest


class EncodedHeader(NamedTuple):
    """A header as it stands in shared memory. Equal digests: equal texts. 0: don't compare."""

    text: bytes = b""
    digest: int = 0


NO_HEADER = EncodedHeader()
_lock = threading.Lock()


def _memory_fence() -> None:
    """Make earlier writes visible to other processes before any later read: a lock does that."""
    with _lock:
        pass


def encoded(header: Header) -> EncodedHeader:
    """Return `header` for the shared memory. Long labels are cut; what tells them apart stays. A
    header that does not fit is not compared."""
    label = header.label
    if len(label) > _LABEL_CHARS:
        label = f"{label[:_LABEL_CHARS]}... ({zlib.crc32(label.encode()):x})"
    text = json.dumps(header._replace(label=label), ensure_ascii=False).encode() + b"\0"
    if len(text) > _TEXT_BYTES:
        return NO_HEADER
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return EncodedHeader(text, int.from_bytes(digest) or 1)


def decoded(text: bytes) -> Header:
    """The header that `encoded` wrote."""
    kind, dtype, shape, nbytes, label = json.loads(text[: text.index(b"\0")])
    return Header(kind, dtype, tuple(shape), nbytes, label)


class ContextCheck:
    """The check of one context's messages at rank `me` of the run. `index`: the context is the
    rank's index-th; None: the rank has more contexts than the shared memory holds."""

    def __init__(self, status: SharedStatus, me: int, context: int, index: int):
        self.status, self.me, self.context = status, me, context
        self.index = index if index < CONTEXTS else None
        if self.index is not None:
            status.add_context(me, self.index, context)

    def add_wildcard(
        self, pending: int, header: EncodedHeader, taken: Sequence[tuple[int, int]]
    ) -> None:
        """Announce a receive from any source, which has no number until it is met; now as many are
        `pending`, all with this header. taken: (sender, how many of its messages have been
        received). Raises `ShapeMismatch`."""
        if self.index is not None and pending == 1:
            words, at = self.status.words, self.status.wildcard_at(self.me, self.index)
            words[at + 1] = 0
            self.status.bytes[8 * at + 16 : 8 * at + 16 + len(header.text)] = header.text
            words[at + 1] = len(header.text)
        self.set_wildcards(pending)
        _memory_fence()
        all_meet_these = self.status.unmet(self.me, self.context) <= pending
        for src, number in taken:
            for later in range(pending if all_meet_these else 1):
                sent = self.read(src, src, self.me, False, number + later)
                if sent:
                    _compare(header.text, sent, src, self.me, receiving=True)

    def set_wildcards(self, pending: int) -> None:
        """Note that `pending` receives from any source are posted."""
        if self.index is not None:
            self.status.words[self.status.wildcard_at(self.me, self.index)] = pending

    def read(self, side: int, src: int, dst: int, receiving: bool, number: int) -> bytes | None:
        """The header that `side` wrote for its number-th message; None if it isn't there."""
        index = self.status.context_index(side, self.context)
        if index is None:
            return None
        at = self.status.header_at(src, dst, receiving, index, number)
        if self.status.words[at] != number + 1:
            return None
        return self.status.bytes[8 * at + 16 : 8 * at + HEADER_BYTES]


class CheckedChannel:
    """Messages of one context from `src` to `dst`, ranks of the run, seen from one of the two:
    numbers them, and compares headers with the other side."""

    def __init__(self, check: ContextCheck | None, src: int, dst: int, receiving: bool):
        self.src, self.dst, self._receiving = src, dst, receiving
        self.posted = 0
        self._check = check if check is not None and check.index is not None else None
        self._theirs: int | None = None  # the word of the other side's count, once it has one
        if self._check is not None and check is not None:
            status, index = check.status, self._check.index
            assert index is not None
            self._words = status.words
            self._mine = status.count_at(src, dst, receiving, index)
            self._my_headers = [status.header_at(src, dst, receiving, index, n)
                                for n in range(DEPTH)]

    def announce(self, header: EncodedHeader) -> int:
        """The next message is about to be posted: returns its number. Raises `ShapeMismatch`."""
        number = self.posted
        if self._check is not None:
            met = self._they_have_posted(number)
            if met:
                self._compare(number, header)
            elif header.digest:
                self._write(number, header)
            self._words[self._mine] = number + 1
            if not met:
                self._recheck(number, header)
        self.posted = number + 1
        return number

    def _recheck(self, number: int, header: EncodedHeader) -> None:
        """The other side may have posted while this one wrote."""
        _memory_fence()  # else both might look too early, in vain
        try:
            if self._they_have_posted(number):
                self._compare(number, header)
            elif not self._receiving:
                self._compare_with_wildcard(number, header)
        except Exception:
            self._words[self._mine] = number
            raise

    def withdraw(self) -> None:
        """The message that was announced last is not posted after all."""
        self.posted -= 1
        self._publish()

    def count(self, header: EncodedHeader) -> int:
        """A receive from any source has met a message of this channel: returns its number. Raises
        `ShapeMismatch` if it came from one that could not be compared before."""
        self.posted += 1
        self._publish()
        if self._check is not None and self._they_have_posted(self.posted - 1):
            self._compare(self.posted - 1, header)
        return self.posted - 1

    def _publish(self) -> None:
        if self._check is not None:
            self._words[self._mine] = self.posted

    def _they_have_posted(self, number: int) -> bool:
        if self._theirs is None:
            assert self._check is not None
            status, side = self._check.status, self.src if self._receiving else self.dst
            index = status.context_index(side, self._check.context)
            if index is None:
                return False
            self._theirs = status.count_at(self.src, self.dst, not self._receiving, index)
            self._their_headers = [
                status.header_at(self.src, self.dst, not self._receiving, index, n)
                for n in range(DEPTH)
            ]
        return number < self._words[self._theirs]

    def _write(self, number: int, header: EncodedHeader) -> None:
        """Leave `header` for the other side. As a rule it stands there already, from before."""
        assert self._check is not None
        at, words = self._my_headers[number % DEPTH], self._words
        if words[at + 1] != header.digest:
            words[at] = 0  # a reader shall not believe it meanwhile
            self._check.status.bytes[8 * at + 16 : 8 * at + 16 + len(header.text)] = header.text
            words[at + 1] = header.digest
        words[at] = number + 1

    def _compare(self, number: int, header: EncodedHeader) -> None:
        """Raise `ShapeMismatch` if the other side's header of this message is another one."""
        if self._words[self._their_headers[number % DEPTH] + 1] == header.digest or not header.text:
            return
        assert self._check is not None
        side = self.src if self._receiving else self.dst
        where = side, self.src, self.dst, not self._receiving, number
        theirs = self._check.read(*where)
        if theirs is not None and not theirs.startswith(header.text):
            time.sleep(0.002)  # it may have been in the middle of writing: look again
            theirs = self._check.read(*where)
        if theirs is not None:
            _compare(header.text, theirs, self.src, self.dst, self._receiving)

    def _compare_with_wildcard(self, number: int, header: EncodedHeader) -> None:
        """A message for which no receive has been posted meets one from any source if there are as
        many of these as messages under way to that rank. The first one from here may, if it was the
        first before and after: else that receive may have met the one before."""
        assert self._check is not None
        status, context = self._check.status, self._check.context
        index = status.context_index(self.dst, context)
        if index is None:
            return
        at = status.wildcard_at(self.dst, index)
        if not self._words[at]:
            return
        taken = self._words[status.count_at(self.src, self.dst, True, index)]
        pending, length = self._words[at], self._words[at + 1]
        wanted = status.bytes[8 * at + 16 : 8 * at + 16 + length]
        again = self._words[status.count_at(self.src, self.dst, True, index)]
        if pending and (number == taken == again
                        or status.unmet(self.dst, context) <= pending):
            _compare(header.text, wanted, self.src, self.dst, receiving=False)


def _compare(mine: bytes, theirs: bytes, src: int, dst: int, receiving: bool) -> None:
    """Raise `ShapeMismatch` if both headers are there and differ."""
    if not mine or not theirs or theirs.startswith(mine):
        return
    sent, wanted = (theirs, mine) if receiving else (mine, theirs)
    check_match(decoded(sent), src, decoded(wanted), dst)


