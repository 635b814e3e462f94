"""The connections of a process group: closing them ends every wait for this rank.

Gloo has no call for that. A rank that leaves a group after a death closes its sockets, whose
other ends then notice; so one after another, all ranks that wait for each other are let go.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path


class Connections:
    """The sockets that are opened inside `with`."""

    def __init__(self) -> None:
        self._sockets: set[tuple[int, int]] = set()  # (file number, inode)

    def __enter__(self) -> Connections:
        self._sockets = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets = _sockets() - self._sockets

    def close(self) -> None:
        """Nothing is sent or received on them any more, here and at their other ends."""
        for number, inode in self._sockets:
            with contextlib.suppress(OSError):  # it has broken already
                if os.fstat(number).st_ino == inode:
                    with socket.socket(fileno=os.dup(number)) as connection:
                        connection.getpeername()  # else it listens: Gloo doesn't expect its end
                        connection.shutdown(socket.SHUT_RDWR)
        self._sockets = set()


def _sockets() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the folder itself was open
            entry = os.fstat(int(name))
            if stat.S_ISSOCK(entry.st_mode):
                found.add((int(name), entry.st_ino))
    return found


def calm_gloo() -> None:
    """Keep Gloo's thread from pushing aside the rank that it waits for.

    While someone holds the lock of a connection on which something has arrived, Gloo's thread polls
    without pause. A rank that sends holds that lock. With more ranks than cores, the thread that is
    woken just then pushes the rank aside, and polls until the scheduler's next tick: 4 ms on a
    message that takes 0.2. A *batch* thread does not preempt others; its share of time is the same.
    """
    if not os.path.exists("/proc/self/task"):  # Linux has it
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended, or we may not
            name = Path(f"/proc/self/task/{thread}/comm").read_text()
            if name.startswith("gloo"):
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
