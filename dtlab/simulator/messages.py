"""The messages that ranks have posted, and the queues in which their two sides find each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

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

    There are millions of them, so there is no `__init__`: each side fills in its own fields.
    """

    __slots__ = ("arrived", "channel", "into", "label", "left", "nbytes", "next", "order", "real",
                 "receiver", "sender", "sent_s", "start_s", "wanted_s", "x")

    # The sender's side.
    x: Any  # a tensor or an `ObjectPayload`; None: it is not sent yet
    nbytes: int
    real: bool  # False: a tensor without data, so there is nothing to copy
    sent_s: float  # when it was posted
    left: bool  # the sender may go on
    sender: Strand  # the strand that posted it, or waits for that

    # The receiver's side.
    into: Any  # a tensor or an `ObjectBuffer`; None: it is not asked for yet
    wanted_s: float
    arrived: bool  # the receiver may go on
    receiver: Strand  # the strand that posted it, or waits for that

    # Both.
    channel: Any  # a `Channel`; a `ReceiveQueue` as long as it may come from anyone
    label: str  # of the side that came first; both must be equal
    next: PendingMessage | None  # in a queue of messages that have one side only
    order: int  # of sending it; of asking for it, as long as it is not sent
    start_s: float  # when it occupied its sender's port, before its latency

    def is_sent_by(self, rank: int) -> bool:
        """Is `rank`, which has a side of this message, the one that sends it?"""
        return self.x is not None and self.channel.src == rank


ANY_SOURCE = -1  # who sends what comes from anyone


class ObjectPayload:
    """An object, pickled. It has what a message needs to know of a tensor."""

    __slots__ = ("nbytes", "pickled")
    dtype, ndim, shape, is_meta = "object", 0, (), False

    def __init__(self, x: Any):
        try:
            self.pickled = dumps(x)
        except Exception as error:
            raise cannot_send(x, error) from None
        self.nbytes = len(self.pickled)


class ObjectBuffer:
    """A list that takes an object out of its `ObjectPayload`: the counterpart of `Tensor.copy_`."""

    __slots__ = ("_classes", "objects")
    dtype, ndim, shape, nbytes = "object", 0, (), -1  # only its sender knows its size

    def __init__(self, objects: list[Any]):
        self.objects = objects
        self._classes = CLASSES.get()  # its receiver's

    def copy_(self, payload: ObjectPayload) -> None:
        self.objects.append(loads(payload.pickled, self._classes))


class Queue:
    """Messages that have one side only, oldest first, each holding on to the next.

    There are as many queues as pairs of ranks, so they are small. closed: one of the two ranks has
    died, or has called `shrink`.
    """

    __slots__ = ("closed", "first", "last")

    def __init__(self) -> None:
        self.first: PendingMessage | None = None
        self.last: PendingMessage | None = None
        self.closed = False

    def put(self, message: PendingMessage) -> None:
        """`message` is the newest; it is lost if the queue is closed."""
        if self.closed:
            return
        message.next = None
        if self.first is None:
            self.first = message
        else:
            self.last.next = message  # type: ignore[union-attr]
        self.last = message

    def take(self) -> PendingMessage:
        """Take out the oldest; there is one."""
        message = self.first
        assert message is not None
        self.first = message.next
        return message

    def close(self) -> None:
        """Lose what waits here, and all that would wait here later."""
        self.first, self.closed = None, True

    def __iter__(self) -> Iterator[PendingMessage]:
        message = self.first
        while message is not None:
            following = message.next
            yield message
            message = following


