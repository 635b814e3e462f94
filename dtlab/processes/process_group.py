"""Joining the process group of torch.distributed; the communicator of all its ranks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from dtlab.errors import ConfigError
from dtlab.processes import same_host_transport
from dtlab.processes.communicator import ProcessComm
from dtlab.processes.connections import Connections, calm_gloo
from dtlab.processes.endpoint import ProcessEndpoint
from dtlab.processes.nccl_communicator import NcclComm
from dtlab.processes.same_host_transport import SameHostTransport
from dtlab.processes.shared_status import COMPUTE, SharedStatus
from dtlab.processes.status_writer import StatusWriter, Threads
from dtlab.processes.store import RankStore
from dtlab.processes.survivors import FOREVER, connect_survivors, survivors_key
from dtlab.processes.transport import GlooTransport

# With NCCL, what lies on the CPU (objects, agreements) still travels over Gloo.
_GROUPS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}

# What the machine lacks, in the words of Gloo and of the system.
_ADVICE = {
    "Unable to find address for": "ranks talk over this network interface; give it an address, "
                                  "or bring it up (ip link set lo up)",
    "Resource temporarily unavailable": "a rank needs some threads; allow more processes "
                                        "(ulimit -u), or take fewer ranks",
}


def join_group(backend: str, store: dist.Store | None, rank: int, size: int) -> None:
    """Form the default group, so that torch.distributed works too. `store` None: as env says."""
    # The launcher watches over time; Gloo giving up would break all its connections.
    try:
        dist.init_process_group(
            _GROUPS[backend], store=store, rank=rank, world_size=size, timeout=FOREVER
        )
    except RuntimeError as error:
        for sign, advice in _ADVICE.items():
            if sign in str(error):
                raise ConfigError(f"torch can't form the process group: "
                                  f"{str(error)[str(error).index(sign):]}; {advice}") from None
        raise
    calm_gloo()
    _own_groups.append(weakref.ref(dist.group.WORLD))


def is_foreign() -> bool:
    """Has a script, and not dtlab, formed this process's default group?"""
    return dist.is_available() and dist.is_initialized() and not any(
        group() is dist.group.WORLD for group in _own_groups)


_own_groups: list[Any] = []  # default groups that were formed here


def open_endpoint(
    device: str, local_rank: int, status: SharedStatus | None, trace: bool,
    store: RankStore | None = None, connections: Connections | None = None,
) -> ProcessEndpoint:
    """This process's end of the default group."""
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    threads = Threads()
    transport = GlooTransport(group)
    if status is not None and same_host_transport.is_possible():  # our launcher has one host
        transport = SameHostTransport(group, threads.start)
    return ProcessEndpoint(dist.get_rank(), dist.get_world_size(), transport, threads,
                           place(device, local_rank), status, trace, store, connections)


def check_device(device: Any) -> None:
    """Raise `ConfigError` unless this machine has it."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError, OverflowError, ValueError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: choose 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.device_count():
        raise ConfigError("device='cuda': this machine has no GPU that torch can use; use 'cpu'")


def place(device: str, local_rank: int) -> torch.device:
    """Return the device on which this rank computes: ranks take GPUs in turn."""
    where = torch.device(device)
    if where.type == "cuda":
        where = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    return where


def open_late(device: str, rank: int, size: int, status: SharedStatus, trace: bool,
              store: RankStore) -> tuple[ProcessEndpoint, ProcessComm]:
    """The end and the communicator of a rank that was started anew, once the others have met it."""
    threads = Threads()
    StatusWriter(status, rank, 0, threads).does(COMPUTE, "joining")
    number, ranks, transport, connections = connect_survivors(store, rank, threads)
    calm_gloo()
    end = ProcessEndpoint(rank, size, transport, threads, place(device, rank), status, trace, store,
                          connections)
    end.generation = number
    return end, ProcessComm(end, ranks, (survivors_key(number),))


def open_communicator(backend: str, end: ProcessEndpoint, run_number: int) -> ProcessComm:
    """The communicator of all ranks. run_number: it shares no context with those of other runs."""
    kind = NcclComm if backend == "nccl" else ProcessComm
    return kind(end, range(end.size), (run_number,))
