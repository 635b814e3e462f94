"""A server's part in failures: checkpoints, and workers that fall silent."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dtlab.errors import ConfigError, RankDied
from dtlab.ps.messages import Endpoint
from dtlab.ps.partition import Key, Spec
from dtlab.ps.policy import CHECKS, Policy
from dtlab.ps.server_state import ServerState
from dtlab.ps.store import own


def save_if_due(server: ServerState) -> None:
    """Save if a checkpoint is due. Of several copies all know that it is, and one writes it."""
    keep, slowest = server.policy.checkpoints, server.clocks.slowest
    if not keep or slowest == math.inf or slowest < server.saved + keep.every:
        return
    server.saved = int(slowest)
    if server.outbox.answers:
        state = [(server.store.keys((entry.first, entry.last)), own(entry.value),
                  {name: own(x) for name, x in entry.state.items()}, entry.version)
                 for entry in server.store.entries]
        clock = (server.resumed or 0) + server.saved
        keep.save(server.number, clock, (len(server.policy.servers), state), server.comm.rank)


def newest(policy: Policy) -> int:
    """The clock of the checkpoint to go on from: the newest that is sound on all servers; or 0."""
    keep = policy.checkpoints
    if not keep:
        return 0
    for clock in keep.clocks(policy.servers[0]):  # which is there whatever their number
        found = keep.load(policy.servers[0], clock)
        if found and found[0] != len(policy.servers):
            raise ConfigError(f"the checkpoint in {keep.folder} is of servers={found[0]}, not "
                              f"{len(policy.servers)}; join with as many, or take another folder")
    return keep.newest(policy.servers) or 0


def resume(server: ServerState, specs: Mapping[Key, Spec]) -> None:
    """Where there is a checkpoint, let these keys, which are new, go on from it."""
    keep = server.policy.checkpoints
    if not keep or not server.resumed:
        return
    if server.found is None:
        found = keep.load(server.number, server.resumed)
        if found is None:
            raise ConfigError(f"the checkpoint of clock {server.resumed} in {keep.folder} has gone "
                              f"while it was being read; start again")
        _, server.found = found
    others = []
    for entry in server.found:
        keys, value, state, version = entry
        if not specs.keys() & keys:
            others.append(entry)
            continue
        runs = server.store.index.runs(server.store.index.number_of.get(key, -1) for key in keys)
        made = server.store.at(runs[0]) if len(runs) == 1 and runs[0][0] >= 0 else []
        if len(made) != 1 or value.shape != made[0].value.shape:
            raise ConfigError(f"the checkpoint in {keep.folder} is of another model, or of keys "
                              f"on other servers: its key {keys[0]!r} does not fit")
        made[0].value, made[0].state, made[0].version = value, state, version
    server.found = others  # for keys that are made later


def silent_workers(server: ServerState, endpoint: Endpoint) -> list[int]:
    """Return the workers that have died or been silent for too long. Called now and then. Raises
    `RankDied` if none may be lost.

    It counts checks without a message, not time: a server that was suspended itself has unread
    messages. A worker may wait for another server, so it is probed before it is given up.
    """
    policy, now_s = server.policy, server.comm.now()
    looks = policy.patience_s is not None and now_s >= server.next_check_s
    if not (looks or endpoint.dead & server.clocks.running.keys()):
        return []
    if policy.patience_s is not None and looks:
        server.next_check_s = now_s + policy.patience_s / CHECKS
    held = {pull.worker for pulls in server.held.values() for pull in pulls}
    lost = []
    for worker in server.clocks.running.keys() - held - server.inits.keys():
        server.unheard[worker] += looks
        if looks and server.unheard[worker] == CHECKS // 2:
            endpoint.send(worker, ("probe",))
        if worker in endpoint.dead or server.unheard[worker] > CHECKS:
            _check_may_be_lost(server, worker)
            lost.append(worker)
    for worker in (*held, *server.inits):
        server.unheard[worker] = 0  # it waits for this server
    return sorted(lost)


def _check_may_be_lost(server: ServerState, worker: int) -> None:
    policy = server.policy
    if policy.lost_worker == "stop":
        patience_s = policy.patience_s
        silent = "" if patience_s is None else f" or been silent for {patience_s:.3g} s"
        raise RankDied(f"worker {worker} has died{silent}, after {server.clocks.running[worker]} "
                       f'clocks; join(lost_worker="go on") goes on without it', worker)
    if worker == policy.workers[0] and not server.batches:
        raise RankDied(f"worker {worker}, whose values count, has died before init", worker)
