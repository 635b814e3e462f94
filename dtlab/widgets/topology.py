"""A cluster at work: choose the cluster and its traffic, then watch the links fill and empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtlab import topology
from dtlab.collectives import all_reduce
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.plots import Picture
from dtlab.plots.flows import columns, draw_flows, heading_of, note_of, rates_of, shares_of
from dtlab.plots.link_geometry import HIGH_IN, geometry_of
from dtlab.plots.network import node_sizes
from dtlab.plots.palette import line_style
from dtlab.recording import LinkHistory
from dtlab.simulator import simulate
from dtlab.topology import Topology, send_together
from dtlab.units import seconds_text, time_unit
from dtlab.widgets.player import Json, Player, looks, runs_of, select

Traffic = Callable[[Comm], Any]
MOST_MOMENTS = 64  # of a run with more changes, this many are shown, evenly spread
NBYTES = 8_000_000  # of the messages of the traffic that comes with the widget


def _sending(pairs: Callable[[int], dict[tuple[int, int], int]]) -> Traffic:
    """Messages at once: `pairs` gives the bytes from each rank to each other, of so many ranks."""
    return lambda comm: send_together(comm, pairs(comm.size))


def _ring(comm: Comm) -> None:
    all_reduce(comm, torch.empty(NBYTES // 4, device="meta"), algorithm="ring")


TRAFFIC: dict[str, Traffic] = {
    "half to half, unequal": _sending(
        lambda p: {(rank, rank + p // 2): NBYTES * (rank + 1) for rank in range(p // 2)}),
    "half to half": _sending(lambda p: {(rank, rank + p // 2): NBYTES for rank in range(p // 2)}),
    "first to last": _sending(lambda p: {(0, p - 1): NBYTES} if p > 1 else {}),
    "all to rank 0": _sending(lambda p: {(rank, 0): NBYTES for rank in range(1, p)}),
    "all to all": _sending(
        lambda p: {(a, b): NBYTES // p for a in range(p) for b in range(p) if a != b}),
    "ring all-reduce": _ring,
}
CLUSTERS = {
    "two racks, 4:1": "racks:2x4", "two racks, 1:1": "racks:2x4,oversubscription=1",
    "PCIe server": "pcie_server:8x2", "8 V100, NVLink": "v100_nvlink",
    "8 A100, NVSwitch": "nvswitch:8", "fat tree": "fat_tree:4", "4 × 4 torus": "torus:4x4",
    "4 servers in 2 racks": "nvswitch:4@racks:2x2",
}
PX = 94  # an inch of `link_geometry`, in the drawing
TOP_PX, LEFT_PX = 80, 10


class TopologyExplorer(Player):
    """`plots.flows`, played over the moments at which rates change.

    clusters: name → topology, to choose from; traffic: name → function of a communicator, run on
    every rank in the simulator. None: those that come with the widget. The first of each is shown
    first. Shows errors of a traffic that does not run on a cluster instead of a drawing.
    """

    drawing = "flows"

    def __init__(self, clusters: Mapping[str, Topology] | None = None,
                 traffic: Mapping[str, Traffic] | None = None):
        self.clusters = dict(clusters) if clusters is not None else {
            name: topology.named(text) for name, text in CLUSTERS.items()}
        self.kinds = dict(traffic) if traffic is not None else dict(TRAFFIC)
        if not self.clusters or not self.kinds:
            raise ConfigError("give at least one cluster and one kind of traffic")
        self.has_runs = clusters is None and traffic is None
        self._histories: dict[tuple[str, str], LinkHistory] = {}
        super().__init__({"cluster": next(iter(self.clusters)), "traffic": next(iter(self.kinds))})

    @property
    def at_s(self) -> float:
        """The virtual time that is shown."""
        return self._moments[self.at]

    def static(self, at_s: float | None = None) -> Picture:
        """The moment that is shown, or another virtual time, as a matplotlib figure."""
        return draw_flows(self.history, self.at_s if at_s is None else at_s, title=self._title)

    def _answer(self) -> Json:
        """Simulate what the controls ask for; begin with the first moment at which bytes move."""
        chosen = cluster, traffic = self.choice["cluster"], self.choice["traffic"]
        if chosen not in self._histories:
            run = simulate(self.kinds[traffic], network=self.clusters[cluster], echo=False)
            self._histories[chosen] = LinkHistory(self.clusters[cluster], run.trace)
        self.history, self._title = self._histories[chosen], " · ".join(chosen)
        self._moments = _moments(self.history)
        first = next((i for i, at_s in enumerate(self._moments)
                      if (now := self.history.at(at_s)) and now.moving), 0)
        return {"controls": [select("cluster", "cluster", [*self.clusters]),
                             select("traffic", "traffic", [*self.kinds])],
                "scene": _scene(self.history), "at": first,
                "moments": [_moment(self.history, at_s, self._title) for at_s in self._moments]}


def _scene(history: LinkHistory) -> Json:
    """All that stays where it is: nodes, a lane for each direction of a link, loads over time."""
    shape = geometry_of(history)
    host_pt, letters_pt = node_sizes(history.graph, shape.places)
    scale, _ = time_unit(history.end_s)
    shown = history.busiest[:columns(history.busiest)]
    return {
        "size": [990, round(TOP_PX + HIGH_IN * PX + 210)], "thin": shape.thin,
        "node": round(host_pt * 2.1 * PX / 72), "letters": round(letters_pt * PX / 72),
        "nodes": [[str(node), *_at(place), node if isinstance(node, int) else -1]
                  for node, place in shape.places.items()],
        "lanes": {number: [_at(point) for point in line] for number, line in shape.lanes.items()},
        "series": [[name, [round(load, 4) for load in loads], line_style(number).color]
                   for number, (name, loads) in enumerate(shown)],
        "times": [0.0, *(stretch.end_s / scale for stretch in history.stretches)],
        "end": history.end_s / scale, "last": seconds_text(history.end_s), "interval_ms": 800,
        "looks": looks(history.cluster.ranks),
    }


def _moment(history: LinkHistory, at_s: float, title: str) -> Json:
    stretch, scale = history.at(at_s), time_unit(history.end_s)[0]
    loads = stretch.loads if stretch else {}
    heading = heading_of(history, at_s, title)
    note = note_of(history, stretch)
    return {"title": heading, "note": note, "words": f"{heading}: {note}. {rates_of(stretch)}",
            "label": seconds_text(at_s), "time": at_s / scale,
            "loads": {number: round(load, 4) for number, load in loads.items() if load > 0},
            "shares": [[*_at(place), text] for place, text in shares_of(history, stretch)]}


def _at(place: Any) -> list[float]:
    """Convert inches from the lower left corner to the drawing's pixels."""
    x, y = place
    return [round(float(x) * PX + LEFT_PX, 1), round(float(HIGH_IN - y) * PX + TOP_PX, 1)]


def _moments(history: LinkHistory) -> list[float]:
    """Return the start of each stretch, and the end; only some if there are very many."""
    times = [stretch.start_s for stretch in history.stretches] + [history.end_s]
    if len(times) <= MOST_MOMENTS:
        return times
    return [times[round(i * (len(times) - 1) / (MOST_MOMENTS - 1))] for i in range(MOST_MOMENTS)]


def runs() -> list[Json]:
    """All that a page without a kernel may choose."""
    return runs_of(TopologyExplorer(), ({"cluster": cluster, "traffic": traffic}
                                        for cluster in CLUSTERS for traffic in TRAFFIC))
