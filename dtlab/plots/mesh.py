"""The axes of a mesh on the machines of a cluster: which kind of parallelism crosses which wire."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from dtlab.parallel.mesh import check_axes, groups
from dtlab.plots.palette import FAINT, QUIET, ink_on, rank_color
from dtlab.plots.picture import Picture, page
from dtlab.topology import Topology

WIDTH_IN = 11.0


def crossings(axes: Mapping[str, int], machines: list[list[int]]) -> dict[str, tuple[int, int]]:
    """Count, for each axis, the groups that lie inside one machine, and those that don't."""
    home = {rank: number for number, machine in enumerate(machines) for rank in machine}
    found = {}
    for name in axes:
        inside = sum(len({home[rank] for rank in group}) == 1 for group in groups(axes, name))
        found[name] = inside, len(groups(axes, name)) - inside
    return found


def mesh(axes: Mapping[str, int], cluster: Topology, axis: str | None = None, *,
         title: str = "") -> Picture:
    """The devices of `cluster` in their machines, each with its coordinates along `axes`, the last
    of which varies fastest; devices of one group of `axis` (None: of the last) have one colour.

    Devices are in one machine if the quickest links join them. Raises `ConfigError` unless the axes
    multiply to the cluster's ranks.
    """
    check_axes(axes, cluster.ranks, cluster.name)
    machines = machines_of(cluster)
    shown = axis or list(axes)[-1]
    color = {rank: rank_color(number) for number, group in enumerate(groups(axes, shown))
             for rank in group}
    counts = crossings(axes, machines)
    note = " · ".join(f"{name}: {inside} of {inside + outside} groups inside a machine"
                      for name, (inside, outside) in counts.items())
    order = " × ".join(f"{name} {size}" for name, size in axes.items())
    heading = f"{title or f'Mesh {order}'}, coloured by {shown} (predicted)"
    most, columns = max(map(len, machines)), min(len(machines), 4)
    rows = -(-len(machines) // columns)
    with page(WIDTH_IN, 1.4 + 1.15 * rows, heading, note) as picture:
        axes_ = picture.place(left=0.3, right=0.3, bottom=0.15, top=1.1)
        axes_.axis("off")
        for number, machine in enumerate(machines):
            corner = (number % columns) * (most + 0.6), (number // columns) * 1.7
            axes_.add_patch(Rectangle((corner[0] - 0.1, corner[1] - 0.1), most + 0.2, 1.3,
                                      facecolor="none", edgecolor=QUIET, linewidth=1.2))
            for place, rank in enumerate(machine):
                at = ",".join(map(str, np.unravel_index(rank, list(axes.values()))))
                _draw_device(axes_, corner[0] + place, corner[1], rank, at, color[rank])
        axes_.set_xlim(-0.3, columns * (most + 0.6) - 0.2)
        axes_.set_ylim(rows * 1.7 - 0.2, -0.3)
    picture.alt = f"{heading}: {note}. Machines: {'; '.join(map(str, machines))}."
    return picture


def _draw_device(axes: Axes, x: float, y: float, rank: int, at: str, color: str) -> None:
    axes.add_patch(Rectangle((x + 0.05, y), 0.9, 1.1, facecolor=color, edgecolor=FAINT))
    for text, down, size in ((str(rank), 0.32, 12.0), (at, 0.8, 8.5)):
        axes.text(x + 0.5, y + down, text, ha="center", va="center", size=size,
                  color=ink_on(color))


def machines_of(cluster: Topology) -> list[list[int]]:
    """Ranks joined by routes as quick as the quickest of all, in order."""
    def pace(a: int, b: int) -> float:
        return min(cluster.capacity_Bps[link] for link in cluster.route(a, b)[1])

    ranks = range(cluster.ranks)
    quickest = max((pace(0, b) for b in ranks if b), default=0.0)
    machines: list[list[int]] = []
    for rank in ranks:
        home = next((m for m in machines if pace(m[0], rank) >= quickest), None)
        if home is None:
            machines.append([rank])
        else:
            home.append(rank)
    return machines
