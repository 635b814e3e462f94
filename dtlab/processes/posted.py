"""The result of `ProcessComm.post`: a message under way, to be waited for or cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dtlab.comm import Work
from dtlab.processes.endpoint import Endpoint
from dtlab.processes.message import Message
from dtlab.processes.transport import WatchedHandle
from dtlab.ranks.overlap import extent_of


class PostedMessage(Work):
    """A message under way. finish: waits until it is done, and puts it in its place. inside: a
    collective has posted it."""

    def __init__(self, end: Endpoint, message: Message, finish: Callable[[list[Message]], None],
                 inside: bool):
        self._end, self.message, self._finish = end, message, finish
        self.extent = None if inside else extent_of(message.x, not message.sends)

    def wait(self) -> int:
        """As in `Work`."""
        self._end.posted.pop(self, None)
        if not self.message.done_s:
            self._finish([self.message])
        return self.message.peer

    def cancel(self) -> None:
        """As in `Work`: Gloo can't take a receive back. Threads hold what is under way, until it
        has moved."""
        end, message = self._end, self.message
        if end.posted.pop(self, None) is not None:
            self.notify(threading.Event())
            if message.rest is not None:
                WatchedHandle(message.rest_handle, end.threads.start)
            end.cancelled = [*(work for work in end.cancelled if not work.is_over), self]

    def _detach(self) -> None:
        self.cancel()  # which leaves it under way

    @property
    def is_over(self) -> bool:
        """Does `wait` return, or raise, at once?"""
        handle = self.message.handle
        return bool(self.message.done_s) or (
            isinstance(handle, WatchedHandle) and handle.over.is_set())

    @property
    def has_failed(self) -> bool:
        """Does `wait` raise, now that it is over?"""
        handle = self.message.handle
        return isinstance(handle, WatchedHandle) and handle.error is not None

    def notify(self, listener: threading.Event) -> list[threading.Event]:
        """Set `listener` once it is over, unless it is taken out of the returned list before."""
        message = self.message
        if message.done_s:
            listener.set()
            return [listener]
        if not isinstance(message.handle, WatchedHandle):
            message.handle = WatchedHandle(message.handle, self._end.threads.start)
        return message.handle.notify(listener)

    def __str__(self) -> str:
        return str(self.message)
