"""Three copies of a server, two workers, and a failure: the run that `replicas` draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx
import torch

from dtlab import ps
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps.master import MasterLog
from dtlab.simulator import simulate
from dtlab.topology import Topology, with_link
from dtlab.topology.graphs import ShortestPaths, from_paths, join
from dtlab.trace import Trace

COPIES, MASTER, FAR, NEAR = (0, 1, 2), 3, 4, 5  # ranks; FAR and NEAR are workers
NEAR_SIDE = (0, NEAR)  # on one side of the link that can be cut
LEASE_S, PAUSE_S, LINK_S = 0.02, 0.006, 0.0004
NEVER_S = 0.3  # a cut link heals then at the latest, when all that is shown is long over
END_S = 0.17  # of what is shown


class PushReply(NamedTuple):
    """The answer that a worker got to one push."""

    worker: int
    asked_s: float
    replied_s: float
    acknowledged: bool  # else refused: done, or not
    weight: float | None = None  # what it reads then, if it looks; None if that is refused


class WorkerResult(NamedTuple):
    """The return value of a worker."""

    replies: list[PushReply]
    last: float  # the weight that it reads in the end


def count_pushes(comm: Comm, rule: ps.Replication, pushes: int = 10, look: bool = False) -> Any:
    """Each push adds one to a weight that begins at 0: it says how many pushes count. `look`: read
    it after each push."""
    node = ps.join(comm, servers=3, replicas=2, replication=rule, update=ps.SGD(lr=1.0),
                   consistency=ps.ASP(), lease_s=LEASE_S, grace_s=0.0)
    if node.is_server:
        return node.serve()
    node.init({"w": torch.zeros(1)})
    replies = []
    for step in range(pushes):
        late = step == 0 and comm.rank == NEAR  # so that the workers take turns
        with comm.compute("gradient", seconds=PAUSE_S * (1 + late)):
            pass
        replies.append(_push_one(comm, node))
        if look:
            replies[-1] = replies[-1]._replace(weight=_pull(node))
    last = _pull_at_last(comm, node)
    node.finish()
    return WorkerResult(replies, last)


def _push_one(comm: Comm, node: ps.Node) -> PushReply:
    asked_s = comm.now()
    try:
        node.push({"w": -torch.ones(1)})  # returns: it is acknowledged
    except ps.Unavailable:
        return PushReply(comm.rank, asked_s, comm.now(), False)
    return PushReply(comm.rank, asked_s, comm.now(), True)


def _pull(node: ps.Node) -> float | None:
    try:
        return float(node.pull(["w"])["w"])
    except ps.Unavailable:
        return None


def _pull_at_last(comm: Comm, node: ps.Node) -> float:
    """The weight, once the servers give it."""
    while (weight := _pull(node)) is None:
        with comm.compute("wait", seconds=LEASE_S):
            pass
    return weight


def islands(cut_s: float | None = None, healed_s: float = NEVER_S,
            near: tuple[int, ...] = NEAR_SIDE, ranks: int = 6, link_s: float = LINK_S) -> Topology:
    """Two switches, joined by a link that is cut at `cut_s` (None: it holds) and works again from
    `healed_s` on; the ranks of `near` on one side, the others on the other."""
    graph = nx.DiGraph()
    for rank in range(ranks):
        graph.add_node(rank, kind="host", host=rank)
    for side in ("near", "far"):
        graph.add_node(side, kind="switch")
    for rank in range(ranks):
        join(graph, rank, "near" if rank in near else "far", link_s, 1e9)
    join(graph, "near", "far", link_s, 1e9)
    network = from_paths(graph, "islands", ShortestPaths(graph).path)
    if cut_s is None:
        return network
    network = with_link(network, "near", "far", bandwidth_Bps=0, at_s=cut_s)
    return with_link(network, "near", "far", bandwidth_Bps=1e9, at_s=healed_s)


@dataclass(frozen=True)
class ReplicaRun:
    """A recorded run, in virtual time. `victim`: the copy that died, None if none did."""

    name: str
    rule: ps.Replication
    victim: int | None
    cut_s: float | None
    healed_s: float
    values: list[Any]
    trace: Trace

    @property
    def replies(self) -> list[PushReply]:
        """The replies to both workers, in the order of time."""
        both = [*self.values[FAR].replies, *self.values[NEAR].replies]
        return sorted(both, key=lambda reply: reply.replied_s)

    @property
    def acknowledged(self) -> int:
        """Pushes that were acknowledged to the workers."""
        return sum(reply.acknowledged for reply in self.replies)

    @property
    def refused(self) -> int:
        """Pushes that were refused: they may have been carried out, or not."""
        return len(self.replies) - self.acknowledged

    @property
    def counted(self) -> int:
        """Pushes that are in the weight in the end: those carried out by a copy that lived, and was
        never cut off."""
        return int(max(self.values[copy].pushes for copy in (1, 2) if self.values[copy]))

    @property
    def lost(self) -> int:
        """Acknowledged pushes that are not in the weight, at least."""
        return max(0, self.acknowledged - self.counted)

    @property
    def longest_s(self) -> float:
        """The longest time for which a worker waited for a reply."""
        return max(reply.replied_s - reply.asked_s for reply in self.replies)

    @property
    def master_log(self) -> MasterLog:
        """The log of what the master has seen."""
        found: MasterLog = self.values[MASTER]
        return found

    @cached_property
    def died_s(self) -> float:
        """The time of the victim's last message; infinity if no copy died."""
        if self.victim is None or self.values[self.victim] is not None:
            return math.inf
        return max((m.start_s for m in self.trace.transfers if m.src == self.victim), default=0.0)


def replica_run(rule: ps.Replication, *, victim: int | None = None, event: int = 0,
                cut_s: float | None = None, healed_s: float = NEVER_S, look: bool = False,
                name: str = "") -> ReplicaRun:
    """Simulate two workers that push to a server of three copies, 10 times each.

    victim: this copy (0 to 2, the head first) dies before its event number `event`: a message
    posted, a wait with a limit. cut_s: when copy 0 and a worker are cut off from all others, until
    `healed_s`. look: see `count_pushes`. Raises `ConfigError` for what can't be.
    """
    if victim is not None and victim not in COPIES:
        raise ConfigError(f"the victim is one of the copies 0, 1, 2, not {victim!r}")
    if cut_s is not None and not 0 < cut_s < healed_s < math.inf:
        raise ConfigError(f"the link is cut after 0 s and heals later, not at {cut_s!r} and "
                          f"{healed_s!r} s")
    crash = {} if victim is None else {victim: event}
    result = simulate(count_pushes, rule, 10, look, network=islands(cut_s, healed_s), crash=crash,
                      timeout=60)
    return ReplicaRun(name or repr(rule), rule, victim, cut_s, healed_s, result.values,
                      result.trace)
