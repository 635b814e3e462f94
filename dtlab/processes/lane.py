"""The short way over Gloo: for tensors that it takes as they are.

Collectives live in these calls, often with more ranks than cores: then each microsecond that one
rank spends here, others wait for. So nothing is made for what begins and ends within the call, and
what a neighbour has to do with it stands ready: in a `Way` to or from it, in a `Lane` of two such,
in a `Fan` of many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtlab.processes.board import ALL, EXCHANGE, RECV, SEND, bit
from dtlab.processes.ledger import NO_HEADER, Announced, Pair, Pairs, compare

if TYPE_CHECKING:
    from dtlab.processes.communicator import GlooComm


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
    """Messages to rank `peer`, or (not `sends`) from it: their numbers, what the ledger says."""

    def __init__(self, comm: GlooComm, peer: int, sends: bool):
        comm._check_peer(peer, "send to" if sends else "receive from")
        self._comm, self._peer, self.sends = comm, peer, sends
        self.world = comm.members[peer]
        self.bit = bit(self.world)
        self._counts = comm.sent if sends else comm.received
        self.gloo = comm.end.group.send if sends else comm.end.group.recv
        self._doing, self._peers = SEND if sends else RECV, (self.world,)
        src, dst = (comm.end.rank, self.world) if sends else (self.world, comm.end.rank)
        board = comm.end.board
        self.pair = None if board is None else Pair(board, src, dst, not sends, comm.context)

    def count(self) -> int:
        """The number of the next message, which now is no longer the next."""
        number = self._counts[self._peer]
        self._counts[self._peer] = number + 1
        return number

    def announce(self, header: Announced) -> int:
        """The next message is about to be handed to Gloo: returns its number. Raises
        `ShapeMismatch`."""
        number = self._counts[self._peer]
        if self.pair is not None:
            # With receives from anyone about, which message a receive gets is not certain.
            fits = header if self.sends or not self._comm.anyone else NO_HEADER
            if not self.pair.announce(number, fits) and self.sends:
                self.meet_anyone(number, header)
        self._counts[self._peer] = number + 1
        return number

    def meet_anyone(self, number: int, header: Announced) -> None:
        """Message `number`, for which no receive has been posted, may meet one from anyone, if
        nothing else is on its way there; nor was just now, or that receive may have met it. So the
        count is read before and after. Raises `ShapeMismatch`."""
        board, pair, context = self._comm.end.board, self.pair, self._comm.context
        assert board is not None
        assert pair is not None
        if not pair.anyone_waits():
            return
        me, to = self._comm.end.rank, self.world
        taken = board.count(me, to, True, context)
        pending, wanted = board.anyone(to, context)
        if pending and number == taken == board.count(me, to, True, context):
            try:
                compare(header.text, lambda: wanted, me, to, False)
            except Exception:
                pair.withdraw(number)
                raise

    def announce_letter(self) -> None:
        """The next message is a letter, see `Letters`: it is counted, and not compared."""
        number = self.count()
        if self.pair is not None:
            self.pair.count(number)

    def follow(self, count: int) -> Callable[[int], None]:
        """The next `count` messages need no comparison. Returns what tells the ledger, when it is
        called with the number of one of them, that it is about to be handed to Gloo."""
        self._counts[self._peer] += count
        return self.pair.count if self.pair is not None else _unheard

    def withdraw(self) -> None:
        """The message that was announced last is not posted after all."""
        number = self._counts[self._peer] = self._counts[self._peer] - 1
        if self.pair is not None:
            self.pair.withdraw(number)

    def move(self, x: torch.Tensor) -> None:
        """Send `x`, or receive into it; `x` `is_plain`."""
        comm, sends, world = self._comm, self.sends, self.world
        end, label, nbytes = comm.end, comm.label, x.nbytes
        with end.lock:
            number = self.announce(comm.header(x))
            posted_s = time.perf_counter()
            handle = self.gloo([x if nbytes else NOTHING], world, comm.tag)
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


class Lane:
    """Exchanges with two neighbours (or one): always to rank `dst`, always from rank `src`."""

    def __init__(self, comm: GlooComm, dst: int, src: int):
        self._comm, self._there, self._here = comm, comm.way(dst, True), comm.way(src, False)
        self._to, self._from = self._there.world, self._here.world
        self._peers = (self._to,) if dst == src else (self._to, self._from)

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        """Send `out` while receiving into `into`; both `is_plain`."""
        comm, to, origin = self._comm, self._to, self._from
        end, label, nbytes = comm.end, comm.label, out.nbytes
        with end.lock:
            received = self._here.announce(comm.header(into))
            try:
                sent = self._there.announce(comm.header(out))
            except Exception:
                self._here.withdraw()
                raise
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


class Fan:
    """Many messages at once: always from the ranks `srcs`, always to the ranks `dsts`."""

    def __init__(self, comm: GlooComm, srcs: Sequence[int], dsts: Sequence[int]):
        self._comm, self._receives = comm, len(srcs)
        # Receives first: a message that finds its buffer ready moves at once.
        self._ways = [comm.way(src, False) for src in srcs] + [comm.way(dst, True) for dst in dsts]
        self._pairs = Pairs([way.pair for way in self._ways if way.pair is not None])
        self._peers = tuple(dict.fromkeys([way.world for way in self._ways]))
        origins, goals = ({way.bit for way in self._ways if way.sends is sends}
                          for sends in (False, True))
        self._doing = RECV if not goals else EXCHANGE if origins else SEND
        self._record = (False, sum(origins), ALL, True, sum(goals), ALL)
        self._posts = [(way.gloo, way.world) for way in self._ways]

    def move(
        self, xs: Sequence[torch.Tensor], headers: Sequence[Announced],
        wires: Sequence[torch.Tensor], nbytes: int, own: Callable[[], object] | None = None,
    ) -> None:
        """Receive into the first of `xs`, send the others; all are `is_plain`.

        headers, wires: what the ledger says of them, what Gloo moves for them. nbytes: of all. own:
        called while they are under way.
        """
        comm, ways = self._comm, self._ways
        end, label, context, tag = comm.end, comm.label, comm.context, comm.tag
        with end.lock:
            self._announce(headers)
            posted_s = time.perf_counter()
            handles = [post([wire], world, tag)
                       for (post, world), wire in zip(self._posts, wires, strict=True)]
        if own is not None:
            own()
        end.waits(self._peers, label, self._doing, context, xs[0].nbytes, *self._record)
        try:
            if end.traced and comm.visible:
                for way, x, handle in zip(ways, xs, handles, strict=True):
                    handle.wait()
                    end.rows.append((way.sends, way.world, context, x.nbytes, posted_s,
                                     time.perf_counter(), label))
            else:
                for handle in handles:
                    handle.wait()
            del handles[:-1]  # Gloo has let go of these while we waited for the last
        finally:
            end.runs()
            end.bury(handles, nbytes)

    def _announce(self, headers: Sequence[Announced]) -> None:
        """Number all messages and write them into the ledger. Raises `ShapeMismatch`."""
        comm, ways = self._comm, self._ways
        numbers = [way.count() for way in ways]
        if comm.end.board is None:
            return
        if comm.anyone:
            headers = [NO_HEADER] * self._receives + [*headers[self._receives :]]
        try:
            for place in self._pairs.announce(numbers, headers):
                if place >= self._receives:
                    ways[place].meet_anyone(numbers[place], headers[place])
        except Exception:
            for way in reversed(ways):
                way.withdraw()
            raise
