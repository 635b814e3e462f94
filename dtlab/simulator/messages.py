"""The messages that ranks have posted, and the queues in which sends and receives are matched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dtlab.ranks.matching import Header
from dtlab.ranks.serialization import cannot_send
from dtlab.simulator.network import Flow
from dtlab.simulator.rank_classes import CLASSES, dumps, loads
from dtlab.simulator.strands import Strand
from dtlab.topology import Topology


class PendingMessage(Flow):
    """One message, from its first side's post to its arrival. The side that posts first makes it,
    the other side completes it.

    There is no `__init__`, for speed: each side sets its own fields.
    """

    __slots__ = ("channel", "into", "label", "nbytes", "next", "order", "real", "receiver",
                 "recv_done", "send_done", "sender", "sent_s", "start_s", "wanted_s", "x")

    # The sender's side.
    x: Any  # a tensor or an `ObjectPayload`; None: the send is not posted
    nbytes: int
    real: bool  # False: a tensor without data, so there is nothing to copy
    sent_s: float  # when the send was posted
    send_done: bool  # the send is complete: the sender may go on
    sender: Strand  # the strand that posted it, or waits for that

    # The receiver's side.
    into: Any  # a tensor or an `ObjectBuffer`; None: the receive is not posted
    wanted_s: float  # when the receive was posted
    recv_done: bool  # the receive is complete: the receiver may go on
    receiver: Strand  # the strand that posted it, or waits for that

    # Both.
    channel: Any  # a `Channel`; a `ReceiveQueue` as long as it may come from anyone
    label: str  # of the side that was posted first; both must be equal
    next: PendingMessage | None  # in a `Queue`
    order: int  # of the send; of the receive until the send is posted
    start_s: float  # when it began to occupy its sender's port

    def is_sent_by(self, rank: int) -> bool:
        """Is `rank`, one of the two ranks, the sender?"""
        return self.x is not None and self.channel.src == rank


ANY_SOURCE = -1


class ObjectPayload:
    """A pickled object, with those attributes of a tensor that the engine reads."""

    __slots__ = ("nbytes", "pickled")
    dtype, ndim, shape, is_meta = "object", 0, (), False

    def __init__(self, x: Any):
        try:
            self.pickled = dumps(x)
        except Exception as error:
            raise cannot_send(x, error) from None
        self.nbytes = len(self.pickled)


class ObjectBuffer:
    """A list to which a received object is appended, with the attributes of a tensor."""

    __slots__ = ("_classes", "objects")
    dtype, ndim, shape, nbytes = "object", 0, (), -1  # only its sender knows its size

    def __init__(self, objects: list[Any]):
        self.objects = objects
        self._classes = CLASSES.get()  # the receiver's

    def copy_(self, payload: ObjectPayload) -> None:
        self.objects.append(loads(payload.pickled, self._classes))


class Queue:
    """A linked list of messages of which one side is posted, oldest first.

    closed: one of the two ranks has died, or has called `shrink`.
    """

    __slots__ = ("closed", "first", "last")

    def __init__(self) -> None:
        self.first: PendingMessage | None = None
        self.last: PendingMessage | None = None
        self.closed = False

    def put(self, message: PendingMessage) -> None:
        """Append `message`. A closed queue drops it."""
        if self.closed:
            return
        message.next = None
        if self.first is None:
            self.first = message
        else:
            self.last.next = message  # type: ignore[union-attr]
        self.last = message

    def take(self) -> PendingMessage:
        """Remove and return the oldest message; there must be one."""
        message = self.first
        assert message is not None
        self.first = message.next
        return message

    def close(self) -> None:
        """Drop all messages, and those that `put` is given later."""
        self.first, self.closed = None, True

    def __iter__(self) -> Iterator[PendingMessage]:
        message = self.first
        while message is not None:
            following = message.next
            yield message
            message = following


class Channel(Queue):
    """The unmatched sends, or the unmatched receives, from one rank to another in one context."""

    __slots__ = ("dst", "from_anyone", "latency_s", "links", "peer", "shared", "src")

    def __init__(self, src: int, dst: int, peer: int, from_anyone: ReceiveQueue,
                 topology: Topology):
        super().__init__()
        self.src, self.dst = src, dst  # in the numbering of the whole run
        self.peer = peer  # the sender, in the numbering of the communicator
        self.latency_s, self.links = topology.route(src, dst)
        self.from_anyone = from_anyone
        self.shared = from_anyone.opened  # the receiver has also received from anyone
        from_anyone.channels.append(self)

    def put_send(self, message: PendingMessage) -> None:
        """Append `message`, whose receive is not posted."""
        self.put(message)
        if self.shared and not self.closed:
            self.from_anyone.sends[message] = None

    def take_send(self) -> PendingMessage | None:
        """The oldest message that is not asked for."""
        if self.first is None or self.first.x is None:
            return None
        if self.shared:
            del self.from_anyone.sends[self.first]
        return self.take()

    def take_recv(self) -> PendingMessage | None:
        """The oldest receive that a send on this channel may match. Receives from anyone and from
        this sender never wait together."""
        if self.first is not None and self.first.x is None:
            return self.take()
        return self.from_anyone.take() if self.from_anyone.first is not None else None


class ReceiveQueue(Queue):
    """The unmatched receives from anyone of one rank in one context.

    Once the queue is closed, receives still match sends of living ranks.
    """

    __slots__ = ("anyone", "channels", "named", "opened", "ranks", "sends")
    shared = True
    src = dst = ANY_SOURCE

    def __init__(self) -> None:
        super().__init__()
        self.channels: list[Channel] = []  # to this rank
        self.opened = False  # has the rank received from anyone?
        self.ranks: Sequence[int] = ()  # of the communicator, once opened
        self.anyone: list[Header] = []  # of the unwaited receives from anyone
        self.named = 0  # the number of unwaited receives from named ranks
        self.sends: OrderedDict[PendingMessage, None] = OrderedDict()  # unmatched, once opened

    @property
    def from_anyone(self) -> ReceiveQueue:
        """This queue itself: a `Channel` has the same attribute."""
        return self

    def add(self, anyone: Header | None) -> None:
        """Count a receive that is posted: from anyone, with this header, or (None) from a rank."""
        if anyone is None:
            self.named += 1
        else:
            self.anyone.append(anyone)

    def discard(self, anyone: Header | None) -> None:
        """Forget a receive that the rank has waited for."""
        if anyone is None:
            self.named -= 1
        else:
            self.anyone.remove(anyone)

    def open(self, ranks: Sequence[int]) -> ReceiveQueue:
        """Collect the channels' unmatched sends, for the first receive from anyone."""
        if not self.opened:
            self.opened, self.ranks = True, ranks
            for channel in self.channels:
                channel.shared = True
            sends = [m for channel in self.channels for m in channel if m.x is not None]
            self.sends.update(dict.fromkeys(sorted(sends, key=lambda m: m.order)))
        return self

    def take_send(self) -> PendingMessage | None:
        """The oldest message that is not asked for."""
        if not self.sends:
            return None
        message, _ = self.sends.popitem(last=False)
        message.channel.take()
        return message


