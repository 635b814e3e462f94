"""The state of a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dtlab.comm import Comm
from dtlab.ps.consistency import Clocks
from dtlab.ps.packing import pack
from dtlab.ps.partition import Key, Shards, Spec
from dtlab.ps.policy import Policy
from dtlab.ps.statistics import Statistics
from dtlab.ps.store import Entry, Store


class Outbox(Protocol):
    """A server's way to answer: its node's `Endpoint`, or the `Replica` that it is part of."""

    @property
    def answers(self) -> bool:
        """Does this rank speak for the server, to others and to the disk?"""

    def send(self, dst: int, body: tuple[Any, ...], payload: Sequence[torch.Tensor] = ()) -> None:
        """Send a message."""

    def is_sending(self, x: torch.Tensor) -> bool:
        """Is `x` being sent, so that it must stay as it is?"""


class HeldPull(NamedTuple):
    """A pull that waits for others' clocks."""

    worker: int
    body: tuple[Any, ...]
    rows: list[torch.Tensor]
    since_s: float


class ServerState:
    """The state of a server, and what failures and migration ask of it.

    number: which of `policy.servers` it is, or a copy of.
    """

    def __init__(self, comm: Comm, outbox: Outbox, policy: Policy, number: int):
        self.comm, self.outbox, self.policy, self.number = comm, outbox, policy, number
        self.clocks = Clocks(policy.workers)
        self.store = Store(policy.update)
        self.batches: list[dict[Key, Spec]] = []  # what was made together is placed together
        self.active = policy.active
        self.statistics = Statistics(comm.rank)
        self._group = policy.consistency.group(len(policy.workers))
        self.held: dict[int, list[HeldPull]] = {}  # by the clock of the worker
        self._began: set[int] = set()  # workers that have pulled in this iteration
        self.inits: dict[int, tuple[int, dict[Key, Spec]]] = {}
        self.unheard: Counter[int] = Counter()  # worker → looks in vain: see `failures.silent`
        self.next_check_s = 0.0  # when `silent_workers` counts again
        self.lost: list[int] = []  # workers that were given up: their clocks don't count any more
        self.resumed: int | None = None  # the clock of the checkpoint to go on from; 0: of none
        self.found: list[Any] | None = None  # what stands there of keys that are not made yet
        self.saved = 0  # the clock of the last checkpoint, since then

    @property
    def over(self) -> bool:
        """Has every worker finished?"""
        return not self.clocks.running

    def reply(self, dst: int, number: int, more: Any = None,
              tensors: Sequence[torch.Tensor] = ()) -> None:
        """Answer request `number` of `dst`, which may be this very node."""
        self.outbox.send(dst, ("reply", number, more), pack(tensors))

    def update(self, entry: Entry, bucket: int, absent: int = 0) -> None:
        """Make an update, on a copy of the weights if these are still being sent."""
        if self.outbox.is_sending(entry.value):
            entry.value = entry.value.clone()
        entry.update(bucket, absent)
        self.statistics.updates += entry.count

    def shards(self, servers: Sequence[int]) -> Shards:
        """The shards of all keys if `servers` hold them."""
        found: Shards = {}
        for specs in self.batches:
            found |= self.policy.partition.place(specs, servers)
        return found
