"""The launcher: starts ranks, watches over them, and brings home what they return or why not."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dtlab.errors import ConfigError, DtlabError, RankDied
from dtlab.output import RankOutput
from dtlab.processes import failures, transfer
from dtlab.processes.board import Board
from dtlab.processes.rank import Settings
from dtlab.processes.server import STATUS, ask_rank, fork_server
from dtlab.processes.watchdog import Watchdog
from dtlab.processes.wire import Line
from dtlab.tracebacks import PACKAGE

_PIPE_BYTES = 1 << 20
_GRACE_S = 1.0  # how long a broken wire waits for the news of who broke it


class Reply(NamedTuple):
    """What one rank brought home."""

    done_s: float
    value: Any
    messages: list[tuple[Any, ...]]
    spans: list[tuple[Any, ...]]


class _Rank:
    """The launcher's view of one rank."""

    def __init__(self, line: Line, output: int):
        self.line, self.pipe = line, output
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.output: RankOutput | None = None
        self.pid = 0  # known once it is ready
        self.ready = False
        self.returned: tuple[float, int] | None = None  # when, and the file with the value
        self.raised: tuple[float, failures.Failure] | None = None
        self.stopped = False  # did not begin, as another one could not
        self.died: int | None = None  # wait status


class Crew:
    """Ranks that are alive, and what can be asked of them. Close it, or use `with`."""

    def __init__(self, ranks: int, *, backend: str = "gloo", device: str = "cpu",
                 threads: int = 1, trace: bool = True):
        self.size = ranks
        self._select = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._context = 0
        self._screen: list[str] = []  # lines to show
        self._channel: socket.socket | None = None
        self._files: list[int] = []
        self._orphaned = False  # the server is gone
        try:
            self._start(backend, device, threads, trace)
        except BaseException:
            self.close()
            raise

    # ---- start and end ----------------------------------------------------------------------------

    def _start(self, backend: str, device: str, threads: int, trace: bool) -> None:
        board = transfer.memory_file("dtlab-board")
        self._files.append(board)
        self.board = Board(board, self.size)
        self._diagnosis, diagnosis = os.pipe()
        os.set_blocking(self._diagnosis, False)
        self._files += [self._diagnosis, diagnosis]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))  # TCPStore itself would listen on every interface
            listener.listen(self.size)
            self._channel = fork_server().new_crew()
            self._watch(self._channel, self._on_status)
            told = Settings(
                0, self.size, listener.getsockname()[1], backend, device, threads, trace,
                dict(os.environ), _cwd(), list(sys.path),
            )
            for rank in range(self.size):
                shared = [diagnosis, board] + ([listener.fileno()] if rank == 0 else [])
                self._start_rank(told._replace(rank=rank), shared)

    def _start_rank(self, told: Settings, shared: list[int]) -> None:
        assert self._channel is not None
        ours, theirs = socket.socketpair()
        output, their_output = os.pipe()
        with contextlib.suppress(Exception):  # more room: fewer switches when much is printed
            import fcntl

            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(output, False)
        rank = _Rank(Line(ours), output)
        self._ranks.append(rank)
        with theirs:
            ask_rank(self._channel, theirs)
        rank.line.send(told, [their_output, *shared])
        os.close(their_output)
        self._watch(rank.line, lambda: self._on_frame(rank))
        self._watch(output, lambda: self._on_output(rank))

    def _watch(self, file: Any, act: Callable[[], None]) -> None:
        self._select.register(file, selectors.EVENT_READ, act)

    def close(self, wait: bool = False) -> None:
        """The end for all ranks, whatever they do. `wait`: until they are gone, and heard out."""
        try:
            if self._channel is not None:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_WR)
                if wait:
                    self._hear_out()
        finally:
            for rank in self._ranks:
                rank.line.close()
                os.close(rank.pipe)
                if rank.returned:
                    os.close(rank.returned[1])
            for file in self._files:
                os.close(file)
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            self._select.close()
            self._ranks, self._files = [], []

    def _hear_out(self) -> None:
        assert self._channel is not None
        deadline = time.monotonic() + 5
        while self._channel in self._select.get_map() and time.monotonic() < deadline:
            self._pump(0.1)
        self._finish_output()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Has it ended?"""
        return self._channel is None

    # ---- one call -----------------------------------------------------------------------------------

    def call(self, what: str, parcel: int, *, timeout: float | None, echo: bool,
             stay: bool = False) -> tuple[float, list[Reply], list[str]]:
        """Have all ranks do the same; returns when it began, their replies and their output.

        `stay`: after a failure, ranks that can still answer stay alive.
        """
        for number, rank in enumerate(self._ranks):
            rank.ready, rank.returned, rank.raised, rank.stopped = False, None, None, False
            rank.output = RankOutput(number, self._screen.append if echo else None)
        try:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it died; the server tells how
                    rank.line.send((what, self._context), [parcel])
            return self._attend(timeout)
        except DtlabError:
            self._context += 2000  # messages of this call may be astray: leave its context behind
            if stay and self._all_came_back():
                self._finish_output()
            else:
                self.close(wait=True)
            raise
        except BaseException:
            self.close(wait=True)
            raise

    def _attend(self, timeout: float | None) -> tuple[float, list[Reply], list[str]]:
        watchdog = Watchdog(self.board, timeout)
        self._began = False
        self._wait_for(lambda: all(rank.ready for rank in self._ranks), watchdog)
        start_s = time.perf_counter()
        watchdog.start()
        self._began = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.line.send(("go", start_s))
        self._wait_for(lambda: all(rank.returned for rank in self._ranks), watchdog)
        replies = [self._unpack(number, rank) for number, rank in enumerate(self._ranks)]
        return start_s, replies, self._finish_output()

    def _wait_for(self, done: Callable[[], bool], watchdog: Watchdog) -> None:
        while not done():
            self._pump(watchdog.pause_s())
            self._raise_failure()
            watchdog.check(self._where)

    def _unpack(self, number: int, rank: _Rank) -> Reply:
        assert rank.returned is not None
        (done_s, file), rank.returned = rank.returned, None
        try:
            value, (messages, spans) = transfer.unpack(file)
        except Exception as error:
            raise ConfigError(
                f"what rank {number} returned can't be read here: {type(error).__name__}: {error}"
            ) from error
        return Reply(done_s, value, messages, spans)

    def _all_came_back(self) -> bool:
        """Can all ranks be asked again? Those that wait for a failed one will never answer."""
        for rank in self._ranks:
            if not self._began:
                with contextlib.suppress(OSError):
                    rank.line.send(("stop", 0.0))
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            if all(rank.returned or rank.raised or rank.stopped for rank in self._ranks):
                return True
            self._pump(0.02)
        return False

    # ---- why it failed --------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        """Raise for the rank that is to blame, if any: the dead first, then who raised first."""
        died = [(rank.died, n) for n, rank in enumerate(self._ranks) if rank.died is not None]
        if died:  # Gloo may abort a rank whose peer died: others come before an abort
            status, number = min(died, key=lambda d: os.WIFSIGNALED(d[0]) and
                                 os.WTERMSIG(d[0]) == signal.SIGABRT)
            raise _rank_died(number, status)
        if self._orphaned:
            raise RankDied("the server that had started the ranks is gone, and they with it; "
                           "run again and a new one is started")
        raised = [(failure.secondary, when, n, failure) for n, rank in enumerate(self._ranks)
                  if rank.raised for when, failure in [rank.raised]]
        if not raised:
            return
        secondary, when, number, failure = min(raised, key=lambda r: r[:3])
        if not secondary or time.perf_counter() - when > _GRACE_S:
            raise failures.rank_failed(number, failure)

    def _where(self, number: int) -> str:
        """The line at which a rank is now, though it may hang in C: faulthandler tells."""
        rank = self._ranks[number]
        if not rank.pid or rank.died is not None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
        text, deadline = "", time.monotonic() + 0.5
        while time.monotonic() < deadline:
            try:
                text += os.read(self._diagnosis, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                if text:
                    break
                time.sleep(0.01)
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', text)
        for file, line, function in frames:
            if not file.startswith((PACKAGE, sys.prefix)):
                return f"{Path(file).name}:{line} in {function}"
        return ""

    # ---- events -------------------------------------------------------------------------------------

    def _pump(self, pause_s: float) -> None:
        """Take what comes within `pause_s`."""
        for key, _ in self._select.select(pause_s):
            key.data()
        self._show()

    def _show(self) -> None:
        if self._screen:
            lines = "".join(self._screen)
            self._screen.clear()
            sys.stdout.write(lines)
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
        self._ranks[number].died = status

    def _on_frame(self, rank: _Rank) -> None:
        try:
            frames = rank.line.ready_frames()
        except EOFError:
            self._select.unregister(rank.line)
            return
        for frame, fds in frames:
            if frame[0] == "ready":
                rank.ready, rank.pid = True, frame[1]
            elif frame[0] == "returned":
                rank.returned = (frame[1], fds[0])
            elif frame[0] == "raised":
                rank.raised = (frame[1], frame[2])
            else:
                rank.stopped = True

    def _on_output(self, rank: _Rank) -> bool:
        """Read once; False if there was nothing."""
        try:
            data = os.read(rank.pipe, _PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._select.unregister(rank.pipe)
        elif rank.output:
            rank.output.feed(rank.decoder.decode(data))
        return bool(data)

    def _drain(self, rank: _Rank) -> None:
        while rank.pipe in self._select.get_map() and self._on_output(rank):
            pass

    def _finish_output(self) -> list[str]:
        """Show the rest of what the ranks printed; returns each one's text."""
        texts = []
        for rank in self._ranks:
            self._drain(rank)
            if rank.output:
                rank.output.close()
                texts.append(rank.output.text)
        self._show()
        return texts


def _rank_died(number: int, status: int) -> RankDied:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        how = f"its process ended with exit code {code} before the function returned (sys.exit?)"
    else:
        how = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += " (perhaps by the system, for want of memory)"
        elif -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE):
            how += " (a crash in compiled code; what it printed last says where)"
    return RankDied(f"rank {number} died: {how}", number, code)


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder is gone
        return "/"
