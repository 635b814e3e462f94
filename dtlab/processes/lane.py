"""The short way over Gloo: for tensors that it takes as they are.

Collectives live in these calls, often with more ranks than cores: then each microsecond that one
rank spends here, others wait for. So nothing is made for what begins and ends within the call, and
what a neighbour has to do with it stands ready: in a `Way` to or from it, in a `Lane` of two such.
`move_all` takes any number of messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtlab.processes.board import ALL, EXCHANGE, RECV, SEND, bit

if TYPE_CHECKING:
    from dtlab.processes.communicator import GlooComm
    from dtlab.processes.ledger import Announced


# What travels for a tensor without elements: Gloo won't receive zero bytes from anyone.
NOTHING = torch.zeros(1, dtype=torch.uint8)


def is_direct(x: torch.Tensor) -> bool:
    """Can Gloo read and write the memory of the dense tensor `x` as it is?"""
    return x.is_contiguous() and x.is_cpu and not x.is_conj() and not x.is_neg()


def is_plain(x: Any) -> bool:
    """Is `x` a tensor that needs no second look before Gloo takes it?"""
    return (
        x.__class__ is torch.Tensor and x.layout is torch.strided and not x.is_quantized
        and is_direct(x)
    )


def wire_of(x: torch.Tensor) -> torch.Tensor:
    """What Gloo sends for `x`: its memory, or a copy that Gloo can read."""
    if not x.nbytes:
        return NOTHING
    return x if is_direct(x) else x.detach().cpu().resolve_conj().resolve_neg().contiguous()


def room_of(x: torch.Tensor) -> torch.Tensor:
    """Where Gloo may write what `x` is to hold."""
    if not x.nbytes:
        return NOTHING
    return x if is_direct(x) else torch.empty(x.shape, dtype=x.dtype)


class Way:
    """Messages to rank `peer`, or (not `sends`) from it, one at a time."""

    def __init__(self, comm: GlooComm, peer: int, sends: bool):
        comm._check_peer(peer, "send to" if sends else "receive from")
        self._comm, self._peer, self.sends = comm, peer, sends
        self.world = comm.members[peer]
        self.bit = bit(self.world)
        self._counts = comm.sent if sends else comm.received
        self._pairs = comm.outgoing if sends else comm.incoming
        self._announce = comm.announce_send if sends else comm.announce_recv
        self._withdraw = comm.withdraw_send if sends else comm.withdraw_recv
        self._gloo = comm.end.group.send if sends else comm.end.group.recv
        self._doing, self._peers = SEND if sends else RECV, (self.world,)

    def announce(self, header: Announced) -> int:
        """The next message is about to be handed to Gloo: returns its number. Raises
        `ShapeMismatch`."""
        number = self._counts[self._peer]
        if self._comm.end.board is not None:
            self._announce(self._peer, header)
        self._counts[self._peer] = number + 1
        return number

    def follow(self, count: int) -> Callable[[int], None]:
        """The next `count` messages need no comparison. Returns what tells the ledger, when it is
        called with the number of one of them, that it is about to be handed to Gloo."""
        self._counts[self._peer] += count
        return self._pairs[self._peer].count if self._comm.end.board is not None else _unheard

    def withdraw(self) -> None:
        """The message that was announced last is not posted after all."""
        self._counts[self._peer] -= 1
        if self._comm.end.board is not None:
            self._withdraw(self._peer)

    def post(self, x: torch.Tensor) -> Any:
        """Hand the message to Gloo."""
        return self._gloo([x if x.nbytes else NOTHING], self.world, self._comm.tag)

    def move(self, x: torch.Tensor) -> None:
        """Send `x`, or receive into it; `x` `is_plain`."""
        comm, sends, world = self._comm, self.sends, self.world
        end, label, nbytes = comm.end, comm.label, x.nbytes
        with end.lock:
            number = self.announce(comm.header(x))
            posted_s = time.perf_counter()
            handle = self.post(x)
        end.waits(self._peers, label, self._doing, comm.context, nbytes, sends, world, number)
        try:
            handle.wait()
            done_s = time.perf_counter()
        finally:
            end.runs()
            end.bury(handle, nbytes)
        if end.traced and comm.visible:
            end.rows.append((sends, world, comm.context, nbytes, posted_s, done_s, label))


def _unheard(number: int) -> None:
    """Without a board there is no ledger."""


def move_all(comm: GlooComm, moves: Sequence[tuple[Way, torch.Tensor]]) -> None:
    """All these messages together; tensors that are `is_plain`, receives first."""
    end, label, context = comm.end, comm.label, comm.context
    with end.lock:
        announced = 0
        try:
            for way, x in moves:
                way.announce(comm.header(x))
                announced += 1
        except Exception:
            for way, _ in moves[:announced]:
                way.withdraw()
            raise
        posted_s = time.perf_counter()
        handles = [way.post(x) for way, x in moves]
    origins = goals = 0
    for way, _ in moves:
        if way.sends:
            goals |= way.bit
        else:
            origins |= way.bit
    doing = RECV if not goals else EXCHANGE if origins else SEND
    end.waits(tuple(dict.fromkeys([way.world for way, _ in moves])), label, doing, context,
              moves[0][1].nbytes, False, origins, ALL, True, goals, ALL)
    try:
        if end.traced and comm.visible:
            for (way, x), handle in zip(moves, handles, strict=True):
                handle.wait()
                end.rows.append((way.sends, way.world, context, x.nbytes, posted_s,
                                 time.perf_counter(), label))
        else:
            for handle in handles:
                handle.wait()
    finally:
        end.runs()
        end.bury(handles, sum([x.nbytes for _, x in moves]))


class Lane:
    """Exchanges with two neighbours (or one): always to rank `dst`, always from rank `src`."""

    def __init__(self, comm: GlooComm, dst: int, src: int):
        self._comm, self._dst, self._src = comm, dst, src
        self._to, self._from = comm.way(dst, True).world, comm.way(src, False).world
        self._peers = (self._to,) if dst == src else (self._to, self._from)

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        """Send `out` while receiving into `into`; both `is_plain`."""
        comm, dst, src, to, origin = self._comm, self._dst, self._src, self._to, self._from
        end, label, nbytes = comm.end, comm.label, out.nbytes
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
            handles = (end.group.recv([into if into.nbytes else NOTHING], origin, comm.tag),
                       end.group.send([out if nbytes else NOTHING], to, comm.tag))
        end.waits(self._peers, label, EXCHANGE, comm.context, nbytes, True, to, sent,
                  False, origin, received)
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
