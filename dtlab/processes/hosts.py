"""Ranks on several hosts: do all run the same versions, and how far apart are their clocks?"""

from __future__ import annotations

import platform
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtlab.errors import ConfigError, RunTimeout
from dtlab.processes.communicator import ProcessComm
from dtlab.processes.monitor import host_name

_PINGS = 16


class Clock(NamedTuple):
    """The offset between a rank's `time.perf_counter` and rank 0's."""

    ahead_s: float  # add it to get the time on rank 0's clock
    uncertainty_s: float  # the true value lies within ± this; 0 if it is the same clock


def join(rank: int, size: int, at: str, timeout_s: float) -> tuple[dist.Store, int, int]:
    """The store through which the ranks meet, this process's rank, and how many there are. at:
    the address "host:port" that all were given.

    Raises `RunTimeout` if one is still missing after `timeout_s`, and `ConfigError` if they can't
    meet there, were told different numbers of ranks, or run different versions of dtlab, torch or
    Python.
    """
    host, begun_s = platform.node(), time.monotonic()
    try:
        store, rank, size = next(dist.rendezvous(
            "env://", rank, size, timeout=timedelta(seconds=timeout_s)))
        about = "\n".join([host, str(size), *versions().values()])
        store = _meet(store, rank, size, about, timeout_s)
        everyone = []
        for other in range(size):
            there, told, *theirs = store.get(f"about/{other}").decode().split("\n")
            if told != str(size):
                raise ConfigError(f"rank {rank} on {host} was told of {size} ranks, but rank "
                                  f"{other} on {there} of {told}; give all the same WORLD_SIZE")
            everyone.append((there, *theirs))
    except ConfigError:
        raise
    except (dist.DistError, ValueError) as error:
        if time.monotonic() - begun_s < 0.9 * timeout_s:  # something else, such as a port in use
            raise ConfigError(
                f"rank {rank} on {host} can't meet the others at {at}, as MASTER_ADDR and "
                f"MASTER_PORT say: {str(error).splitlines()[0]}") from None
        raise RunTimeout(f"rank {rank} on {host}: not all of {size} ranks came to {at} within "
                         f"{timeout_s:g} s; start the others, with the same address and number of "
                         f"hosts, or see why they can't reach it") from None
    check_same(everyone)
    return store, rank, size


def _meet(store: dist.Store, rank: int, size: int, about: str, timeout_s: float) -> dist.Store:
    """A part of `store` that only these processes use, and where about/r holds rank r's `about`.

    torchrun's store outlives a restart, and so do the addresses of ranks that have died. Rank 0
    names a new part; another rank tells its own name there, and goes on once rank 0 has repeated
    that: no rank goes on in the part of a dead rank 0.
    """
    until, name = time.monotonic() + timeout_s, uuid.uuid4().hex
    others = range(1, size)
    if rank == 0:
        new = dist.PrefixStore(f"dtlab/{name}", store)
        new.set("about/0", about)
        store.set("dtlab/part", name)
        if others:
            new.wait([f"name/{r}" for r in others], timedelta(seconds=timeout_s))
        for r in others:
            new.set(f"welcome/{r}", new.get(f"name/{r}").decode())
        return new
    while time.monotonic() < until:
        if store.check(["dtlab/part"]):
            new = dist.PrefixStore(f"dtlab/{store.get('dtlab/part').decode()}", store)
            new.set(f"about/{rank}", about)
            new.set(f"name/{rank}", name)
            if new.check([f"welcome/{rank}"]) and new.get(f"welcome/{rank}").decode() == name:
                return new
        time.sleep(0.01)
    raise dist.DistStoreError("rank 0 did not answer")


def versions() -> dict[str, str]:
    """Return versions that must be the same on all hosts; a torch for GPUs fits one for CPUs."""
    package = sys.modules["dtlab"]  # which this module, being below it, may not import
    return {"dtlab": package.__version__, "torch": torch.__version__.split("+")[0],
            "Python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def check_same(ranks: Sequence[Sequence[str]]) -> None:
    """Raise `ConfigError` unless all ranks run the same versions; each: its host, then these."""
    host, *mine = ranks[0]
    for other, *theirs in ranks[1:]:
        for what, here, there in zip(versions(), mine, theirs, strict=True):
            if here != there:
                raise ConfigError(f"{what} is {here} on {host}, but {there} on {other}; install "
                                  f"the same on all hosts")


def align_clocks(untraced: ProcessComm) -> tuple[Clock, float]:
    """This rank's clock beside rank 0's, and when the last rank got here, on this rank's clock.

    All ranks call it; untraced: a communicator of all, in no trace. A rank of each other host asks
    rank 0 for its time, as in NTP. That time lies between the start and the end of the round trip,
    so the fastest round trip bounds the offset to within half of it, when the run begins.
    """
    hosts = untraced._all_gather_objects(host_name())
    clients = sorted({hosts.index(host) for host in hosts} - {0})
    mine = Clock(0.0, 0.0)
    for client in clients:  # one after another, so that none waits in another's queue
        if untraced.rank == 0:
            _answer(untraced, client)
        elif untraced.rank == client:
            mine = min((_ping(untraced) for _ in range(_PINGS)),
                       key=lambda clock: clock.uncertainty_s)
    if clients:
        mine = untraced._all_gather_objects(mine)[hosts.index(hosts[untraced.rank])]
    ready = untraced._all_gather_objects(time.perf_counter() + mine.ahead_s)
    return mine, max(ready) - mine.ahead_s


def _ping(untraced: ProcessComm) -> Clock:
    sent_s = time.perf_counter()
    untraced.send(None, 0)
    there_s = untraced.recv_object(0)
    got_s = time.perf_counter()
    return Clock(there_s - (sent_s + got_s) / 2, (got_s - sent_s) / 2)


def _answer(untraced: ProcessComm, client: int) -> None:
    for _ in range(_PINGS):
        untraced.recv_object(client)
        untraced.send(time.perf_counter(), client)
