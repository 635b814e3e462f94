"""A panel of bars for each case, all to one scale, with its mean: staleness, and servers' load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from dtlab.errors import ConfigError
from dtlab.plots.palette import INK, PAPER, QUIET, line_style, rank_style
from dtlab.plots.picture import MARGIN_IN, Picture, clock_name, fit_text, page
from dtlab.units import count_text

WIDTH_IN, HEIGHT_IN = 11.0, 4.5
_PLATE = {"boxstyle": "square,pad=0", "facecolor": PAPER, "linewidth": 0}  # hides the dashed line


def _panels(picture: Picture, names: Sequence[str], highest: float) -> list[Axes]:
    """Axes side by side, one for each name, all up to one height."""
    panels = list(picture.subplots(1, len(names), sharey=True, squeeze=False)[0])
    picture.subplots_adjust(left=0.95 / WIDTH_IN, right=1 - MARGIN_IN / WIDTH_IN,
                            bottom=0.8 / HEIGHT_IN, top=1 - 1.3 / HEIGHT_IN, wspace=0.08)
    for axes, name in zip(panels, names, strict=True):
        fit_text(axes.set_title(name, size=13, color=INK, loc="left"),
                 (WIDTH_IN - 1.5) / len(names))
    panels[0].set_ylim(0, 1.12 * highest)
    return panels


def server_load(loads: Mapping[str, Sequence[int]], *, title: str = "Requests a server",
                virtual: bool = True) -> Picture:
    """A panel for each case of `loads`: a bar a server with its number of requests, all to one
    scale; the dashed line is the mean. Raises `ConfigError` without cases or servers."""
    if not loads or not all(loads.values()):
        raise ConfigError("server_load needs at least one case, and a number for each server")
    heading = f"{title} ({clock_name(virtual)})"
    note = " · ".join(f"{name}: busiest {max(counts) / np.mean(counts):.1f} × the mean"
                      for name, counts in loads.items())
    with page(WIDTH_IN, HEIGHT_IN, heading, note) as picture:
        panels = _panels(picture, list(loads), max(map(max, loads.values())))
        for axes, counts in zip(panels, loads.values(), strict=True):
            for server, count in enumerate(counts):
                style = rank_style(server)
                axes.bar(server, count, color=style.color, hatch=style.hatch, width=0.75)
                axes.annotate(f"{count:,}", (server, count), (0, 2), ha="center", va="bottom",
                              textcoords="offset points", size=12, color=INK, bbox=_PLATE)
            axes.axhline(float(np.mean(counts)), color=QUIET, linewidth=1.5, linestyle=(0, (5, 2)))
            short = len(counts) * len(loads) > 12
            axes.set_xticks(range(len(counts)), [f"{server}" if short else f"server {server}"
                                                 for server in range(len(counts))])
    cases = "; ".join(f"{name}: {', '.join(f'{count:,}' for count in counts)}"
                      for name, counts in loads.items())
    picture.alt = f"{heading}, {count_text(len(loads), 'case')}. {note}. {cases}."
    return picture


def staleness_histograms(seen: Mapping[str, Mapping[int, int]], title: str = "Staleness"
                         ) -> Picture:
    """Draw the share of gradients by updates missed: one panel a name, the mean as a line.

    seen: name → staleness → gradients, as `Statistics.staleness`.
    """
    if not seen or not all(sum(counts.values()) for counts in seen.values()):
        raise ConfigError("staleness_histograms needs at least one gradient for each name")
    heading = f"{title} (simulated)"
    shares = {name: {s: n / sum(counts.values()) for s, n in counts.items()}
              for name, counts in seen.items()}
    means = {name: sum(s * share for s, share in found.items()) for name, found in shares.items()}
    with page(WIDTH_IN, HEIGHT_IN, heading,
              "how many updates a gradient had missed when it arrived") as picture:
        panels = _panels(picture, [f"{name}\nmean {mean:.2f}" for name, mean in means.items()],
                         100 * max(max(found.values()) for found in shares.values()))
        for index, (axes, (name, found)) in enumerate(zip(panels, shares.items(), strict=True)):
            axes.bar(list(found), [100 * share for share in found.values()], width=0.85,
                     color=line_style(index).color, edgecolor=INK)
            axes.axvline(means[name], color=INK, linestyle=(0, (4, 2)), linewidth=2)
            axes.set_xlim(-0.7, max(map(max, seen.values())) + 0.7)
            axes.set_xlabel("staleness (updates)" if len(seen) < 5 else "(updates)")
        panels[0].set_ylabel("of gradients (%)")
    note = "; ".join(f"{name}: mean {mean:.2f}, at most {max(seen[name])}"
                     for name, mean in means.items())
    picture.alt = f"{heading}. {note}."
    return picture
