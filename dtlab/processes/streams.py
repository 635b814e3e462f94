"""Streams: threads of a rank that run what `Comm.begin` begins, in order."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any

import torch

from dtlab.comm import Work
from dtlab.errors import RankDied
from dtlab.processes.endpoint import ProcessEndpoint
from dtlab.processes.shared_status import IDLE, RUNNING
from dtlab.tracebacks import Place, place_text


class BegunWork(Work):
    """A function that a stream runs, has run, or will run."""

    def __init__(self, end: ProcessEndpoint, stream: Stream, name: str):
        self._endpoint, self._stream, self._name = end, stream, name
        self.future: Future[Any] = Future()

    def wait(self) -> Any:
        self._endpoint.begun.pop(self, None)
        if not self.future.done():
            writer, begun_s = self._endpoint.writer, time.perf_counter()
            writer.waits_for_stream(self._stream.number)
            try:
                self.future.exception()  # waits
            finally:
                writer.runs()
            self._endpoint.recorder.add_wait(begun_s, f"stream {self._stream.number}",
                                             writer.number)
        self._stream.join()
        return self.future.result()

    def cancel(self) -> None:
        """As in `Work`; what was begun runs all the same."""
        self._endpoint.begun.pop(self, None)

    def as_future(self) -> Future[Any]:
        """Return a future that is done once `wait` would return, or raise, at once."""
        return self.future

    def __str__(self) -> str:
        return f"begin({self._name}, …)"


class Stream:
    """A thread that runs one function after another."""

    def __init__(self, end: ProcessEndpoint):
        self._endpoint, self._writer = end, end.new_writer()
        self.number = self._writer.number
        self._tasks: queue.SimpleQueue[tuple[BegunWork, str, Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        end.streams.append(self)
        context = copy_context()
        self.thread = end.threads.start(lambda: context.run(self._serve), f"stream {self.number}")

    def begin(self, task: Callable[[], Any], name: str, place: Place) -> BegunWork:
        """Run `task` after all that was begun before. place: in the learner's code."""
        work = BegunWork(self._endpoint, self, name)
        self._endpoint.begun[work] = place
        self._tasks.put((work, place_text(place), self.prepared(task)))
        return work

    def end(self) -> None:
        """End the thread after all that was begun."""
        self._tasks.put(None)

    def prepared(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """Return the function to run for `task`; called where it is begun."""
        return task

    def join(self) -> None:
        """Synchronize the caller, who has waited for something that ran here, with this stream."""

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which the thread runs."""
        return nullcontext()

    def _serve(self) -> None:
        self._endpoint.adopt_thread(self._writer)
        died: BaseException | None = None  # raised by all functions after the one that raised it
        with self.context():
            while True:
                begun = self._tasks.get()
                if begun is None:
                    return
                work, line, task = begun
                self._writer.does(RUNNING, line=line)
                value, error = None, died
                if died is None:
                    try:
                        value = task()
                    except BaseException as raised:  # for the strand that waits
                        error = raised
                died = error if isinstance(error, RankDied) else None
                if self._tasks.empty():
                    self._writer.does(IDLE)
                if error is None:
                    work.future.set_result(value)
                else:
                    work.future.set_exception(error)
                del work, task, begun, value, error  # an idle stream keeps no object alive


class CudaStream(Stream):
    """A thread with a CUDA stream of its own, so that it moves data while the rank computes."""

    def __init__(self, end: ProcessEndpoint):
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
        torch.cuda.set_device(self._endpoint.device)
        return torch.cuda.stream(self._cuda)