class Channels:
    """All channels of a run."""

    def __init__(self, topology: Topology, extra_latency_s: Mapping[int, float]):
        self._topology = topology
        self._slower_s = extra_latency_s  # by link: see `Changes`
        self._channels: dict[tuple[Any, int, int], Channel] = {}
        self._queues: dict[tuple[Any, int], ReceiveQueue] = {}
        self.closed: set[tuple[int, int]] = set()  # (generation, rank): see `close`

    def get(self, context: tuple[Any, ...], src: int, dst: int, peer: int) -> Channel:
        """The channel from `src` to `dst` (ranks of the run) in a context, in which the sender is
        rank `peer`."""
        key = (context, src, dst)
        if key not in self._channels:
            from_anyone = self.receive_queue(context, dst)
            channel = self._channels[key] = Channel(src, dst, peer, from_anyone, self._topology)
            for link, extra_latency_s in self._slower_s.items():
                if link in channel.links:
                    channel.latency_s += extra_latency_s
            if self.closed & {(generation(context), rank) for rank in (src, dst)}:
                channel.close()
        return self._channels[key]

    def receive_queue(self, context: tuple[Any, ...], dst: int) -> ReceiveQueue:
        """The queue in which `dst` receives from anyone in a context."""
        return self._queues.setdefault((context, dst), ReceiveQueue())

    def close(self, number: int, rank: int) -> None:
        """Close the channels between `rank` and others in generation `number`."""
        self.closed.add((number, rank))
        for (context, src, dst), channel in self._channels.items():
            if generation(context) == number and rank in (src, dst):
                for message in channel:
                    channel.from_anyone.sends.pop(message, None)
                channel.close()
        for (context, _), queue in self._queues.items():
            if generation(context) == number and rank in queue.ranks:
                queue.close()

    def slow_down(self, link: int, seconds: float) -> None:
        """The latency of `link` has grown by `seconds`."""
        for channel in self._channels.values():
            if link in channel.links:
                channel.latency_s += seconds


def generation(context: tuple[Any, ...]) -> int:
    """Return the generation of a context: the number of shrinks before it."""
    return context[0] if context and isinstance(context[0], int) else 0


def put(into: Any, x: Any) -> None:
    """Copy `x` into the tensor or `ObjectBuffer` `into`."""
    if isinstance(into, torch.Tensor) and into.is_inference():
        with torch.inference_mode():  # elsewhere torch refuses to change it
            into.copy_(x)
    elif type(into) in (torch.Tensor, ObjectBuffer):
        into.copy_(x)
    else:  # torch refuses to mix the sender's and the receiver's own subclasses
        with torch._C.DisableTorchFunctionSubclass():
            into.copy_(x)
