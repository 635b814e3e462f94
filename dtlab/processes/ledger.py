"""A rank's side of the ledger: refuse a message that does not fit, before a byte of it moves.

Gloo compares nothing: a message larger than its buffer aborts the process, a smaller one fills a
part of it in silence. So before a message is handed to Gloo, its side writes a header on the board
(number k of this pair and context), then looks for the k-th header of the other side. Whoever
comes second finds it, and raises `ShapeMismatch` there.

Only the last few headers of a pair are kept: with more messages outstanding than that, the check
is skipped, never wrong.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from dtlab.matching import Header, check_match
from dtlab.processes.board import Board

_ROOM = 248  # bytes of text that fit beside a header's stamp


def encode(header: Header) -> bytes:
    """`header` as text, zero-terminated; empty if it does not fit (then nothing is compared)."""
    text = json.dumps(header._replace(label=header.label[:90])).encode() + b"\0"
    return text if len(text) <= _ROOM else b""


def decode(text: bytes) -> Header:
    """The header that `encode` wrote."""
    kind, dtype, shape, nbytes, label = json.loads(text[: text.index(b"\0")])
    return Header(kind, dtype, tuple(shape), nbytes, label)


class Ledger:
    """What rank `me` has posted, and what the others have. Ranks here are those of the run."""

    def __init__(self, board: Board, me: int):
        self._board = board
        self._me = me
        self._fence = threading.Lock()

    def send(self, dst: int, context: int, number: int, text: bytes, *, first: bool) -> None:
        """About to send message `number` to `dst`. `first`: all earlier ones have arrived."""
        board, me = self._board, self._me
        board.put_header(me, dst, False, context, number, text)
        board.set_count(me, dst, False, context, number + 1)
        self._publish()
        posted = board.count(me, dst, True, context)
        try:
            if posted is not None and posted > number:
                self._compare(text, me, dst, lambda: board.header(me, dst, True, context, number))
            elif first:  # then a receive from anyone is what it would meet
                pending, wanted = board.anyone(dst, context)
                if pending and wanted:
                    self._compare(text, me, dst, lambda: board.anyone(dst, context)[1])
        except Exception:
            board.set_count(me, dst, False, context, number)  # it was not sent
            raise

    def recv(self, src: int, context: int, number: int, text: bytes) -> None:
        """About to receive message `number` from `src`. Empty `text`: which one is uncertain."""
        board, me = self._board, self._me
        if text:
            board.put_header(src, me, True, context, number, text)
        board.set_count(src, me, True, context, number + 1)
        self._publish()
        posted = board.count(src, me, False, context)
        if text and posted is not None and posted > number:
            try:
                self._compare(text, src, me, lambda: board.header(src, me, False, context, number))
            except Exception:
                board.set_count(src, me, True, context, number)
                raise

    def recv_anyone(
        self, taken: dict[int, int], context: int, pending: int, text: bytes
    ) -> None:
        """About to post the pending-th receive from anyone; `taken`: messages so far, by sender.

        Whoever has sent already is compared here, whoever comes later compares itself.
        """
        board, me = self._board, self._me
        board.set_anyone(me, context, pending, text)
        self._publish()
        if not text:
            return
        try:
            for src, number in taken.items():
                posted = board.count(src, me, False, context) if src != me else 0
                if posted and posted > number:
                    self._compare(
                        text, src, me,
                        lambda src=src, number=number:  # type: ignore[misc]
                        board.header(src, me, False, context, number),
                    )
        except Exception:
            board.set_anyone(me, context, pending - 1, b"")
            raise

    def took(self, src: int, context: int, count: int, pending: int, text: bytes) -> None:
        """A receive from anyone turned out to be from `src`: its count-th message."""
        self._board.set_count(src, self._me, True, context, count)
        self._board.set_anyone(self._me, context, pending, text)

    def _publish(self) -> None:
        """What was written is visible to others before anything further is read.

        Else both sides might look too early and miss each other. A lock is a memory fence.
        """
        with self._fence:
            pass

    def _compare(
        self, mine: bytes, src: int, dst: int, read: Callable[[], bytes | None]
    ) -> None:
        theirs = read()
        if not mine or not theirs or theirs[: len(mine)] == mine:
            return
        time.sleep(0.002)  # they may have been in the middle of writing it: look again
        theirs = read()
        if not theirs or theirs[: len(mine)] == mine:
            return
        sent, wanted = (mine, theirs) if src == self._me else (theirs, mine)
        check_match(decode(sent), src, decode(wanted), dst)
