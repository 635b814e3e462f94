"""Strands: the threads of control of ranks. The engine runs one at a time, from pause to pause.

A *greenlet* strand switches in a fraction of a microsecond,
so it serves thousands of ranks. A *thread* strand costs some ten microseconds a switch, but
has a thread's own state in torch, which autograd's backward and dispatch modes need.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from types import FrameType
from typing import Any, Self

import greenlet
import torch

from dtlab.errors import ConfigError
from dtlab.ranks.overlap import Extent
from dtlab.simulator.lines import SourceLine
from dtlab.simulator.process_state import ProcessState

is_grad_enabled = torch.is_grad_enabled  # asked for at every pause
backward_number = torch._C._current_graph_task_id  # −1 outside of autograd's backward
function_modes = torch._C._len_torch_function_stack  # how many are active
dispatch_modes = torch._C._len_torch_dispatch_stack
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # the innermost
transforms = torch._C._functorch.peek_interpreter_stack  # the innermost of torch.func
enter_autocast, leave_autocast = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def modes() -> tuple[Any, ...]:
    """Return the torch modes of this thread that can't be saved and restored, for comparison."""
    enter_autocast()
    return (function_modes(), dispatch_modes(), saved_tensors_hooks(True), transforms(),
            leave_autocast())


NO_MODES = 0, 0, None, None, 0


class Stopped(BaseException):
    """Thrown into a strand to end it when the run is over. Never leaves the simulator."""


class Crashed(BaseException):
    """Raised in a rank to crash it; the others go on. Never leaves the simulator."""


class NeedsThreads(BaseException):
    """A greenlet would have to pause inside autograd's backward, or inside a mode such as `with
    torch.device(…)`, autocast, or hooks on saved tensors, whose state it shares with the others of
    its thread. `simulate` then starts again with threads."""


class Strand(ABC):
    """A thread of control of one rank: exactly one of all strands and the engine runs at a time.

    stream: 0 for the rank itself; 1, 2, … for what it has begun beside itself.
    next_strand: moves the clock and returns the strand to run next; None if there is none.
    """

    __slots__ = ("_body", "_next_strand", "_process", "any_of", "done", "handled_error", "idle",
                 "idle_since_s", "label", "line", "posted", "rank", "real", "stream", "waits_for",
                 "wakes_on")

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None], stream: int = 0):
        self.rank, self.stream = rank, stream
        self.done = False
        self.idle = False  # a stream on which nothing is begun
        # While it is paused: the messages for which it waits, or a description of the wait.
        self.waits_for: list[Any] | tuple[Any, ...] | str = ()
        self.posted: dict[Any, Extent] = {}  # memory of unwaited messages
        self.handled_error: BaseException | None = None  # inside an `except` block: its error
        self.wakes_on: object = None  # the message or function whose end wakes it
        self.any_of: Sequence[object] = ()  # if `wakes_on` is ANY: the end of any of these wakes it
        self.idle_since_s = 0.0  # since when it has only waited
        self.label = ""  # of the messages for which it waits
        self.line: SourceLine | None = None  # of a stream: the line that began what it runs
        self.real = True  # False while it sends meta tensors: nothing is computed
        self._body = body
        self._process = ProcessState()
        self._next_strand = next_strand

    def is_busy(self) -> bool:
        """Does the strand compute, or wait for something?"""
        return not (self.done or self.idle)

    @abstractmethod
    def new_strand(self, stream: int, body: Callable[[Strand], None]) -> Self:
        """Called on this strand: return a new one of this rank, with the same context variables."""

    @abstractmethod
    def resume(self) -> None:
        """Engine only: run this strand. Returns when no strand can run."""

    @abstractmethod
    def pause(self) -> None:
        """Called on this strand: let others run. Returns when the engine resumes this one."""

    @abstractmethod
    def stop(self) -> None:
        """Engine only: raise `Stopped` in the paused strand, so that its `finally` blocks run."""

    @abstractmethod
    def frame(self) -> FrameType | None:
        """The innermost Python frame of a paused strand."""

    def _run_body(self) -> None:
        if self.stream:
            self._process.restore()
        else:
            self._process.begin(self.rank)
        try:
            self._body(self)
            self._process.save()
        finally:
            self.done = True
            if not self.stream:
                self._process.end()


