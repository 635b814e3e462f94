"""The rates of messages over time: worked out again from the trace of a simulation.

A trace holds when messages began and ended, but not their rates in between, which few simulations
need. So `replay` sends the messages through the same `Network` once more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from dtlab.errors import ConfigError
from dtlab.simulator.changes import Changes
from dtlab.simulator.network import Flow, Network
from dtlab.topology import Topology, check_trace
from dtlab.trace import Message, Trace

ROUNDING = 1e-9  # of the elapsed time: instants that are closer are one


class Moving(NamedTuple):
    """A message on the move, at `rate_Bps`; `links` are the numbers of those it crosses."""

    message: Message
    rate_Bps: float
    links: tuple[int, ...]


class Stretch(NamedTuple):
    """The time from `start_s` to `end_s`, in which all rates stay as they are.

    capacity_Bps: of each link, by its number: less than the bandwidth if other traffic took a part,
    0 if the link had failed.
    """

    start_s: float
    end_s: float
    moving: tuple[Moving, ...]
    capacity_Bps: tuple[float, ...]

    @property
    def link_rates(self) -> dict[int, float]:
        """Bytes per second on each link, by its number; links without a message are left out."""
        rates: dict[int, float] = {}
        for flow in self.moving:
            for link in flow.links:
                rates[link] = rates.get(link, 0.0) + flow.rate_Bps
        return rates

    @property
    def loads(self) -> dict[int, float]:
        """The load of each link, 0 to 1, as a share of its capacity; links without a message are
        left out."""
        capacity = self.capacity_Bps
        return {link: min(rate / capacity[link], 1.0) if capacity[link] else 0.0
                for link, rate in self.link_rates.items()}


def replay(topology: Topology, trace: Trace) -> list[Stretch]:
    """The stretches of a simulated run between which rates changed, from its start to the end of
    its last message, without gaps.

    Before: `trace` is from `simulate(…, network=topology)`. Cost: at each change, the flows that
    move then. Raises `ConfigError` if the trace was measured, or is from another cluster: then its
    messages can't have ended when it says.
    """
    check_trace(topology, trace)
    if not trace.virtual:
        raise ConfigError("the trace is measured: how fast its messages moved is not known; "
                          "simulate the run")
    return _Replay(topology, trace).stretches()


class _Replayed(Flow):
    """A message of the trace, as a flow."""

    __slots__ = ("message",)

    def __init__(self, message: Message, links: tuple[int, ...]):
        self.message, self.links, self.remaining = message, links, float(message.nbytes)
        self.end_s = math.inf


class _Replay:
    """The flows of one trace, their network and its changes."""

    def __init__(self, topology: Topology, trace: Trace):
        self.topology = topology
        self.network, self.changes = Network(topology), Changes(topology)
        self.pending = deque(sorted(self._entries(trace), key=lambda entry: entry[0]))
        self.moving: dict[_Replayed, None] = {}
        ends_s = [message.end_s for message in trace.transfers]
        self.rounding_s = ROUNDING * max(ends_s, default=0.0)

    def _entries(self, trace: Trace) -> Iterable[tuple[float, _Replayed]]:
        """(when its first bytes enter their links, flow) of each message."""
        changes = Changes(self.topology)
        routes: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for message in trace.transfers:
            pair = message.src, message.dst
            if pair not in routes:
                routes[pair] = self.topology.route(*pair)
            latency_s, links = routes[pair]
            for _ in changes.due(message.start_s):
                pass  # latencies that have changed by then are in `extra_latency_s`
            if changes.extra_latency_s:
                latency_s += sum(changes.extra_latency_s.get(link, 0.0) for link in links)
            yield message.start_s + latency_s, _Replayed(message, links)

    def stretches(self) -> list[Stretch]:
        found: list[Stretch] = []
        since_s = 0.0
        capacity = tuple(self.network.capacity_Bps)
        while self.pending or self.moving:
            now_s = self._next_s()
            if now_s - since_s > self.rounding_s:
                flows = tuple(Moving(f.message, f.rate_Bps, f.links) for f in self.moving)
                found.append(Stretch(since_s, now_s, flows, capacity))
                since_s = now_s
            if now_s >= self.changes.next_s:
                for link, capacity_Bps, _ in self.changes.due(now_s):
                    self.network.change(link, capacity_Bps)
                capacity = tuple(self.network.capacity_Bps)
            self._end(now_s)
            self._start(now_s)
            self.network.settle(now_s)
        return found

    def _next_s(self) -> float:
        """Return when something happens next."""
        enters_s = self.pending[0][0] if self.pending else math.inf
        next_s = min(enters_s, self.changes.next_s,
                     min((flow.end_s for flow in self.moving), default=math.inf))
        if next_s == math.inf:  # a flow waits for a link that has failed
            raise self._foreign(next(iter(self.moving)).message)
        return next_s

    def _end(self, now_s: float) -> None:
        for flow in self.network.end([f for f in self.moving if f.end_s == now_s], now_s):
            del self.moving[flow]
            message = flow.message
            taken_late = message.end_s == message.wanted_s >= now_s  # it was sent eagerly
            if abs(now_s - message.end_s) > 1e-6 * message.end_s and not taken_late:
                raise self._foreign(message)

    def _start(self, now_s: float) -> None:
        fresh = []
        while self.pending and self.pending[0][0] <= now_s:
            fresh.append(self.pending.popleft()[1])
        self.network.start(fresh, now_s)
        self.moving.update(dict.fromkeys(fresh))

    def _foreign(self, message: Message) -> ConfigError:
        return ConfigError(
            f"the trace is not from {self.topology.name}: there, the {message.nbytes:,} bytes from "
            f"rank {message.src} to {message.dst} would not have arrived at {message.end_s:.6g} s; "
            f"give the topology that the run was simulated on")
