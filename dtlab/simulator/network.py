"""Flows: messages on the move, which share the links they cross max–min fairly.

Max–min fair: no flow can get more without taking from one that has no more than it. Rates change
only when flows start or end, so they are computed then, once for all that do at the same instant,
and only for flows that share a link, directly or through others, with one of those.
Source: Bertsekas & Gallager, Data Networks, 2nd ed., §6.5.2.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtlab.topology import Topology


class Flow:
    """`remaining` bytes on their way across `links` at `rate_Bps`, as of `since_s`.

    The fields are declared here; whoever is a flow (`messages.Outgoing`) has slots for them.
    """

    __slots__ = ()

    links: tuple[int, ...]
    remaining: float
    rate_Bps: float  # 0: not known yet
    since_s: float
    end_s: float  # when it will have arrived, if no rate changes; −1: it isn't moving


class Network:
    """The flows that are moving now."""

    def __init__(self, topology: Topology):
        self.capacity_Bps = topology.capacity_Bps
        self._on: list[dict[Flow, None]] = [{} for _ in self.capacity_Bps]  # flows of each link
        self._fresh: list[Flow] = []  # started at this instant
        self._touched: set[int] = set()  # links that lost a flow at this instant

    def start(self, flow: Flow, now_s: float) -> None:
        """The first byte of `flow` enters its links."""
        flow.since_s = now_s
        for link in flow.links:
            self._on[link][flow] = None
        self._fresh.append(flow)

    def end(self, flow: Flow) -> None:
        """The last byte of `flow` has arrived."""
        for link in flow.links:
            flows = self._on[link]
            del flows[flow]
            if flows:
                self._touched.add(link)

    def settle(self, now_s: float) -> Iterable[Flow]:
        """Give every flow its fair rate. Returns those whose `end_s` changed."""
        if not self._fresh and not self._touched:
            return ()
        changed: list[Flow] = []
        crowded: dict[Flow, None] = {}
        on, capacity = self._on, self.capacity_Bps
        for flow in self._fresh:
            rate = float("inf")
            for link in flow.links:
                if len(on[link]) > 1:
                    crowded[flow] = None
                    break
                if capacity[link] < rate:
                    rate = capacity[link]
            else:  # alone on all its links: the narrowest one sets its pace
                flow.rate_Bps = rate
                flow.end_s = now_s + flow.remaining / rate
                changed.append(flow)
        for link in sorted(self._touched):
            crowded.update(on[link])
        self._fresh, self._touched = [], set()
        while crowded:
            group = self._sharing(next(iter(crowded)))
            for flow in group:
                crowded.pop(flow, None)
            changed += self._share(group, now_s)
        return changed

    def _sharing(self, first: Flow) -> list[Flow]:
        """All flows that share a link with `first`, or with one that does, and so on."""
        group, links = {first: None}, set()
        todo = [first]
        while todo:
            for link in todo.pop().links:
                if link not in links:
                    links.add(link)
                    new = [flow for flow in self._on[link] if flow not in group]
                    group.update(dict.fromkeys(new))
                    todo += new
        return list(group)

    def _share(self, group: list[Flow], now_s: float) -> list[Flow]:
        """Set the rates in `group`; returns the flows whose end moved."""
        changed = []
        for flow, rate in fair_rates(group, self.capacity_Bps).items():
            if rate != flow.rate_Bps:
                if flow.rate_Bps:
                    flow.remaining -= (now_s - flow.since_s) * flow.rate_Bps
                flow.since_s, flow.rate_Bps = now_s, rate
                flow.end_s = now_s + max(flow.remaining, 0.0) / rate
                changed.append(flow)
        return changed


def fair_rates(flows: list[Flow], capacity_Bps: tuple[float, ...]) -> dict[Flow, float]:
    """Max–min fair rates, by filling up: the tightest link fixes the rate of its flows, which
    leaves the other links less to share among fewer; repeat."""
    on: dict[int, dict[Flow, None]] = {}
    for flow in flows:
        for link in flow.links:
            on.setdefault(link, {})[flow] = None
    free = {link: capacity_Bps[link] for link in on}
    rates: dict[Flow, float] = {flow: float("inf") for flow in flows if not flow.links}
    while on:
        tightest = min(on, key=lambda link: free[link] / len(on[link]))
        rate = free[tightest] / len(on[tightest])
        for flow in list(on[tightest]):
            rates[flow] = rate
            for link in flow.links:
                del on[link][flow]
                free[link] = max(free[link] - rate, 0.0) if rate != float("inf") else free[link]
                if not on[link]:
                    del on[link]
    return rates
