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
from dtlab.grading.frames import Blob, ConnectionClosed, Frame, FrameSocket, decode, encode
from dtlab.grading.learner_errors import learner_place
from dtlab.grading.meter import Meter
from dtlab.ranks.overlap import Extent


class RankConnection:
    """The rank's end of the socket to the referee. A thread reads it and hands each answer to its
    stream."""

    def __init__(self, sock: FrameSocket):
        self.sock = sock
        self.meter: Meter | None = None
        self.numbers = itertools.count(1)  # of works
        self.under_way: dict[int, Extent] = {}  # the memory of works not waited for, by number
        self._streams: list[StreamRequests] = []  # the first: the rank itself
        self._calls: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._hand_over(self.sock.recv())
        except ConnectionClosed:
            os._exit(0)  # the referee is done

    def _hand_over(self, frame: Frame) -> None:
        """Hand the frame over. A local variable of `_read` would keep it in memory."""
        if frame.kind == "call":
            self._calls.put(frame)
        else:
            self._streams[frame.stream].answers.put(frame)

    def next_call(self) -> Frame:
        """Wait for the referee's next call, and end the streams of the last one."""
        call = self._calls.get()
        for stream in self._streams:
            stream.answers.put(None)
        self._streams = []
        self.under_way.clear()
        return call

    def add_stream(self, begun_at: str = "") -> StreamRequests:
        """Add one more stream; `StreamRequests.attach` gives it a thread."""
        stream = StreamRequests(self, len(self._streams), begun_at)
        self._streams.append(stream)
        return stream

    def current(self) -> StreamRequests:
        """The stream that runs on this thread."""
        thread = threading.get_ident()
        for stream in self._streams:
            if stream.thread == thread:
                return stream
        raise errors.ConfigError("a communicator works on the rank's own thread and in functions "
                                 "that `comm.begin` begins; begin this function rather than start "
                                 "a thread")

    def ask_oracle(self, *args: Any) -> Any:
        """Ask the case's oracle, in the referee, and return its answer."""
        requests, blobs = self.current(), list[Blob]()
        tree = encode(args, blobs)
        with requests.paused_meter():
            answer = requests.ask("oracle", *blobs, args=tree)
        return decode(answer.fields["value"], answer.blobs)

    def send_places(self) -> None:
        """Send the line in which each stream is: the referee has waited too long for one."""
        frames = sys._current_frames()
        places = {stream.number: learner_place(frames.get(stream.thread)) or stream.begun_at
                  for stream in self._streams}
        self.sock.send("hang", places=places)


class StreamRequests:
    """The requests of one stream of the rank. number 0: the rank itself. begun_at: the learner's
    line that began the stream's function."""

    def __init__(self, connection: RankConnection, number: int, begun_at: str):
        self.connection, self.number, self.begun_at = connection, number, begun_at
        self.answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()  # None: no more
        self.thread = 0

    def attach(self) -> None:
        """Let the stream run on this thread."""
        self.thread = threading.get_ident()

    def tell(self, kind: str, *blobs: Blob, **fields: Any) -> None:
        """Make a request that gets no answer."""
        at = learner_place(sys._getframe(1)) or self.begun_at
        self.connection.sock.send(kind, *blobs, stream=self.number, **{"at": at, **fields})

    def ask(self, kind: str, *blobs: Blob, **fields: Any) -> Frame:
        """Make a request and wait for the answer; raises the error that the answer names."""
        self.tell(kind, *blobs, **fields)
        answer = self.answers.get()
        assert answer is not None
        if "error" in answer.fields:
            family = getattr(errors, answer.fields["error"], errors.DtlabError)
            raise family(answer.fields["message"])
        return answer

    def paused_meter(self) -> AbstractContextManager[None]:
        """Don't count what this thread allocates inside as the learner's."""
        meter = self.connection.meter
        return meter.paused() if meter else nullcontext()
