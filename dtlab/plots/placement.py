"""Where the servers live: the bytes on every link of a machine, and the time that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import networkx as nx
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dtlab import cost
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.plots.network import draw_nodes, layout_of
from dtlab.plots.palette import FAINT, HUES, INK, PAPER, QUIET, line_style
from dtlab.plots.picture import MARGIN_IN, Picture, new_picture, place_axes, styled, write_title
from dtlab.plots.units import bytes_text, count_text, seconds_text, time_unit
from dtlab.ps.gpu_placement import GPU_PLACEMENTS, gpus_and_cpu, servers_of, sum_on_gpus
from dtlab.simulator import simulate
from dtlab.topology import link_bytes

Simulated = Mapping[int, Mapping[int, float]]
MOST_GPUS = 8  # more can't be read in one picture
_WIDTH_IN, _HEIGHT_IN, _TREE_IN = 11.0, 5.6, 6.5
_CHOSEN, _OTHER = HUES[0], FAINT


class Placed(NamedTuple):
    """What one placement costs. links: (a, b) → bytes in the busier of its two directions."""

    elapsed_s: float
    links: dict[tuple[int | str, int | str], int]

    @property
    def busiest(self) -> int:
        """The most bytes on any link, in one direction."""
        return max(self.links.values(), default=0)


@lru_cache(maxsize=512)
def placed(where: str, gpus: int, nbytes: int, bandwidth_Bps: float, switches: int = 1) -> Placed:
    """Simulate it. nbytes: of the gradients of each GPU; bandwidth_Bps: of each PCIe link."""
    cluster = gpus_and_cpu(gpus, switches, bandwidth_Bps)

    def gradients(comm: Comm) -> None:
        sum_on_gpus(comm, torch.empty(nbytes // 4, device="meta"), where)

    result = simulate(gradients, network=cluster, echo=False)
    links: dict[tuple[int | str, int | str], int] = {}
    for (a, b), count in link_bytes(cluster, result.trace).items():
        if gpus not in (a, b):  # between the CPU and its memory
            pair = (a, b) if str(a) <= str(b) else (b, a)
            links[pair] = max(count, links.get(pair, 0))
    return Placed(result.elapsed_s, links)


def placement(where: str = GPU_PLACEMENTS[0], gpus: int = 4, nbytes: int = 160_000_000,
              bandwidth_Bps: float = 16e9, switches: int = 1, *, dpi: float = 100) -> Picture:
    """Left: the machine, with the bytes that cross each link, each way, while the gradients are
    summed up; the thicker the more, the busiest dark. Right: how long each placement takes.

    where: one of `dtlab.ps.gpu_placement.GPU_PLACEMENTS`. gpus: 1 to 8; nbytes: of gradients, each;
    bandwidth_Bps: of each PCIe link, bytes per second, one direction; switches: PCIe switches.
    Latency and addition cost nothing here. Raises `ConfigError` for what doesn't exist.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"the picture has room for 1 to {MOST_GPUS} GPUs, not {gpus}")
    servers = servers_of(where, gpus)
    shown = {name: placed(name, gpus, nbytes, bandwidth_Bps, switches) for name in GPU_PLACEMENTS}
    chosen = shown[where]
    heading = f"Gradients summed {where}: {seconds_text(chosen.elapsed_s)} (simulated)"
    note = (f"{count_text(gpus, 'GPU')} · {bytes_text(nbytes)} of gradients on each · "
            f"{count_text(switches, 'PCIe switch', 'PCIe switches')}, "
            f"{bytes_text(bandwidth_Bps)}/s · busiest link: {bytes_text(chosen.busiest)} each way")
    with styled():
        picture = new_picture(_WIDTH_IN, _HEIGHT_IN, dpi)
        write_title(picture, heading, note)
        tree = place_axes(picture, left=MARGIN_IN, right=_WIDTH_IN - _TREE_IN, bottom=0.55, top=1.0)
        graph = gpus_and_cpu(gpus, switches, bandwidth_Bps).graph()
        graph.remove_node(gpus)
        _draw_machine(tree, graph, chosen)
        _draw_shares(tree, layout_of(graph), servers, gpus)
        bars = place_axes(picture, left=_TREE_IN + 0.5, right=0.9, bottom=0.75, top=1.35)
        _draw_times(bars, {name: one.elapsed_s for name, one in shown.items()}, where)
    links = ", ".join(f"{_called(a)} – {_called(b)} {bytes_text(count)}"
                      for (a, b), count in sorted(chosen.links.items(), key=lambda i: str(i[0])))
    times = "; ".join(f"{name} {seconds_text(one.elapsed_s)}" for name, one in shown.items())
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
    """How far up a link its label stands: neighbours' in two rows where there are many."""
    if nodes <= 7:
        return 0.4
    return 0.27 if isinstance(link[0], int) and link[0] % 2 == 0 else 0.43


