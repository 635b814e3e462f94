"""What all communicators of one rank share: the connection, the board, the trace."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from collections import deque
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from dtlab.processes.board import EXCHANGE, RECV, SEND, Board
from dtlab.processes.messages import Frames, Message
from dtlab.processes.post import Post
from dtlab.processes.shelf import Shelf

_GRAVES = 4
_GRAVE_BYTES = 64 << 20
_PAYLOAD_TAG = 1 << 30  # from here up, one tag for each large object under way


class Reply(NamedTuple):
    """What one rank brings home. Times are in seconds since the run began."""

    done_s: float
    value: Any
    messages: list[tuple[Any, ...]]
    spans: list[tuple[Any, ...]]


class Endpoint:
    """This process's end of every wire. `rank` and `size` are those of the whole run."""

    def __init__(
        self, rank: int, size: int, group: Any, device: torch.device,
        board: Board | None = None, traced: bool = True, shelf: Shelf | None = None,
        post: Post | None = None,
    ):
        self.rank, self.size, self.device, self.traced = rank, size, device, traced
        self.group = group  # torch's ProcessGroupGloo
        self.board, self.shelf, self.post = board, shelf, post
        self._write = board.writer(rank) if board is not None else None
        self.lock = threading.Lock()  # numbering and posting are one step, whichever thread
        self.start_s = time.perf_counter()
        self._open: set[Message] = set()  # Gloo forgets a message that nobody holds
        self._payloads = itertools.count()
        self.frames = Frames()
        self._graves: deque[tuple[Any, int]] = deque()
        self._grave_bytes = 0
        self._log: list[Message] = []
        self.rows: list[tuple[Any, ...]] = []  # of the trace, besides the log: see `diary`
        self._spans: list[tuple[str, float, float, str]] = []
        self._events = 0
        self._threads = _thread._count()  # besides the main one, from the start
        self._written: Any = None  # the texts of this rank's record, as they were last written

    # ---- messages -------------------------------------------------------------------------------

    def posted(self, message: Message) -> None:
        """`message` is under way."""
        self._open.add(message)
        if self.traced and message.comm.visible:
            self._log.append(message)

    def done(self, message: Message) -> None:
        """`message` has been waited for."""
        self._open.discard(message)
        self.bury(message.handles, message.nbytes)

    def bury(self, handles: Any, nbytes: int) -> None:
        """Keep Gloo's objects for messages of `nbytes`, which are over, a little longer: as their
        destructors wait for Gloo's thread to let go, and that thread has only just woken us,
        dropping them now would cost a scheduler's tick. Later, while we wait anyway, it is free.
        """
        self._graves.append((handles, nbytes))
        self._grave_bytes += nbytes
        while self._grave_bytes > _GRAVE_BYTES:
            self._grave_bytes -= self._graves.popleft()[1]

    def payload_tag(self) -> int:
        """A tag that no other message of this rank uses now."""
        return _PAYLOAD_TAG + next(self._payloads) % _PAYLOAD_TAG

    # ---- what this rank says of itself ----------------------------------------------------------

    def blocked(self, message: Message) -> None:
        """Write on the board that this rank now waits for `message`."""
        peers, sends = message.peers, message.sends
        doing = EXCHANGE if len(peers) > 1 else SEND if sends else RECV
        self.waits(peers, message.label, doing, message.context, message.nbytes,
                   sends, message.world, message.number)

    def waits(
        self, peers: tuple[int, ...], label: str, doing: int, context: int, nbytes: int,
        sends: bool, world: int, number: int,
        sends_2: bool = False, world_2: int = 0, number_2: int = -1,
    ) -> None:
        """Write on the board that this rank waits for its `number`-th message to (`sends`) or from
        rank `world` of the run; or for that and a second one. All together are with `peers`.

        At which line it waits, the launcher asks when it needs to know.
        """
        while len(self._graves) > _GRAVES:
            self._grave_bytes -= self._graves.popleft()[1]
        if self._write is None:
            return
        if (peers, label) != self._written:
            self._write_texts(peers, label)
        self._events += 1
        alone = _thread._count() == self._threads  # no other thread could end this wait
        self._write(self._events, doing, alone, sends, context, nbytes,
                    world, number, sends_2, world_2, number_2)

    def runs(self) -> None:
        """Write on the board that this rank waits no more."""
        if self.board is not None:
            self.board.runs(self.rank)

    def say(self, doing: int, label: str = "") -> None:
        """Write on the board what this rank does, when it isn't waiting."""
        if self.board is not None:
            self._write_texts((), label)
            self._events += 1
            self.board.write(self.rank, self._events, doing)

    def _write_texts(self, peers: tuple[int, ...], label: str) -> None:
        assert self.board is not None
        names = ["anyone" if peer < 0 else str(peer) for peer in peers]
        self.board.write_texts(self.rank, " and ".join(names), label)
        self._written = (peers, label)

    # ---- the trace ------------------------------------------------------------------------------

    def span(self, kind: str, start_s: float, end_s: float, label: str) -> None:
        """Note a stretch of work."""
        if self.traced:
            self._spans.append((kind, start_s, end_s, label))

    def begin(self, start_s: float) -> None:
        """A new run begins: forget the trace of the last one."""
        self.start_s = start_s
        self._log, self.rows, self._spans = [], [], []

    def diary(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """This rank's side of the trace: messages and spans, in seconds since the run began."""
        t0 = self.start_s
        messages = [
            (m.sends, m.world, m.context, m.nbytes, m.posted_s - t0,
             m.done_s - t0 if m.done_s else None, m.label)
            for m in self._log
        ]
        messages += [
            (*m[:4], posted_s - t0, done_s and done_s - t0, label)
            for *m, posted_s, done_s, label in self.rows
        ]
        messages.sort(key=itemgetter(4))  # in order of posting
        return messages, [(kind, a - t0, b - t0, label) for kind, a, b, label in self._spans]
