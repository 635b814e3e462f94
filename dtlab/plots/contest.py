"""All-reduce against all-reduce, on the wires: a table of clusters, and one cluster looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.markers import CARETLEFT
from matplotlib.patches import Rectangle

from dtlab.errors import ConfigError
from dtlab.plots.lines import TIME, style_of
from dtlab.plots.network import draw_nodes, frame_nodes, layout_of, line_of
from dtlab.plots.palette import ALARM, FAINT, FRESH, INK, PAPER, QUIET, mix
from dtlab.plots.picture import Picture, fit_text, page
from dtlab.topology import Topology
from dtlab.units import bytes_text, count_text, seconds_text
from dtlab.wires import ContestEntry, winners

STAR = "★"
_LABEL = ("time, simulated (upright line: what the busiest link needs, at least; "
          "◂: less than is shown)")
FULL = 0.999  # as busy as the busiest link, but for rounding


def contest_table(entries: Sequence[ContestEntry], title: str = "") -> Picture:
    """Rows: clusters, columns: algorithms; in each cell the simulated time. The fastest of a row
    (all within 1 %) has a star and a frame; the more times slower than it, the darker a cell.

    entries: of one size, as `wires.contest` gives them. Raises `ConfigError` for several sizes, or
    none.
    """
    sizes = {entry.nbytes for entry in entries}
    if len(sizes) != 1:
        raise ConfigError(f"a table is of one size; these entries have {len(sizes)}")
    nbytes = sizes.pop()
    rows, columns = (list(dict.fromkeys(names)) for names in zip(
        *((e.cluster, e.algorithm) for e in entries), strict=True))
    best = winners(entries)
    heading = title or f"All-reduce of {bytes_text(nbytes)}: simulated time"
    note = f"{STAR} fastest on that cluster, and all within 1 % of it; the darker, the slower"
    with page(11, 1.75 + 0.5 * len(rows), heading, note) as picture:
        axes = picture.place(left=3.1, right=0.3, bottom=0.15, top=1.45)
        for entry in entries:
            fastest_s = min(e.elapsed_s for e in entries if e.cluster == entry.cluster)
            won = (entry.cluster, nbytes, entry.algorithm) in best
            _draw_cell(axes, columns.index(entry.algorithm), rows.index(entry.cluster), entry,
                       entry.elapsed_s / fastest_s if fastest_s else 1.0, won)
        axes.set_xlim(0, len(columns))
        axes.set_ylim(len(rows), 0)
        axes.set_xticks(np.arange(len(columns)) + 0.5, [n.replace("_", "\n") for n in columns],
                        size=12)
        axes.set_yticks([])
        for row, name in enumerate(rows):
            fit_text(axes.text(-0.08, row + 0.5, name, ha="right", va="center_baseline", size=13),
                     2.85)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.grid(False)
    found = "; ".join(f"{name}: " + " = ".join(e.algorithm for e in entries if e.cluster == name and
                                              (name, nbytes, e.algorithm) in best)
                     + f" {seconds_text(min(e.elapsed_s for e in entries if e.cluster == name))}"
                     for name in rows)
    picture.alt = f"{heading}. Fastest on {found}."
    return picture


def _draw_cell(axes: Axes, x: int, y: int, entry: ContestEntry, times_slower: float, won: bool
               ) -> None:
    share = min(1.0, np.log2(times_slower) / 5)  # 32 times slower: as dark as it gets
    axes.add_patch(Rectangle((x + 0.03, y + 0.06), 0.94, 0.88, linewidth=2.5 if won else 0,
                             edgecolor=INK, facecolor=FRESH if won else mix(PAPER, QUIET, 0.1 + 0.5
                                                                            * share)))
    text = seconds_text(entry.elapsed_s)
    axes.text(x + 0.5, y + 0.5, f"{STAR} {text}" if won else text, ha="center",
              va="center_baseline", size=12, color=INK, weight="bold" if won else "normal")


def contest_on(cluster: Topology, entries: Sequence[ContestEntry], algorithm: str) -> Picture:
    """Draw each algorithm's time on `cluster`, and the links that `algorithm` keeps busy.

    entries: of this cluster and one size. Above, the cluster: the wider a link, the longer it needs
    for its bytes; the busiest are red and widest, one of them named. Below, a mark for each
    algorithm: its time; a short line: what its busiest link needs, and no run can take less; an
    arrow where that is less than the axis shows. Raises `ConfigError` if `algorithm` is not among
    the entries, or they are not of one cluster and size.
    """
    if len({(e.cluster, e.nbytes) for e in entries}) != 1:
        raise ConfigError("these entries must be of one cluster and one size")
    shown = next((e for e in entries if e.algorithm == algorithm), None)
    if shown is None:
        raise ConfigError(f"no entry of {algorithm!r}; there are: "
                          f"{', '.join(e.algorithm for e in entries)}")
    a, b = shown.busiest
    alike = sum(seconds >= FULL * shown.needed_s[a, b] for seconds in shown.needed_s.values()) - 1
    others = f" (and {alike} alike)" if alike and shown.needed_s[a, b] else ""
    heading = (f"All-reduce of {bytes_text(shown.nbytes)} on {shown.cluster}, "
               f"{count_text(shown.ranks, 'rank')} (simulated)")
    note = (f"{algorithm} takes {seconds_text(shown.elapsed_s)}; its busiest link, "
            f"{a} → {b}{others}, carries {bytes_text(shown.crossed[a, b])} and needs "
            f"{seconds_text(shown.needed_s[a, b])} for them")
    with page(11, 7.5, heading, note) as picture:
        axes = picture.place(left=0.3, right=0.3, bottom=3.25, top=0.95)
        _draw_loads(axes, cluster, shown)
        axes = picture.place(left=2.2, right=1.35, bottom=0.75, top=4.4)
        _dress(axes, entries)
        best = winners(entries)
        for row, entry in enumerate(entries):
            won = (entry.cluster, entry.nbytes, entry.algorithm) in best
            _draw_time(axes, row, entry, won=won, shown=entry is shown)
    fastest = " = ".join(e.algorithm for e in entries
                         if (e.cluster, e.nbytes, e.algorithm) in best)
    times = ", ".join(f"{e.algorithm} {seconds_text(e.elapsed_s)}" for e in entries)
    picture.alt = f"{heading}: {times}. Fastest: {fastest}. {note}."
    return picture


def _draw_loads(axes: Axes, cluster: Topology, shown: ContestEntry) -> None:
    """Draw each link as wide as it is busy, in its busier direction."""
    graph, most_s = cluster.graph(), max(shown.needed_s.values()) or 1.0
    places = layout_of(graph)
    busy: dict[frozenset[Any], float] = {}
    for pair, seconds in shown.needed_s.items():
        busy[frozenset(pair)] = max(busy.get(frozenset(pair), 0.0), seconds / most_s)
    lines, widths, colors = [], [], []
    for joined, share in sorted(busy.items(), key=lambda item: item[1]):
        a, b = sorted(joined, key=str)
        lines.append(line_of(graph, a, b, places))
        widths.append(0.8 + 5.2 * share + 1.2 * (share >= FULL))
        colors.append(ALARM if share >= FULL else mix(FAINT, INK, 0.15 + 0.7 * share))
    axes.add_collection(LineCollection(lines, colors=colors, linewidths=widths, zorder=1))
    draw_nodes(axes, graph, places)
    frame_nodes(axes, graph, places)


def _draw_time(axes: Axes, row: int, entry: ContestEntry, *, won: bool, shown: bool) -> None:
    style = style_of("all_reduce", entry.algorithm, row)
    need_s, (left_s, _) = max(entry.needed_s.values()), axes.get_xlim()
    axes.plot([left_s, entry.elapsed_s], [row, row], color=FAINT, linewidth=2, zorder=1)
    if need_s < left_s:
        axes.plot([left_s], [row], marker=CARETLEFT, markersize=9, color=INK, zorder=2)
    axes.plot([need_s, need_s], [row - 0.32, row + 0.32], color=INK, linewidth=2, zorder=2)
    axes.plot([entry.elapsed_s], [row], marker=style.marker, markersize=11, color=style.color,
              markeredgecolor=INK, zorder=3, clip_on=False)
    text = f"{STAR} {seconds_text(entry.elapsed_s)}" if won else seconds_text(entry.elapsed_s)
    axes.annotate(text, (entry.elapsed_s, row), (11, 0), textcoords="offset points",
                  va="center_baseline", size=12, weight="bold" if won else "normal")
    if shown:
        axes.axhspan(row - 0.45, row + 0.45, color=FRESH, lw=0, zorder=0)


def _dress(axes: Axes, entries: Sequence[ContestEntry]) -> None:
    """The axis shows all times, and what links need from a quarter of the least time on."""
    times = [e.elapsed_s for e in entries if e.elapsed_s > 0] or [1e-6]
    needs = [max(e.needed_s.values()) for e in entries]
    low = min([*times, *(need_s for need_s in needs if need_s > min(times) / 4)]) / 1.1
    high = max(*times, 2 * low) * 1.05
    digits = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
    TIME._replace(digits=digits, label=_LABEL).apply(axes.xaxis)
    axes.set_xlim(low, high)
    axes.set_ylim(len(entries) - 0.5, -0.5)
    axes.set_yticks(range(len(entries)), [e.algorithm for e in entries])
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
