"""What ranks have posted: messages, and the channels on which their two sides find each other."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import cloudpickle

from dtlab.comm import Work
from dtlab.simulator.network import Flow
from dtlab.simulator.strands import Errand, Strand
from dtlab.topology import Topology


class Message(Flow):
    """One message. Whichever side comes first makes it, the other side completes it.

    There are millions of them, so there is no `__init__`: each side fills in its own fields.
    """

    __slots__ = ("arrived", "channel", "into", "label", "left", "nbytes", "next", "order", "real",
                 "receiver", "sender", "sent_s", "source", "start_s", "wanted_label", "wanted_s",
                 "x")

    # The sender's side.
    channel: Channel
    x: Any  # a tensor or an `Envelope`; None: nobody has sent it yet
    nbytes: int
    real: bool  # False: a tensor without data, so there is nothing to copy
    label: str
    sent_s: float  # when it was posted
    left: bool  # the sender may go on
    sender: Strand | Errand | None  # whoever waits for that

    # The receiver's side.
    source: Channel | Mailbox  # where it looked for a sender, in vain
    into: Any  # a tensor or an `Inbox`; None: nobody has asked for it yet
    wanted_label: str
    wanted_s: float
    arrived: bool  # the receiver may go on
    receiver: Strand | Errand | None

    # Both.
    next: Message | None  # in a queue of messages that have one side only
    order: int  # of sending it; of asking for it, until somebody sends it
    start_s: float  # when it occupied its sender's port, before its latency

    def is_sent_by(self, rank: int) -> bool:
        """Is `rank`, which has a side of this message, the one that sends it?"""
        return self.x is not None and self.channel.src == rank


class Sending(Work):
    """The sender's end of a message to rank `dst` of its communicator."""

    __slots__ = ("_dst", "_strand", "message")

    def __init__(self, message: Message, strand: Strand, dst: int):
        self.message, self._strand, self._dst = message, strand, dst

    def wait(self) -> int:
        self._strand.waits_for = (self.message,)
        return self.finish()

    def cancel(self) -> None:
        pass

    def finish(self) -> int:
        """Wait, as one of several in `Strand.waits_for`."""
        if not self.message.left:
            self.message.sender = self._strand
            self._strand.pause()
        return self._dst


class Receiving(Work):
    """The receiver's end of a message."""

    __slots__ = ("_strand", "message")

    def __init__(self, message: Message, strand: Strand):
        self.message, self._strand = message, strand

    def wait(self) -> int:
        self._strand.waits_for = (self.message,)
        return self.finish()

    def cancel(self) -> None:
        pass

    def arrived(self) -> bool:
        return self.message.arrived

    def finish(self) -> int:
        """Wait, as one of several in `Strand.waits_for`."""
        if not self.message.arrived:
            self.message.receiver = self._strand
            self._strand.pause()
        return self.message.channel.peer


class Envelope:
    """An object on its way, pickled: looks like a tensor as far as a message is concerned."""

    __slots__ = ("nbytes", "pickled")
    dtype, ndim, shape, is_meta = "object", 0, (), False

    def __init__(self, x: Any):
        self.pickled: bytes = cloudpickle.dumps(x)
        self.nbytes = len(self.pickled)


class Inbox:
    """A list that takes an object out of its `Envelope`: the counterpart of `Tensor.copy_`."""

    __slots__ = ("objects",)
    dtype, ndim, shape, nbytes = "object", 0, (), -1  # how large it is, its sender knows

    def __init__(self, objects: list[Any]):
        self.objects = objects

    def copy_(self, envelope: Envelope) -> None:
        self.objects.append(pickle.loads(envelope.pickled))


class Queue:
    """Messages that have one side only, oldest first, each holding on to the next.

    Two references and no more, for there are as many queues as pairs of ranks.
    """

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first: Message | None = None
        self.last: Message | None = None

    def put(self, message: Message) -> None:
        """`message` is the newest."""
        message.next = None
        if self.first is None:
            self.first = message
        else:
            self.last.next = message  # type: ignore[union-attr]
        self.last = message

    def take(self) -> Message:
        """Take out the oldest; there is one."""
        message = self.first
        assert message is not None
        self.first = message.next
        return message


class Channel(Queue):
    """From one rank to another on one communicator: sends that wait for their receives, or
    receives that wait for their sends."""

    __slots__ = ("dst", "latency_s", "links", "mailbox", "peer", "shared", "src")

    def __init__(self, src: int, dst: int, peer: int, mailbox: Mailbox, topology: Topology):
        super().__init__()
        self.src, self.dst = src, dst  # in the numbering of the whole run
        self.peer = peer  # the sender, in the numbering of the communicator
        self.latency_s, self.links = topology.route(src, dst)
        self.mailbox = mailbox
        self.shared = mailbox.opened  # the receiver also takes from anyone
        mailbox.channels.append(self)

    def put_send(self, message: Message) -> None:
        """Nobody has asked for `message` yet."""
        self.put(message)
        if self.shared:
            self.mailbox.sends[message] = None

    def take_send(self) -> Message | None:
        """The oldest message that nobody has asked for."""
        if self.first is None or self.first.x is None:
            return None
        if self.shared:
            del self.mailbox.sends[self.first]
        return self.take()

    def take_recv(self) -> Message | None:
        """The oldest receive that a message of this channel may satisfy."""
        mine = self.first if self.first is not None and self.first.x is None else None
        anyone = self.mailbox.first if self.shared else None
        if anyone is not None and (mine is None or anyone.order < mine.order):
            return self.mailbox.take()
        return None if mine is None else self.take()


class Mailbox(Queue):
    """Where one rank of one communicator receives from anyone: the receives that wait."""

    __slots__ = ("channels", "opened", "sends")
    shared = True

    def __init__(self) -> None:
        super().__init__()
        self.channels: list[Channel] = []  # that lead here
        self.opened = False  # most never are: their owners always say from whom
        self.sends: OrderedDict[Message, None] = OrderedDict()  # if opened: not asked for, by age

    def open(self) -> Mailbox:
        """Before the first receive from anyone. Returns itself."""
        if not self.opened:
            self.opened = True
            for channel in self.channels:
                channel.shared = True
            pending = [message for channel in self.channels for message in _sends(channel)]
            self.sends.update(dict.fromkeys(sorted(pending, key=lambda m: m.order)))
        return self

    def take_send(self) -> Message | None:
        """The oldest message that nobody has asked for."""
        if not self.sends:
            return None
        message, _ = self.sends.popitem(last=False)
        return message.channel.take()


def _sends(channel: Channel) -> Iterator[Message]:
    """The sends that wait in `channel`."""
    message = channel.first
    while message is not None and message.x is not None:
        yield message
        message = message.next
