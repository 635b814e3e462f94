"""The communicator of real processes, composed of its layers.

Every message passes the check that it fits (`match_check`), the transport that moves it
(`transport`), the status, which says what the rank waits for (`status_writer`), and the recorder of
the trace (`recorder`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from dtlab.checks import check_amount, check_wait, no_operation
from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import ConfigError
from dtlab.processes.endpoint import ProcessEndpoint
from dtlab.processes.match_check import CheckedChannel, EncodedHeader, decoded, encoded
from dtlab.processes.message import TransportMessage
from dtlab.processes.posted import PostedMessage
from dtlab.processes.shared_status import COMPUTE, EXCHANGE, RECV, RUNNING, SEND
from dtlab.processes.store import JOINING
from dtlab.processes.streams import BegunWork, Stream
from dtlab.processes.survivors import survivors_key
from dtlab.processes.transport import ANY_SOURCE, Operation, Transport, TransportHandle
from dtlab.ranks.matching import check_sources, describe
from dtlab.ranks.overlap import check_overlap
from dtlab.reduction import check_receives, combine_, not_dense
from dtlab.tracebacks import calling_place

_FIRST_TAG, _TAGS = 1 << 20, 1 << 30  # below are those that learners use with torch.distributed


class ProcessComm(Comm):
    """A group of ranks, each a process. `members[r]` is rank r's number in the whole run."""

    on_host = True  # see `message.payload_of`

    def __init__(self, end: ProcessEndpoint, members: Sequence[int], context: tuple[Any, ...],
                 visible: bool = True):
        super().__init__(members.index(end.rank), len(members), end.device)
        self.endpoint, self.members, self.context, self.visible = end, members, context, visible
        self.transport: Transport = end.transport
        self.tag = tag_of(context)
        self._check = end.context_check(self.tag)
        self._index = self._check.index or 0 if self._check is not None else 0
        self._channels: dict[tuple[int, bool], CheckedChannel] = {}
        self._from_anyone: list[TransportMessage] = []  # receives that nobody has waited for
        self._headers: dict[Any, EncodedHeader] = {}
        self._hidden: list[ProcessComm] = []  # for `_all_gather_objects`
        self._streams: list[tuple[Stream, ProcessComm]] = []

    # ---- messages -------------------------------------------------------------------------------

    def post(self, *ops: Send | Recv) -> list[Work]:
        check_overlap(self, ops, self.endpoint.posted_extents())
        messages = [self._message(op) for op in ops]
        self._start(messages)
        works: list[Work] = [PostedMessage(self.endpoint, message, self._finish,
                                           self.in_collective) for message in messages]
        self.endpoint.posted.update(dict.fromkeys(works, calling_place()))
        return works

    def exchange(self, *ops: Send | Recv) -> None:
        check_overlap(self, ops, self.endpoint.posted_extents())
        self._finish(self._start([self._message(op) for op in ops]))

    def send(self, x: Any, dst: int) -> None:
        self.exchange(Send(x, dst))

    def recv(self, x: Any, src: int | None = None) -> int:
        check_overlap(self, [Recv(x, src)], self.endpoint.posted_extents())
        messages = self._start([self._message(Recv(x, src))])
        self._finish(messages)
        return messages[0].peer

    def wait_any(self, works: Sequence[Work], timeout_s: float | None = None) -> Work | None:
        """As in `Comm`. Gloo can't test a handle, and closes all connections of the process if a
        wait times out. So a thread waits for each message."""
        check_wait(self.rank, works, Work, timeout_s)
        futures: list[Future[Any]] = [work.as_future() for work in works]  # type: ignore[attr-defined]
        begun_s, writer = time.perf_counter(), self.endpoint.writer
        if not any(future.done() for future in futures):
            writer.waits_for_any([work.message.awaited() for work in works
                                  if isinstance(work, PostedMessage)], self.label,
                                 ends=timeout_s is not None)
            wait(futures or [Future()], timeout_s, FIRST_COMPLETED)  # of none, wait for the limit
            writer.runs()
            self.endpoint.recorder.add_wait(begun_s, self.label, writer.number)
        for work, future in zip(works, futures, strict=True):
            if future.done():
                if future.exception() is None:
                    work.wait()
                return work
        return None

    def _message(self, op: Send | Recv) -> TransportMessage:
        """Check `op` and return this side of its message, not posted yet."""
        if op.__class__ not in (Send, Recv):
            raise no_operation(self.rank, op)
        x, peer = op
        sends = op.__class__ is Send
        if isinstance(x, torch.Tensor):
            self._check_tensor(x)
            if not sends:
                check_receives(self.rank, x)
        elif not sends and not isinstance(x, list):
            raise ConfigError(f"rank {self.rank}: can't receive into a {type(x).__name__}; give a "
                              f"tensor, a list that takes an object, or call recv_object")
        header = self._header(x)
        if peer is None and not sends:
            return TransportMessage(False, x, ANY_SOURCE, ANY_SOURCE, self.tag, header, None,
                                    self.on_host)
        channel = self._channel(peer, sends)
        world = channel.dst if sends else channel.src
        return TransportMessage(sends, x, int(peer), world, self.tag, header,  # type: ignore[arg-type]
                                channel, self.on_host)

    def _start(self, messages: list[TransportMessage]) -> list[TransportMessage]:
        """Post all `messages` together, receives first. Returns them in the order of posting, in
        which to wait for them."""
        ordered = sorted(messages, key=attrgetter("sends"))
        self.endpoint.check_not_shrunk(self.context)
        with self.endpoint.lock:
            self._announce(ordered)
            posted_s = time.perf_counter()
            handles = self._move([message.operation for message in ordered])
            for message, handle in zip(ordered, handles, strict=True):
                message.posted_s = posted_s
                message.handle = self.endpoint.watched(handle, message, self.members)
                if message.rest is not None:
                    rest_handle = self.endpoint.transport.start([message.rest])[0]
                    message.rest_handle = self.endpoint.watched(rest_handle, message, self.members)
        return ordered

    def _move(self, operations: list[Operation]) -> Sequence[TransportHandle]:
        """Start operations. Returns their handles."""
        return self.transport.start(operations)

    def _announce(self, messages: list[TransportMessage]) -> None:
        """Number the messages and check that they fit. Raises `ShapeMismatch`."""
        self._check_sources([message for message in messages if not message.sends])
        announced = []
        try:
            for message in messages:
                message.context = self._index
                announced.append(message)
                if message.channel is not None:
                    message.number = message.channel.announce(message.header)
                    continue
                message.number = len(self._from_anyone)
                self._from_anyone.append(message)
                if self._check is not None:
                    taken = [(self.members[peer], self._channel(peer, False).posted)
                             for peer in range(self.size) if peer != self.rank]
                    self._check.add_wildcard(len(self._from_anyone), message.header, taken)
        except Exception:
            for message in reversed(announced):
                if message.channel is None:
                    self._forget(message)
                elif message.number >= 0:
                    message.channel.withdraw()
            raise

    def _check_sources(self, receives: list[TransportMessage]) -> None:
        """Call `check_sources` for the receives under way and these new ones."""
        anyone = [*self._from_anyone, *(m for m in receives if m.channel is None)]
        if anyone:
            others = [work.message for work in (*self.endpoint.posted, *self.endpoint.cancelled)]
            named = any(m.channel is not None and not m.sends and m.tag == self.tag
                        for m in (*others, *receives))
            check_sources(self.rank, named, [
                decoded(m.header.text) if m.header.text else describe(m.x) for m in anyone])

    def _forget(self, receive: TransportMessage) -> None:
        """Remove a receive from anyone from those under way, and renumber the others."""
        self._from_anyone.remove(receive)
        for number, other in enumerate(self._from_anyone):
            other.number = number
        if self._check is not None:
            self._check.set_wildcards(len(self._from_anyone))

    def _finish(self, messages: Sequence[TransportMessage]) -> None:
        """Wait for all `messages`, and deliver what was received."""
        writer, recorder = self.endpoint.writer, self.endpoint.recorder
        peers = tuple(dict.fromkeys([message.world for message in messages]))
        directions = {message.sends for message in messages}
        doing = EXCHANGE if len(directions) > 1 else SEND if True in directions else RECV
        begun_s, label, nbytes = time.perf_counter(), self.label, 0
        try:
            for message in messages:
                writer.waits(doing, peers, label, self._index, message.nbytes, message.sends,
                             message.world, message.number)
                message.handle.wait()
                if message.rest is not None:
                    message.rest_handle.wait()
                if not message.sends:
                    if message.peer == ANY_SOURCE:
                        self._met(message)
                    message.deliver(self.endpoint.transport)
                message.done_s = time.perf_counter()
                nbytes += message.nbytes
        except RuntimeError as error:
            self.endpoint.unfinished += [m for m in messages if m is not message and not m.done_s]
            failure = self.endpoint.connection_error(error, self.rank, message.peer)
            raise failure from failure.__cause__
        finally:
            writer.runs()
            self.transport.release([message.handle for message in messages], nbytes)
        if recorder.enabled and self.visible:
            recorder.messages += [(m.sends, m.world, self.tag, m.nbytes, m.posted_s, m.done_s,
                                   label, writer.number) for m in messages]
            recorder.add_wait(begun_s, label, writer.number)

    def _met(self, message: TransportMessage) -> None:
        """Set the sender of a receive from anyone, and count its message."""
        message.world = message.handle._source_rank()  # type: ignore[attr-defined]
        message.peer = self.members.index(message.world)
        with self.endpoint.lock:
            self._forget(message)  # before it is counted: see `CheckedChannel`
            message.number = self._channel(message.peer, False).count(message.header)

    def _channel(self, peer: Any, sends: bool) -> CheckedChannel:
        channel = self._channels.get((peer, sends)) if peer.__class__ is int else None
        if channel is None:
            self._check_peer(peer, "send to" if sends else "receive from")
            me, other = self.endpoint.rank, self.members[peer]
            src, dst = (me, other) if sends else (other, me)
            channel = CheckedChannel(self._check, src, dst, not sends)
            channel = self._channels.setdefault((int(peer), sends), channel)
        return channel

    def _header(self, x: Any) -> EncodedHeader:
        """Encode, for the match check, the header of a message that carries `x`."""
        key = (x.dtype, x.shape, self.label) if isinstance(x, torch.Tensor) else self.label
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) > 1000:
                self._headers.clear()
            header = self._headers[key] = encoded(describe(x, self.label))
        return header

    def _check_tensor(self, x: torch.Tensor) -> None:
        if x.is_meta:
            raise ConfigError(f"rank {self.rank}: a tensor on the device meta has no data to send: "
                              f"make its module on {self.device}, or fill what "
                              f"module.to_empty(device=comm.device) makes")
        if x.device != self.device:
            raise ConfigError(f"rank {self.rank}: the tensor is on {x.device}, this communicator "
                              f"works on {self.device}; move it with x.to(comm.device)")
        if kind := not_dense(x):
            raise ConfigError(f"rank {self.rank}: can't send or receive {kind}; make it dense")

    # ---- work, time, groups ---------------------------------------------------------------------

    @contextmanager
    def compute(self, label: str, seconds: float = 0.0) -> Iterator[None]:
        """Mark the work done inside as a span of the trace; it takes what it takes."""
        check_amount(f"rank {self.rank}: seconds of compute({label!r})", seconds)
        writer = self.endpoint.writer
        writer.does(COMPUTE, label)
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.endpoint.recorder.add_span("compute", start_s, label, writer.number)
            writer.does(RUNNING)

    def accumulate_(self, into: torch.Tensor, x: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        """into ← into op x, in place, as a span of the trace. Returns `into`."""
        start_s = time.perf_counter()
        combine_(into, x, op)
        self.endpoint.recorder.add_span("reduce", start_s, self.label, self.endpoint.writer.number)
        return into

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.endpoint.start_s

    def begin(self, fn: Callable[..., Any], *args: Any, **options: Any) -> BegunWork:
        """As in `Comm`: on a thread of its own."""
        if not callable(fn):
            raise ConfigError(f"rank {self.rank}: begin takes a function of a communicator, "
                              f"not {fn!r}")
        if not self._streams:
            comm = self._new_group(range(self.size), ("stream",))
            self._streams.append((self._new_stream(), comm))  # type: ignore[arg-type]
        stream, comm = self._streams[0]
        if self.label:
            comm = comm.labelled(self.label)
        return stream.begin(lambda: fn(comm, *args, **options),
                            getattr(fn, "__name__", type(fn).__name__), calling_place())

    def _new_stream(self) -> Stream:
        return Stream(self.endpoint)

    def _all_gather_objects(self, value: Any) -> list[Any]:
        """As in `Comm`: through rank 0, by messages that are not traced."""
        if not self._hidden:
            context = (*self.context, "agree")
            self._hidden.append(ProcessComm(self.endpoint, self.members, context, visible=False))
        hidden = self._hidden[0].labelled(self.label or "split")
        if self.rank:
            hidden.send(value, 0)
            return list(hidden.recv_object(0))
        values = [value] + [hidden.recv_object(peer) for peer in range(1, self.size)]
        for peer in range(1, self.size):
            hidden.send(values, peer)
        return values

    def shrink(self) -> ProcessComm:
        if self.endpoint.store is None:
            raise ConfigError(f"rank {self.rank}: torchrun can't shrink a communicator: it stops "
                              f"all ranks after a death, and starts them anew: --max-restarts")
        if self.endpoint.in_session:
            raise ConfigError(f"rank {self.rank}: a session can't shrink a communicator, for a "
                              f"death ends all its ranks; call dtlab.run(…, may_die=…)")
        if type(self) is not ProcessComm or len(self.context) > 1:
            super().shrink()
        number, ranks = self.endpoint.shrink()
        return ProcessComm(self.endpoint, ranks, (survivors_key(number),))

    def joining(self) -> bool:
        return self.endpoint.store is not None and self.endpoint.store.check([JOINING])

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return tuple(self.members)

    def _make_group(self, ranks: Sequence[int], context: tuple[Any, ...]) -> ProcessComm:
        members = [self.members[rank] for rank in ranks]
        return type(self)(self.endpoint, members, (*self.context, *context))


def tag_of(context: tuple[Any, ...]) -> int:
    """The tag of a context's messages: the same on all ranks, another one for each context."""
    digest = hashlib.blake2b(repr(context).encode(), digest_size=8).digest()
    return _FIRST_TAG + int.from_bytes(digest) % (_TAGS - _FIRST_TAG)
