"""The communicator over a process group that a script has formed with torch.distributed.

It has connections of its own, over Gloo, whatever the group's backend: messages never meet those of
torch, and when a wait has no end, closing them leaves the group whole. In a group of NCCL, tensors
of GPUs go over NCCL.
"""

from __future__ import annotations

import atexit
import copy
import gc
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtlab.comm import Comm
from dtlab.errors import ConfigError, RunTimeout
from dtlab.processes.communicator import ProcessComm
from dtlab.processes.connections import Connections, calm_gloo
from dtlab.processes.endpoint import ProcessEndpoint
from dtlab.processes.monitor import EndReason, Monitor, open_status
from dtlab.processes.nccl_communicator import NcclComm
from dtlab.processes.process_group import check_device
from dtlab.processes.shared_status import RUNNING
from dtlab.processes.status_writer import Threads
from dtlab.processes.survivors import FOREVER
from dtlab.processes.transport import GlooTransport

_IDLE_S, _LET_GO_S = 0.2, 5.0  # until a stream ends that is idle, and one that waits
_MEET_S = 300.0  # how long ranks wait for each other where nobody has named a limit


def from_process_group(group: dist.ProcessGroup | DeviceMesh | None = None,
                       device: str | torch.device | None = None) -> Comm:
    """This process's communicator over a process group of torch.distributed.

    group: None for the default group, what `dist.new_group` returned, or one dimension of a
    DeviceMesh: `mesh["dp"]`. All ranks of the group call this; the same group gives the same
    communicator again. Ranks are numbered as in the group. device: where its tensors lie; None:
    on this process's current CUDA device in a group of NCCL, otherwise on the CPU. Without NCCL,
    the tensors of "cuda" go over Gloo, through the CPU's memory.

    A message that does not fit is refused, and a deadlock of all the ranks of the default group
    raises `Deadlock`, as under `run` (between hosts, sizes are not compared); other waits end when
    the group's own time limit does, with `RunTimeout` on all its ranks, or with Ctrl-C. After that
    this communicator is closed; the group is not.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError("from_process_group: no process group has been formed; call "
                          "torch.distributed.init_process_group() first, or let dtlab.run start "
                          "the ranks")
    group = _checked(group)
    where = _place(group, device)
    if _joined is None or _joined.default() is not dist.group.WORLD or _joined.monitor.error:
        _detach()
        _join()
    assert _joined is not None
    _forget_destroyed(_joined)
    members = tuple(dist.get_process_group_ranks(group))
    comm = _joined.comms.get((group, where.type))
    if comm is None:
        comm = _communicator(_joined, group, members, where)
        _joined.comms[group, where.type] = comm
    return comm


def _checked(group: Any) -> dist.ProcessGroup:
    """The group itself. Raises `ConfigError` unless this process is one of its ranks."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or range(group.ndim)
            raise ConfigError(f"from_process_group takes one dimension of a DeviceMesh, and this "
                              f"one has {group.ndim}: choose mesh.get_group({names[0]!r})")
        here = group.get_coordinate() is not None
        group = group.get_group() if here else dist.GroupMember.NON_GROUP_MEMBER
    if group is None:
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"from_process_group: rank {dist.get_rank()} is not in this group; only "
                          f"its ranks call it")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"from_process_group takes a process group, one dimension of a "
                          f"DeviceMesh, or nothing for the default group, not {group!r}")
    return group


class _Joined(NamedTuple):
    """State that all communicators over groups of this process share."""

    default: Any  # a weak reference to the default group
    name: str  # other communicators over the same groups, before, had another one
    endpoint: ProcessEndpoint  # of no group yet: see `_communicator`
    monitor: Monitor
    comms: dict[tuple[dist.ProcessGroup, str], ProcessComm]  # by group and kind of device


_joined: _Joined | None = None


def _join() -> None:
    global _joined
    rank, size = dist.get_rank(), dist.get_world_size()
    name = f"groups {next_number('groups')}"
    store, threads = part_of_store(name), Threads()
    status, _ = open_status(store, rank, size)
    monitor = Monitor(status, store, rank, threads, None)
    end = ProcessEndpoint(rank, size, GlooTransport(None), threads, torch.device("cpu"), status,
                          False)
    end.find_cause = monitor.why
    end.writer.does(RUNNING)
    monitor.publish()
    _joined = _Joined(weakref.ref(dist.group.WORLD), name, end, monitor, {})
    atexit.register(_detach)


