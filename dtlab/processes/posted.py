"""The result of `ProcessComm.post`: a message under way, to be waited for or cancelled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dtlab.comm import Work
from dtlab.processes.endpoint import ProcessEndpoint
from dtlab.processes.message import TransportMessage
from dtlab.processes.transport import WatchedHandle
from dtlab.ranks.overlap import extent_of


class PostedMessage(Work):
    """A message under way. finish: waits for messages and delivers them. inside: a collective has
    posted it."""

    def __init__(self, end: ProcessEndpoint, message: TransportMessage,
                 finish: Callable[[list[TransportMessage]], None], inside: bool):
        self._endpoint, self.message, self._finish = end, message, finish
        self.extent = None if inside else extent_of(message.x, not message.sends)

    def wait(self) -> int:
        self._endpoint.posted.pop(self, None)
        if not self.message.done_s:
            self._finish([self.message])
        return self.message.peer

    def cancel(self) -> None:
        """As in `Work`. Gloo can't cancel a receive, so a thread waits for the message."""
        end, message = self._endpoint, self.message
        if end.posted.pop(self, None) is not None:
            self.as_future()
            if message.rest is not None:
                WatchedHandle(message.rest_handle, end.threads.start)
            end.cancelled = [*(w for w in end.cancelled if not w.as_future().done()), self]

    def _detach(self) -> None:
        self.cancel()  # the message still moves

    def as_future(self) -> Future[Any]:
        """Return a future that is done once `wait` would return, or raise, at once."""
        message = self.message
        if message.done_s:
            future: Future[Any] = Future()
            future.set_result(None)
            return future
        if not isinstance(message.handle, WatchedHandle):
            message.handle = WatchedHandle(message.handle, self._endpoint.threads.start)
        return message.handle.future

    def __str__(self) -> str:
        return str(self.message)
