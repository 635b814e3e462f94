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
_BUFFER_S = 0.25


class RankGroup:
    """The processes of a group of ranks. Close it, or use `with`."""

    def __init__(self, ranks: int, *, backend: str = "gloo", device: str = "cpu",
                 threads: int = 1, trace: bool = True, env: Mapping[str, str] | None = None):
        self.size, self._env = ranks, env or {}
        self._select = selectors.DefaultSelector()
        self._ranks: list[RankHandle] = []
        self._store = StoreServer(ranks)
        self._forked: list[RankHandle] = []  # in the order in which the server has forked them
        self._restarts = 0  # how many more ranks may be restarted
        self._run_number = 0
        self._lines: list[tuple[int, str]] = []  # (rank, line) to show
        self._buffered_since = 0.0
        self._channel: socket.socket | None = None
        self._files: list[int] = []
        self._server_gone = False  # the server is gone
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
                raise rank_monitor.cannot_start(0, error.errno) from None
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
        self._settings = Settings(0, self.size, backend, device, threads, trace,
                                  os.environ | self._env, _cwd(), list(sys.path),
                                  torch.get_default_dtype())
        for rank in range(self.size):
            self._start_rank(self._settings._replace(rank=rank))

    def _start_rank(self, settings: Settings) -> RankHandle:
        assert self._channel is not None
        ours, theirs = socket.socketpair()
        store, their_store = socket.socketpair()
        output, their_output = os.pipe()
        with contextlib.suppress(Exception):  # more room: fewer switches when much is printed
            import fcntl

            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(output, False)
        rank = RankHandle(settings.rank, ControlChannel(ours), ControlChannel(store), output,
                          settings.new)
        self._ranks[rank.number : rank.number + 1] = [rank]  # `close` closes it from here on
        self._forked.append(rank)
        try:
            ask_rank(self._channel, theirs)
            with contextlib.suppress(OSError):  # it died at once; the server will tell
                rank.control.send(settings, [their_output, *self._shared, their_store.fileno()])
        finally:
            theirs.close()
            their_store.close()
            os.close(their_output)
        self._watch(rank.control, lambda: self._on_frame(rank))
        self._watch(rank.store, lambda: self._on_store(rank))
        self._watch(output, lambda: self._on_output(rank))
        return rank

    def _restart(self, dead: RankHandle) -> None:
        """Start the process of a rank again; it joins the others when they shrink."""
        while dead.read_output():
            pass
        for file in (dead.control, dead.store, dead.pipe):
            with contextlib.suppress(KeyError):  # its end has been read
                self._select.unregister(file)
        dead.close()
        rank = self._start_rank(self._settings._replace(rank=dead.number, new=True))
        rank.output = dead.output
        with contextlib.suppress(OSError):  # it died at once
            rank.control.send((self._what, self._run_number), [self._call])

    def _watch(self, file: Any, act: Callable[[], object]) -> None:
        self._select.register(file, selectors.EVENT_READ, act)

    def close(self, wait: bool = False) -> None:
        """Kill all ranks. wait: until their processes have ended and their output is read. If
        Ctrl-C interrupts it, call it again."""
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
            self._process_events(0.1)
        self._finish_output()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one call -------------------------------------------------------------------------------

    def call(self, what: str, call: int, *, timeout: float | None, echo: bool,
             keep_alive: bool = False, may_die: Collection[int] = (),
             restarts: int = 0) -> tuple[list[Reply], list[str]]:
        """Send all ranks the same request. Returns their replies and their output, by rank.

        keep_alive: after a failure, keep the ranks if all of them answer. may_die: ranks that may
        die without failing the call; their value is None. The first `restarts` are started again.
        """
        self._may_die, self._restarts, self._what, self._call = may_die, restarts, what, call
        for number, rank in enumerate(self._ranks):
            rank.begin(RankOutput(number, partial(self._buffer_line, number) if echo else None))
        goes_on = False
        try:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it died; the server tells how
                    rank.control.send((what, self._run_number), [call])
            try:
                return self._run_call(timeout, keep_alive)
            except DtlabError:
                self._run_number += 1  # no later call may receive its messages
                if keep_alive and self._all_answered():
                    self.status.clear()
                    self._finish_output()
                    goes_on = True
                raise
        except BaseException as error:  # also Ctrl-C, at any moment
            if not goes_on:  # without ranks there is no output to read
                self.close(isinstance(error, DtlabError) or any(rank.ready for rank in self._ranks))
            raise

    def _run_call(self, timeout: float | None, keep_alive: bool) -> tuple[list[Reply], list[str]]:
        watchdog = Watchdog(self.status, timeout, self._describe_death,
                            lambda number: rank_monitor.describe_activity(self._ranks[number]),
                            lambda number: rank_monitor.is_stopped(self._ranks[number]))
        self._began = False
        self._wait_for(lambda: all(rank.ready for rank in self._ranks), watchdog)
        self._start_s = time.perf_counter()  # one clock for the whole machine
        watchdog.start()
        self._began = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.control.send(("go", self._start_s, bool(self._may_die), keep_alive))
        self._wait_for(lambda: all(rank.result_fd is not None or self._died_as_allowed(rank)
                                   for rank in self._ranks), watchdog)
        replies = [self._unpack(rank) for rank in self._ranks]
        return replies, self._finish_output()

    def _wait_for(self, done: Callable[[], bool], watchdog: Watchdog) -> None:
        while not done():
            self._process_events(watchdog.pause_s())
            result = any(rank.result_fd is not None for rank in self._ranks) or self._store.members
            may_die = self._may_die if self._began and result else ()
            rank_monitor.raise_failure(self._ranks, self._server_gone, may_die)
            watchdog.check(lambda n: rank_monitor.current_stack(self._ranks[n], self._diagnosis))

    def _describe_death(self, number: int) -> str:
        """ "" if this rank lives."""
        status = self._ranks[number].wait_status
        return "" if status is None else rank_monitor.describe_death(status)

    def _died_as_allowed(self, rank: RankHandle) -> bool:
        """Has this rank, which may die, died, or been restarted with no rank left to join?"""
        alone = rank.restarted and not rank.ready and not self._store.members
        return rank.number in self._may_die and (rank.wait_status is not None or alone)

    def _unpack(self, rank: RankHandle) -> Reply:
        if rank.result_fd is None and self._died_as_allowed(rank):
            return Reply(0.0, None, [], [], [])
        assert rank.result_fd is not None
        file, rank.result_fd = rank.result_fd, None
        try:
            reply: Reply = serialization.unpack(file)
        except Exception as error:
            raise ConfigError(f"what rank {rank.number} returned can't be read here: "
                              f"{type(error).__name__}: {error}") from error
        return reply

    def _all_answered(self) -> bool:
        """Wait a moment: do all ranks answer? A rank that waits for a failed one never does."""
        for rank in self._ranks:
            if not self._began:
                with contextlib.suppress(OSError):
                    rank.control.send(("stop", 0.0))
        deadline = time.monotonic() + rank_monitor.GRACE_S
        while time.monotonic() < deadline:
            if all(rank.answered for rank in self._ranks):
                return True
            self._process_events(0.02)
        return False

    # ---- events ---------------------------------------------------------------------------------

    def _process_events(self, pause_s: float) -> None:
        """Handle the events that come within `pause_s`."""
        for key, _ in self._select.select(pause_s):
            if self._is_watched(key):  # else its rank has just been replaced
                key.data()
        self._store.answer_waiting()
        if self._lines and time.monotonic() - self._buffered_since > _BUFFER_S:
            self._print_lines()

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        try:
            return self._select.get_key(key.fileobj) == key
        except (KeyError, ValueError):  # it is closed
            return False

    def _buffer_line(self, number: int, line: str) -> None:
        if not self._lines:
            self._buffered_since = time.monotonic()
        self._lines.append((number, line))

    def _print_lines(self) -> None:
        """Print the lines of the last moment, sorted by rank."""
        lines = sorted(self._lines, key=lambda item: item[0])
        self._lines.clear()
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
            self._server_gone = True
            return
        number, status = STATUS.unpack(data)
        rank = self._forked[number]
        rank.wait_status = status
        self._store.rank_ended(rank.number, died=True)
        if self._restarts and rank.number in self._may_die and self._began and self._store.members:
            self._restarts -= 1
            self._restart(rank)

    def _on_frame(self, rank: RankHandle) -> None:
        was_ready = rank.ready
        if not rank.read_frames():
            self._select.unregister(rank.control)
        if rank.restarted and rank.ready and not was_ready:
            with contextlib.suppress(OSError):
                rank.control.send(("go", self._start_s, bool(self._may_die), False))
        if rank.result_fd is not None:
            self._store.rank_ended(rank.number)

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
        self._print_lines()
        return texts


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder is gone
        return "/"