class GreenletStrand(Strand):
    """A strand on the engine's own thread.

    Torch keeps one gradient mode and one inference mode a thread, so each strand restores its own.
    A strand that pauses moves the clock itself and switches directly to the next strand, which may
    be itself.
    """

    __slots__ = ("_engine", "_greenlet", "_modes")

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None], stream: int = 0,
                 engine: greenlet.greenlet | None = None):
        super().__init__(rank, body, next_strand, stream)
        self._engine = engine or greenlet.getcurrent()
        self._modes = modes()  # the caller's
        # A switch copies the greenlet's part of the C stack. A function takes less of it than a
        # method, and `f(x)` less than `f(*args)`.
        self._greenlet = greenlet.greenlet(lambda: self._main(), self._engine)

    def new_strand(self, stream: int, body: Callable[[Strand], None]) -> GreenletStrand:
        strand = GreenletStrand(self.rank, body, self._next_strand, stream, self._engine)
        strand._modes = self._modes
        strand._process = self._process
        strand._greenlet.gr_context = copy_context()
        return strand

    def _main(self) -> None:
        torch.set_grad_enabled(True)  # whatever the mode of the rank that ran before
        torch.set_autocast_enabled("cpu", False)
        self._run_body()

    def resume(self) -> None:
        following: Any = self
        while following:
            following = following._greenlet.switch()

    def pause(self) -> None:
        if greenlet.getcurrent() is not self._greenlet:
            raise ConfigError(f"rank {self.rank}: a thread or greenlet that the rank has started "
                              f"can't communicate; use comm.begin, or simulate(…, "
                              f"strands=\"thread\")")
        if backward_number() != -1 or modes() != self._modes:
            raise NeedsThreads
        grad = is_grad_enabled()
        if not grad and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # for the other strands
                self.pause()
            return
        self._process.save(self.real)
        following = self._next_strand()
        if following is None:
            self._engine.switch()
        elif not following._greenlet:  # type: ignore[attr-defined]  # of the same kind as this
            # The engine starts it: a greenlet counts its recursion depth on from its starter's.
            self._engine.switch(following)
        elif following is not self:
            following._greenlet.switch()  # type: ignore[attr-defined]
        if is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
        self._process.restore(self.real)

    def stop(self) -> None:
        while not self._greenlet.dead:  # a `finally` block may pause once more
            with suppress(Stopped):  # a strand that has not started raises it here
                self._greenlet.throw(Stopped)
        self.done = True

    def frame(self) -> FrameType | None:
        frame: FrameType | None = self._greenlet.gr_frame
        return frame


STOP_LIMIT_S = 2.0  # how long to wait for an interrupted strand to end


class ThreadStrand(Strand):
    """A strand on a thread of its own; two locks see to it that only one thread runs."""

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None], stream: int = 0):
        super().__init__(rank, body, next_strand, stream)
        self._may_run, self._paused = threading.Lock(), threading.Lock()
        self._may_run.acquire()
        self._paused.acquire()
        self._stopping = self._thread_ended = self._running = False
        name = f"rank {rank}, stream {stream}" if stream else f"rank {rank}"
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._main), name=name,
                                        daemon=True)

    def new_strand(self, stream: int, body: Callable[[Strand], None]) -> ThreadStrand:
        strand = ThreadStrand(self.rank, body, self._next_strand, stream)
        strand._process = self._process
        return strand

    def _main(self) -> None:
        self._may_run.acquire()
        try:
            if not self._stopping:
                self._run_body()
        except Stopped:
            pass
        finally:
            self.done = self._thread_ended = True
            self._running = False
            self._paused.release()

    def resume(self) -> None:
        if not self._thread.ident:
            self._thread.start()
        self._running = True
        self._may_run.release()
        self._paused.acquire()

    def pause(self) -> None:
        self._process.save()
        self._running = False
        self._paused.release()
        self._may_run.acquire()
        self._process.restore()
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        self._stopping = True
        if self._running:  # the engine, which waits for it, was interrupted
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Stopped))
            if not self._paused.acquire(timeout=STOP_LIMIT_S):
                return  # it is in a call that does not return; it ends with the process
        else:
            self._paused.acquire(blocking=False)  # an interrupted engine has not seen it pause
        while not self._thread_ended:  # a `finally` block may pause again
            self.resume()
        if self._thread.ident:
            self._thread.join()

    def frame(self) -> FrameType | None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_filename != __file__:  # it is in `pause`
            frame = frame.f_back
        return frame


STRANDS: dict[str, type[Strand]] = {"greenlet": GreenletStrand, "thread": ThreadStrand}
