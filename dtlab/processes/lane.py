"""The short way of `sendrecv` over Gloo: what is the same for every exchange is worked out once.

A ring lives in this call, often with more ranks than cores: then each microsecond that one rank
spends here, others wait for. So nothing is made for what begins and ends within the call, and what
the two neighbours have to do with it stands ready in a `Lane`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dtlab.processes.communicator import GlooComm


def is_direct(x: torch.Tensor) -> bool:
    """Can Gloo read and write the memory of the dense tensor `x` as it is?"""
    return (
        x.is_contiguous() and x.is_cpu and x.nbytes > 0 and not x.is_conj() and not x.is_neg()
    )


def is_plain(x: Any) -> bool:
    """Is `x` a tensor that needs no second look before Gloo takes it?"""
    return (
        x.__class__ is torch.Tensor and x.layout is torch.strided and not x.is_quantized
        and is_direct(x)
    )


class Lane:
    """Exchanges with two neighbours (or one): always to rank `dst`, always from rank `src`."""

    def __init__(self, comm: GlooComm, dst: int, src: int):
        self._comm, self._dst, self._src = comm, dst, src
        self._to, self._from = comm.members[dst], comm.members[src]

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        """Send `out` while receiving into `into`; both `is_plain`."""
        comm, dst, src, to, origin = self._comm, self._dst, self._src, self._to, self._from
        end, label = comm.end, comm.label
        with end.lock:
            sent, received = comm.sent[dst], comm.received[src]
            if end.board is not None:
                comm.announce_recv(src, comm.header(into))
                try:
                    comm.announce_send(dst, comm.header(out))
                except Exception:
                    comm.withdraw_recv(src)
                    raise
            comm.received[src], comm.sent[dst] = received + 1, sent + 1
            posted_s = time.perf_counter()
            # The receive first: a message that finds its buffer ready moves at once.
            handles = (end.group.recv([into], origin, comm.tag),
                       end.group.send([out], to, comm.tag))
        nbytes = out.nbytes
        end.exchanging(comm.context, label, nbytes, to, sent, origin, received)
        try:
            handles[0].wait()  # the longer wait first: then, as a rule, the other is none
            received_s = time.perf_counter()
            handles[1].wait()
            sent_s = time.perf_counter()
        finally:
            end.runs()
            end.bury(handles, nbytes)
        if end.traced and comm.visible:
            end.rows += (
                (True, to, comm.context, nbytes, posted_s, sent_s, label),
                (False, origin, comm.context, into.nbytes, posted_s, received_s, label),
            )
