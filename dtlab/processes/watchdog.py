"""The watchdog: tells from the shared status when a run can't go on, and gives the hang a name."""

from __future__ import annotations

import time
from collections.abc import Callable

from dtlab.errors import Deadlock, RunTimeout, Waiting, why_stuck
from dtlab.processes.shared_status import COMPUTE, RAISED, RETURNED, RUNNING, SharedStatus, State

_LOOK_EVERY_S = 0.2
_STILL_S = 0.5  # so long nothing may have changed before a deadlock is called one
_START_LIMIT_S = 120.0


class Watchdog:
    """Watches one call; `check` raises once the call can't complete. describe_death(rank): how it
    died; "" if it lives. describe_activity(rank): what a rank does that isn't waiting.
    is_stopped(rank): by a signal or a debugger?"""

    def __init__(self, status: SharedStatus, timeout: float | None,
                 describe_death: Callable[[int], str] = lambda rank: "",
                 describe_activity: Callable[[int], str] = lambda rank: "",
                 is_stopped: Callable[[int], bool] = lambda rank: False):
        self._status, self._describe_death = status, describe_death
        self._describe_activity, self._is_stopped = describe_activity, is_stopped
        self._timeout = timeout
        self._began = time.monotonic()
        self._started = False
        self._looked = 0.0
        self._seen: list[tuple[State, list[tuple[int, State]]]] = []
        self._since = 0.0  # when `_seen` was first seen

    def start(self) -> None:
        """All ranks are ready: the time limit counts from now."""
        self._began, self._started = time.monotonic(), True

    def pause_s(self) -> float:
        """Return the seconds that the launcher may sleep until the next `check`."""
        limit = self._timeout if self._started else _START_LIMIT_S
        left = _LOOK_EVERY_S if limit is None else self._began + limit - time.monotonic()
        return max(0.0, min(_LOOK_EVERY_S, left))

    def check(self, where: Callable[[int], list[str]]) -> None:
        """Raise `Deadlock` or `RunTimeout`, with the table. `where` asks a rank for its stack."""
        now = time.monotonic()
        if not self._started:
            if now - self._began > _START_LIMIT_S:
                raise RunTimeout(
                    f"the ranks did not get ready within {_START_LIMIT_S:.0f} s",
                    self._table(where),
                )
            return
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            if self._is_deadlock(now):
                rows = self._table(where)
                raise Deadlock(
                    "every rank waits for a message that nobody will send or receive"
                    + why_stuck(rows, self._labels()), rows,
                )
        if self._timeout is not None and now - self._began > self._timeout:
            rows, (who, stack) = self._table(where), self._stalled(where)
            raise RunTimeout(
                f"the run did not end within its timeout of {self._timeout:g} s{who}; "
                f"when it was stopped, the ranks were here:", rows, stack)

    def _stalled(self, where: Callable[[int], list[str]]) -> tuple[str, str]:
        """The rank for which all others wait, if there is one: what it does, and its stack."""
        doing = {rank: self._status.state(rank).doing for rank in range(self._status.ranks)
                 if not self._describe_death(rank)}
        busy = [rank for rank in doing if self._is_stopped(rank)] or [
            rank for rank, what in doing.items() if what in (RUNNING, COMPUTE)]
        if len(busy) != 1 or len(doing) == 1 or not (alive := self._describe_activity(busy[0])):
            return "", ""
        lines = [f"the stack of rank {busy[0]}:", *where(busy[0])]
        stack = "\n" + "\n  ".join(lines) if len(lines) > 1 else ""  # a stopped rank tells none
        return f", because rank {busy[0]} {alive}", stack

    def _is_deadlock(self, now: float) -> bool:
        """Has no rank that could go on been seen for a while?

        A rank may just have been slow to be scheduled, hence the while; and its record may be
        half written, hence the comparison of two complete readings.
        """
        status = self._status
        states = [(status.state(rank), status.streams(rank)) for rank in range(status.ranks)]
        over = [state.doing == RETURNED for state, _ in states]
        stuck = [not done and status.stuck(rank) for rank, done in enumerate(over)]
        if states != self._seen or not any(stuck):
            self._seen, self._since = states, now
            return False
        if not all(s or o for s, o in zip(stuck, over, strict=True)):
            return False
        return now - self._since >= _STILL_S

    def _labels(self) -> list[str]:
        """List the collectives in which strands wait."""
        return [state.label for main, streams in self._seen
                for state in (main, *(state for _, state in streams)) if state.doing != RETURNED]

    def _table(self, where: Callable[[int], list[str]]) -> list[Waiting]:
        rows = []
        for rank in range(self._status.ranks):
            if died := self._describe_death(rank):
                rows.append(Waiting(rank, died))
                continue
            doing = self._status.state(rank).doing
            stack = [] if doing in (RETURNED, RAISED) else where(rank)
            line = stack[0] if stack else ""
            rows += self._status.table(rank, line)
        return rows
