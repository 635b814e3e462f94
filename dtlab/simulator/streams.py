"""Streams: functions that `Comm.begin` runs beside their rank, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from dtlab.comm import Comm
from dtlab.errors import RankDied
from dtlab.simulator.engine import Engine
from dtlab.simulator.lines import SourceLine
from dtlab.simulator.strands import Crashed, Stopped, Strand
from dtlab.simulator.works import SimWork


class SimBegunWork(SimWork):
    """A function that a stream runs, has run, or will run."""

    __slots__ = ("_name", "_number", "_waiting", "call", "done", "error", "line", "value")

    def __init__(self, engine: Engine, rank: int, line: SourceLine | None, number: int, name: str,
                 call: Callable[[], Any]):
        super().__init__(engine, rank, line)
        self.line, self._number, self._name, self.call = line, number, name, call
        self.done, self.value = False, None
        self.error: BaseException | None = None
        self._waiting: Strand | None = None

    def wait(self) -> Any:
        engine = self._engine
        if not self.done:
            engine.running.waits_for = f"wait for stream {self._number}"
            engine.wait_for(self.wake_when_done(engine.running), "")
        engine.unwaited.pop(self, None)
        if self.error is not None:
            raise self.error
        return self.value

    def is_done(self) -> bool:
        return self.done

    def wake_when_done(self, strand: Strand) -> object:
        self._waiting = strand
        return self

    def run(self, died: BaseException | None) -> None:
        """Call the function, on the stream's strand. died: the `RankDied` of an earlier function,
        in which other ranks may still be: then this one raises it, too."""
        try:
            if died is not None:
                raise died
            self.value = self.call()
        except Exception as error:
            self.error = error
            self._engine.unwaited.setdefault(self, self.line)
        self.done = True
        if self._waiting is not None:
            self._engine.done(self, self._waiting)

    def __str__(self) -> str:
        return f"begin({self._name}, …)"


class SimStream:
    """Runs what is begun on one communicator, in that order, on a strand of its own."""

    def __init__(self, engine: Engine, comm: Comm, has_ended: Callable[[], bool]):
        self.comm, self._has_ended = comm, has_ended
        self._engine, self._rank = engine, engine.running.rank
        self._begun: deque[SimBegunWork] = deque()
        self._strand = engine.add_stream(self._run)

    def begin(self, line: SourceLine | None, label: str, fn: Callable[..., Any],
              args: tuple[Any, ...], options: dict[str, Any]) -> SimBegunWork:
        """Run `fn(stream, *args, **options)` after what was begun before."""
        comm = self.comm.labelled(label) if label else self.comm
        name = getattr(fn, "__name__", type(fn).__name__)
        begun = SimBegunWork(self._engine, self._rank, line, self._strand.stream, name,
                      lambda: fn(comm, *args, **options))
        self._begun.append(begun)
        if self._strand.idle:
            self._strand.idle = False
            self._engine.wake(self._strand)
        return begun

    def _run(self, strand: Strand) -> None:
        """The body of the stream's strand."""
        strand.idle_since_s = self._engine.now
        died: BaseException | None = None
        while True:
            while not self._begun:
                self._engine.end_wait(strand)
                strand.idle = True
                strand.pause()
                strand.idle_since_s = self._engine.now
            begun = self._begun.popleft()
            strand.line = begun.line
            try:
                begun.run(died)
                died = begun.error if isinstance(begun.error, RankDied) else died
                if begun.error is not None and self._has_ended():
                    begun._detach()
            except Stopped:
                raise
            except Crashed:
                self._engine.crash(strand.rank)
                return
            except BaseException as error:  # KeyboardInterrupt, SystemExit
                self._engine.fail(strand.rank, error)
                return
            del begun  # nothing is kept alive while the stream is idle
