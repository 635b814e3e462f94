"""Joining the process group of torch.distributed; the communicator of all its ranks."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dtlab.errors import ConfigError
from dtlab.processes import same_host_transport
from dtlab.processes.communicator import ProcessComm
from dtlab.processes.endpoint import Endpoint
from dtlab.processes.nccl_communicator import NcclComm
from dtlab.processes.same_host_transport import SameHostTransport
from dtlab.processes.shared_status import SharedStatus
from dtlab.processes.status_writer import Threads
from dtlab.processes.transport import GlooTransport

# With NCCL, what lies on the CPU (objects, agreements) still travels over Gloo.
_GROUPS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}


def join_group(backend: str, store: dist.Store | None, rank: int, size: int) -> None:
    """Form the default group, so that torch.distributed works too. `store` None: as env says."""
    # The launcher watches over time; Gloo giving up would break all its connections.
    forever = timedelta(days=30)
    dist.init_process_group(
        _GROUPS[backend], store=store, rank=rank, world_size=size, timeout=forever
    )
    _calm_gloo()


def _calm_gloo() -> None:
    """Keep Gloo's thread from pushing aside the rank that it waits for.

    While someone holds the lock of a connection on which something has arrived, Gloo's thread polls
    without pause. A rank that sends holds that lock. With more ranks than cores, the thread that is
    woken just then pushes the rank aside, and polls until the scheduler's next tick: 4 ms on a
    message that takes 0.2. A *batch* thread does not preempt others; its share of time is the same.
    """
    if not os.path.exists("/proc/self/task"):  # Linux has it
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended, or we may not
            name = Path(f"/proc/self/task/{thread}/comm").read_text()
            if name.startswith("gloo"):
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def open_endpoint(
    backend: str, device: str, local_rank: int, status: SharedStatus | None, trace: bool
) -> Endpoint:
    """This process's end of the default group."""
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    try:
        group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        raise ConfigError(
            "the process group has no backend for the CPU; form it with "
            f"init_process_group({_GROUPS[backend]!r}), or leave that to dtlab.run"
        ) from error
    threads = Threads()
    transport = GlooTransport(group)
    if status is not None and same_host_transport.is_possible():  # our launcher has one host
        transport = SameHostTransport(group, threads.start)
    return Endpoint(dist.get_rank(), dist.get_world_size(), transport, threads, place, status,
                    trace)


def open_communicator(backend: str, end: Endpoint, run_number: int) -> ProcessComm:
    """The communicator of all ranks. run_number: it shares no context with those of other runs."""
    kind = NcclComm if backend == "nccl" else ProcessComm
    return kind(end, range(end.size), (run_number,))
