"""The launcher: starts ranks, watches them, and returns their results or raises their failures."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from dtlab.errors import ConfigError, DtlabError
from dtlab.processes import rank_monitor
from dtlab.processes.control_channel import ControlChannel
from dtlab.processes.endpoint import Reply
from dtlab.processes.fork_server import ask_rank, new_rank_group
from dtlab.processes.fork_server_main import STATUS
from dtlab.processes.rank_main import Settings
from dtlab.processes.rank_monitor import RankHandle
from dtlab.processes.shared_status import SharedStatus
from dtlab.processes.store import StoreServer
from dtlab.processes.watchdog import Watchdog
from dtlab.ranks import serialization
from dtlab.ranks.output import RankOutput, write

_PIPE_BYTES = 1 << 20
_HOLD_S = 0.25


class RankGroup:
    """Ranks that are alive, and what they can be asked to do. Close it, or use `with`."""

    def __init__(self, ranks: int, *, backend: str = "gloo", device: str = "cpu",
                 threads: int = 1, trace: bool = True, env: Mapping[str, str] | None = None):
        self.size, self._env = ranks, env or {}
        self._select = selectors.DefaultSelector()
        self._ranks: list[RankHandle] = []
        self._store = StoreServer(ranks)
        self._forked: list[RankHandle] = []  # in the order in which the server has forked them
        self._restarts = 0  # how many ranks that may die are still to be started anew
        self._run_number = 0
        self._screen: list[tuple[int, str]] = []  # (rank, line) to show
        self._held_since = 0.0
        self._channel: socket.socket | None = None
        self._files: list[int] = []
        self._orphaned = False  # the server is gone
        self.closed = False
        self._may_die: Collection[int] = ()
        try:
            self._start(backend, device, threads, trace)
        except OSError as error:
            self.close()
            if error.errno == errno.EFBIG:
                raise ConfigError("the memory that ranks share is a file larger than you may have "
                                  "(ulimit -f); allow larger ones") from None
            if error.errno in (errno.EAGAIN, errno.ENOMEM):  # even the server
                raise rank_monitor.not_started(0, error.errno) from None
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS):
                raise
            import resource  # Windows has none

            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ConfigError(f"{ranks} ranks need more open files than you may have, {files} "
                              f"(ulimit -n); allow more, or take fewer ranks") from None
        except BaseException:
            self.close()
            raise

    # ---- start and end --------------------------------------------------------------------------

    def _start(self, backend: str, device: str, threads: int, trace: bool) -> None:
        events = os.environ.get("TORCH_FR_BUFFER_SIZE", "0")
        whole = events.isascii() and events.isdigit() and len(events) < 11
        if not whole or int(events) >= 2**31:  # torch would abort every rank
            raise ConfigError(f"the environment says TORCH_FR_BUFFER_SIZE={events!r:.60}, where "
                              f"torch takes a whole number below 2,147,483,648; correct it, or "
                              f"unset it")
        status = serialization.memory_file("dtlab-status")
        self._files.append(status)
        self.status = SharedStatus(status, self.size)
        self._diagnosis, diagnosis = os.pipe()
        os.set_blocking(self._diagnosis, False)
        self._files += [self._diagnosis, diagnosis]
        self._shared = [diagnosis, status]  # by all ranks
        self._channel = new_rank_group()
        self._watch(self._channel, self._on_status)
        self._told = Settings(0, self.size, backend, device, threads, trace, os.environ | self._env,
                              _cwd(), list(sys.path), torch.get_default_dtype())
        for rank in range(self.size):
            self._start_rank(self._told._replace(rank=rank))

    def _start_rank(self, told: Settings) -> RankHandle:
        assert self._channel is not None
        ours, theirs = socket.socketpair()
        store, their_store = socket.socketpair()
        output, their_output = os.pipe()
        with contextlib.suppress(Exception):  # more room: fewer switches when much is printed
            import fcntl

            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(output, False)
        rank = RankHandle(told.rank, ControlChannel(ours), ControlChannel(store), output, told.new)
        self._ranks[rank.number : rank.number + 1] = [rank]  # `close` closes it from here on
        self._forked.append(rank)
        try:
            ask_rank(self._channel, theirs)
            with contextlib.suppress(OSError):  # it died at once; the server will tell
                rank.control.send(told, [their_output, *self._shared, their_store.fileno()])
        finally:
            theirs.close()
            their_store.close()
            os.close(their_output)
        self._watch(rank.control, lambda: self._on_frame(rank))
        self._watch(rank.store, lambda: self._on_store(rank))
        self._watch(output, lambda: self._on_output(rank))
        return rank

    def _restart(self, dead: RankHandle) -> None:
        """Start a rank anew; it will join the others when they shrink."""
        while dead.read_output():
            pass
        for file in (dead.control, dead.store, dead.pipe):
            with contextlib.suppress(KeyError):  # its end has been read
                self._select.unregister(file)
        dead.close()
        rank = self._start_rank(self._told._replace(rank=dead.number, new=True))
        rank.output = dead.output
        with contextlib.suppress(OSError):  # it died at once
            rank.control.send((self._what, self._run_number), [self._call])

    def _watch(self, file: Any, act: Callable[[], object]) -> None:
        self._select.register(file, selectors.EVENT_READ, act)

    def close(self, wait: bool = False) -> None:
        """End all ranks, whatever they do. `wait`: until they are gone and their output is read.
        If Ctrl-C cuts it short, the next call does the rest."""
        self._restarts, self.closed = 0, True
        try:
            if self._channel is not None:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_WR)
                if wait:
                    self._read_to_end()
        finally:
            while self._ranks:
                self._ranks.pop().close()
            while self._files:
                os.close(self._files.pop())
            if self._channel is not None:
                self._channel.close()
            self._select.close()
            self._channel, self._forked = None, []

    def _read_to_end(self) -> None:
        assert self._channel is not None
        deadline = time.monotonic() + 5
        while self._channel in self._select.get_map() and time.monotonic() < deadline:
            self._pump(0.1)
        self._finish_output()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one call -------------------------------------------------------------------------------

    def call(self, what: str, call: int, *, timeout: float | None, echo: bool,
             stay: bool = False, may_die: Collection[int] = (),
             restarts: int = 0) -> tuple[list[Reply], list[str]]:
        """Have all ranks do the same; returns their replies and their output, by rank.

        `stay`: after a failure, ranks that can still answer stay alive. `may_die`: ranks whose
        death ends nothing; their value is None, unless they are among the first `restarts` that
        are started anew.
        """
        self._may_die, self._restarts, self._what, self._call = may_die, restarts, what, call
        for number, rank in enumerate(self._ranks):
            rank.begin(RankOutput(number, partial(self._hold, number) if echo else None))
        goes_on = False
        try:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it died; the server tells how
                    rank.control.send((what, self._run_number), [call])
            try:
                return self._attend(timeout, stay)
            except DtlabError:
                self._run_number += 1  # messages of this call may be astray: leave its contexts
                if stay and self._all_came_back():
                    self.status.clear()
                    self._finish_output()
                    goes_on = True
                raise
        except BaseException as error:  # also Ctrl-C, at any moment
            if not goes_on:  # the server may be importing, and no rank be there for long
                self.close(isinstance(error, DtlabError) or any(rank.ready for rank in self._ranks))
            raise

    def _attend(self, timeout: float | None, stay: bool) -> tuple[list[Reply], list[str]]:
        watchdog = Watchdog(self.status, timeout, self._how_died,
                            lambda number: rank_monitor.is_it_alive(self._ranks[number]),
                            lambda number: rank_monitor.is_stopped(self._ranks[number]))
        self._began = False
        self._wait_for(lambda: all(rank.ready for rank in self._ranks), watchdog)
        self._start_s = time.perf_counter()  # one clock for the whole machine
        watchdog.start()
        self._began = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.control.send(("go", self._start_s, bool(self._may_die), stay))
        self._wait_for(lambda: all(rank.returned is not None or self._died_as_allowed(rank)
                                   for rank in self._ranks), watchdog)
        replies = [self._unpack(rank) for rank in self._ranks]
        return replies, self._finish_output()

    def _wait_for(self, done: Callable[[], bool], watchdog: Watchdog) -> None:
        while not done():
            self._pump(watchdog.pause_s())
            result = any(rank.returned is not None for rank in self._ranks) or self._store.members
            may_die = self._may_die if self._began and result else ()
            rank_monitor.raise_failure(self._ranks, self._orphaned, may_die)
            watchdog.check(lambda n: rank_monitor.current_stack(self._ranks[n], self._diagnosis))

    def _how_died(self, number: int) -> str:
        """ "" if this rank lives."""
        status = self._ranks[number].died
        return "" if status is None else rank_monitor.how_died(status)

    def _died_as_allowed(self, rank: RankHandle) -> bool:
        """Has this rank died, as it may, or been started anew when no rank was left to join?"""
        alone = rank.new and not rank.ready and not self._store.members
        return rank.number in self._may_die and (rank.died is not None or alone)

    def _unpack(self, rank: RankHandle) -> Reply:
        if rank.returned is None and self._died_as_allowed(rank):
            return Reply(0.0, None, [], [], [])
        assert rank.returned is not None
        file, rank.returned = rank.returned, None
        try:
            reply: Reply = serialization.unpack(file)
        except Exception as error:
            raise ConfigError(f"what rank {rank.number} returned can't be read here: "
                              f"{type(error).__name__}: {error}") from error
        return reply

    def _all_came_back(self) -> bool:
        """Can all ranks be asked again? Those that wait for a failed one will never answer."""
        for rank in self._ranks:
            if not self._began:
                with contextlib.suppress(OSError):
                    rank.control.send(("stop", 0.0))
        deadline = time.monotonic() + rank_monitor.GRACE_S
        while time.monotonic() < deadline:
            if all(rank.answered for rank in self._ranks):
                return True
            self._pump(0.02)
        return False

    # ---- events ---------------------------------------------------------------------------------

    def _pump(self, pause_s: float) -> None:
        """Take what comes within `pause_s`."""
        for key, _ in self._select.select(pause_s):
            if self._is_watched(key):  # else its rank has just been replaced
                key.data()
        self._store.look_again()
        if self._screen and time.monotonic() - self._held_since > _HOLD_S:
            self._show()

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        try:
            return self._select.get_key(key.fileobj) == key
        except (KeyError, ValueError):  # it is closed
            return False

    def _hold(self, number: int, line: str) -> None:
        if not self._screen:
            self._held_since = time.monotonic()
        self._screen.append((number, line))

    def _show(self) -> None:
        """Lines are held back a moment and shown by rank: what comes together reads in order."""
        lines = sorted(self._screen, key=lambda item: item[0])
        self._screen.clear()
        if lines and sys.stdout is not None:  # it was closed before Python began
            write(sys.stdout, "".join(line for _, line in lines))
            sys.stdout.flush()

    def _on_status(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(STATUS.size, socket.MSG_WAITALL)
        except ConnectionError:
            data = b""
        if len(data) < STATUS.size:
            self._select.unregister(self._channel)
            self._orphaned = True
            return
        number, status = STATUS.unpack(data)
        rank = self._forked[number]
        rank.died = status
        self._store.left(rank.number, died=True)
        if self._restarts and rank.number in self._may_die and self._began and self._store.members:
            self._restarts -= 1
            self._restart(rank)

    def _on_frame(self, rank: RankHandle) -> None:
        was_ready = rank.ready
        if not rank.read_frames():
            self._select.unregister(rank.control)
        if rank.new and rank.ready and not was_ready:
            with contextlib.suppress(OSError):
                rank.control.send(("go", self._start_s, bool(self._may_die), False))
        if rank.returned is not None:
            self._store.left(rank.number)

    def _on_store(self, rank: RankHandle) -> None:
        if not self._store.serve(rank.store):
            self._select.unregister(rank.store)

    def _on_output(self, rank: RankHandle) -> None:
        if rank.read_output() == b"":
            self._select.unregister(rank.pipe)

    def _finish_output(self) -> list[str]:
        """Show the rest of what the ranks printed; returns each one's text."""
        texts = []
        for rank in self._ranks:
            while rank.read_output():
                pass
            if rank.output:
                rank.output.close()
                texts.append(rank.output.text)
        self._show()
        return texts


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder is gone
        return "/"
