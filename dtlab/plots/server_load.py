"""How much each server has to do, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dtlab.errors import ConfigError
from dtlab.plots.palette import INK, PAPER, QUIET, rank_style
from dtlab.plots.picture import MARGIN_IN, Picture, fit_text, new_picture, styled, write_title
from dtlab.plots.units import count_text

WIDTH_IN, HEIGHT_IN = 11.0, 4.4
_PLATE = {"boxstyle": "square,pad=0", "facecolor": PAPER, "linewidth": 0}  # hides the dashed line


def server_load(loads: Mapping[str, Sequence[int]], *, title: str = "Requests a server",
                virtual: bool = True, dpi: float = 100) -> Picture:
    """A panel for each case of `loads`: a bar a server with its number of requests, all to one
    scale; the dashed line is the mean. Raises `ConfigError` without cases or servers."""
    if not loads or not all(loads.values()):
        raise ConfigError("server_load needs at least one case, and a number for each server")
    clock = "simulated" if virtual else "measured"
    note = " · ".join(f"{name}: busiest {max(counts) / np.mean(counts):.1f} × the mean"
                      for name, counts in loads.items())
    with styled():
        picture = new_picture(WIDTH_IN, HEIGHT_IN, dpi)
        write_title(picture, f"{title} ({clock})", note)
        panels = picture.subplots(1, len(loads), sharey=True, squeeze=False)[0]
        picture.subplots_adjust(left=0.95 / WIDTH_IN, right=1 - MARGIN_IN / WIDTH_IN,
                                bottom=0.75 / HEIGHT_IN, top=1 - 1.3 / HEIGHT_IN, wspace=0.08)
        for axes, (name, counts) in zip(panels, loads.items(), strict=True):
            for server, count in enumerate(counts):
                style = rank_style(server)
                axes.bar(server, count, color=style.color, hatch=style.hatch, width=0.75)
                axes.annotate(f"{count:,}", (server, count), (0, 2), ha="center", va="bottom",
                              textcoords="offset points", size=12, color=INK, bbox=_PLATE)
            axes.axhline(np.mean(counts), color=QUIET, linewidth=1.5, linestyle=(0, (5, 2)))
            short = len(counts) * len(loads) > 12
            axes.set_xticks(range(len(counts)), [f"{server}" if short else f"server {server}"
                                                 for server in range(len(counts))])
            fit_text(axes.set_title(name, size=13, color=INK, loc="left"),
                     (WIDTH_IN - 1.5) / len(loads))
        panels[0].set_ylim(0, 1.12 * max(max(counts) for counts in loads.values()))
    cases = "; ".join(f"{name}: {', '.join(f'{count:,}' for count in counts)}"
                      for name, counts in loads.items())
    picture.alt = (f"{title} ({clock}), {count_text(len(loads), 'case')}. {note}. {cases}.")
    return picture