class Channel(Queue):
    """The sends from one rank to another in one context that wait for their receives, or the
    receives that wait for their sends."""

    __slots__ = ("dst", "from_anyone", "latency_s", "links", "peer", "shared", "src")

    def __init__(self, src: int, dst: int, peer: int, from_anyone: ReceiveQueue,
                 topology: Topology):
        super().__init__()
        self.src, self.dst = src, dst  # in the numbering of the whole run
        self.peer = peer  # the sender, in the numbering of the communicator
        self.latency_s, self.links = topology.route(src, dst)
        self.from_anyone = from_anyone
        self.shared = from_anyone.opened  # the receiver also takes from anyone
        from_anyone.channels.append(self)

    def put_send(self, message: PendingMessage) -> None:
        """`message` is not asked for yet."""
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
        """The oldest receive that a message of this channel may satisfy. (From anyone and from this
        sender none wait together.)"""
        if self.first is not None and self.first.x is None:
            return self.take()
        return self.from_anyone.take() if self.from_anyone.first is not None else None


class ReceiveQueue(Queue):
    """The receives from anyone of one rank in one context that wait for their sends.

    Once it is closed, receives still find what has been sent by ranks that live.
    """

    __slots__ = ("anyone", "channels", "named", "opened", "ranks", "sends")
    shared = True
    src = dst = ANY_SOURCE

    def __init__(self) -> None:
        super().__init__()
        self.channels: list[Channel] = []  # that lead here
        self.opened = False  # most never are, for their ranks name the sender
        self.ranks: Sequence[int] = ()  # if opened: of the communicator
        # Receives that nobody has waited for: what those from anyone are received into; how many
        # are from named ranks.
        self.anyone: list[Header] = []
        self.named = 0
        self.sends: OrderedDict[PendingMessage, None] = OrderedDict()  # if opened: not asked for

    @property
    def from_anyone(self) -> ReceiveQueue:
        """This queue, as a `Channel` has it."""
        return self

    def add(self, anyone: Header | None) -> None:
        """A receive is under way: from anyone, into what this says, or from a named rank."""
        if anyone is None:
            self.named += 1
        else:
            self.anyone.append(anyone)

    def discard(self, anyone: Header | None) -> None:
        """Forget a receive that is waited for."""
        if anyone is None:
            self.named -= 1
        else:
            self.anyone.remove(anyone)

    def open(self, ranks: Sequence[int]) -> ReceiveQueue:
        """Prepare for the first receive from anyone of these ranks. Returns itself."""
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

    def __init__(self, topology: Topology, slower_s: Mapping[int, float]):
        self._topology = topology
        self._slower_s = slower_s  # latency of a link, more than the topology says
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
            for link, slower_s in self._slower_s.items():
                if link in channel.links:
                    channel.latency_s += slower_s
            if self.closed & {(generation(context), rank) for rank in (src, dst)}:
                channel.close()
        return self._channels[key]

    def receive_queue(self, context: tuple[Any, ...], dst: int) -> ReceiveQueue:
        """Return where `dst` receives from anyone in a context."""
        return self._queues.setdefault((context, dst), ReceiveQueue())

    def close(self, number: int, rank: int) -> None:
        """Nothing gets through any more between `rank` and others on communicators of the
        number-th generation."""
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
        """The latency of `link` has grown."""
        for channel in self._channels.values():
            if link in channel.links:
                channel.latency_s += seconds


def generation(context: tuple[Any, ...]) -> int:
    """Count the calls of `shrink` before a communicator was made."""
    return context[0] if context and isinstance(context[0], int) else 0


def put(into: Any, x: Any) -> None:
    """Copy `x` into its place."""
    if isinstance(into, torch.Tensor) and into.is_inference():
        with torch.inference_mode():  # where else torch refuses to change it
            into.copy_(x)
    elif type(into) in (torch.Tensor, ObjectBuffer):
        into.copy_(x)
    else:  # a subclass, of which the sender has one of its own: torch refuses to mix them
        with torch._C.DisableTorchFunctionSubclass():
            into.copy_(x)


Peer = TypeVar("Peer", int, int | None)
Found = TypeVar("Found")


class LazyDict(dict[Peer, Found]):
    """A dictionary by peer; values are made at the first use."""

    def __init__(self, make: Callable[[Peer], Found]):
        super().__init__()
        self._make: Callable[[Peer], Found] = make

    def __missing__(self, peer: Peer) -> Found:
        found = self[peer] = self._make(peer)
        return found
