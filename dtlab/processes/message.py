"""One side of one message: what is sent or received, and what the transport moves for it."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from dtlab.processes import object_frames
from dtlab.processes.match_check import CheckedChannel, EncodedHeader
from dtlab.processes.shared_status import Awaited
from dtlab.processes.transport import ANY_SOURCE, Operation, Transport, TransportHandle

# What travels for a tensor without elements: Gloo won't receive zero bytes from any source.
NOTHING = torch.zeros(1, dtype=torch.uint8)


class TransportMessage:
    """`x` is what is sent, or where to receive it; `peer` a rank of the communicator, `world` the
    same rank of the whole run; ANY_SOURCE: not known yet. on_host: the transport moves only what
    lies in the CPU's memory."""

    __slots__ = ("channel", "context", "done_s", "handle", "header", "nbytes", "number",
                 "operation", "payload", "peer", "posted_s", "rest", "rest_handle", "sends", "tag",
                 "world", "x")

    handle: TransportHandle
    rest_handle: TransportHandle

    def __init__(self, sends: bool, x: Any, peer: int, world: int, tag: int, header: EncodedHeader,
                 channel: CheckedChannel | None, on_host: bool = True):
        self.sends, self.x, self.peer, self.world, self.tag = sends, x, peer, world, tag
        self.header, self.channel = header, channel
        self.number = -1  # of this channel; from ANY_SOURCE: as many such receives are older
        self.context = 0  # its index
        self.posted_s = self.done_s = 0.0
        self.rest: Operation | None = None  # a long object's pickle, which follows its frame
        if isinstance(x, torch.Tensor):
            self.nbytes = x.nbytes
            self.payload = payload_of(x, sends, on_host)
        elif not sends:
            self.nbytes = 0  # not known yet
            self.payload = object_frames.empty_frame()
        else:
            self.payload, rest, rest_tag = object_frames.framed(x)
            self.nbytes, _ = object_frames.head(self.payload)
            if rest is not None:
                self.rest = True, rest, world, rest_tag
        self.operation: Operation = sends, self.payload, world, tag  # for the transport, first

    def awaited(self) -> Awaited:
        """Describe it for the shared status."""
        return Awaited(self.sends, self.context, self.world, self.number)

    def deliver(self, transport: Transport) -> None:
        """The payload has arrived: put what it holds where it was wanted."""
        if isinstance(self.x, list):
            self.x.append(self._object(transport))
        elif self.payload is not self.x and self.nbytes:
            self.x.detach().copy_(self.payload.view(self.x.shape))
        elif not self.x.is_inference():  # autograd must notice that its memory has changed
            torch.autograd.graph.increment_version(self.x)

    def _object(self, transport: Transport) -> Any:
        self.nbytes, tag = object_frames.head(self.payload)
        if not tag:
            return object_frames.content(self.payload, self.nbytes)
        rest = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        transport.start([(False, rest, self.world, tag)])[0].wait()
        return pickle.loads(rest.numpy().data)

    def __str__(self) -> str:
        name = "send to" if self.sends else "receive from"
        what = f"{self.x.nbytes:,} bytes" if isinstance(self.x, torch.Tensor) else "an object"
        return f"{name} {'any rank' if self.peer == ANY_SOURCE else self.peer} of {what}"


def payload_of(x: torch.Tensor, sends: bool, on_host: bool) -> torch.Tensor:
    """Return what the transport moves for the dense tensor `x`: its memory, or if that can't be
    read or written as it is, a copy, or memory for one. on_host: it moves the CPU's memory only."""
    if not x.nbytes:
        return NOTHING
    if on_host and not x.is_cpu:
        return x.detach().resolve_conj().resolve_neg().contiguous().cpu() if sends else (
            torch.empty(x.shape, dtype=x.dtype, device="cpu"))
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    if sends:
        return x.detach().resolve_conj().resolve_neg().contiguous()
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
