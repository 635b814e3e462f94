"""The referee's end of a process of the submission: it receives frames in limited time, and kills.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtlab.grading.frames import ConnectionClosed, Frame, FrameTimeout
from dtlab.grading.rank_server import RankServer
from dtlab.processes.forking import kill_group

STARVED_FACTOR = 6  # times the limit that a process may take longer while it gets no processor
MOST_QUEUED_FRAMES = 10_000  # of streams other than the one for which the referee waits
MOST_QUEUED_BYTES = 1 << 28
MEMORY_BYTES = 1 << 30  # that a process may take besides what it starts with


class UntrustedProcess:
    """A process for untrusted code, forked by `server`. The fields of `kind`, its first frame, say
    what it does: "rank", or "cells"."""

    def __init__(self, server: RankServer, kind: str, **fields: Any):
        self._server = server
        self._queued: defaultdict[int, deque[Frame]] = defaultdict(deque)  # by stream
        self.socket, self.pid, self._inside = server.fork()
        self._limit_memory()
        self.start_timing()
        with suppress(FrameTimeout, ConnectionClosed):  # shows when a frame is awaited
            self.socket.send(kind, until_s=time.monotonic() + 5, **fields)

    def _limit_memory(self) -> None:
        """Limit its memory from outside, as it can't see its own size."""
        with suppress(OSError, AttributeError):  # it has ended already; or not on Linux
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])
            ceiling = pages * resource.getpagesize() + MEMORY_BYTES
            resource.prlimit(self.pid, resource.RLIMIT_AS, (ceiling, ceiling))

    def held_bytes(self, most: bool = True) -> int:
        """The most memory that it has held at once, or what it holds now, without pages of files,
        such as libraries, that are in memory now; 0 where there is no /proc."""
        with suppress(OSError, KeyError):  # it has ended
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":")
                   for line in lines) if name in ("VmHWM", "VmRSS", "RssFile")}
            return kib["VmHWM" if most else "VmRSS"] - kib["RssFile"] << 10
        return 0

    def start_timing(self) -> None:
        """Count its time from now on."""
        self._since_s, self._used_s = time.monotonic(), self._processor_s()

    def recv(self, limit_s: float, stream: int = 0) -> Frame:
        """The next frame of one of its streams; those of others are kept until they are wanted.
        Raises `FrameTimeout` if none has come `limit_s` after `start_timing`; but a process that
        computes may run that long, however long it waits for a processor on a busy machine. Raises
        `ConnectionClosed`."""
        while not self._queued[stream]:
            frame = self._next_frame(limit_s)
            self._queued[frame.stream].append(frame)
            sizes = [each.nbytes for frames in self._queued.values() for each in frames]
            if len(sizes) > MOST_QUEUED_FRAMES or sum(sizes) > MOST_QUEUED_BYTES:
                raise ConnectionClosed("it sends frames that no one asked for")
        return self._queued[stream].popleft()

    def _next_frame(self, limit_s: float) -> Frame:
        until_s = self._since_s + limit_s
        last_s = self._since_s + (STARVED_FACTOR + 1) * limit_s
        while not self.socket.wait(until_s):
            starved = self._processor_s() - self._used_s < limit_s and self._would_run()
            if self.socket.wait(0.0):  # the frame came during `_would_run`
                break
            if not starved or until_s > last_s:
                raise FrameTimeout
            until_s += 0.5
        if time.monotonic() > last_s:  # also if it sends frame after frame
            raise FrameTimeout
        return self.socket.recv(time.monotonic() + limit_s)

    def place(self, stream: int) -> str:
        """Ask which of the learner's lines a stream of this sandboxed rank is in; "" if unknown."""
        until_s = time.monotonic() + 1.0
        with suppress(FrameTimeout, ConnectionClosed, ProcessLookupError, AttributeError):
            os.kill(self.pid, signal.SIGUSR1)
            while True:
                frame = self.socket.recv(until_s)
                if frame.kind == "hang":
                    return str(frame.fields["places"].get(str(stream), ""))
        return ""

    def _processor_s(self) -> float:
        """Seconds that its threads have run; 0 if it is gone, or where there is no /proc."""
        return sum(map(int, _stat(Path(f"/proc/{self.pid}"))[11:13])) / os.sysconf("SC_CLK_TCK")

    def _would_run(self) -> bool:
        """Does one of its threads run, or wait for a processor or for paging? It takes several
        samples: of threads that wake each other, all may seem to wait in one sample."""
        for _ in range(5):
            threads = Path(f"/proc/{self.pid}/task").glob("*")
            if any(_stat(thread)[:1] in (["R"], ["D"]) for thread in threads):
                return True
            time.sleep(0.01)
        return False

    def how_it_ended(self) -> str:
        """Return "exit code 3" or "signal SIGSEGV"; "" if it is alive."""
        for _ in range(100):  # the socket closes a moment before the process is gone
            if how := self._server.how_it_ended(self._inside):
                return how
            time.sleep(0.002)
        return ""

    def end(self) -> None:
        """Kill the process, and its group: without seccomp it may have started others."""
        kill_group(self.pid)
        self._server.forget(self._inside)
        self.socket.close()


def _stat(task: Path) -> list[str]:
    """Read Linux's status of a process or thread, its state first; empty if it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
