"""Strands: how the engine lets one rank at a time run, and go on where it paused.

The engine knows only this interface. A *greenlet* strand switches in a fraction of a microsecond,
so thousands of ranks are no trouble. A *thread* strand costs some ten microseconds a switch, but
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
from dtlab.simulator.lines import Line
from dtlab.simulator.process_state import ProcessState

is_grad_enabled = torch.is_grad_enabled  # asked for at every pause
backward_number = torch._C._current_graph_task_id  # −1 outside of autograd's backward
function_modes = torch._C._len_torch_function_stack  # how many are active
dispatch_modes = torch._C._len_torch_dispatch_stack
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # the innermost
transforms = torch._C._functorch.peek_interpreter_stack  # the innermost of torch.func
enter_autocast, leave_autocast = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def modes() -> tuple[Any, ...]:
    """The modes that torch keeps once a thread and that can't be put back: equal if they are the
    same."""
    enter_autocast()
    return (function_modes(), dispatch_modes(), saved_tensors_hooks(True), transforms(),
            leave_autocast())


NO_MODES = 0, 0, None, None, 0


class Stopped(BaseException):
    """Thrown into a strand that shall end because the run is over. Never seen outside."""


class Crashed(BaseException):
    """Ends a rank that was to crash; the others go on. Never seen outside."""


class NeedsThreads(BaseException):
    """A greenlet would have to pause inside autograd's backward, or inside a mode such as `with
    torch.device(…)`, autocast, or hooks on saved tensors, whose state it shares with the others of
    its thread. Seen outside only where greenlets were asked for."""


class Strand(ABC):
    """A thread of control of one rank: exactly one of all strands and the engine runs at a time.

    stream: 0 for the rank itself; 1, 2, … for what it has begun beside itself.
    next_strand: moves the clock on and returns the strand to go on next; None if there is none.
    """

    __slots__ = ("_body", "_next_strand", "_process", "any_of", "awaits", "done", "handles", "idle",
                 "idle_since_s", "label", "line", "posted", "rank", "real", "stream", "waits_for")

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None], stream: int = 0):
        self.rank, self.stream = rank, stream
        self.done = False
        self.idle = False  # it has nothing to do, until something is begun on it
        # What it waits for, while it is paused: messages, or in words.
        self.waits_for: list[Any] | tuple[Any, ...] | str = ()
        self.posted: dict[Any, Extent] = {}  # outside of collectives, not waited for
        self.handles: BaseException | None = None  # while it waits, the error behind that
        self.awaits: object = None  # the message or function that wakes it
        self.any_of: Sequence[object] = ()  # or any of these does
        self.idle_since_s = 0.0  # when it last worked: since then, it only waited
        self.label = ""  # for what
        self.line: Line | None = None  # which began what it does, if it is a stream
        self.real = True  # False while it sends tensors without data: then only time matters
        self._body = body
        self._process = ProcessState()
        self._next_strand = next_strand

    def is_busy(self) -> bool:
        """Has it something to do, or to wait for?"""
        return not (self.done or self.idle)

    @abstractmethod
    def beside(self, stream: int, body: Callable[[Strand], None]) -> Self:
        """Called on this strand: return another of its rank, with the same context variables."""

    @abstractmethod
    def resume(self) -> None:
        """Let this strand go on. On the engine's side, returns when no strand can."""

    @abstractmethod
    def pause(self) -> None:
        """Called on this strand: let others go on; returns when it is this one's turn again."""

    @abstractmethod
    def stop(self) -> None:
        """Engine only: end the strand where it stands; its `finally` blocks run."""

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

    Torch keeps gradient and inference modes once a thread, so each strand puts back its own: a rank
    inside `torch.no_grad()` must not switch gradients off for the others. A strand that pauses
    moves the clock itself and hands over directly to the next, which may be itself.
    """

    __slots__ = ("_engine", "_greenlet", "_modes")

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None], stream: int = 0,
                 engine: greenlet.greenlet | None = None):
        super().__init__(rank, body, next_strand, stream)
        self._engine = engine or greenlet.getcurrent()
        self._modes = modes()  # the caller's
        # A switch copies the greenlet's part of the C stack, so that is kept small: a function
        # takes less of it than a method, and `f(x)` less than `f(*args)`.
        self._greenlet = greenlet.greenlet(lambda: self._main(), self._engine)

    def beside(self, stream: int, body: Callable[[Strand], None]) -> GreenletStrand:
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
            with torch.inference_mode(False):  # the others'; at its end, this rank's again
                self.pause()
            return
        self._process.save(self.real)
        following = self._next_strand()
        if following is None:
            self._engine.switch()
        elif not following._greenlet:  # type: ignore[attr-defined]  # of the same kind as this
            # The engine begins it: a greenlet counts its calls on from those of the one before.
            self._engine.switch(following)
        elif following is not self:
            following._greenlet.switch()  # type: ignore[attr-defined]
        if is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
        self._process.restore(self.real)

    def stop(self) -> None:
        while not self._greenlet.dead:  # a `finally` block may pause once more
            with suppress(Stopped):  # it comes back from a strand that has not begun
                self._greenlet.throw(Stopped)
        self.done = True

    def frame(self) -> FrameType | None:
        frame: FrameType | None = self._greenlet.gr_frame
        return frame


STOP_LIMIT_S = 2.0  # until an interrupted strand is left to itself


class ThreadStrand(Strand):
    """A strand on a thread of its own; a baton makes sure that only one moves."""

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None], stream: int = 0):
        super().__init__(rank, body, next_strand, stream)
        self._go, self._ended = threading.Lock(), threading.Lock()  # an interrupt leaves them whole
        self._go.acquire()
        self._ended.acquire()
        self._stopping = self._over = self._moving = False
        name = f"rank {rank}, stream {stream}" if stream else f"rank {rank}"
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._main), name=name,
                                        daemon=True)

    def beside(self, stream: int, body: Callable[[Strand], None]) -> ThreadStrand:
        strand = ThreadStrand(self.rank, body, self._next_strand, stream)
        strand._process = self._process
        return strand

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self._run_body()
        except Stopped:
            pass
        finally:
            self.done = self._over = True
            self._moving = False
            self._ended.release()

    def resume(self) -> None:
        if not self._thread.ident:
            self._thread.start()
        self._moving = True
        self._go.release()
        self._ended.acquire()

    def pause(self) -> None:
        self._process.save()
        self._moving = False
        self._ended.release()
        self._go.acquire()
        self._process.restore()
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        self._stopping = True
        if self._moving:  # the engine, which waits for it, was interrupted
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Stopped))
            if not self._ended.acquire(timeout=STOP_LIMIT_S):
                return  # it is in a call that does not return; it ends with the process
        else:
            self._ended.acquire(blocking=False)  # an interrupted engine has not seen it pause
        while not self._over:  # a `finally` block may pause once more: it is stopped again
            self.resume()
        if self._thread.ident:
            self._thread.join()

    def frame(self) -> FrameType | None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_filename != __file__:  # it is in `pause`
            frame = frame.f_back
        return frame


STRANDS: dict[str, type[Strand]] = {"greenlet": GreenletStrand, "thread": ThreadStrand}
