"""Ranks that no launcher of ours watches: each watches its own waits, and they decide together.

Ranks of one host share the status, as under `run`: a message that does not fit is refused before it
moves. Hosts tell each other of waits that last, through the store of the process group. The rank
that first finds that no rank can go on writes the verdict into the store; every rank reads it
there, and ends its waits by closing its connections.

The limit: between hosts, the sizes of messages are not compared; and a wait ends, not a loop.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import queue
import select
import signal
import socket
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dtlab.errors import RunTimeout
from dtlab.processes import failures
from dtlab.processes.connections import Connections
from dtlab.processes.failures import CapturedError
from dtlab.processes.shared_status import EXCHANGE, RECV, SEND, WAIT, WAIT_ANY, SharedStatus
from dtlab.processes.status_writer import Threads
from dtlab.processes.watchdog import Watchdog
from dtlab.ranks import serialization
from dtlab.tracebacks import learner_line

_LOOK_EVERY_S = 0.2
_PATIENCE_S = 2.0  # how long a rank whose connection has broken waits to hear why
_ANSWER_S = 10.0  # how long the store may take to answer
_KNOWN_S = 0.5  # so long before the rank that has decided closes its connections
T = TypeVar("T")
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # one kernel, one clock


def host_name() -> str:
    """The same on all ranks of this host, and on no other's."""
    return f"{platform.node()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"


# ---- memory that the ranks of a host share -------------------------------------------------------


def open_status(store: dist.Store, rank: int, ranks: int) -> tuple[SharedStatus, int | None]:
    """The status of `ranks` ranks, and the file that the caller closes at the end, if others of
    this host open it. A rank that can't reach the memory of the one that came first has its own. It
    lies in no folder: nothing is left behind."""
    name = uuid.uuid4().hex
    mine = serialization.memory_file(name)
    status, key = SharedStatus(mine, ranks), f"memory/{host_name()}"
    offer = f"/proc/{os.getpid()}/fd/{mine}\n{name}"
    taken = store.compare_set(key, "", offer).decode()
    shared = taken == offer
    if not shared:
        path, name = taken.split("\n")
        with contextlib.suppress(OSError):
            if name in os.readlink(path):  # else the number means another process here
                theirs = os.open(path, os.O_RDWR)
                status, shared = SharedStatus(theirs, ranks), True
                os.close(theirs)
        os.close(mine)
    store.set(f"host/{rank}", taken if shared else offer)
    return status, mine if taken == offer else None


# ---- what ended a run ----------------------------------------------------------------------------


class EndReason:
    """The reason for a run's end, in the store. The first one that is set counts."""

    def __init__(self, store: dist.Store):
        self._store = store

    def set(self, rank: int, why: CapturedError | Exception) -> None:
        """Note that `rank` has failed, or finds that no rank can go on."""
        self._store.compare_set("over", "", pickle.dumps((rank, why)).hex())

    def read(self, patience_s: float = 0.0) -> Exception | None:
        """The error that all ranks raise, if there is one within this time."""
        until = time.monotonic() + patience_s
        while not self._store.check(["over"]):
            if time.monotonic() >= until:
                return None
            time.sleep(0.02)
        rank, why = pickle.loads(bytes.fromhex(self._store.get("over").decode()))
        return why if isinstance(why, Exception) else failures.rank_failed(rank, why)


