"""A sandboxed rank's end of its connection to the referee, shared by the rank's streams.

A stream (`Comm.begin`) is a thread of the rank's process, and in the referee a strand of the
simulation. Requests and answers of all streams share one socket; each frame carries the number of
its stream. The referee lets one strand run at a time, and a stream that has made a request waits
for its answer; so one thread of the rank runs at a time, and equal submissions get equal grades.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dtlab import errors
from dtlab.grading.frames import ConnectionClosed, Frame, FrameSocket
from dtlab.grading.learner_errors import learner_place
from dtlab.grading.meter import Meter


class RankConnection:
    """The rank's end of the socket to the referee. A thread reads it and hands each frame to its
    stream."""

    def __init__(self, sock: FrameSocket):
        self.sock = sock
        self.meter: Meter | None = None
        self.numbers = itertools.count(1)  # of works and streams
        self.streams: dict[int, StreamRequests] = {}
        self._calls: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._hand_over(self.sock.recv())
        except ConnectionClosed:
            os._exit(0)  # the referee is done

    def _hand_over(self, frame: Frame) -> None:
        if frame.kind == "call":
            self._calls.put(frame)
        else:
            self.streams[frame.stream].answers.put(frame)

    def next_call(self) -> Frame:
        """Wait for the next call that the referee wants."""
        return self._calls.get()

    def begin_call(self, meter: Meter | None) -> StreamRequests:
        """Before the learner's function is called. Returns the requests of the rank itself."""
        self.meter, self.streams = meter, {}
        requests = StreamRequests(self, 0)
        requests.thread = threading.main_thread()
        return requests

    def end_call(self, kind: str, *blobs: bytes, **report: Any) -> None:
        """Send how the call ended."""
        self.sock.send(kind, *blobs, **report)

    def send_places(self) -> None:
        """Tell the referee in which line each stream is. It has waited too long for one."""
        frames = sys._current_frames()
        places = {number: learner_place(frames.get(stream.thread.ident or 0)) or stream.begun_at
                  for number, stream in self.streams.items()}
        self.sock.send("hang", places=places)


class StreamRequests:
    """The requests of one stream of the rank, under its number. 0: the rank itself.

    begun_at: the learner's line that began it.
    """

    def __init__(self, connection: RankConnection, number: int, begun_at: str = ""):
        self.connection, self.number, self.begun_at = connection, number, begun_at
        self.answers: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.thread: threading.Thread
        connection.streams[number] = self

    def tell(self, kind: str, *blobs: bytes, **fields: Any) -> None:
        """Make a request that gets no answer."""
        if threading.current_thread() is not self.thread:
            raise errors.ConfigError(
                "a function that `begin` has begun must use the communicator that it is given, and "
                "wait for its own work; this communicator or work belongs to another stream")
        at = learner_place(sys._getframe(1)) or self.begun_at
        self.connection.sock.send(kind, *blobs, stream=self.number, at=at, **fields)

    def ask(self, kind: str, *blobs: bytes, **fields: Any) -> Frame:
        """Make a request and wait for the answer; raises the error that the answer names."""
        self.tell(kind, *blobs, **fields)
        return self.answer()

    def answer(self) -> Frame:
        """Wait for an answer; raises the error that it names."""
        answer = self.answers.get()
        if "error" in answer.fields:
            family = getattr(errors, answer.fields["error"], errors.DtlabError)
            raise family(answer.fields["message"])
        return answer

    def paused_meter(self) -> AbstractContextManager[None]:
        """Inside, what is allocated is not the learner's."""
        meter = self.connection.meter
        return meter.paused() if meter else nullcontext()
