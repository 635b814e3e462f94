"""A pipeline schedule is data: for each rank, a list of actions in order, which is printed, parsed,
checked, timed and run. Chapter: 12."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dtlab.errors import ConfigError
from dtlab.parallel.pipeline.action import Action, ranks_of, run_in_order
from dtlab.parallel.pipeline.timing import Timing, spans_of, time_of

_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
# What torch's runtime adds to a schedule, and ours does by itself: messages, and what FSDP does.
_ADDED = re.compile(r"\d{1,6}(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d{1,6})")
_PAIR = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")  # torch's DualPipe-V: two actions at once


@dataclass(frozen=True)
class Schedule:
    """rows[r] is what rank r does, in order. Stages lie on the ranks whose rows have them.

    `str` prints it as a grid, a column for each unit of time if all actions took one; `parse` reads
    it. Nothing is checked before `check`, `time` or a run.
    """

    rows: tuple[tuple[Action, ...], ...]

    @staticmethod
    def of(rows: Iterable[Iterable[Action]]) -> Schedule:
        """Make a schedule of any rows of actions."""
        return Schedule(tuple(tuple(row) for row in rows))

    @property
    def ranks(self) -> int:
        """p."""
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """The number of stages on all ranks."""
        return 1 + max((action.stage for _, _, action in self._cells()), default=-1)

    @cached_property
    def micro_batches(self) -> int:
        """m."""
        return 1 + max((action.micro for _, _, action in self._cells()), default=-1)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return ranks_of(self.rows)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return sorted(stage for stage, owner in self.rank_of.items() if owner == rank)

    # ---- as text ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self._grid()

    def _grid(self, marked: tuple[int, int] | None = None) -> str:
        """marked: (rank, number of the action) to be printed between » and «."""
        spans = spans_of(self.rows, self.stages, lambda action: 1)
        cells: list[list[str]] = [[] for _ in self.rows]
        for rank, row in enumerate(self.rows):
            for number, action in enumerate(row):
                if number < len(spans[rank]):  # what can't ever run comes last
                    cells[rank] += ["."] * (int(spans[rank][number][1]) - len(cells[rank]))
                cells[rank].append(f"»{action}«" if (rank, number) == marked else str(action))
        columns = max(map(len, cells), default=0)
        for row_cells in cells:
            row_cells += ["."] * (columns - len(row_cells))
        width = max((len(cell) for row in cells for cell in row), default=1)
        return "\n".join(" ".join(cell.rjust(width) for cell in row).rstrip() for row in cells)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read a grid: a line for each rank, actions with blanks between, "." for nothing."""
        if not isinstance(text, str):
            raise ConfigError(f"Schedule.parse takes text, not {text!r}")
        lines = [line for line in text.splitlines() if line.strip()]
        return Schedule._read([line.split() for line in lines], "line", "word")

    def to_csv(self) -> str:
        """Return what torch.distributed.pipelining's `_load_csv` reads: a row for each rank."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [str(action) for action in row] or [""] for row in self.rows)
        return text.getvalue()

    @staticmethod
    def from_csv(text: str) -> Schedule:
        """Read what torch's `_dump_csv` writes, or `to_csv`. Empty cells are idle; two actions that
        torch overlaps follow one another; messages (SEND_F, RECV_B, …), UNSHARD, RESHARD and
        REDUCE_GRAD, which torch's runtime adds, are left out: a run adds its own."""
        if not isinstance(text, str):
            raise ConfigError(f"Schedule.from_csv takes text, not {text!r}")
        rows = [row for row in csv.reader(io.StringIO(text))
                if row and not ",".join(row).isspace()]  # a rank without actions has empty cells
        return Schedule._read(rows, "row", "cell")

    @staticmethod
    def _read(rows: Sequence[Sequence[str]], row_word: str, cell_word: str) -> Schedule:
        if not rows:
            raise ConfigError("there is no schedule: the text is empty")
        found: list[list[Action]] = []
        for number, row in enumerate(rows, 1):
            found.append([])
            for place, cell in enumerate(row, 1):
                text = cell.strip()
                pair = _PAIR.fullmatch(text)
                for part in pair.groups() if pair else (text,):
                    action = _ACTION.fullmatch(part.strip())
                    if action:
                        found[-1].append(Action(int(action[1]), action[2], int(action[3])))
                    elif text not in ("", ".") and not _ADDED.fullmatch(text):
                        raise ConfigError(f"{row_word} {number}, {cell_word} {place}: {cell!r} is "
                                          f"no action; write stage, F, B, I or W, and micro-batch, "
                                          f"as in 0F3")
        return Schedule.of(found)

    # ---- checks ----------------------------------------------------------------------------------

    def check(self) -> Schedule:
        """Raise `ConfigError`, which prints the grid and marks the cell, unless each micro-batch
        passes each stage exactly once, forward and backward, in an order that ends. Returns self.
        """
        for rank, _, action in self._cells():
            if not isinstance(action, Action) or not _ACTION.fullmatch(str(action)):
                raise ConfigError(f"rank {rank}: {action!s:.30} is no action, such as "
                                  f"Action(0, 'F', 3)")
        if not self.stages:
            raise ConfigError("the schedule has no actions")
        seen: dict[Action, tuple[int, int]] = {}
        for rank, number, action in self._cells():
            home = self.rank_of[action.stage]
            if home != rank:
                self._refuse(f"stage {action.stage} is on rank {home}, too", rank, number)
            if action in seen:
                self._refuse(f"{action} is done twice", rank, number)
            seen[action] = rank, number
        for stage in range(self.stages):
            for micro in range(self.micro_batches):
                self._check_complete(stage, micro, seen)
        done = set(run_in_order(self.rows, self.stages))
        for rank, number, action in self._cells():
            if (rank, number) not in done:
                waits = next(one for one in action.needs(self.stages)
                             if not any(a in seen and seen[a] in done for a in one))
                missing = next(a for a in waits if a in seen)
                self._refuse(f"{action} waits for {missing}, which comes after it on rank {rank}"
                             if seen[missing][0] == rank else
                             f"deadlock: {action} waits for {missing}, which never runs",
                             rank, number)
        return self

    def _cells(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (rank, number, action) of all actions."""
        for rank, row in enumerate(self.rows):
            for number, action in enumerate(row):
                yield rank, number, action

    def _check_complete(self, stage: int, micro: int, seen: dict[Action, tuple[int, int]]) -> None:
        forward, full, *halves = (Action(stage, kind, micro) for kind in "FBIW")
        there = [half for half in halves if half in seen]
        missing = [half for half in halves if half not in seen]
        if forward not in seen:
            self._refuse(f"{forward} is missing")
        if full in seen and there:
            self._refuse(f"{full} computes both gradients, so {there[0]} is one too many",
                         *seen[there[0]])
        if full not in seen and len(missing) == 1:
            self._refuse(f"{missing[0]} is missing")
        if full not in seen and len(missing) == 2:
            self._refuse(f"{full}, or {missing[0]} and {missing[1]}, are missing")

    def _refuse(self, what: str, rank: int | None = None, number: int = 0) -> None:
        marked = None if rank is None else (rank, number)
        place = "" if rank is None else f"rank {rank}, action {number}: "
        raise ConfigError(f"{place}{what}\n{self._grid(marked)}")

    # ---- time ------------------------------------------------------------------------------------

    def time(self, F: float = 1.0, B: float = 2.0, W: float | None = None, comm: float = 0.0
             ) -> Timing:
        """When everything happens, if a rank's stages together take `F` seconds forward for one
        micro-batch and `B` for its full backward, of which `W` for the weights' gradients (half, if
        None), shared evenly by its stages; a message arrives `comm` seconds after it was sent."""
        self.check()
        return time_of(self.rows, self.stages, self.micro_batches, F, B, B / 2 if W is None else W,
                       comm)