class Monitor:
    """Watches the waits of this rank, on a thread, until `close`. timeout: seconds, from now."""

    def __init__(self, status: SharedStatus, store: dist.Store, rank: int, threads: Threads,
                 timeout: float | None):
        self.verdict = EndReason(store)
        self.error: Exception | None = None  # why the run has ended
        self._status, self._store, self._rank = status, store, rank
        self._connections: list[Connections] = []
        self._watchdog = Watchdog(status, timeout)
        self._watchdog.start()
        self._questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._questions = queue.SimpleQueue()
        self._thread = threading.get_ident()  # of the rank's own strand
        self._seen: Any = None
        self._published = False
        self._parts: dict[int, bytes] = {}  # of ranks on other hosts, as read last
        self._closed, self._gets_signals, self._before = False, False, -1
        self._signal_reader, self._signal_writer = socket.socketpair()
        for end in (self._signal_reader, self._signal_writer):
            end.setblocking(False)
        with contextlib.suppress(ValueError):  # only the main thread may call it
            self._before = signal.set_wakeup_fd(self._signal_writer.fileno(),
                                                warn_on_full_buffer=False)
            self._gets_signals = True
        threads.start(self._answer, "store")
        self._watching = threads.start(self._watch, "monitor")

    def add(self, connections: Connections) -> None:
        """Close `connections`, too, at the end of the run."""
        self._connections.append(connections)

    def remove(self, connections: Connections) -> None:
        """Leave `connections` alone from now on."""
        self._connections.remove(connections)

    def why(self) -> Exception | None:
        """Return why a connection has broken; None if no verdict says so."""
        if self.error is None and not self._closed:
            with contextlib.suppress(dist.DistError):  # the monitor's thread says so
                self.error = self.ask(lambda: self.verdict.read(_PATIENCE_S))
        return self.error

    def ask(self, fn: Callable[[], T]) -> T:
        """Return `fn()`, which uses the store. Raises `DistStoreError` if it isn't done within
        `_ANSWER_S`: the store's host may be lost without a word, and torch would wait for it."""
        answer = Future[T]()
        self._questions.put((answer, fn))
        if not wait([answer], _ANSWER_S).done:
            raise dist.DistStoreError(f"it has not answered for {_ANSWER_S:.0f} s; its host is "
                                      f"lost, or the network to it")
        return answer.result()

    def store_is_gone(self, error: Exception) -> RunTimeout:
        """The error that a rank raises if it can't reach the others' store."""
        return RunTimeout(f"rank {self._rank}: the process group's store is gone: {error}")

    def close(self) -> None:
        """Stop watching: the run is over."""
        self._closed = True
        self._questions.put(None)
        if self._gets_signals:
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(self._before)
        self._signal_writer.close()  # which ends the thread
        if not self._watching.is_alive():
            self._signal_reader.close()

    # ---- the threads ----------------------------------------------------------------------------

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            answer, fn = question
            try:
                answer.set_result(fn())
            except BaseException as error:
                answer.set_exception(error)

    def _watch(self) -> None:
        while not self._closed and self.error is None:
            if select.select([self._signal_reader], [], [], _LOOK_EVERY_S)[0]:
                signals = self._signal_reader.recv(4096)
                if self._before != -1 and signals:
                    os.write(self._before, signals)  # for the earlier listener
                if signal.SIGINT in signals and self._waits():
                    self._end(RunTimeout(f"rank {self._rank} was interrupted, which has closed its "
                                         f"connections"))
                continue
            try:
                self._look()
            except RunTimeout as error:  # perhaps a Deadlock
                self._end(self._agreed(error))
            except (dist.DistError, RuntimeError) as error:  # the store is gone, with its rank
                self._end(self.store_is_gone(error))
        if self._closed:  # else a later monitor passes signals on to this one
            self._signal_reader.close()

    def _waits(self) -> bool:
        states = [self._status.state(self._rank),
                  *(state for _, state in self._status.streams(self._rank))]
        return any(state.doing in (SEND, RECV, EXCHANGE, WAIT, WAIT_ANY) for state in states)

    def _look(self) -> None:
        """If this rank has waited since the last call, or the time is over, look for a verdict or
        a deadlock."""
        now = self._status.state(self._rank), self._status.streams(self._rank)
        lasts, self._seen = now == self._seen and self._waits(), now
        if lasts or self._published or not self._watchdog.pause_s():
            self.ask(lambda: self._use_store(lasts))

    def _use_store(self, lasts: bool) -> None:
        if lasts or self._published:
            self.publish()
            self._published = lasts
        if lasts or not self._watchdog.pause_s():
            if (error := self.verdict.read()) is not None:
                self._end(error)
                return
            self._read_parts()
            self._watchdog.check(self._where)

    def _agreed(self, error: Exception) -> Exception:
        """Tell the others that `error` ends the run, unless another one has: return that."""
        try:
            self.ask(lambda: self.verdict.set(self._rank, error))
            time.sleep(_KNOWN_S)
            return self.ask(self.verdict.read) or error
        except dist.DistError:
            return error

    def _end(self, error: Exception) -> None:
        self.error = self.error or error
        for connections in self._connections:
            connections.close()

    def publish(self) -> None:
        """Write into the store this rank's line and, for other hosts, its status."""
        frame = sys._current_frames().get(self._thread)
        self._store.set(f"line/{self._rank}", learner_line(frame))
        self._store.set(f"part/{self._rank}",
                        zlib.compress(pickle.dumps(self._status.part(self._rank))).hex())

    def _read_parts(self) -> None:
        """Write into this host's status what ranks on other hosts have published."""
        here = self._store.get(f"host/{self._rank}")
        for rank in range(self._status.ranks):
            if not self._store.check([f"host/{rank}", f"part/{rank}"]) or (
                    self._store.get(f"host/{rank}") == here):
                continue
            part = self._store.get(f"part/{rank}")
            if part != self._parts.get(rank):
                self._parts[rank] = part
                self._status.write_part(pickle.loads(zlib.decompress(bytes.fromhex(part.decode()))))

    def _where(self, rank: int) -> list[str]:
        key = f"line/{rank}"
        return [self._store.get(key).decode()] if self._store.check([key]) else []
