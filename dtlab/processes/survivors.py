"""After a death: the surviving ranks form a process group of their own.

The launcher decides which ranks survive: `RankStore.shrink`. If a rank dies while the others
connect, all of them start again.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from dtlab.processes import same_host_transport
from dtlab.processes.connections import Connections, calm_gloo
from dtlab.processes.same_host_transport import SameHostTransport
from dtlab.processes.status_writer import Threads
from dtlab.processes.store import RankStore, addresses_of, broken_key
from dtlab.processes.transport import GlooTransport

FOREVER = timedelta(days=30)  # the launcher watches over time
_LOOK_EVERY_S = 0.02
_TOLD_WITHIN_S = 10.0  # the launcher may learn of a death later than those who connect


def survivors_key(number: int) -> str:
    """Return the first part of the contexts of generation `number`."""
    return f"survivors {number}"


class Survivors(NamedTuple):
    """The ranks of generation `number`, and the transport between them."""

    number: int
    ranks: list[int]  # of the run
    transport: GlooTransport
    connections: Connections


def connect_survivors(store: RankStore, rank: int, threads: Threads) -> Survivors:
    """Connect the living ranks, which all call this."""
    while True:
        number, ranks = store.shrink(rank)
        connections = Connections()
        with contextlib.suppress(_DiedMeanwhile), connections:
            group = _group(store, number, ranks, rank, threads)
            if same_host_transport.is_possible():
                return Survivors(number, ranks, SameHostTransport(group, threads.start, ranks),
                                 connections)
            return Survivors(number, ranks, GlooTransport(group, ranks), connections)
        connections.close()


class _DiedMeanwhile(Exception):
    """A rank has died while the others connected."""


def _group(store: RankStore, number: int, ranks: list[int], rank: int, threads: Threads) -> Any:
    """Form torch's ProcessGroupGloo, on a thread, for Gloo would wait for dead ranks. Returns it
    once all ranks have formed it, so that none uses a group that another has given up."""
    formed = [f"formed {number}/{each}" for each in ranks]
    found: list[Any] = []

    def form() -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = FOREVER
        prefixed = dist.PrefixStore(addresses_of(number), store)
        try:
            found.append(dist.ProcessGroupGloo(prefixed, ranks.index(rank), len(ranks), options))
        except RuntimeError as error:
            found.append(error)

    thread = threads.start(form, "joining")
    announced, give_up_s = False, float("inf")
    while True:
        if thread.is_alive():
            thread.join(_LOOK_EVERY_S)
        elif isinstance(found[0], RuntimeError):
            give_up_s = min(give_up_s, time.monotonic() + _TOLD_WITHIN_S)
        elif not announced:
            store.set(formed[ranks.index(rank)], "")
            announced = True
        broken = store.check([broken_key(number)])  # read before `formed`
        if announced and store.check(formed):
            calm_gloo()
            return found[0]
        if broken:
            raise _DiedMeanwhile
        if time.monotonic() > give_up_s:
            raise found[0]
        if not thread.is_alive():
            time.sleep(_LOOK_EVERY_S / 10)