def _detach() -> None:
    """Join Gloo's threads before the interpreter ends, or another default group is joined."""
    global _joined
    if _joined is not None:
        _joined.monitor.close()
        for comm in _joined.comms.values():
            comm.endpoint.close()
        streams = [stream.thread for stream in _joined.endpoint.streams if stream.thread.is_alive()]
        for thread in streams:
            thread.join(_IDLE_S)
        if any(thread.is_alive() for thread in streams):  # it waits, and nobody waits for it
            for comm in _joined.comms.values():
                assert comm.endpoint.connections is not None
                comm.endpoint.connections.close()
            for thread in streams:
                thread.join(_LET_GO_S)
        atexit.unregister(_detach)
    _joined = None
    gc.collect()


def _forget_destroyed(joined: _Joined) -> None:
    """Close the communicators over groups that the script has destroyed."""
    for key in [key for key in joined.comms if key[0] not in dist.distributed_c10d._world.pg_map]:
        end = joined.comms.pop(key).endpoint
        assert end.connections is not None
        joined.monitor.remove(end.connections)
        end.close()


def _communicator(joined: _Joined, group: dist.ProcessGroup, members: Sequence[int],
                  where: torch.device) -> ProcessComm:
    key = f"group {group.group_name} of {members} on {where.type}"
    limit = getattr(getattr(_backend(group, where.type), "options", None), "_timeout", FOREVER)
    end = copy.copy(joined.endpoint)  # shares what a rank has only one of
    for attempt in itertools.count():  # the first that nobody has given up
        store = part_of_store(f"{joined.name}, {key}, {attempt}")
        if not store.check(["late"]) or store.get("late") == b"none":
            break
    end.transport, connections = connect(store, members, end.rank, _MEET_S, "from_process_group",
                                         limit)
    joined.monitor.add(connections)
    end.connections, end.device = connections, where
    verdict = EndReason(store)  # on this group alone
    end.report_failure = partial(verdict.set, end.rank)
    end.find_cause = lambda: joined.monitor.why() or verdict.read()
    if where.type == "cpu" or not _has_nccl(group):
        return ProcessComm(end, members, (key,))
    return NcclComm(end, members, (key,))


def _place(group: dist.ProcessGroup, device: Any) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() and _has_nccl(group) else "cpu"
    check_device(device)
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return where


def _has_nccl(group: dist.ProcessGroup) -> bool:
    """Gloo says that it serves GPUs, too."""
    backend = _backend(group, "cuda")
    return backend is not None and backend.name() == "nccl"


def _backend(group: dist.ProcessGroup, device: str) -> Any:
    """The group's backend for this kind of device, if it has one."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


# ---- connections, also for `run` in a group ------------------------------------------------------


def part_of_store(name: str) -> dist.Store:
    """A part of the default group's store that nothing else uses."""
    return dist.PrefixStore(f"dtlab/{name}", dist.distributed_c10d._get_default_store())


def next_number(name: str) -> int:
    """0, 1, 2, … for this name and the default group: the same on all its ranks."""
    numbers = _numbers.setdefault(dist.group.WORLD, Counter())
    numbers[name] += 1
    return numbers[name] - 1


_numbers: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def connect(store: dist.Store, members: Sequence[int], rank: int, timeout: float | None,
            call: str, limit: timedelta = FOREVER) -> tuple[GlooTransport, Connections]:
    """Connect with the other `members`, all of whom make the same `call`. Raises `RunTimeout` if
    one has not come after `timeout` seconds. limit: for a wait on the connections."""
    until = time.monotonic() + (timeout or _MEET_S)
    store.set(f"here/{rank}", "")
    while not store.check([f"here/{member}" for member in members]) and time.monotonic() < until:
        time.sleep(0.002)
    late = [str(member) for member in members if not store.check([f"here/{member}"])]
    # The first that knows decides for all: nobody connects with one that has given up.
    late_ranks = store.compare_set("late", "", " and ".join(late) or "none").decode()
    if late_ranks != "none":
        raise RunTimeout(f"{call} waited {timeout or _MEET_S:g} s for rank {late_ranks}; all "
                         f"{len(members)} ranks must call it")
    connections = Connections()
    with connections:
        group = dist.ProcessGroupGloo(store, members.index(rank), len(members), limit)
    calm_gloo()
    return GlooTransport(group, list(members)), connections
