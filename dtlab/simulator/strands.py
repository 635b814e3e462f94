"""Strands: how the engine lets one rank at a time run, and go on where it paused.

The engine knows only this interface. A *greenlet* strand switches in a fraction of a microsecond,
so thousands of ranks are no trouble. A *thread* strand costs some ten microseconds a switch, but
has a thread's own state in torch, which autograd's backward and dispatch modes need.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType

import greenlet
import torch


FRESH_RANDOM_STATE = torch.Generator().get_state()


class Stopped(BaseException):
    """Thrown into a strand that shall end because the run is over. Never seen outside."""


class Strand(ABC):
    """One rank's thread of control: exactly one of all strands and the engine runs at a time."""

    def __init__(self, rank: int, body: Callable[[], None]):
        self.rank = rank
        self.done = False
        self.doing: object = None  # what it waits for, while it is paused
        self.real = True  # False while it sends tensors without data: then only time matters
        self.random_state = FRESH_RANDOM_STATE  # torch's, as in a process that has just begun
        self._body = body

    @abstractmethod
    def resume(self) -> None:
        """Engine only: let the strand run until it pauses or ends."""

    @abstractmethod
    def pause(self) -> None:
        """Strand only: let the engine go on; returns when the engine resumes this strand."""

    @abstractmethod
    def stop(self) -> None:
        """Engine only: end the strand where it stands; its `finally` blocks run."""

    @abstractmethod
    def frame(self) -> FrameType | None:
        """The innermost Python frame of a paused strand."""


class GreenletStrand(Strand):
    """A strand on the engine's own thread.

    Gradient mode belongs to the thread, so it is put back at every switch: a rank inside
    `torch.no_grad()` must not switch gradients off for the others.
    """

    def __init__(self, rank: int, body: Callable[[], None]):
        super().__init__(rank, body)
        self._engine = greenlet.getcurrent()
        self._greenlet = greenlet.greenlet(self._main)
        self._to_engine = self._engine.switch

    def _main(self) -> None:
        torch.set_grad_enabled(True)
        try:
            self._body()
        finally:
            self.done = True

    def resume(self) -> None:
        self._greenlet.switch()

    def pause(self) -> None:
        grad = torch.is_grad_enabled()
        self._to_engine()
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)

    def stop(self) -> None:
        if not self._greenlet.dead:
            try:
                self._greenlet.throw(Stopped)
            except Stopped:
                pass  # it had not begun
        self.done = True

    def frame(self) -> FrameType | None:
        frame: FrameType | None = self._greenlet.gr_frame
        return frame


class ThreadStrand(Strand):
    """A strand on a thread of its own; a baton makes sure that only one moves."""

    def __init__(self, rank: int, body: Callable[[], None]):
        super().__init__(rank, body)
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name=f"rank {rank}", daemon=True)

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self._body()
        except Stopped:
            pass
        finally:
            self.done = True
            self._paused.release()

    def resume(self) -> None:
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
        self._paused.acquire()

    def pause(self) -> None:
        self._paused.release()
        self._go.acquire()
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        self._stopping = True
        while not self.done:  # a `finally` block may pause once more: it is stopped again
            self.resume()
        self._thread.join()

    def frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)


STRANDS: dict[str, type[Strand]] = {"greenlet": GreenletStrand, "thread": ThreadStrand}
