"""The placement of servers: the bytes on every link of a machine, and the time that they take."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from dtlab.errors import ConfigError
from dtlab.plots.network import draw_nodes, layout_of
from dtlab.plots.palette import FAINT, HUES, INK, PAPER, QUIET
from dtlab.plots.picture import MARGIN_IN, Picture, page
from dtlab.ps.gpu_placement import GPU_PLACEMENTS, servers_of
from dtlab.recording.placements import Placed, Placements
from dtlab.units import bytes_text, count_text, seconds_text, time_unit

MOST_GPUS = 8  # more can't be read in one picture
_WIDTH_IN, _HEIGHT_IN, _TREE_IN = 11.0, 5.6, 6.5
_CHOSEN, _OTHER = HUES[0], FAINT


def placement(there: Placements, where: str = GPU_PLACEMENTS[0]) -> Picture:
    """Left: the machine, with the bytes that cross each link, each way, while the gradients are
    summed up; the thicker the more, the busiest dark. Right: how long each placement takes.

    there: what `recording.placements` gives. where: one of `ps.gpu_placement.GPU_PLACEMENTS`.
    Raises `ConfigError` for what doesn't exist, and for more than 8 GPUs.
    """
    runs, gpus, nbytes, bandwidth_Bps, switches = there
    if gpus > MOST_GPUS:
        raise ConfigError(f"the picture has room for {MOST_GPUS} GPUs, not {gpus}")
    servers = servers_of(where, gpus)
    chosen = runs[where]
    heading = f"Gradients summed {where}: {seconds_text(chosen.elapsed_s)} (simulated)"
    note = (f"{count_text(gpus, 'GPU')} · {bytes_text(nbytes)} of gradients on each · "
            f"{count_text(switches, 'PCIe switch', 'PCIe switches')}, "
            f"{bytes_text(bandwidth_Bps)}/s · busiest link: {bytes_text(chosen.busiest)} each way")
    with page(_WIDTH_IN, _HEIGHT_IN, heading, note) as picture:
        tree = picture.place(left=MARGIN_IN, right=_WIDTH_IN - _TREE_IN, bottom=0.55, top=1.0)
        graph = there.cluster.graph()
        graph.remove_node(gpus)
        _draw_machine(tree, graph, chosen)
        _draw_shares(tree, layout_of(graph), servers, gpus)
        bars = picture.place(left=_TREE_IN + 0.5, right=0.9, bottom=0.75, top=1.35)
        _draw_times(bars, {name: one.elapsed_s for name, one in runs.items()}, where)
    links = ", ".join(f"{_called(a)} – {_called(b)} {bytes_text(count)}"
                      for (a, b), count in sorted(chosen.links.items(), key=lambda i: str(i[0])))
    times = "; ".join(f"{name} {seconds_text(one.elapsed_s)}" for name, one in runs.items())
    picture.alt = f"{heading}. {note}. Each way: {links or 'nothing'}. Times: {times}."
    return picture


def _called(node: int | str) -> str:
    return f"GPU {node}" if isinstance(node, int) else node


def _draw_machine(axes: Axes, graph: nx.DiGraph, chosen: Placed) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.22, 1.1)
    places = layout_of(graph)
    most = chosen.busiest or 1
    order = sorted(chosen.links, key=lambda link: chosen.links[link])
    shares = [chosen.links[link] / most for link in order]
    axes.add_collection(LineCollection(
        [[places[a], places[b]] for a, b in order],
        colors=[INK if share > 0.999 else QUIET if share else FAINT for share in shares],
        linewidths=[1.5 + 8 * share for share in shares], zorder=1), autolim=False)
    for link, share in zip(order, shares, strict=True):
        (x0, y0), (x1, y1) = places[link[0]], places[link[1]]
        up = _label_height(link, len(places)) if y0 < y1 else 0.6  # low, where links are apart
        axes.text(x0 + up * (x1 - x0), y0 + up * (y1 - y0), bytes_text(chosen.links[link]),
                  ha="center", va="center", size=12, zorder=2, color=INK,
                  weight="bold" if share > 0.999 else "normal",
                  bbox={"boxstyle": "round,pad=0.12", "facecolor": PAPER, "linewidth": 0})
    draw_nodes(axes, graph, places)


def _label_height(link: tuple[int | str, int | str], nodes: int) -> float:
    """Choose the height of a link's label: neighbours' in two rows where there are many."""
    if nodes <= 7:
        return 0.4
    return 0.27 if isinstance(link[0], int) and link[0] % 2 == 0 else 0.43


def _draw_shares(axes: Axes, places: dict[int | str, tuple[float, float]], servers: Sequence[int],
                 gpus: int) -> None:
    """Write the part of the sum that each server keeps; below the GPUs, or beside the CPU."""
    part = "all" if len(servers) == 1 else f"1/{len(servers)}"
    text = f"sums {part}" if gpus <= 4 else part
    for server in servers:
        if server == gpus:
            axes.text(places["cpu"][0] + 0.1, places["cpu"][1], f"sums {part}", ha="left",
                      va="center", size=13, weight="bold")
        else:
            x, y = places[server]
            axes.text(x, y - 0.15, text, ha="center", va="center", size=13, weight="bold")


def _draw_times(axes: Axes, times: dict[str, float], where: str) -> None:
    scale, unit = time_unit(max(times.values()))
    for row, (name, elapsed_s) in enumerate(times.items()):
        mine = name == where
        axes.barh(row, elapsed_s / scale, height=0.42, color=_CHOSEN if mine else _OTHER,
                  edgecolor=INK, linewidth=2.0 if mine else 1.0)
        axes.text(0, row - 0.32, ("▶ " if mine else "") + name, ha="left", va="bottom", size=13,
                  weight="bold" if mine else "normal")
        axes.annotate(seconds_text(elapsed_s), (elapsed_s / scale, row), xytext=(6, 0),
                      textcoords="offset points", va="center", size=13,
                      weight="bold" if mine else "normal")
    axes.set_ylim(len(times) - 0.6, -0.75)
    axes.set_xlim(0, max(times.values()) / scale * 1.02 or 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time ({unit})")
