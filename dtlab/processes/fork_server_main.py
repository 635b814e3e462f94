"""The process of the fork server: loads what ranks need, then forks them on demand.

See `fork_server`, which starts it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import struct
from importlib import import_module

import numpy.random  # noqa: F401  ranks need it: loaded once, before they are forked

from dtlab.processes.fork_server import TRAINING
from dtlab.processes.forking import kill_group, share_memory
from dtlab.processes.rank_main import rank_main

# rank, wait status; or, if no process could be forked, the error's number times -1
STATUS = struct.Struct("<ii")


class _RankGroup:
    def __init__(self, channel: socket.socket):
        self.channel = channel
        self.asked = 0  # how many ranks so far
        self.alive: dict[int, int] = {}  # pid → rank


class _Server:
    def __init__(self, parent: socket.socket):
        self._parent = parent
        self._groups: list[_RankGroup] = []
        self._loaded = False  # what ranks that train need
        self._select = selectors.DefaultSelector()
        self._select.register(parent, selectors.EVENT_READ, self._on_parent)
        self._wake, self._waker = socket.socketpair()  # SIGCHLD writes a byte here
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end())  # also while it imports
        self._select.register(self._wake, selectors.EVENT_READ, self._on_child)
        self._watch_parent()

    def _watch_parent(self) -> None:
        """A fork of the parent may hold its socket open after it is gone; its pid tells too."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._select.register(os.pidfd_open(os.getppid()), selectors.EVENT_READ, self._end)

    def serve(self) -> None:
        """Serve until the parent is gone."""
        while True:
            ready = self._select.select(None if self._loaded or self._groups else 0.5)
            if not ready:  # idle
                self._load()
            for key, _ in ready:
                if key.fileobj in self._select.get_map():  # not closed by an earlier event
                    key.data()

    def _load(self) -> None:
        """Load once, but not while ranks run: their death, or the parent's, would go unnoticed."""
        if not self._groups:
            for name in TRAINING:
                import_module(name)
            self._loaded = True

    def _on_parent(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._parent, 1, 1)
        if not data:
            self._end()
        if data == b"t":
            self._load()
        group = _RankGroup(socket.socket(fileno=fds[0]))
        self._groups.append(group)
        self._select.register(group.channel, selectors.EVENT_READ, lambda: self._on_group(group))

    def _on_group(self, group: _RankGroup) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(group.channel, 1, 1)
        except ConnectionError:
            data = b""
        if data:
            self._fork(group, fds[0])
            return
        self._select.unregister(group.channel)
        for pid in group.alive:
            kill_group(pid)
        self._groups.remove(group)
        for pid, rank in list(group.alive.items()):
            self._tell(group, rank, os.waitpid(pid, 0)[1])
        group.channel.close()  # the parent reads the end: all gone

    def _fork(self, group: _RankGroup, control: int) -> None:
        rank, group.asked = group.asked, group.asked + 1
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or too little memory
            os.close(control)
            self._tell(group, rank, -(error.errno or errno.EAGAIN))
            return
        if pid:
            os.close(control)
            group.alive[pid] = rank
            return
        try:
            self._forget()
            rank_main(socket.socket(fileno=control))
        finally:
            os._exit(70)

    def _forget(self) -> None:
        """In the child, let go of all that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for key in list(self._select.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._waker.close()
        self._select.close()

    def _on_child(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        for group in self._groups:
            for pid, rank in list(group.alive.items()):
                if (status := _ended(pid)) is not None:
                    del group.alive[pid]
                    self._tell(group, rank, status)

    def _tell(self, group: _RankGroup, rank: int, status: int) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            group.channel.send(STATUS.pack(rank, status))

    def _end(self) -> None:
        for group in self._groups:
            for pid in group.alive:
                kill_group(pid)
        os._exit(0)


def _ended(pid: int) -> int | None:
    """The wait status of a rank that has ended, None if it lives."""
    if hasattr(os, "waitid"):
        # Look before reaping: while the zombie is there, its number is nobody else's, so that we
        # kill its own children and no stranger.
        if not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return None
        kill_group(pid)
        return os.waitpid(pid, 0)[1]
    done, status = os.waitpid(pid, os.WNOHANG)
    return status if done else None


def main(fd: int) -> None:
    """Serve until the parent is gone. fd: of the socket to it."""
    for number in (0, 1, 2):  # or a socket takes the place of one that is closed
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    share_memory()
    _Server(socket.socket(fileno=fd)).serve()
