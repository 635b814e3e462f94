"""All that is chosen once for a parameter server, and the same on every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtlab.ps.checkpoint import Checkpoints
from dtlab.ps.consistency import Consistency
from dtlab.ps.partition import Partition
from dtlab.ps.replication import Replication
from dtlab.ps.updates import Update

CHECKS = 4  # how often a node looks for silent ones while its patience lasts
GIVE_UP = 20  # leases: see `give_up_s`


@dataclass(frozen=True)
class Policy:
    """All that is chosen in `join`. Equal on every node."""

    servers: tuple[int, ...]  # the ranks that may hold keys; where there are copies, the first ones
    workers: tuple[int, ...]
    active: tuple[int, ...]  # the servers that hold keys at first
    consistency: Consistency
    update: Update
    partition: Partition
    nan: str  # "raise" | "drop" | "pass"
    replication: Replication | None = None
    copies: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # server → its copies
    master: int = -1  # the configuration master's rank, if there are copies
    lease_s: float = 0.0
    grace_s: float = 0.0  # for how long a leader without a lease keeps requests, then refuses them
    checkpoints: Checkpoints | None = None
    patience_s: float | None = None
    lost_worker: str = "stop"  # "stop" | "go on"

    @property
    def give_up_s(self) -> float:
        """Silence after which a copy gives up the master, and the master a copy without which no
        other has everything."""
        return GIVE_UP * self.lease_s + self.grace_s

    @property
    def check_interval_s(self) -> float | None:
        """Where silence counts, a node waits for no message longer than this without a look at who
        is silent."""
        return (self.patience_s or self.lease_s) / CHECKS or None

    @property
    def may_die(self) -> frozenset[int]:
        """Ranks whose death does not end the run at once. A server is among them if it has copies.
        """
        if self.copies:
            return self.serving | {self.master, *self.workers}
        if self.patience_s is None and self.lost_worker == "stop":
            return frozenset()
        return frozenset(self.workers) - self.serving

    @property
    def serving(self) -> frozenset[int]:
        """Every rank that holds keys, copies included."""
        return frozenset(self.servers).union(*self.copies.values())

    def peers(self, rank: int) -> frozenset[int]:
        """The ranks that `rank` gets messages from: workers hear of all that serve, who hear of
        all others."""
        serving = self.serving | ({self.master} if self.copies else frozenset())
        return (serving if rank not in serving else serving.union(self.workers)) - {rank}
