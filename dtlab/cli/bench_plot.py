"""The pictures of `dtlab bench`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dtlab.bench import CollectiveTime, Start, StepTime
from dtlab.plots.lines import Scale
from dtlab.plots.palette import line_style
from dtlab.plots.picture import Picture, page
from dtlab.units import bytes_text, seconds_text


def bandwidths(rows: Sequence[CollectiveTime]) -> Picture:
    """Bus bandwidth over size, both logarithmic: a line a contestant, a bar from min to max."""
    lines: dict[str, list[CollectiveTime]] = defaultdict(list)
    for row in rows:
        if row.bus_Bps:
            lines[f"{row.collective}, {row.algorithm}"].append(row)
    title = f"Collectives on {rows[0].ranks} processes (measured)"
    note = f"median of {rows[0].repeats} repetitions; bars: fastest to slowest"
    with page(11, 6.5, title, note) as picture:
        axes = picture.place(left=1.2, right=3.6, bottom=1.0, top=1.0)
        for number, (name, line) in enumerate(lines.items()):
            style = line_style(number)
            bus = [row.bus_Bps / 1e9 for row in line if row.bus_Bps]
            down = [b * (1 - r.time_s / r.slowest_s) for b, r in zip(bus, line, strict=True)]
            up = [b * (r.time_s / r.fastest_s - 1) for b, r in zip(bus, line, strict=True)]
            axes.errorbar([row.nbytes for row in line], bus, [down, up], label=name, capsize=3,
                          color=style.color, linestyle=style.dashes, marker=style.marker)
        sizes = sorted({row.nbytes for row in rows if row.bus_Bps})
        Scale("size (bytes)", bytes_text, ticks=sizes).apply(axes.xaxis)
        Scale("bus bandwidth (GB/s)", digits=(1, 2, 5)).apply(axes.yaxis)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=11)
    picture.alt = "Bus bandwidth in GB/s: " + "; ".join(
        f"{row.collective} {row.algorithm} of {bytes_text(row.nbytes)} {row.bus_Bps / 1e9:.2f}"
        for row in rows if row.bus_Bps)
    return picture


def starts(rows: Sequence[Start]) -> Picture:
    """Draw the time of each launcher on a logarithmic axis: dots, as bars would need a zero."""
    title = f"Starting {rows[0].ranks} processes (measured)"
    note = f"median of up to {rows[0].repeats} repetitions; bars: fastest to slowest"
    with page(11, 1.9 + 0.6 * len(rows), title, note) as picture:
        axes = picture.place(left=3.2, right=1.2, bottom=0.8, top=1.0)
        for number, row in enumerate(rows):
            spread = [[row.time_s - row.fastest_s], [row.slowest_s - row.time_s]]
            axes.errorbar([row.time_s], [number], xerr=spread, color=line_style(number).color,
                          marker="o", markersize=12, capsize=4, linestyle="none")
            axes.annotate(seconds_text(row.time_s), (row.slowest_s, number), (8, 0),
                          textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [row.launcher for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        Scale("time from call to return (s)", digits=(1, 2, 5)).apply(axes.xaxis)
    picture.alt = "; ".join(f"{row.launcher} {seconds_text(row.time_s)}" for row in rows)
    return picture


def steps(rows: Sequence[StepTime]) -> Picture:
    """Time and peak memory of each contestant: a dot a number of ranks."""
    names = list(dict.fromkeys(row.contestant for row in rows))
    title = f"A training step of {rows[0].parameters:,} parameters (measured)"
    note = f"median of {rows[0].repeats} repetitions"
    with page(13, 1.9 + 0.45 * len(names), title, note) as picture:
        for number, (left, right, label) in enumerate(
                [(3.4, 5.0, "time (ms)"), (8.6, 0.6, "peak memory (MB)")]):
            axes = picture.place(left=left, right=right, bottom=0.9, top=1.0)
            for style, ranks in enumerate(dict.fromkeys(row.ranks for row in rows)):
                points = [(row.peak_bytes / 1e6 if number else row.time_s * 1e3,
                           names.index(row.contestant)) for row in rows if row.ranks == ranks]
                axes.plot(*zip(*points, strict=True), linestyle="none", markersize=10,
                          color=line_style(style).color, marker=line_style(style).marker,
                          label=f"{ranks} ranks")
            axes.set_yticks(range(len(names)), names if not number else [""] * len(names))
            axes.set(xlabel=label, xlim=(0, None))
            axes.invert_yaxis()
            axes.legend(loc="lower right", fontsize=11)
    picture.alt = "Training steps: " + "; ".join(
        f"{row.contestant} on {row.ranks} ranks {row.time_s * 1e3:.0f} ms, "
        f"{row.peak_bytes / 1e6:.0f} MB" for row in rows)
    return picture
