"""The statistics of a server, as `node.serve()` returns them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dtlab.ps.partition import Key


@dataclass
class Statistics:
    """One server's account. Waits are in seconds, virtual in the simulator."""

    server: int  # its rank
    clocks: dict[int, int] = field(default_factory=dict)  # worker → iterations it has ended
    closed: int = 0  # clocks that closed: BSP and its kin
    pulls: int = 0
    pushes: int = 0
    updates: int = 0  # of keys
    dropped: int = 0  # gradients of keys that came too late for their clock
    unused: int = 0  # gradients of keys that waited for more, which never came
    nan: int = 0  # gradients of keys with NaN that were let through, or dropped, by choice
    staleness: Counter[int] = field(default_factory=Counter)  # updates missed → pushes of keys
    ahead: Counter[int] = field(default_factory=Counter)  # clocks before the slowest → pulls
    waits: dict[int, float] = field(default_factory=dict)  # worker → seconds its pulls were held
    load: Counter[Key] = field(default_factory=Counter)  # key → pulls and pushes of it
    resumed: int = 0  # the clock of the checkpoint that it went on from
    lost_workers: list[int] = field(default_factory=list)  # that it went on without
    cut_off: bool = False  # a copy that ended because it heard no more of the master
    rejoined: int = 0  # times that this copy was declared dead and came back
    lost: int = 0  # pushes that it had carried out by then, without knowing that others had them
    checksum: int = 0  # of the weights, at the end
    moved: int = 0  # units given to other servers (see `use_servers`)
    held_bytes: int = 0  # of weights, at the end
    received_bytes: int = 0  # of payloads, without headers
    sent_bytes: int = 0

    @property
    def mean_staleness(self) -> float:
        """Updates that a gradient had missed, on average."""
        pushes = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / pushes if pushes else 0.0
