"""What ranks have posted: sends, receives, and the channels on which they find each other."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from dtlab.comm import Work
from dtlab.simulator.network import Flow
from dtlab.simulator.strands import Strand
from dtlab.topology import Topology


class Side(Work):
    """One end of a message: what a rank posted, and whether it is done."""

    __slots__ = ("done", "label", "nbytes", "order", "peer", "posted_s", "strand", "waited", "x")
    verb = "?"

    peer: int | None  # in the numbering of the communicator it was posted on; None: anyone
    order: int  # of posting, among sides that found no partner at once

    def wait(self) -> int:
        if not self.done:
            self.waited = True
            self.strand.doing = self
            self.strand.pause()
        return self.peer  # type: ignore[return-value]  # whoever was matched has filled it in


class Incoming(Side):
    """A receive. `x` is the tensor to fill, or the list to append an object to."""

    __slots__ = ()
    verb = "recv"

    def __init__(self, x: Any, nbytes: int, peer: int | None, label: str, posted_s: float,
                 strand: Strand):
        self.x = x
        self.nbytes = nbytes  # −1: an object, whose sender knows how large it is
        self.peer = peer
        self.label = label
        self.posted_s = posted_s
        self.strand = strand
        self.done = self.waited = False


class Outgoing(Side, Flow):
    """A send; once it is matched, also the flow of its bytes. `x` is a tensor or a pickle."""

    __slots__ = ("channel", "end_s", "links", "matched_s", "moving", "rate_Bps", "recv",
                 "remaining", "since_s")
    verb = "send"

    matched_s: float

    def __init__(self, x: Any, nbytes: int, peer: int, label: str, posted_s: float,
                 strand: Strand, channel: Channel):
        self.x = x
        self.remaining = self.nbytes = nbytes
        self.peer = peer
        self.label = label
        self.posted_s = posted_s
        self.strand = strand
        self.done = self.waited = self.moving = False
        self.channel = channel
        self.links = channel.links
        self.rate_Bps = 0.0
        self.end_s = -1.0
        self.recv: Incoming | None = None

    @property
    def arrived(self) -> bool:
        """All of its bytes are at the receiver's."""
        return self.moving and self.end_s < 0


class Mailbox:
    """Where one rank of one communicator receives: from one other, or from anyone."""

    __slots__ = ("channels", "from_anyone", "sends")

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.from_anyone: deque[Incoming] = deque()
        # Sends that nobody has received yet, oldest first. Kept from the first receive from
        # anyone on: most ranks never make one.
        self.sends: OrderedDict[Outgoing, None] | None = None

    def oldest_sends(self) -> OrderedDict[Outgoing, None]:
        """`sends`, set up when first asked for."""
        if self.sends is None:
            pending = [send for channel in self.channels for send in channel.sends]
            self.sends = OrderedDict.fromkeys(sorted(pending, key=lambda send: send.order))
        return self.sends


class Channel:
    """What is posted from one rank to another on one communicator, and not yet matched."""

    __slots__ = ("dst", "latency_s", "links", "mailbox", "peer", "recvs", "sends", "src")

    def __init__(self, src: int, dst: int, peer: int, mailbox: Mailbox, topology: Topology):
        self.src, self.dst = src, dst  # in the numbering of the whole run
        self.peer = peer  # the sender, in the numbering of the communicator
        self.latency_s, self.links = topology.route(src, dst)
        self.mailbox = mailbox
        mailbox.channels.append(self)
        self.sends: deque[Outgoing] = deque()
        self.recvs: deque[Incoming] = deque()
