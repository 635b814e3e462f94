"""Flows: messages on the move, which share the links they cross max–min fairly.

Max–min fair: no flow can get more without taking from one that has no more than it. Rates change
only when flows start or end, or links change, so they are computed then, once for all that do at
the same instant, and only for flows that share a link, directly or through others, with one of
those.
Source: Bertsekas & Gallager, Data Networks, 2nd ed., §6.5.2.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from dtlab.topology import Topology

ARRIVED = -1.0


class Flow:
    """`remaining` bytes that cross `links` at `rate_Bps`, as of `since_s`."""

    __slots__ = ("end_s", "links", "rate_Bps", "remaining", "since_s")

    links: tuple[int, ...]
    remaining: float
    rate_Bps: float  # 0: not known yet, or a link has failed
    since_s: float
    end_s: float  # when it will have arrived, if no rate changes; ARRIVED afterwards


AnyFlow = TypeVar("AnyFlow", bound=Flow)


class Network:
    """The flows that are moving now.

    A link carries nothing (None), one flow, or several that share it, oldest first.
    """

    def __init__(self, topology: Topology):
        self.capacity_Bps = list(topology.capacity_Bps)
        self._on: list[Flow | dict[Flow, None] | None] = [None] * len(self.capacity_Bps)
        self._new: list[Flow] = []  # those that started at this instant
        self._changed_links: set[int] = set()  # links that changed, or shared ones that lost a flow

    def start(self, flows: Sequence[Flow], now_s: float) -> None:
        """The first bytes of `flows` enter their links."""
        on, capacity = self._on, self.capacity_Bps
        for flow in flows:
            flow.since_s, flow.end_s = now_s, math.inf
            rate = math.inf
            for link in flow.links:
                if on[link] is None:
                    on[link] = flow
                    if capacity[link] < rate:
                        rate = capacity[link]
                else:
                    self._shared_flows(link)[flow] = None
                    rate = 0.0
            flow.rate_Bps = rate  # 0.0 if it shares a link: `settle` computes the rate
        self._new.extend(flows)

    def end(self, flows: Iterable[AnyFlow], now_s: float) -> list[AnyFlow]:
        """Remove from their links those of `flows` that end now, and return them. The others'
        rates have changed since this end was scheduled."""
        on = self._on
        ended = []
        for flow in flows:
            if flow.end_s == now_s:
                flow.end_s = ARRIVED
                ended.append(flow)
                for link in flow.links:
                    if on[link] is flow:
                        on[link] = None
                    else:
                        self._remove_shared(link, flow)
        return ended

    def change(self, link: int, capacity_Bps: float) -> None:
        """Let `link` carry `capacity_Bps` from now on; 0: flows on it wait."""
        self.capacity_Bps[link] = capacity_Bps
        self._changed_links.add(link)

    def blocked(self) -> list[int]:
        """The links that have failed while flows wait for them."""
        return [link for link, flows in enumerate(self._on)
                if flows is not None and not self.capacity_Bps[link]]

    def settle(self, now_s: float) -> list[Flow]:
        """Give every flow its fair rate. Returns those whose `end_s` changed."""
        if not self._new and not self._changed_links:
            return []
        changed: list[Flow] = []
        sharing: dict[Flow, None] = {}
        for flow in self._new:
            if flow.rate_Bps:  # revised below if another one has joined it at this instant
                flow.end_s = now_s + flow.remaining / flow.rate_Bps
                changed.append(flow)
            else:
                sharing[flow] = None
        for link in sorted(self._changed_links):
            sharing.update(dict.fromkeys(self._flows(link)))
        self._new, self._changed_links = [], set()
        while sharing:
            group = self._connected_flows(next(iter(sharing)))
            for flow in group:
                sharing.pop(flow, None)
            changed += self._assign_rates(group, now_s)
        return changed

    def _flows(self, link: int) -> Iterable[Flow]:
        """The flows on `link`, oldest first."""
        flows = self._on[link]
        if isinstance(flows, Flow):
            return (flows,)
        return flows or ()

    def _shared_flows(self, link: int) -> dict[Flow, None]:
        """The flows on `link`, as a dict for the caller to change."""
        sharers = self._on[link]
        if not isinstance(sharers, dict):
            sharers = self._on[link] = dict.fromkeys(self._flows(link))
        return sharers

    def _remove_shared(self, link: int, flow: Flow) -> None:
        sharers = self._shared_flows(link)
        del sharers[flow]
        self._changed_links.add(link)
        if len(sharers) == 1:
            self._on[link] = next(iter(sharers))

    def _connected_flows(self, first: Flow) -> list[Flow]:
        """All flows that share a link with `first`, or with one that does, and so on."""
        group, links = {first: None}, set()
        todo = [first]
        while todo:
            for link in todo.pop().links:
                if link not in links:
                    links.add(link)
                    new = [flow for flow in self._flows(link) if flow not in group]
                    group.update(dict.fromkeys(new))
                    todo += new
        return list(group)

    def _assign_rates(self, group: list[Flow], now_s: float) -> list[Flow]:
        """Set the fair rates in `group`. Returns the flows whose `end_s` changed."""
        changed = []
        for flow, rate in fair_rates(group, self.capacity_Bps).items():
            if rate != flow.rate_Bps:
                if flow.since_s < now_s:
                    flow.remaining -= (now_s - flow.since_s) * flow.rate_Bps
                flow.since_s, flow.rate_Bps = now_s, rate
                if rate:
                    flow.end_s = now_s + max(flow.remaining, 0.0) / rate
                    changed.append(flow)
                else:  # it waits for a link that has failed
                    flow.end_s = math.inf
        return changed


def fair_rates(flows: Sequence[Flow], capacity_Bps: Sequence[float]) -> dict[Flow, float]:
    """Max–min fair rates, by filling up: the tightest link fixes the rate of its flows, which
    leaves the other links less to share among fewer; repeat.

    What a link can give to each of its flows never shrinks on the way, so a heap finds the tightest
    link: an entry that is out of date goes back in with its new value.
    """
    rates: dict[Flow, float] = {flow: math.inf for flow in flows if not flow.links}
    on: dict[int, list[Flow]] = {}
    for flow in flows:
        for link in flow.links:
            on.setdefault(link, []).append(flow)
    free = {link: capacity_Bps[link] for link in on}  # not assigned yet
    count = {link: len(flows) for link, flows in on.items()}  # flows without a rate
    heap = [(free[link] / count[link], link) for link in on]
    heapq.heapify(heap)
    while heap:
        rate, link = heapq.heappop(heap)
        if not count[link]:
            continue
        share = free[link] / count[link]
        if share > rate * (1 + 1e-12):  # more than rounding
            heapq.heappush(heap, (share, link))
            continue
        for flow in on[link]:
            if flow not in rates:
                rates[flow] = rate
                for crossed in flow.links:
                    count[crossed] -= 1
                    if rate < math.inf:
                        free[crossed] = max(free[crossed] - rate, 0.0)
    return rates
