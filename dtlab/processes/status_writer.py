"""The writer of one thread's state to the shared status."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Sequence

from dtlab.errors import after_error
from dtlab.processes.shared_status import (
    PEERS_BYTES,
    STRANDS,
    WAIT,
    WAIT_ANY,
    Awaited,
    SharedStatus,
    pack_messages,
    peer_names,
)


class Threads:
    """Counts the threads of this process: one that dtlab does not know could end any wait, so that
    no deadlock would be certain."""

    def __init__(self) -> None:
        self._before = _thread._count()  # besides the main one, from the start
        self._ours = 0

    def all_known(self) -> bool:
        """Are there no threads but those that dtlab has started?"""
        return _thread._count() - self._ours <= self._before

    def start(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Start a thread, whose posts the shared status must show."""
        def run() -> None:
            try:
                target()
            finally:
                self._ours -= 1

        self._ours += 1
        thread = threading.Thread(target=run, daemon=True, name=name)
        thread.start()
        return thread


class StatusWriter:
    """Writes the record of one strand: of the rank itself (number 0), or of a stream.

    At which line a rank waits, the launcher asks when it needs to know; a stream names the `line`
    that began what it runs.
    """

    def __init__(self, status: SharedStatus | None, rank: int, number: int, threads: Threads):
        self.number = number
        self._status = status if number < STRANDS else None
        self._rank, self._threads = rank, threads
        self._events = 0
        self._line = self._error = ""
        self._peers: tuple[int, ...] | None = ()  # whose names stand there
        self._label = ""

    def waits(
        self, doing: int, peers: tuple[int, ...], label: str, context: int, nbytes: int,
        sends: bool, peer: int, number: int,
    ) -> None:
        """The strand waits for the message that `State` describes, which was posted together with
        others to or from `peers`."""
        if self._status is None:
            return
        error = after_error(sys.exception())
        if peers != self._peers or label != self._label or error != self._error:
            self._error = error
            self._write_texts(peers, label)
        self._events += 1
        self._status.write(self._rank, self.number, self._events, doing,
                           self._threads.all_known(), sends, context, nbytes, peer, number)

    def waits_for_any(self, messages: Sequence[Awaited], label: str, ends: bool) -> None:
        """The strand waits until one of the messages is done, or something that a stream runs.
        ends: this wait has a time limit."""
        if self._status is None:
            return
        text = pack_messages(messages)
        fits = len(text) <= PEERS_BYTES
        self._status.write_texts(self._rank, self.number, text * fits, label,
                                 self._line + after_error(sys.exception()))
        self._peers = None
        self._events += 1
        self._status.write(self._rank, self.number, self._events, WAIT_ANY,
                           fits and not ends and self._threads.all_known())

    def waits_for_stream(self, number: int) -> None:
        """The strand waits for what the stream of this number runs."""
        self.waits(WAIT, (), "", 0, 0, False, 0, number)

    def runs(self) -> None:
        """The strand no longer waits."""
        if self._status is not None:
            self._status.set_running(self._rank, self.number)

    def does(self, doing: int, label: str = "", line: str = "") -> None:
        """Write what the strand does, when it isn't waiting."""
        if self._status is not None:
            self._line, self._error = line, ""
            self._write_texts((), label)
            self._events += 1
            self._status.write(self._rank, self.number, self._events, doing)

    def _write_texts(self, peers: tuple[int, ...], label: str) -> None:
        assert self._status is not None
        self._status.write_texts(self._rank, self.number, peer_names(peers), label,
                                 self._line + self._error)
        self._peers, self._label = peers, label
