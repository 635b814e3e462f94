"""The loop of a rank that holds one copy of a server."""

from __future__ import annotations

from typing import Any

from dtlab.comm import Comm
from dtlab.ps.master import BEATS
from dtlab.ps.messages import Endpoint
from dtlab.ps.policy import Policy
from dtlab.ps.replica import Replica
from dtlab.ps.replication import View
from dtlab.ps.statistics import Statistics

CUT_OFF = "the leader of server {} has lost touch with the master for so long that it has ended"


def serve_replica(comm: Comm, endpoint: Endpoint, policy: Policy) -> Statistics:
    """Serve as one copy of a server until the master says that all is over, or this copy has been
    cut off for long."""
    shard = next(server for server, copies in policy.copies.items() if comm.rank in copies)
    assert policy.replication is not None
    replica = Replica(comm, endpoint, policy, shard, policy.replication)
    beat_s, unheard = comm.now(), 0  # beats since the master was heard of, however long they took
    over, give_up = False, BEATS * policy.give_up_s / policy.lease_s
    while not over and unheard < give_up:
        if comm.now() >= beat_s:
            endpoint.send(policy.master, ("beat", comm.now(), replica.had, *replica.ended_workers))
            beat_s = comm.now() + policy.lease_s / BEATS
            unheard += 1
            replica.lapse()
            replica.give_up_silent()
            replica.watch.check(replica.awaited())
        message = endpoint.receive(max(beat_s - comm.now(), 0.0))
        if message is None:
            continue
        src, body, payload = message
        replica.watch.heard(src)
        if body[0] == "snapshot":
            if replica.install(*body[2:]):
                endpoint.send(policy.master, ("ready", body[1]))
        elif body[0] == "probe":
            endpoint.send(src, ("alive",))
        elif src == policy.master:
            unheard = 0
            over = _obey(replica, body, endpoint, policy)
        else:
            replica.dispatch(src, body, payload)
    for worker in () if over else policy.workers:
        endpoint.send(worker, ("lost", shard, replica.view.epoch, CUT_OFF))
    found = replica.server.account(endpoint)
    found.cut_off = not over
    return found


def _obey(replica: Replica, body: tuple[Any, ...], endpoint: Endpoint, policy: Policy) -> bool:
    """A message from the master. Returns whether all is over. "heard": no more than that."""
    if body[0] == "lease":
        replica.granted(body[1])
    elif body[0] == "elect":
        replica.promised = body[1]
        endpoint.send(policy.master, ("had", body[1], replica.had))
    elif body[0] == "adopt":
        replica.adopt(*body[1:])
    elif body[0] == "view":
        server, view = body[1], View(*body[2:])
        if server == replica.shard:
            replica.change(view)
        else:
            replica.transfers.change(server, view, replica.answers)
    return bool(body[0] == "over")
