"""The communicator of real processes: messages over Gloo, one socket a pair of ranks.

Gloo's own send and receive do the moving. Around them: numbered contexts, so that communicators
don't mix; the ledger, so that a message that does not fit is refused; the board, so that a wait
has a name; and the trace.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import ConfigError
from dtlab.matching import Header, describe, describe_all
from dtlab.processes.board import ANYONE, COMPUTE, EPOCH, RUNNING
from dtlab.processes.endpoint import Endpoint
from dtlab.processes.lane import NOTHING, Fan, Lane, Way, is_plain, room_of, wire_of
from dtlab.processes.ledger import Announced, Anyone, announced
from dtlab.processes.messages import Message, framed, receiving
from dtlab.processes.post import Letters
from dtlab.processes.relay import relay
from dtlab.processes.shelf import Passing
from dtlab.processes.watch import Bell
from dtlab.reduction import combine_
from dtlab.relay import one_call, others

_SCRATCH_BYTES = 64 << 20  # keep no more than this
_TAG = 1 << 20  # below are the tags that learners use with torch.distributed itself


class GlooComm(Comm):
    """A group of ranks, each a process. `members[r]` is the rank r's number in the whole run."""

    def __init__(self, end: Endpoint, members: list[int], context: int = 0, visible: bool = True):
        self.end, self.members, self.context, self.visible = end, members, context, visible
        super().__init__(members.index(end.rank), len(members), end.device)
        self._on_cpu = end.device.type == "cpu"
        self.tag = _TAG + context
        self.sent = [0] * self.size  # messages posted so far, by peer
        self.received = [0] * self.size
        self._ways: dict[tuple[int, bool], Way] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._fans: dict[tuple[tuple[int, ...], tuple[int, ...]], Fan] = {}
        self.anyone = Anyone(end.board, end.rank, context) if end.board is not None else None
        self._headers: dict[Any, Announced] = {}
        self._scratch: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # memory, and a view of it
        self._bell = Bell()
        self._hidden: list[GlooComm] = []  # for `_agree`
        self.shared = Passing(self, end.shelf) if end.shelf is not None and self._on_cpu else None
        self.letters = Letters(self, end.post) if end.post is not None and self._on_cpu else None

    # ---- messages -------------------------------------------------------------------------------

    def post(self, *ops: Send | Recv) -> list[Work]:
        """Start all of `ops` together and return at once; wait for each with `Work.wait`."""
        for op in ops:
            self._check(op)
        # Receives first: a message that finds its buffer ready moves at once.
        works: list[Any] = [
            self._recv(op.x, op.src) if isinstance(op, Recv) else None for op in ops
        ]
        for place, op in enumerate(ops):
            if isinstance(op, Send):
                works[place] = self._send(op.x, op.dst)
        peers = tuple(dict.fromkeys([message.world for message in works]))
        for message in works:
            message.peers = peers
        return works

    def isend(self, x: Any, dst: int) -> Work:
        """As in `Comm`."""
        if not self._on_cpu:
            return super().isend(x, dst)
        self._check(Send(x, dst))
        return self._send(x, dst)

    def irecv(self, x: Any, src: int | None = None) -> Work:
        """As in `Comm`."""
        if not self._on_cpu:
            return super().irecv(x, src)
        self._check(Recv(x, src))
        return self._recv(x, src)

    def exchange(self, *ops: Send | Recv) -> None:
        """Post all of `ops` together, then wait for all of them."""
        into, out, srcs, dsts = [], [], [], []
        for op in ops:
            x, peer = op
            if peer.__class__ is not int or not is_plain(x) or not self._on_cpu:
                super().exchange(*ops)
                return
            if op.__class__ is Recv:
                into.append(x)
                srcs.append(peer)
            else:
                out.append(x)
                dsts.append(peer)
        if len(srcs) == len(dsts) == 1:
            self._lane(dsts[0], srcs[0]).exchange(out[0], into[0])
        elif ops:
            into += out
            headers = [self.header(x) for x in into]
            wires = [x if x.nbytes else NOTHING for x in into]
            self._fan(tuple(srcs), tuple(dsts)).move(
                into, headers, wires, sum([wire.nbytes for wire in wires])
            )

    def rows(self, leaving: torch.Tensor, arriving: torch.Tensor, members: range) -> None:
        """See `dtlab.relay.rows`."""
        if not (self._on_cpu and is_plain(leaving) and is_plain(arriving)):
            one_call(self, leaving, arriving, members)
            return
        into, out = list(arriving.unbind()), list(leaving.unbind())
        me, peers = members.index(self.rank), others(self.rank, members)
        room, own = into.pop(me), out.pop(me)
        if not peers:
            room.copy_(own)
            return
        xs = into[me:] + into[:me] + out[me:] + out[:me]  # in the order of `peers`
        headers = [self.header(room)] * len(peers) + [self.header(own)] * len(peers)
        wires = xs if own.nbytes else [NOTHING] * len(xs)
        nbytes = arriving.nbytes + leaving.nbytes
        self._fan(peers, peers).move(xs, headers, wires, nbytes, lambda: room.copy_(own))

    def send(self, x: Any, dst: int) -> None:
        """As in `Comm`; tensors that Gloo can take as they are go the short way, here and below."""
        if dst.__class__ is int and self._on_cpu and is_plain(x):
            self.way(dst, True).move(x)
        else:
            super().send(x, dst)

    def recv(self, x: Any, src: int | None = None) -> int:
        """As in `Comm`."""
        if src.__class__ is int and self._on_cpu and is_plain(x):
            assert src is not None
            self.way(src, False).move(x)
            return src
        return super().recv(x, src)

    def sendrecv(self, out: Any, dst: int, into: Any, src: int | None) -> None:
        """As in `Comm`."""
        ints = dst.__class__ is int is src.__class__  # else the long way says what is wrong
        if ints and self._on_cpu and is_plain(out) and is_plain(into):
            assert src is not None
            self._lane(dst, src).exchange(out, into)
        else:
            super().sendrecv(out, dst, into, src)

    relay, in_turn = relay, exchange  # see `dtlab.relay`

    def wait_any(self, works: Sequence[Work], timeout_s: float | None = None) -> Work | None:
        """As in `Comm`."""
        if not self._bell.wait_any(works, 1e9 if timeout_s is None else timeout_s):
            return None
        return next(work for work in works if work.arrived())

    def _lane(self, dst: int, src: int) -> Lane:
        lane = self._lanes.get((dst, src))
        if lane is None:
            lane = self._lanes[dst, src] = Lane(self, dst, src)
        return lane

    def _fan(self, srcs: tuple[int, ...], dsts: tuple[int, ...]) -> Fan:
        fan = self._fans.get((srcs, dsts))
        if fan is None:
            fan = self._fans[srcs, dsts] = Fan(self, srcs, dsts)
        return fan

    def way(self, peer: int, sends: bool) -> Way:
        """The short way to rank `peer`, or (not `sends`) from it."""
        way = self._ways.get((peer, sends))
        if way is None:
            way = self._ways[peer, sends] = Way(self, peer, sends)
        return way

    def _check(self, op: Send | Recv) -> None:
        x, peer = op
        if not (type(peer) is int and 0 <= peer < self.size and peer != self.rank):
            self._check_peer(peer, "send to" if isinstance(op, Send) else "receive from")
        if isinstance(x, torch.Tensor):
            self.check_tensor(x)
        elif isinstance(op, Recv) and not isinstance(x, list):
            raise ConfigError(
                f"rank {self.rank}: can't receive into a {type(x).__name__}; give a tensor, "
                f"a list that takes an object, or call recv_object"
            )

    def check_tensor(self, x: torch.Tensor) -> None:
        """Raise `ConfigError` unless `x` is dense and on this communicator's device."""
        if x.device != self.device:
            raise ConfigError(
                f"rank {self.rank}: the tensor is on {x.device}, this communicator works on "
                f"{self.device}; move it with x.to(comm.device)"
            )
        if x.layout is not torch.strided or x.is_quantized:
            raise ConfigError(
                f"rank {self.rank}: can't send or receive a {x.layout} tensor; make it dense"
            )

    def _send(self, x: Any, dst: int) -> Message:
        payload = None
        if isinstance(x, torch.Tensor):
            nbytes = x.nbytes
            wire = wire_of(x)
        else:
            wire, payload, nbytes, tag = framed(x, self.end.payload_tag)
        message = Message(self, True, dst, wire, None, nbytes)
        end, group = self.end, self.end.group
        with end.lock:
            message.number = self.way(dst, True).announce(self.header(x))
            message.posted_s = time.perf_counter()
            message.handles = (group.send([wire], message.world, self.tag),)
            if payload is not None:
                message.handles += (group.send([payload], message.world, tag),)
            end.posted(message)
        return message

    def _recv(self, x: Any, src: int | None) -> Message:
        nbytes, frame = 0, None
        if isinstance(x, list):
            wire, frame = self.end.frames.take()
        else:
            nbytes = x.nbytes
            wire = room_of(x)
        message = Message(self, False, ANYONE if src is None else src, wire, x, nbytes)
        message.frame = frame
        end, group = self.end, self.end.group
        with end.lock:
            if src is None:
                self._announce_recv_anyone(message, self.header(x))
                message.posted_s = time.perf_counter()
                message.handles = (receiving(group.recv_anysource, [wire], self.tag),)
            else:
                message.number = self.way(src, False).announce(self.header(x))
                message.posted_s = time.perf_counter()
                message.handles = (receiving(group.recv, [wire], message.world, self.tag),)
            end.posted(message)
        return message

    # ---- the ledger's numbers -------------------------------------------------------------------

    def header(self, x: Any) -> Announced:
        """What the ledger says of a message that carries `x`."""
        tensor = isinstance(x, torch.Tensor)
        key = (x.dtype, x.shape, self.label) if tensor else self.label
        return self._headers.get(key) or self._keep(key, describe(x, self.label))

    def header_of_all(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> Announced:
        """The same of several messages that go as one: vectors of these sizes."""
        key = (dtype, sizes, self.label)
        return self._headers.get(key) or self._keep(key, describe_all(dtype, sizes, self.label))

    def _keep(self, key: Any, header: Header) -> Announced:
        if len(self._headers) > 1000:
            self._headers.clear()
        announcement = self._headers[key] = announced(header)
        return announcement

    def _announce_recv_anyone(self, message: Message, header: Announced) -> None:
        """`message` is about to be received from whoever comes. Raises `ShapeMismatch`."""
        if self.anyone is not None:
            self.anyone.announce(message, header, zip(self.members, self.received, strict=True))

    def met(self, message: Message) -> None:
        """A receive from anyone has got its sender: count it as that one's."""
        with self.end.lock:
            message.peer = src = self.members.index(message.world)
            message.number = self.received[src]
            self.received[src] += 1
            if self.end.board and self.anyone is not None:
                self.anyone.met(message)  # before it is counted: see `Way.meet_anyone`
                self.end.board.set_count(
                    message.world, self.end.rank, True, self.context, self.received[src]
                )

    # ---- the rest of the page -------------------------------------------------------------------

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        """Mark the work done inside as a span of the trace; it takes what it takes."""
        self.end.say(COMPUTE, label)
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.end.span("compute", start_s, time.perf_counter(), label)
            self.end.say(RUNNING)

    def accumulate_(self, into: torch.Tensor, x: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        """into ← into op x, in place, as a span of the trace. Returns `into`."""
        if not self.end.traced:
            return combine_(into, x, op)
        start_s = time.perf_counter()
        combine_(into, x, op)
        self.end.span("reduce", start_s, time.perf_counter(), self.label)
        return into

    def scratch(self, like: torch.Tensor, use: str = "inbox", rows: int = 0) -> torch.Tensor:
        """As in `Comm`: the same memory for every call with the same `use`."""
        memory, last = self._scratch.get(use, (None, None))
        shape = (rows, *like.shape) if rows else like.shape
        if last is not None and last.shape == shape and last.dtype is like.dtype:
            return last
        wanted = like.nbytes * (rows or 1)
        if not (like.is_cpu and like.is_contiguous() and 0 < wanted <= _SCRATCH_BYTES):
            return super().scratch(like, use, rows)
        if memory is None or memory.nbytes < wanted:
            memory = torch.empty(wanted, dtype=torch.uint8)
        tensor = memory[:wanted].view(like.dtype).view(shape)
        self._scratch[use] = memory, tensor
        return tensor

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.end.start_s

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator can't leave its rank")

    def _agree(self, value: Any) -> list[Any]:
        """Everyone's `value`, by rank, through rank 0. On messages that no trace shows."""
        if not self._hidden:
            hidden = self._form(range(self.size), ("agree",))
            hidden.visible, hidden.label = False, "split"
            self._hidden.append(hidden)
        hidden = self._hidden[0]
        if self.rank:
            hidden.send(value, 0)
            values: list[Any] = hidden.recv_object(0)
            return values
        values = [value] + [hidden.recv_object(peer) for peer in range(1, self.size)]
        for peer in range(1, self.size):
            hidden.send(values, peer)
        return values

    def _form(self, ranks: Sequence[int], context: tuple[Any, ...]) -> GlooComm:
        return GlooComm(self.end, [self.members[rank] for rank in ranks], self._derived(context))

    def _derived(self, context: tuple[Any, ...]) -> int:
        key = repr((self.context, context)).encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) % EPOCH
        return self.context - self.context % EPOCH + number

    def labelled(self, label: str) -> GlooComm:
        named = super().labelled(label)
        named._ways, named._lanes, named._fans = {}, {}, {}
        return named

    def begin(self, fn: Any, *args: Any, **options: Any) -> Work:
        raise NotImplementedError
