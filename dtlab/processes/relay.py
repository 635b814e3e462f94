"""A relay over Gloo (see `dtlab.relay`): one is added while the next comes in.

Long chunks travel in pieces, and each leaves again as soon as it has been added to. The next two
always have a place to go to, so they need not wait until this rank is woken. Only the first message
is compared with its peer's; the header names the sizes of all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtlab.processes.board import EXCHANGE, LATEST
from dtlab.processes.lane import is_plain
from dtlab.reduction import combiner
from dtlab.relay import one_by_one

if TYPE_CHECKING:
    from dtlab.processes.communicator import GlooComm

_LONG_BYTES = 512 << 10  # what is longer goes in pieces, two or more, of at most
_PIECE_BYTES = 1 << 20  # so many bytes; Gloo's own all-reduce cuts no longer ones
_INBOXES = ("this summand", "the next")
_AHEAD = len(_INBOXES)  # so many pieces have a place before they come


def relay(
    comm: GlooComm, chunks: Sequence[torch.Tensor], dst: int, src: int, op: Any, adding: int
) -> None:
    """`dtlab.relay.relay`."""
    if comm.device.type != "cpu":
        one_by_one(comm, chunks, dst, src, op, adding)
    elif not comm.label:
        with comm.labelled("relay"):  # its messages are not for `recv`, nor the other way round
            relay(comm, chunks, dst, src, op, adding)
    elif len(chunks) < 2:  # a ring of one rank has no neighbours
        return
    elif all(map(is_plain, chunks)):
        _relay(comm, chunks, dst, src, op, adding)
    else:
        _relay_copies(comm, chunks, dst, src, op, adding)


def _relay_copies(
    comm: GlooComm, chunks: Sequence[torch.Tensor], dst: int, src: int, op: Any, adding: int
) -> None:
    """The same for tensors that Gloo can't read as they are: others' may be, and all cut alike."""
    for x in chunks:
        comm.check_tensor(x)
    plain = {id(x): x.detach().resolve_conj().resolve_neg().contiguous() for x in chunks}
    _relay(comm, [plain[id(x)] for x in chunks], dst, src, op, adding)
    for x in chunks:
        x.detach().copy_(plain[id(x)])


def _relay(
    comm: GlooComm, chunks: Sequence[torch.Tensor], dst: int, src: int, op: Any, adding: int
) -> None:
    """The same for tensors that are `is_plain`."""
    there, here = comm.way(dst, True), comm.way(src, False)
    to, origin = there.world, here.world
    end, label, context, tag = comm.end, comm.label, comm.context, comm.tag
    traced = end.traced and comm.visible
    send, recv, last = end.group.send, end.group.recv, len(chunks) - 2
    combine = combiner(op, chunks[0].dtype)
    sizes = tuple([chunk.numel() for chunk in chunks])
    pieces = [_pieces(chunk) for chunk in chunks]
    rooms = _rooms(comm, pieces, adding)
    with end.lock:
        received = here.announce(comm.header_of_all(chunks[0].dtype, sizes[1:]))
        try:
            sent = there.announce(comm.header_of_all(chunks[0].dtype, sizes[:-1]))
        except Exception:
            here.withdraw()
            raise
        counts_received, counts_sent = here.follow(last), there.follow(last)
        posted_s = time.perf_counter()
        arriving = [recv([room], origin, tag) for room in rooms[:_AHEAD]]
        sends = [send([piece], to, tag) for piece in pieces[0]]
    end.waits((to,) if to == origin else (to, origin), label, EXCHANGE, context, chunks[0].nbytes,
              True, to, LATEST, False, origin, LATEST)
    turn = 0
    try:
        for step, staying in enumerate(pieces[1:]):
            if step:
                counts_received(received + step)
                counts_sent(sent + step)
            for piece in staying:
                arriving[turn].wait()
                if step < adding:
                    begun_s = time.perf_counter()
                    combine(piece, rooms[turn])
                    end.span("reduce", begun_s, time.perf_counter(), label)
                if step < last:
                    sends.append(send([piece], to, tag))
                turn += 1
                if turn + _AHEAD <= len(rooms):
                    arriving.append(recv([rooms[turn + _AHEAD - 1]], origin, tag))
            if traced:  # that a chunk has left, its receiver knows: here nobody waits for it
                received_s = time.perf_counter()
                end.rows += (
                    (True, to, context, chunks[step].nbytes, posted_s, None, label),
                    (False, origin, context, chunks[step + 1].nbytes, posted_s, received_s, label),
                )
                posted_s = received_s
        for handle in sends:
            handle.wait()
    finally:
        end.runs()
        end.bury((sends, arriving), sum(sizes) * chunks[0].itemsize)


def _pieces(chunk: torch.Tensor) -> Sequence[torch.Tensor]:
    """The vector `chunk`; a long one in equal parts, two or more; of an empty one nothing. All
    ranks cut alike."""
    nbytes = chunk.nbytes
    if nbytes <= _LONG_BYTES:
        return (chunk,) if nbytes else ()
    return chunk.tensor_split(max(2, -(-nbytes // _PIECE_BYTES)))


def _rooms(
    comm: GlooComm, pieces: Sequence[Sequence[torch.Tensor]], adding: int
) -> list[torch.Tensor]:
    """Where each piece that comes is to go: by turns into one of the inboxes, or to its place."""
    summands = [piece for chunk in pieces[1 : adding + 1] for piece in chunk]
    rooms = [comm.scratch(piece, _INBOXES[turn % _AHEAD]) for turn, piece in enumerate(summands)]
    return rooms + [piece for chunk in pieces[adding + 1 :] for piece in chunk]
