"""Strands: how the engine lets one rank at a time run, and go on where it paused.

The engine knows only this interface. A *greenlet* strand switches in a fraction of a microsecond,
so thousands of ranks are no trouble. A *thread* strand costs some ten microseconds a switch, but
has a thread's own state in torch, which autograd's backward and dispatch modes need.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import greenlet
import torch

if TYPE_CHECKING:
    from dtlab.simulator.messages import Message

is_grad_enabled = torch.is_grad_enabled  # asked for at every pause


def thread_state() -> tuple[torch.Tensor, bool, torch.dtype]:
    """Random numbers and autocast: a rank's own affair, but torch keeps them once a thread."""
    return (torch.default_generator.get_state(), torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"))


def set_thread_state(state: tuple[torch.Tensor, bool, torch.dtype]) -> None:
    """Put back what `thread_state` has returned."""
    random_state, autocast, dtype = state
    torch.default_generator.set_state(random_state)
    if autocast or torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_autocast_dtype("cpu", dtype)
        torch.clear_autocast_cache()  # what others have cast may have changed since


class Stopped(BaseException):
    """Thrown into a strand that shall end because the run is over. Never seen outside."""


class Strand(ABC):
    """One rank's thread of control: exactly one of all strands and the engine runs at a time.

    next_strand: moves the clock on and says whose turn it is; None if it is nobody's.
    """

    __slots__ = ("_body", "_next_strand", "any_of", "done", "rank", "real", "waits_for")

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None]):
        self.rank = rank
        self.done = False
        # What it waits for, while it is paused: messages, or in words.
        self.waits_for: Sequence[Message] | str = ()
        self.any_of: Sequence[Message] = ()  # one of these is enough to go on
        self.real = True  # False while it sends tensors without data: then only time matters
        self._body = body
        self._next_strand = next_strand

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
        torch.default_generator.manual_seed(self.rank)  # as in `run`: other numbers a rank
        try:
            self._body(self)
        finally:
            self.done = True


class Errand:
    """Steps of a strand that run none of its own code, so that nothing is switched between them:
    whoever would wake the strand wakes the errand instead, and it goes on at once.

    wake: of the strand, at the end.
    """

    __slots__ = ("_error", "_steps", "_strand", "_wake")
    any_of: Sequence[Message] = ()  # as a strand's

    def __init__(self, strand: Strand, wake: Callable[[Strand], None]):
        self._strand, self._wake = strand, wake
        self._error: Exception | None = None

    def run(self, steps: Iterator[None]) -> None:
        """Called on the strand: returns when it has walked `steps`, a step each time it is woken.
        Raises what they raise."""
        self._steps = steps
        try:
            next(steps)
        except StopIteration:
            return
        self._strand.pause()
        if self._error is not None:
            raise self._error

    def go_on(self) -> None:
        """The next step."""
        try:
            next(self._steps)
            return
        except StopIteration:
            pass
        except Exception as error:
            self._error = error
        self._wake(self._strand)


class GreenletStrand(Strand):
    """A strand on the engine's own thread.

    Torch keeps gradient, inference and autocast modes once a thread, so each strand puts back its
    own: a rank inside `torch.no_grad()` must not switch gradients off for the others. A strand
    that pauses moves the clock itself and hands over directly to the next, which may be itself.
    """

    __slots__ = ("_engine", "_greenlet")

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None]):
        super().__init__(rank, body, next_strand)
        self._engine = greenlet.getcurrent()
        # A switch copies the greenlet's part of the C stack, so that is kept small: a function
        # takes less of it than a method, and `f(x)` less than `f(*args)`.
        self._greenlet = greenlet.greenlet(lambda: self._main())

    def _main(self) -> None:
        torch.set_grad_enabled(True)  # whatever the mode of the rank that ran before
        torch.set_autocast_enabled("cpu", False)
        self._run_body()

    def resume(self) -> None:
        self._greenlet.switch()

    def pause(self) -> None:
        grad = is_grad_enabled()
        if not grad and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # the others'; at its end, this rank's again
                self.pause()
            return
        state = thread_state() if self.real else None
        following = self._next_strand()
        if following is None:
            self._engine.switch()
        elif following is not self:
            following._greenlet.switch()  # type: ignore[attr-defined]  # of the same kind as this
        if is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
        if state is not None:
            set_thread_state(state)

    def stop(self) -> None:
        while not self._greenlet.dead:  # a `finally` block may pause once more
            with suppress(Stopped):  # it comes back from a strand that has not begun
                self._greenlet.throw(Stopped)
        self.done = True

    def frame(self) -> FrameType | None:
        frame: FrameType | None = self._greenlet.gr_frame
        return frame


class ThreadStrand(Strand):
    """A strand on a thread of its own; a baton makes sure that only one moves."""

    def __init__(self, rank: int, body: Callable[[Strand], None],
                 next_strand: Callable[[], Strand | None]):
        super().__init__(rank, body, next_strand)
        self._go, self._ended = threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name=f"rank {rank}", daemon=True)

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self._run_body()
        except Stopped:
            pass
        finally:
            self.done = True
            self._ended.release()

    def resume(self) -> None:
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
        self._ended.acquire()

    def pause(self) -> None:
        random_state = torch.default_generator.get_state()  # which is the whole process's
        self._ended.release()
        self._go.acquire()
        torch.default_generator.set_state(random_state)
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        self._stopping = True
        while not self.done:  # a `finally` block may pause once more: it is stopped again
            self.resume()
        if self._thread.ident:
            self._thread.join()

    def frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)


STRANDS: dict[str, type[Strand]] = {"greenlet": GreenletStrand, "thread": ThreadStrand}
