"""A receive that is waited for with a limit: a thread waits in its stead.

Gloo can't be asked whether a message has come, and if it is told to wait for so long and no
longer, it closes every connection of the process. A thread may wait as long as it takes.
"""

from __future__ import annotations

import threading
from typing import Any


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
