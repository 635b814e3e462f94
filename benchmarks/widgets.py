"""How long a widget takes to answer: from the moved control to the new PNG. Limit: 150 ms.

    python benchmarks/widgets.py

Every answer is timed once for pictures not seen before ("new") and once on coming back ("again").
Wall-clock times depend on what else the machine does; CPU times less so.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtlab import simulate
from dtlab.collectives import all_reduce
from dtlab.topology import uniform
from dtlab.widgets import (
    AlphaBetaExplorer,
    ClockExplorer,
    PlacementExplorer,
    RankGrid,
    Stepper,
    TimelineExplorer,
    TopologyExplorer,
)

LIMIT_MS = 150.0


def answers(control: Any, values: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Milliseconds of wall clock and of CPU for setting `control` to each of `values`."""
    wall, cpu = [], []
    for value in values:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        control.value = value
        wall.append((time.perf_counter() - begin) * 1e3)
        cpu.append((time.process_time() - begin_cpu) * 1e3)
    return wall, cpu


def ring_explorer(ranks: int) -> TimelineExplorer:
    """A timeline of a simulated ring all-reduce."""
    run = simulate(lambda comm: all_reduce(comm, torch.ones(64 * ranks)),
                   network=uniform(ranks, 5e-6, 1e9))
    return TimelineExplorer(run.trace)


def cases() -> list[tuple[str, Callable[[], tuple[Any, Sequence[Any]]]]]:
    """(name, () → (control, values to set one after another))."""
    alpha = [1e-6, 2e-6, 1e-5, 2e-5, 5e-5, 1e-4]
    windows = [(0, 50), (10, 60), (20, 70), (25, 50), (50, 75), (60, 100)]
    steps = [2, 3, 4, 5, 6, 3]
    found: list[tuple[str, Callable[[], tuple[Any, Sequence[Any]]]]] = []
    for p in (4, 8, 16):
        found.append((f"Stepper, step, {p} ranks", lambda p=p: (Stepper(ranks=p).step, steps)))
    found.append(("Stepper, another number of ranks",
                  lambda: (Stepper().ranks, [2, 3, 5, 6, 7, 8])))
    for p in (8, 1024):
        found.append((f"AlphaBetaExplorer, α, {p} ranks",
                      lambda p=p: (AlphaBetaExplorer(ranks=p).alpha, alpha)))
    for p in (4, 8, 16, 64):
        found.append((f"TimelineExplorer, window, {p} ranks",
                      lambda p=p: (ring_explorer(p).window, windows)))
    found.append(("RankGrid, another number of ranks",
                  lambda: (RankGrid().ranks, [2, 3, 5, 8, 12, 16])))
    found.append(("PlacementExplorer, bandwidth, 8 GPUs", lambda: (
        PlacementExplorer(gpus=8).speed, [1e9, 2e9, 4e9, 8e9, 12e9, 25e9])))
    for name in ("two racks, 4:1", "fat tree"):
        found.append((f"TopologyExplorer, moment, {name}", lambda name=name: moments_of(name)))
    for rule in ("BSP", "1 backup worker"):
        found.append((f"ClockExplorer, time, {rule}", lambda rule=rule: (
            ClockExplorer(rule, "pauses").time, [21, 25, 30, 36, 40, 12])))
    return found


def moments_of(cluster: str) -> tuple[Any, Sequence[Any]]:
    """The slider over the moments of a ring all-reduce on `cluster`."""
    explorer = TopologyExplorer()
    explorer.cluster.value, explorer.traffic.value = cluster, "ring all-reduce"
    return explorer.moment, [2, 3, 4, 5, 6, 3]


def main() -> int:
    """Print the table; 1 if a median CPU time exceeds the limit."""
    print(f"{'milliseconds, median (most)':40} {'new':>14} {'new, CPU':>14} {'again':>14}")
    slow = 0
    for name, make in cases():
        control, values = make()
        control.value = values[-1]  # fonts and closed forms are loaded once, not at every answer
        wall, cpu = answers(control, values[:-1])
        again, _ = answers(control, values[:-1])
        shown = [f"{statistics.median(x):6.1f} ({max(x):5.1f})" for x in (wall, cpu, again)]
        print(f"{name:40} {shown[0]:>14} {shown[1]:>14} {shown[2]:>14}", flush=True)
        slow += statistics.median(cpu) > LIMIT_MS
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
