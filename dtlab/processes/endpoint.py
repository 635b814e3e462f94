"""State that all communicators of one rank share: its connections, its status, its recorder."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any, NamedTuple

import torch

from dtlab.comm import Work
from dtlab.errors import RankDied, RunTimeout, UnwaitedWork
from dtlab.processes.connections import Connections
from dtlab.processes.match_check import ContextCheck
from dtlab.processes.recorder import Recorder, Row
from dtlab.processes.shared_status import ANY_SOURCE, COMPUTE, RUNNING, SharedStatus
from dtlab.processes.status_writer import StatusWriter, Threads
from dtlab.processes.store import RankStore, disconnected_key
from dtlab.processes.survivors import connect_survivors, survivors_key
from dtlab.processes.transport import WATCHING, GlooTransport, TransportHandle, WatchedHandle
from dtlab.ranks.overlap import Extent
from dtlab.tracebacks import Place, place_text

_LOOK_EVERY_S = 0.1
_SETTLE_S = 1.0  # how long to wait for operations to fail, which Gloo may not report


class Reply(NamedTuple):
    """The reply of one rank to the launcher. Times are in seconds since the run began."""

    done_s: float
    value: Any
    messages: list[Row]
    spans: list[Row]
    waits: list[Row]
    clock_uncertainty_s: float = 0.0  # of these times, on a host with a clock of its own


class ProcessEndpoint:
    """This process's end of all connections. `rank` and `size` are those of the whole run."""

    def __init__(
        self, rank: int, size: int, transport: GlooTransport, threads: Threads,
        device: torch.device, status: SharedStatus | None = None, traced: bool = True,
        store: RankStore | None = None, connections: Connections | None = None,
    ):
        self.store, self.connections = store, connections  # None without a launcher of ours
        self.rank, self.size, self.device = rank, size, device
        self.transport, self.status = transport, status
        self.recorder = Recorder(traced)
        self.lock = threading.Lock()  # held while messages are numbered and posted
        self.start_s = time.perf_counter()
        self.threads = threads
        self._writers = itertools.count()  # shared by ends of other groups: see `joined`
        self._contexts: dict[int, ContextCheck | None] = {}
        self._main = self.new_writer()
        self._local = threading.local()
        # Unwaited works, and the lines that began them. Gloo needs references to its handles.
        self.posted: dict[Any, Place] = {}
        self.begun: dict[Work, Place] = {}
        self.cancelled: list[Any] = []
        self.streams: list[Any] = []  # threads, until `close`
        self.directions: list[Any] = []  # see `nccl_transport`; until the next run
        self.unfinished: list[Any] = []  # messages of broken connections
        self.broken = False  # has a connection broken?
        self.generation = 0  # how many shrinks there were
        self.may_die = False  # may ranks die, and the others go on?
        self.in_session = False
        self.find_cause: Callable[[], Exception | None] = lambda: None  # see `Monitor.why`
        self.report_failure: Callable[[Exception], None] = lambda _: None  # to the other ranks

    def new_writer(self) -> StatusWriter:
        """Return a writer for the next strand of this rank."""
        return StatusWriter(self.status, self.rank, next(self._writers), self.threads)

    @property
    def writer(self) -> StatusWriter:
        """The writer of the current thread's strand: a stream's, or else the rank's own."""
        return getattr(self._local, "writer", self._main)

    def adopt_thread(self, writer: StatusWriter) -> None:
        """Make the current thread the strand of this `writer`."""
        self._local.writer = writer

    def posted_extents(self) -> list[Extent]:
        """Return the memory of unwaited messages outside of collectives."""
        return [work.extent for work in [*self.posted] if work.extent]

    def context_check(self, context: int) -> ContextCheck | None:
        """The match check of a context that this rank forms; None without a shared status."""
        if context not in self._contexts:
            check = None
            if self.status is not None:
                check = ContextCheck(self.status, self.rank, context, len(self._contexts))
            self._contexts[context] = check
        return self._contexts[context]

    def forget_contexts(self) -> None:
        """Count contexts from 0 again; the launcher has cleared the shared status."""
        self._contexts.clear()

    def shrink(self) -> tuple[int, list[int]]:
        """Leave the group, and connect with the other survivors; see `Comm.shrink`. Returns the
        generation and its ranks."""
        assert self.store is not None
        self._disconnect()
        self._main.does(COMPUTE, "shrink")
        number, ranks, self.transport, self.connections = connect_survivors(
            self.store, self.rank, self.threads)
        self._main.does(RUNNING)
        self.generation = number
        return number, ranks

    def check_not_shrunk(self, context: tuple[Any, ...]) -> None:
        """Raise `RankDied` if the communicator of this context has ended with `shrink`."""
        if self.generation and context[0] != survivors_key(self.generation):
            raise RankDied.after_shrink(self.rank)

    def watched(self, handle: Any, message: Any, members: Sequence[int]) -> Any:
        """Return a handle whose wait fails if a peer dies: Gloo's own never ends for a receive from
        anyone, nor for a send whose peer dies as it begins. members: of the communicator."""
        anyone = message.peer == ANY_SOURCE
        if not self.may_die or self.store is None or not (anyone or message.sends):
            return handle
        peers = members if anyone else [message.world]
        keys = [disconnected_key(self.generation, peer) for peer in peers]
        return _FailureAwareHandle(handle, self.threads.start, self.store, keys)

    def connection_error(self, error: RuntimeError, rank: int, peer: int) -> Exception:
        """Return the error to raise in place of Gloo's `error` while `rank` waits for `peer`, both
        of the communicator."""
        self.broken = True
        who = "a rank" if peer == ANY_SOURCE else f"rank {peer}"
        failure: Exception
        if limit := re.search(r"Timed out(?: waiting (\d+)ms)?", str(error)):
            waited = f"{int(limit[1]) / 1000:g} s for {who}" if limit[1] else f"for {who}"
            failure = RunTimeout(f"rank {rank} waited {waited}, the time limit of the process "
                                 f"group; init_process_group and new_group take timeout=")
            self.report_failure(failure)
        elif (why := self.find_cause()) is not None:
            return why
        else:
            failure = RankDied(f"rank {rank}: the connection to {who} has broken", peer)
        failure.__cause__ = error
        return failure

    def _disconnect(self) -> None:
        """Close all connections, and wait until all operations on them have failed."""
        assert self.status is not None
        assert self.connections is not None
        self.connections.close()
        posted = [work.message for work in [*self.posted, *self.cancelled]]
        receives = [message for message in [*self.unfinished, *posted] if not message.sends]
        begun = [*self.begun]
        self.threads.start(lambda: _wait_for_failures(receives, begun), "leaving").join(_SETTLE_S)
        for works in (self.posted, self.begun, self.cancelled, self.unfinished):
            works.clear()
        self.broken = False
        self.forget_contexts()
        self.status.clear_rank(self.rank)

    def close(self) -> None:
        """End all streams and drop the connections, after the last run."""
        for stream in self.streams:
            stream.end()
        self.transport.close()

    def begin_run(self, start_s: float) -> None:
        """Clear the records of the last run."""
        self.start_s = start_s
        self.recorder.clear()
        self.posted.clear()
        self.begun.clear()
        self.cancelled.clear()
        while self.directions:
            self.directions.pop().finish()  # all ranks have left the last run

    def end_run(self) -> None:
        """Wait for begun work, and raise its error, if the rank has not waited for it. Then raise
        `UnwaitedWork` if there was any work for which the rank has not waited, unless a connection
        has broken: then no rank may be able to complete it."""
        if self.broken:
            return
        begun = list(self.begun.items())
        for work, _ in begun:
            work.wait()
        unwaited = [*self.posted.items(), *begun]
        if unwaited:
            raise UnwaitedWork.of(
                self.rank, [f"{work}, at {place_text(place)}" for work, place in unwaited],
                [work.owed for work, _ in unwaited])


class _FailureAwareHandle:
    """A handle whose `wait` also asks the launcher whether a peer has died. gone: keys of peers."""

    def __init__(self, handle: TransportHandle, start: Callable[..., object], store: RankStore,
                 gone: list[str]):
        self._handle, self._start, self._store, self._gone = handle, start, store, gone

    def wait(self) -> None:
        """See `TransportHandle`."""
        watched = WatchedHandle(self._handle, self._start)
        while not wait([watched.future], _LOOK_EVERY_S).done:
            if any(self._store.check([key]) for key in self._gone):
                raise RuntimeError("Connection closed: a rank has died, or called shrink")
        watched.wait()

    def _source_rank(self) -> int:
        return self._handle._source_rank()  # type: ignore[attr-defined, no-any-return]


def _wait_for_failures(receives: list[Any], begun: list[Any]) -> None:
    """Wait for operations on closed connections, which fail at once."""
    for work in begun:
        work.future.exception()
    for message in receives:
        with contextlib.suppress(RuntimeError):
            message.handle.wait()
    for thread in threading.enumerate():
        if thread.name == WATCHING:
            thread.join()
