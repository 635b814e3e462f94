"""What a server does against loss: checkpoints, and workers that are not heard of any more."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from dtlab.errors import ConfigError, RankDied
from dtlab.ps.partition import Key, Spec
from dtlab.ps.store import own

if TYPE_CHECKING:
    from dtlab.ps.server import Server


def save_if_due(server: Server) -> None:
    """A checkpoint, if one is due."""
    keep, slowest = server.policy.checkpoints, server.clocks.slowest
    if keep and slowest < math.inf and slowest >= server.saved + keep.every:
        server.saved = int(slowest)
        state = [(server.store.keys((entry.first, entry.last)), own(entry.value),
                  {name: own(x) for name, x in entry.state.items()}, entry.version)
                 for entry in server.store.entries]
        keep.save(server.comm.rank, server.statistics.resumed + server.saved, state)


def resume(server: Server, specs: Mapping[Key, Spec]) -> None:
    """Where there is a checkpoint that is sound on all servers, go on from it."""
    keep = server.policy.checkpoints
    clock = keep.newest(server.policy.servers) if keep else None
    if keep is None or clock is None:
        return
    server.statistics.resumed = clock
    for keys, value, state, version in keep.load(server.comm.rank, clock):
        if specs.keys() & keys:
            places = [server.store.places.of.get(key, -1) for key in keys]
            runs = server.store.places.runs(places)
            found = server.store.at(runs[0]) if len(runs) == 1 and runs[0][0] >= 0 else []
            if len(found) != 1 or value.shape != found[0].value.shape:
                raise ConfigError(f"the checkpoint in {keep.folder} is of another model or "
                                  f"another number of servers: its key {keys[0]!r} does not fit")
            found[0].value, found[0].state, found[0].version = value, state, version


def miss(server: Server, dead: Collection[int]) -> None:
    """Called now and then, with the ranks known to be dead: workers that have been silent for
    too long, and don't wait for us, are lost."""
    patience_s, now_s = server.policy.patience_s, server.comm.now()
    waiting = {pull.worker for pulls in server.held.values() for pull in pulls} | {*server.inits}
    server.heard_s |= dict.fromkeys(waiting, now_s)
    for worker in [w for w in server.clocks.of if w not in waiting]:
        silent_s = now_s - server.heard_s.setdefault(worker, now_s)
        if worker in dead or (patience_s and silent_s > patience_s):
            if server.policy.lost_worker == "stop":
                raise RankDied(f"worker {worker} has died or been silent for "
                               f"{silent_s:.3g} s, after {server.clocks.of[worker]} clocks; "
                               f'join(lost_worker="go on") goes on without it', worker)
            if worker == server.policy.workers[0] and worker not in server.inits \
                    and not server.batches:
                raise RankDied(f"worker {worker}, whose values count, has died before init",
                               worker)
            server.statistics.lost_workers.append(worker)
            server.clocks.leave(worker)
            server.made()
            server.advance()
