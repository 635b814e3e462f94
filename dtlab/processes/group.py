"""Joining the process group of torch.distributed, and the communicator that stands on it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from dtlab.errors import ConfigError
from dtlab.processes.board import Board
from dtlab.processes.communicator import GlooComm
from dtlab.processes.endpoint import Endpoint
from dtlab.processes.nccl import NcclComm

# With NCCL, what lies on the CPU (objects, agreements) still travels over Gloo.
_GROUPS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}


def join_group(backend: str, store: dist.Store | None, rank: int, size: int) -> None:
    """Form the default group, so that torch.distributed works too. `store` None: as env says."""
    # Whoever launched us watches over time; Gloo giving up would break all its connections.
    forever = timedelta(days=30)
    dist.init_process_group(
        _GROUPS[backend], store=store, rank=rank, world_size=size, timeout=forever
    )


def open_communicator(
    backend: str, device: str, local_rank: int, board: Board | None, trace: bool, context: int = 0
) -> GlooComm:
    """The communicator of all ranks, over the default group."""
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
    end = Endpoint(dist.get_rank(), dist.get_world_size(), group, place, board, trace)
    end.next_context = context // 2 + 1
    kind = NcclComm if backend == "nccl" else GlooComm
    return kind(end, list(range(end.size)), context)