def _draw_shares(axes: Axes, places: dict[int | str, tuple[float, float]], servers: Sequence[int],
                 gpus: int) -> None:
    """Which part of the sum each server keeps; below the GPUs, or beside the CPU."""
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


# ---- m workers, n servers ----------------------------------------------------------------------


def server_times(workers: Sequence[int] = (2, 4, 8, 16), nbytes: int = 160_000_000,
                 bandwidth_Bps: float = 16e9, simulated: Simulated | None = None, *,
                 dpi: float = 100) -> Picture:
    """Time of a push and a pull against the number of servers n, a line for each number of workers
    m: `cost.parameter_server_s`, all ports equal. simulated: m → n → seconds, as open marks."""
    simulated = simulated or {}
    if not workers or min(workers) < 1 or not set(simulated) <= set(workers):
        raise ConfigError("give at least one number of workers, 1 or more, and simulated times of "
                          "these only")
    most = max(workers)
    least_s = cost.parameter_server_s(1, 1, nbytes, bandwidth_Bps)
    kind = "predicted and simulated" if simulated else "predicted"
    title = f"Push and pull, m workers and n servers: {kind} time"
    note = (f"{bytes_text(nbytes)} each way and worker · every port {bytes_text(bandwidth_Bps)}/s "
            f"· push, then pull: {seconds_text(least_s)} at least")
    with styled():
        picture = new_picture(_WIDTH_IN, 5.6, dpi)
        write_title(picture, title, note)
        axes = place_axes(picture, left=1.25, right=2.0, bottom=0.85, top=1.1)
        counts = np.unique(np.geomspace(1, 2 * most, 40).round().astype(int))
        axes.axhline(least_s, color=QUIET, linewidth=2, linestyle=":", zorder=1)
        for index, m in enumerate(workers):
            style = line_style(index)
            line = [cost.parameter_server_s(m, int(n), nbytes, bandwidth_Bps) for n in counts]
            axes.plot(counts, line, color=style.color, linestyle=style.dashes, zorder=3,
                      label=f"m = {m}")
            dots = simulated.get(m, {})
            axes.plot([*dots], [*dots.values()], linestyle="", marker=style.marker,
                      color=style.color, markerfacecolor=PAPER, markersize=10,
                      markeredgewidth=2.5, zorder=4)
        _scale_axes(axes, most)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), title="workers",
                    handlelength=3)
    ends = "; ".join(f"m = {m}: {seconds_text(m * least_s)} with one server, "
                     f"{seconds_text(least_s)} from n = {m} on" for m in workers)
    picture.alt = f"{title}. {note}. {ends}."
    return picture


def _doubles(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def _scale_axes(axes: Axes, most: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator([float(n) for n in _doubles(2 * most)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda t, _: seconds_text(t)))
    low, high = axes.get_ylim()
    least, largest = axes.dataLim.y0, axes.dataLim.y1
    axes.yaxis.set_major_locator(FixedLocator(
        [least * 2**k for k in range(1 + max(0, round(np.log2(largest / least))))]))
    axes.set_ylim(low, high)
    axes.set_xlabel("number of servers n")
    axes.set_ylabel("time")
    axes.grid(True)
