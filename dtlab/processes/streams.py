"""Streams: threads of a rank that run what `Comm.begin` begins, in order."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from threading import Event
from typing import Any

import torch

from dtlab.comm import Work
from dtlab.errors import RankDied
from dtlab.processes.endpoint import Endpoint
from dtlab.processes.shared_status import IDLE, RUNNING
from dtlab.tracebacks import Place, place_text


class BegunWork(Work):
    """A function that a stream runs, has run, or will run."""

    def __init__(self, end: Endpoint, stream: Stream, name: str):
        self._end, self._stream, self._name = end, stream, name
        self.over = Event()
        self._listeners: list[Event] = []
        self._value: Any = None
        self.error: BaseException | None = None

    def wait(self) -> Any:
        """As in `Work`."""
        self._end.begun.pop(self, None)
        if not self.over.is_set():
            writer, begun_s = self._end.writer, time.perf_counter()
            writer.waits_for_stream(self._stream.number)
            try:
                self.over.wait()
            finally:
                writer.runs()
            self._end.recorder.add_wait(begun_s, f"stream {self._stream.number}", writer.number)
        self._stream.join()
        if self.error is not None:
            raise self.error
        return self._value

    def cancel(self) -> None:
        """As in `Work`; what was begun runs all the same."""
        self._end.begun.pop(self, None)

    @property
    def is_over(self) -> bool:
        """Does `wait` return, or raise, at once?"""
        return self.over.is_set()

    @property
    def has_failed(self) -> bool:
        """Does `wait` raise, now that it is over?"""
        return self.error is not None

    def notify(self, listener: Event) -> list[Event]:
        """Set `listener` once it is over, unless it is taken out of the returned list before."""
        self._listeners.append(listener)
        if self.over.is_set():
            listener.set()
        return self._listeners

    def run(self, task: Callable[[], Any], died: BaseException | None) -> None:
        """On the stream's thread, call `task` and keep what comes of it. died: the `RankDied` of
        one before it, which others may be in still: so it fails, too."""
        try:
            if died is not None:
                raise died
            self._value = task()
        except BaseException as error:  # for the strand that waits
            self.error = error

    def finish(self) -> None:
        """It is over: let those go on that wait for it."""
        self.over.set()
        for listener in [*self._listeners]:
            listener.set()

    def __str__(self) -> str:
        return f"begin({self._name}, …)"


class Stream:
    """A thread that runs one function after another."""

    def __init__(self, end: Endpoint):
        self._end, self._writer = end, end.new_writer()
        self.number = self._writer.number
        self._tasks: queue.SimpleQueue[tuple[BegunWork, str, Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        end.streams.append(self)
        context = copy_context()
        self.thread = end.threads.start(lambda: context.run(self._serve), f"stream {self.number}")

    def begin(self, task: Callable[[], Any], name: str, place: Place) -> BegunWork:
        """Run `task` after all that was begun before. place: in the learner's code."""
        work = self._end.begun_at(BegunWork(self._end, self, name), place)
        self._tasks.put((work, place_text(place), self.prepared(task)))
        return work

    def end(self) -> None:
        """The thread ends, after all that was begun."""
        self._tasks.put(None)

    def prepared(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """Return what to run for `task`, which is begun here."""
        return task

    def join(self) -> None:
        """Synchronize the caller, who has waited for something that ran here, with this stream."""

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which the thread runs."""
        return nullcontext()

    def _serve(self) -> None:
        self._end.adopt_thread(self._writer)
        died: BaseException | None = None
        with self.context():
            while True:
                begun = self._tasks.get()
                if begun is None:
                    return
                work, line, task = begun
                self._writer.does(RUNNING, line=line)
                work.run(task, died)
                died = work.error if isinstance(work.error, RankDied) else died
                if self._tasks.empty():
                    self._writer.does(IDLE)
                work.finish()
                del work, task, begun  # nothing is kept alive while the stream is idle


class CudaStream(Stream):
    """A thread with a CUDA stream of its own, so that it moves data while the rank computes."""

    def __init__(self, end: Endpoint):
        self._cuda = torch.cuda.Stream(end.device)
        super().__init__(end)

    def prepared(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """Return `task`, which sees all that the caller's CUDA stream was asked to do before."""
        before = torch.cuda.current_stream().record_event()

        def after() -> Any:
            self._cuda.wait_event(before)
            return task()

        return after

    def join(self) -> None:
        """Make the caller's CUDA stream wait for all work on this one."""
        torch.cuda.current_stream().wait_stream(self._cuda)

    def context(self) -> AbstractContextManager[Any]:
        """As in `Stream`."""
        torch.cuda.set_device(self._end.device)
        return torch.cuda.stream(self._cuda)
