"""A widget of pipeline schedules: choose one and its costs, and change cells of its grid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from dtlab.checks import check_choice
from dtlab.errors import ConfigError
from dtlab.parallel import pipeline
from dtlab.parallel.pipeline import Action, Schedule, Timing
from dtlab.plots import Picture
from dtlab.plots.palette import ink_on
from dtlab.plots.schedule import KINDS, color_of, figures_of, held_of, schedule
from dtlab.widgets.player import Json, Player, runs_of, select, slider

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": lambda p, m, v: pipeline.naive(p, m),
    "GPipe": lambda p, m, v: pipeline.gpipe(p, m),
    "1F1B": lambda p, m, v: pipeline.one_f_one_b(p, m),
    "interleaved 1F1B": pipeline.interleaved,
    "looped BFS": pipeline.looped_bfs,
    "ZB-H1": lambda p, m, v: pipeline.zb_h1(p, m),
    "ZB-H2": lambda p, m, v: pipeline.zb_h2(p, m),
    "ZB-V": lambda p, m, v: pipeline.zb_v(p, m),
    "DualPipe-V": lambda p, m, v: pipeline.dualpipe_v(p, m),
}
B = 2.0
WHAT = ("schedule", "ranks", "micro_batches", "chunks")  # make the grid; the others time it


class ScheduleExplorer(Player):
    """`plots.schedule` with controls, played in time; and the grid as text, to be edited.

    A schedule that can't run is refused, with the reason and the cell.
    """

    drawing = "schedule"
    has_runs = True

    def __init__(self, name: str = "ZB-H1", ranks: int = 4, micro_batches: int = 8,
                 chunks: int = 2):
        check_choice("schedule", name, SCHEDULES)
        self._ranks = sorted({*range(1, 9), ranks})
        self._micro_batches = sorted({1, 2, 3, 4, 6, 8, 12, 16, micro_batches})
        self._made: tuple[object, ...] = ()  # what the grid was made of
        super().__init__({"schedule": name, "ranks": ranks, "micro_batches": micro_batches,
                          "chunks": chunks, "F": 1.0, "W": 1.0, "latency": 0.0, "grid": ""})

    def static(self) -> Picture:
        """Return the picture that is shown, as a matplotlib figure."""
        now = self.choice
        return schedule(Schedule.parse(now["grid"]), F=now["F"], B=B, W=now["W"],
                        comm=now["latency"], title=now["schedule"], room=8)

    def _answer(self) -> Json:
        name, ranks, micro_batches, chunks = wanted = tuple(self.choice[each] for each in WHAT)
        if wanted != self._made:
            grid = str(SCHEDULES[name](ranks, micro_batches, chunks))
            self._made, self.choice = wanted, self.choice | {"grid": grid}
        now = self.choice
        try:
            plan = Schedule.parse(now["grid"])
            timing = plan.time(now["F"], B, now["W"], now["latency"])
        except ConfigError as error:
            reason, *rows = str(error).splitlines()
            marked = next((word for row in rows for word in row.split() if "»" in word), "")
            raise ConfigError(f"This schedule can't run: {reason}"
                              + f", see {marked}" * bool(marked)) from None
        controls = [
            select("schedule", "schedule", [*SCHEDULES]),
            slider("ranks", "ranks", self._ranks),
            slider("micro_batches", "micro-batches", self._micro_batches),
            select("chunks", "chunks a rank, if interleaved", [1, 2, 3]),
            slider("F", "F", [0.5, 1.0, 1.5]),
            slider("W", "W, of B = 2", [0.5, 0.75, 1.0, 1.25]),
            slider("latency", "a message", [0.0, 0.1, 0.25, 0.5, 1.0]),
            {"name": "grid", "label": "grid", "kind": "text"},
        ]
        return _shown(plan, timing, name) | {"controls": controls}


def _shown(plan: Schedule, timing: Timing, name: str) -> Json:
    """The blocks, and for each moment at which one begins or ends: who does and holds what."""
    end = max(stop for row in timing.spans for *_, stop in row)
    kinds = {action.kind for row in plan.rows for action in row}
    scene = {"size": [990, 480], "end": end, "note": figures_of(timing), "interval_ms": 500,
             "rows": [[_block(action, start, stop, plan) for action, start, stop in row]
                      for row in timing.spans],
             "chunks": max(len(plan.stages_of(rank)) for rank in range(plan.ranks)),
             "most": [f"{most:.3g}" for most in timing.held],
             "kinds": {kind: {"name": text, "color": color}
                       for kind, (text, color) in KINDS.items()},
             "present": [kind for kind in KINDS if kind in kinds]}
    heading, held = f"{name} (planned)", [held_of(timing, plan, rank) for rank in range(plan.ranks)]
    moments = []
    for time in sorted({edge for row in timing.spans for _, *edges in row for edge in edges}):
        holds = [amounts[bisect_right(times, time) - 1] for times, amounts in held]
        doing = [f"rank {rank} does {_doing(row, time)} and holds {holds[rank]:.3g}"
                 for rank, row in enumerate(timing.spans)]
        moments.append({"title": f"{heading}, {time:g} s", "time": time, "label": f"{time:g} s",
                        "holds": [f"{amount:.3g}" for amount in holds],
                        "words": f"After {time:g} s: {'; '.join(doing)}."})
    moments[-1]["words"] = f"{heading}: {figures_of(timing)}."
    return {"scene": scene, "moments": moments, "at": len(moments) - 1}


def _block(action: Action, start: float, stop: float, plan: Schedule) -> list[Any]:
    color = color_of(action, plan)
    return [action.kind, action.micro, round(start, 6), round(stop, 6), color, ink_on(color)]


def _doing(row: Sequence[tuple[Action, float, float]], time: float) -> str:
    return next((f"{action.kind}{action.micro}" for action, start, stop in row
                 if start <= time < stop), "nothing")


def runs() -> list[Json]:
    """All that a page without a kernel may choose: every schedule, timed alike."""
    return runs_of(ScheduleExplorer(), (
        {"schedule": name, "ranks": ranks, "micro_batches": micro_batches}
        for name in SCHEDULES for ranks in (2, 4, 8) for micro_batches in (4, 8, 16)))
