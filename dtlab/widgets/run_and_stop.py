"""Two buttons: Run begins work that takes a while, Stop ends it."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

from dtlab.widgets.explorer import button

LOOK_EVERY_S = 0.05  # has the work ended?


class RunAndStop:
    """Run does the work in a thread of its own: a kernel whose thread is busy hears no button.

    begin: says what is about to happen, and returns the work (None: there is none). end: shows what
    the work returned or raised. Both run in the kernel's thread, the only one that draws. Stop
    raises `KeyboardInterrupt` in the work, as the kernel's own interrupt does in a cell. others:
    controls that are off meanwhile, as Run is.
    """

    def __init__(self, text: str, tooltip: str, begin: Callable[[], Callable[[], Any] | None],
                 end: Callable[[Any], None], others: Sequence[Any]):
        self._begin, self._end, self._others = begin, end, others
        self._thread: Thread | None = None
        self.run = button(text, tooltip, self._on_run)
        self.stop = button("■ Stop", "end what Run has begun", self._on_stop)
        self.stop.disabled = True
        self.run.add_class("dtlab-run")  # explorer.js moves the focus between them
        self.stop.add_class("dtlab-stop")
        self.controls = [self.run, self.stop]

    def here(self) -> None:
        """Do the work in this thread, and return when it has ended."""
        if work := self._begin():
            self._switch(running=True)
            self._finish(_outcome(work))

    def _on_run(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no kernel: a script or a test
            self.here()
            return
        if work := self._begin():
            self._switch(running=True)
            self._task = loop.create_task(self._attend(work))  # kept, or it might be collected

    async def _attend(self, work: Callable[[], Any]) -> None:
        outcomes: list[Any] = [KeyboardInterrupt("Stopped.")]
        self._thread = Thread(target=lambda: outcomes.append(_outcome(work)), daemon=True)
        self._thread.start()
        while self._thread.is_alive():
            await asyncio.sleep(LOOK_EVERY_S)
        self._finish(outcomes[-1])

    def _on_stop(self) -> None:
        if self._thread and self._thread.is_alive():
            self.stop.disabled = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(KeyboardInterrupt))

    def _finish(self, outcome: Any) -> None:
        self._switch(running=False)
        self._end(outcome)

    def _switch(self, *, running: bool) -> None:
        self.stop.disabled = not running
        for control in (self.run, *self._others):
            control.disabled = running


def _outcome(work: Callable[[], Any]) -> Any:
    """Return what `work` returns or raises."""
    try:
        return work()
    except KeyboardInterrupt:
        return KeyboardInterrupt("Stopped.")
    except Exception as error:
        return error
