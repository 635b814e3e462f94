"""The ring of consistent hashing: which arcs are whose, and what moves when a server comes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from dtlab.checks import check_whole
from dtlab.errors import ConfigError
from dtlab.plots.palette import INK, PAPER, QUIET, ink_on, rank_color
from dtlab.plots.picture import MARGIN_IN, Picture, page
from dtlab.ps.partition import ring_of, stable_hash

WIDTH_IN, HEIGHT_IN = 11.0, 5.6
FULL = 2.0**64  # hashes go round after this
_CENTRES = (2.6, 7.8)  # of the two rings, in inches
_RADIUS = 1.55


def hash_ring(servers: int = 4, vnodes: Sequence[int] = (1, 16), keys: Sequence[str] = (),
              *, title: str = "Who owns which arc of the ring") -> Picture:
    """Draw for each of two numbers of virtual nodes the ring of `servers`, as `ps.ConsistentHash`
    has it; each arc in the colour of the server that owns it, with its share. `keys` stand where
    their hashes are. Raises `ConfigError` unless two numbers of virtual nodes are given."""
    check_whole("hash_ring's servers", servers)
    if not isinstance(vnodes, Sequence) or len(vnodes) != 2:
        raise ConfigError("hash_ring compares two numbers of virtual nodes, such as (1, 16), not "
                          f"{vnodes!r:.40}")
    for number in vnodes:
        check_whole("a number of virtual nodes", number)
    shares = [arc_shares(servers, v) for v in vnodes]
    note = " · ".join(f"{_nodes_text(v)}: largest share {max(found):.0%}, smallest "
                      f"{min(found):.0%}" for v, found in zip(vnodes, shares, strict=True))
    with page(WIDTH_IN, HEIGHT_IN, title, note) as picture:
        axes = picture.place(left=MARGIN_IN, right=MARGIN_IN, bottom=0.6, top=1.0)
        axes.set_axis_off()
        axes.set_xlim(0, WIDTH_IN - 2 * MARGIN_IN)
        axes.set_ylim(-2, 2)
        for centre, v, found in zip(_CENTRES, vnodes, shares, strict=True):
            _draw_ring(axes, centre, servers, v, found)
            for x, y in _on_circle(np.array([float(stable_hash(key)) for key in keys]), centre):
                axes.plot(x, y, marker="o", markersize=7, color=INK, markeredgecolor=PAPER,
                          zorder=4)
        handles = [Line2D([], [], color=rank_color(s), linewidth=9, label=f"server {s}")
                   for s in range(servers)]
        if keys:
            handles.append(Line2D([], [], color=INK, marker="o", linestyle="", label="a key"))
        picture.explain(handles, len(handles), fontsize=12, labelcolor=QUIET, handlelength=1.6)
    picture.alt = f"{title}, computed: {servers} servers. {note}."
    return picture


def arc_shares(servers: int, vnodes: int) -> list[float]:
    """The share of the ring that each server owns."""
    points, owners = ring_of(tuple(range(servers)), vnodes)
    found = [0.0] * servers
    for begin, end, owner in _arcs(points, owners):
        found[owner] += (end - begin) / FULL
    return found


def _arcs(points: np.ndarray, owners: np.ndarray) -> list[tuple[float, float, int]]:
    """(begin, end, owner): a point owns what lies between the one before it and itself."""
    begins = np.concatenate([[float(points[-1]) - FULL], points[:-1].astype(float)])
    return [(float(b), float(e), int(o)) for b, e, o in zip(begins, points, owners, strict=True)]


def _draw_ring(axes: Axes, centre: float, servers: int, vnodes: int,
               shares: Sequence[float]) -> None:
    points, owners = ring_of(tuple(range(servers)), vnodes)
    lines = []
    for begin, end, _ in _arcs(points, owners):
        steps = max(2, int(200 * (end - begin) / FULL))
        lines.append(_on_circle(np.linspace(begin, end, steps), centre))
    axes.add_collection(LineCollection(lines, colors=[rank_color(int(o)) for o in owners],
                                       linewidths=17, capstyle="butt", zorder=2), autolim=False)
    axes.text(centre, 0.95, _nodes_text(vnodes), ha="center", va="center", size=13, color=INK)
    for server, share in enumerate(shares):
        color = rank_color(server)
        axes.text(centre, 0.5 - 0.36 * server, f"server {server}: {share:.0%}", ha="center",
                  va="center", size=12, color=ink_on(color),
                  bbox={"boxstyle": "round,pad=0.15", "facecolor": color, "linewidth": 0})


def _on_circle(hashes: np.ndarray, centre: float) -> np.ndarray:
    """Return the places of `hashes`, clockwise, from the top."""
    angle = 2 * math.pi * hashes / FULL
    return np.stack([centre + _RADIUS * np.sin(angle), _RADIUS * np.cos(angle)], axis=-1)


def _nodes_text(vnodes: int) -> str:
    return "1 point a server" if vnodes == 1 else f"{vnodes} points a server"
