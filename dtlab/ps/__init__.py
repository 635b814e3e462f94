"""A parameter server on `Comm` alone: it runs on processes and in the simulator unchanged.

    from dtlab import ps

    def train(comm):
        node = ps.join(comm, servers=1, consistency=ps.BSP(), update=ps.SGD(lr=0.1))
        if node.is_server:
            return node.serve()              # a ps.Statistics, once every worker has finished
        node.init({"w": torch.zeros(3)})     # every worker; the first one's values count
        for step in range(10):
            w = node.pull(["w"])["w"]        # waits as long as consistency says
            node.push({"w": gradient(w)})    # returns once the servers have it
            node.clock()                     # the iteration is over
        node.finish()
        return w

An iteration is pull, push, clock. Under BSP the update of a clock is made from the mean of all
workers' gradients once all have passed it; a key that a worker did not push counts as zero.

Consistency   BSP() ASP() SSP(staleness) SoftSync(n) BackupWorkers(extra) Quorum(fraction)
Update        SGD(lr, momentum=0) Adam(lr) StalenessAwareSGD(lr) DCASGD(lr, lam, adaptive=False)
              EASGD(lr, alpha) FedAvg(): workers push weights to these two
Partition     Hash() Range() ConsistentHash(vnodes=64)

More of a worker's calls: `pull(keys, out={key: tensor})` fills tensors that are there, and
`buffer(keys)` makes such as travel without a copy, the way for thousands of small keys;
`pull_async`, `push_async` return handles with `wait()`; `init(…, tables=["emb"])` makes a table, of
which `pull_rows("emb", index)` and `push_rows("emb", index, grad)` move rows only, and `push` takes
sparse gradients; `push(…, weight=n)` weighs an average; `use_servers([0, 1, 2])` moves keys to
other servers between iterations. `join(…, colocated=True)` lets servers work as well: then no node
`is_server`, and `finish()` returns its `Statistics`.

Where gradients are added up, without the rest: `ps.aggregate(comm, x, placement=…)`, with a name of
`ps.PLACEMENTS`: on_one, on_cpu, spread (an all-reduce), tree, two_level.
Copies that choose a leader without a master, by Raft's votes: `dtlab.ps.election.elect`.
"""

from dtlab.ps.checkpoint import Checkpoints
from dtlab.ps.consistency import ASP, BSP, SSP, BackupWorkers, Consistency, Quorum, SoftSync
from dtlab.ps.handle import Handle
from dtlab.ps.join import join
from dtlab.ps.node import Node
from dtlab.ps.partition import ConsistentHash, Hash, Partition, Range
from dtlab.ps.placement import PLACEMENTS, aggregate
from dtlab.ps.replication import Chain, Leader, Replication, Unavailable
from dtlab.ps.statistics import Statistics
from dtlab.ps.updates import DCASGD, EASGD, SGD, Adam, FedAvg, StalenessAwareSGD, Update

__all__ = [
    "join",
    "Node",
    "Handle",
    "Statistics",
    "Consistency", "BSP", "ASP", "SSP", "SoftSync", "BackupWorkers", "Quorum",
    "Update", "SGD", "Adam", "StalenessAwareSGD", "DCASGD", "EASGD", "FedAvg",
    "Partition", "Range", "Hash", "ConsistentHash",
    "Replication", "Chain", "Leader", "Unavailable",
    "Checkpoints",
    "aggregate", "PLACEMENTS",
]
