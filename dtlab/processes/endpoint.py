"""What all communicators of one rank share: the connection, the board, the trace."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from dtlab.processes.board import COMPUTE, EXCHANGE, RECV, RUNNING, SEND, Board
from dtlab.processes.ledger import Ledger
from dtlab.tracebacks import learner_frame, learner_line

if TYPE_CHECKING:
    from types import FrameType

    from dtlab.processes.communicator import Message

_GRAVES = 64
_GRAVE_BYTES = 64 << 20
_PAYLOAD_TAG = 1 << 30  # from here up, one tag for each large object under way


class Endpoint:
    """This process's end of every wire. `rank` and `size` are those of the whole run."""

    def __init__(
        self, rank: int, size: int, group: Any, device: torch.device,
        board: Board | None = None, traced: bool = True,
    ):
        self.rank, self.size, self.device, self.traced = rank, size, device, traced
        self.group = group  # torch's ProcessGroupGloo
        self.board = board
        self.ledger = Ledger(board, rank) if board else None
        self.lock = threading.Lock()  # numbering and posting are one step, whichever thread
        self.next_context = 1
        self.start_s = time.perf_counter()
        self.open: set[Message] = set()  # Gloo forgets a message that nobody holds
        self._payloads = itertools.count()
        self._graves: deque[tuple[Any, int]] = deque()
        self._grave_bytes = 0
        self._log: list[Message] = []
        self._spans: list[tuple[str, float, float, str]] = []
        self._events = 0
        self._texts: dict[Any, bytes] = {}

    # ---- messages -------------------------------------------------------------------------------

    def posted(self, message: Message) -> None:
        """`message` is under way."""
        self.open.add(message)
        if self.traced and message.visible:
            self._log.append(message)

    def done(self, message: Message) -> None:
        """`message` has been waited for.

        Gloo's object is kept a little longer: as its destructor waits for Gloo's thread to let go,
        and that thread has only just woken us, dropping it now would cost a scheduler's tick.
        """
        self.open.discard(message)
        self._graves.append((message.handles, message.nbytes))
        self._grave_bytes += message.nbytes
        while len(self._graves) > _GRAVES or self._grave_bytes > _GRAVE_BYTES:
            self._grave_bytes -= self._graves.popleft()[1]

    def payload_tag(self) -> int:
        """A tag that no other message of this rank uses now."""
        return _PAYLOAD_TAG + next(self._payloads) % _PAYLOAD_TAG

    # ---- what this rank says of itself ----------------------------------------------------------

    def blocked(self, message: Message) -> None:
        """Write on the board that this rank now waits for `message`. About a microsecond."""
        if self.board is None:
            return
        self._events += 1
        doing = SEND if message.sends else RECV
        peers: tuple[int, ...] = (message.world,)
        if len(message.batch) > 1:
            doing, peers = EXCHANGE, tuple(dict.fromkeys(m.world for m in message.batch))
        self.board.write(
            self.rank, self._events, doing, message.sends, threading.active_count() == 1,
            message.world, message.context, message.number, message.nbytes,
            self._peers(peers), self._label(message.label), self._line(sys._getframe(2)),
        )

    def say(self, doing: int, label: str = "") -> None:
        """Write on the board what this rank does, when it isn't waiting."""
        if self.board is None:
            return
        self._events += 1
        if doing == RUNNING:
            self.board.touch(self.rank, self._events, doing)
        else:
            line = self._line(sys._getframe(2)) if doing == COMPUTE else b""
            self.board.write(self.rank, self._events, doing, label=self._label(label), line=line)

    def _line(self, frame: FrameType) -> bytes:
        learner = learner_frame(frame) or frame
        key = (learner.f_code, learner.f_lineno)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = learner_line(learner).encode()[:160]
        return text

    def _peers(self, peers: tuple[int, ...]) -> bytes:
        text = self._texts.get(peers)
        if text is None:
            names = ["anyone" if peer < 0 else str(peer) for peer in peers]
            text = self._texts[peers] = " and ".join(names).encode()[:40]
        return text

    def _label(self, label: str) -> bytes:
        text = self._texts.get(label)
        if text is None:
            text = self._texts[label] = label.split("(")[0].encode()[:40]
        return text

    # ---- the trace ------------------------------------------------------------------------------

    def span(self, kind: str, start_s: float, end_s: float, label: str) -> None:
        """Note a stretch of work."""
        if self.traced:
            self._spans.append((kind, start_s, end_s, label))

    def begin(self, start_s: float) -> None:
        """A new run begins: forget the trace of the last one."""
        self.start_s = start_s
        self._log, self._spans = [], []

    def diary(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """This rank's side of the trace: messages and spans, times as the clock gave them."""
        messages = [
            (m.sends, m.world, m.context, m.nbytes, m.posted_s, m.done_s, m.label)
            for m in self._log
        ]
        return messages, list(self._spans)
