"""Receives that are waited for with a limit: threads wait in their stead.

Gloo can't be asked whether a message has come, and if it is told to wait for so long and no
longer, it closes every connection of the process. A thread may wait as long as it takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtlab.comm import Work


class Watch:
    """Waits for Gloo's `handles`; then rings `bell`. `error`: why they will never be done."""

    def __init__(self, handles: tuple[Any, ...], bell: threading.Event):
        self.over = threading.Event()
        self.error: Exception | None = None
        self._handles, self._bell = handles, bell
        threading.Thread(target=self._wait, daemon=True, name="watch").start()

    def _wait(self) -> None:
        try:
            for handle in self._handles:
                handle.wait()
        except Exception as error:  # the connection has broken
            self.error = error
        self.over.set()
        self._bell.set()


class Bell:
    """Rings whenever one of a communicator's watched receives is over."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def wait_any(self, works: Sequence[Work], seconds: float) -> bool:
        """See `dtlab.patience`. Messages are watched from here on until they are over."""
        from dtlab.processes.messages import Message  # which holds a `Watch`

        messages = [work for work in works if isinstance(work, Message) and not work.sends]
        until_s = time.perf_counter() + seconds
        for message in messages:
            if message.watch is None and not message.done_s:
                message.watch = Watch(message.handles, self._rung)
        while not any(message.arrived() for message in messages):
            left_s = until_s - time.perf_counter()
            if left_s <= 0 or not self._rung.wait(left_s):
                return False
            self._rung.clear()
        return True
