"""A cluster at work: choose the cluster and its traffic, then watch the links fill and empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from dtlab import topology
from dtlab.collectives import all_reduce
from dtlab.comm import Comm
from dtlab.errors import ConfigError, DtlabError
from dtlab.plots import Picture
from dtlab.plots.flows import draw_flows
from dtlab.recording import LinkHistory
from dtlab.simulator import simulate
from dtlab.topology import Topology, send_together
from dtlab.units import seconds_text
from dtlab.widgets.explorer import Explorer, dropdown
from dtlab.widgets.player import Player

Traffic = Callable[[Comm], Any]
MOST_MOMENTS = 64  # of a run with more changes, this many are shown, evenly spread
NBYTES = 8_000_000  # of the messages of the traffic that comes with the widget


def _across(comm: Comm) -> None:
    send_together(comm, {(0, comm.size - 1): NBYTES} if comm.size > 1 else {})


def _halves(comm: Comm) -> None:
    half = comm.size // 2
    send_together(comm, {(rank, rank + half): NBYTES for rank in range(half)})


def _unequal_halves(comm: Comm) -> None:
    half = comm.size // 2
    send_together(comm, {(rank, rank + half): NBYTES * (rank + 1) for rank in range(half)})


def _into_one(comm: Comm) -> None:
    send_together(comm, {(rank, 0): NBYTES for rank in range(1, comm.size)})


def _everyone_to_everyone(comm: Comm) -> None:
    ranks = range(comm.size)
    send_together(comm, {(a, b): NBYTES // comm.size for a in ranks for b in ranks if a != b})


def _ring(comm: Comm) -> None:
    all_reduce(comm, torch.empty(NBYTES // 4, device="meta"), algorithm="ring")


TRAFFIC: dict[str, Traffic] = {
    "half to half, unequal": _unequal_halves,
    "half to half": _halves,
    "first to last": _across,
    "all to rank 0": _into_one,
    "all to all": _everyone_to_everyone,
    "ring all-reduce": _ring,
}
CLUSTERS = {
    "two racks, 4:1": "racks:2x4", "two racks, 1:1": "racks:2x4,oversubscription=1",
    "PCIe server": "pcie_server:8x2", "8 V100, NVLink": "v100_nvlink",
    "8 A100, NVSwitch": "nvswitch:8", "fat tree": "fat_tree:4", "4 × 4 torus": "torus:4x4",
    "4 servers in 2 racks": "nvswitch:4@racks:2x2",
}


class TopologyExplorer(Explorer):
    """`plots.flows` with a slider over the moments at which rates change.

    clusters: name → topology, to choose from; traffic: name → function of a communicator, run on
    every rank in the simulator. None: those that come with the widget. The first of each is shown
    first. Shows errors of a traffic that does not run on a cluster instead of a picture.
    """

    def __init__(self, clusters: Mapping[str, Topology] | None = None,
                 traffic: Mapping[str, Traffic] | None = None):
        self.clusters = dict(clusters) if clusters is not None else {
            name: topology.named(text) for name, text in CLUSTERS.items()}
        self.kinds = dict(traffic) if traffic is not None else dict(TRAFFIC)
        if not self.clusters or not self.kinds:
            raise ConfigError("give at least one cluster and one kind of traffic")
        self._histories: dict[tuple[str, str], LinkHistory] = {}
        self._chosen = next(iter(self.clusters)), next(iter(self.kinds))
        self.cluster = dropdown("cluster", [*self.clusters], self._chosen[0], width="260px")
        self.traffic = dropdown("traffic", [*self.kinds], self._chosen[1], width="300px")
        self.player = Player("moment", "moment", 800, self._update)
        super().__init__([self.cluster, self.traffic], self.player.controls)
        self._load()
        for control in (self.cluster, self.traffic):
            control.observe(lambda _: self._load(), "value")

    @property
    def history(self) -> LinkHistory:
        """The run that is shown."""
        return self._histories[self._chosen]

    @property
    def at_s(self) -> float:
        """The virtual time that is shown."""
        return self._moments[self.player.at]

    def forward(self) -> None:
        """One moment forward, unless at the end."""
        self.player.step(1)

    def back(self) -> None:
        """One moment back, unless at the start."""
        self.player.step(-1)

    def static(self, at_s: float | None = None) -> Picture:
        """The moment that is shown, or another virtual time, as a matplotlib figure."""
        return draw_flows(self.history, self.at_s if at_s is None else at_s,
                          title=" · ".join(self._chosen))

    def _load(self) -> None:
        """Simulate what the controls ask for, and show the first moment at which bytes move."""
        chosen = self.cluster.value, self.traffic.value
        try:
            if chosen not in self._histories:
                cluster = self.clusters[chosen[0]]
                run = simulate(self.kinds[chosen[1]], network=cluster, echo=False)
                self._histories[chosen] = LinkHistory(cluster, run.trace)
        except DtlabError as error:
            if not self._histories:
                raise
            self._say(str(error), alarm=True)
            return
        self._chosen = chosen
        self._moments = _moments(self.history)
        first = next((i for i, at_s in enumerate(self._moments)
                      if (stretch := self.history.at(at_s)) and stretch.moving), 0)
        self.player.load([seconds_text(at_s) for at_s in self._moments], first)
        self._update()

    def _update(self) -> None:
        here = self.player.at
        self._show((self._chosen, here), self._drawing(here))
        for near in (here + 1, here - 1):
            if 0 <= near < len(self._moments):
                self._ahead((self._chosen, near), self._drawing(near))

    def _drawing(self, number: int) -> Callable[[], Picture]:
        title, at_s = " · ".join(self._chosen), self._moments[number]
        return partial(draw_flows, self.history, at_s, title=title)  # drawn later, as it is now



def _moments(history: LinkHistory) -> list[float]:
    """When each stretch begins, and the end; of very many, some."""
    times = [stretch.start_s for stretch in history.stretches] + [history.end_s]
    if len(times) <= MOST_MOMENTS:
        return times
    return [times[round(i * (len(times) - 1) / (MOST_MOMENTS - 1))] for i in range(MOST_MOMENTS)]
