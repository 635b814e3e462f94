"""The communicator of GPUs: tensors over NCCL, everything else over Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab.comm import Recv, Send
from dtlab.errors import ConfigError
from dtlab.processes.communicator import ProcessComm
from dtlab.processes.endpoint import ProcessEndpoint
from dtlab.processes.message import TransportMessage
from dtlab.processes.nccl_transport import NcclTransport
from dtlab.processes.streams import CudaStream, Stream
from dtlab.processes.transport import Operation, TransportHandle


class NcclComm(ProcessComm):
    """A group of ranks, each with a GPU of its own: tensors go over NCCL, all else over Gloo."""

    on_host = False

    def __init__(self, end: ProcessEndpoint, members: Sequence[int], context: tuple[Any, ...]):
        super().__init__(end, members, context)
        self.transport = NcclTransport(end, context)

    def _message(self, op: Send | Recv) -> TransportMessage:
        if isinstance(op, Recv) and op.src is None and isinstance(op.x, torch.Tensor):
            raise ConfigError(f"rank {self.rank}: NCCL can't receive from anyone; name the sender, "
                              f"or use backend='gloo'")
        return super()._message(op)

    def _move(self, operations: list[Operation]) -> Sequence[TransportHandle]:
        """Objects, and messages without bytes, go over Gloo: NCCL would not move them."""
        on_host = [_is_host_data(x) for _, x, _, _ in operations]
        by_gloo = [one for one, host in zip(operations, on_host, strict=True) if host]
        by_nccl = [one for one, host in zip(operations, on_host, strict=True) if not host]
        gloo = iter(self.endpoint.transport.start(by_gloo))
        nccl = iter(self.transport.start(by_nccl) if by_nccl else ())
        return [next(gloo if host else nccl) for host in on_host]

    def _new_stream(self) -> Stream:
        return CudaStream(self.endpoint)


def _is_host_data(x: torch.Tensor) -> bool:
    """Is it an object's frame, or what travels for an empty tensor?"""
    return x.dtype is torch.uint8 and x.is_cpu
