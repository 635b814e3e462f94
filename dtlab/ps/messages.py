"""Messages between the nodes of a parameter server: requests, replies, and what servers tell each
other.

A message is a *header*, a small object, and its *payload*: flat tensors, which are never pickled.
Header and payload are posted together, and no node waits for its sends, so two nodes that write to
each other at the same time don't block. From each peer one receive is always pending: payloads
of several workers arrive side by side, and a peer that dies or is cut off holds up no other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from dtlab.comm import Comm, Recv, Send, Work
from dtlab.errors import RankDied
from dtlab.ps.packing import Size, dtype_name

MOST_SENT = 100  # messages to one peer that are kept, though they have moved
Buffers = Sequence[torch.Tensor | None]  # where a payload is received into; None: fresh memory


class PayloadHeader(NamedTuple):
    """The header of a payload. Sent as a plain tuple, which pickles to fewer bytes."""

    received: int  # messages that I have received from you, so that you may reuse their memory
    sizes: tuple[tuple[str, int], ...]  # dtype and elements of each tensor of the payload
    body: tuple[Any, ...]  # what is asked or answered, and its arguments


class ReceivedMessage(NamedTuple):
    """A message that is here as a whole."""

    src: int
    body: tuple[Any, ...]
    payload: list[torch.Tensor]


class _Pending:
    """The receive of the next message from one peer: first its header, then its payload."""

    def __init__(self, comm: Comm, src: int, owed: str):
        self.src = src
        self.header: list[Any] = []
        self.works: deque[Work] = deque([comm.irecv(self.header, src)])
        self.works[0].owed = owed
        self.message: ReceivedMessage | None = None  # once the header is here


class Endpoint:
    """One node's end of its connections to `peers`.

    may_die: peers whose messages end when they die, and `dead` names them. The death of any other
    peer raises `RankDied`.
    buffers: (sender, body, sizes) → where each tensor of the payload shall go.
    """

    answers = True  # see `server_state.Outbox`

    def __init__(self, comm: Comm, peers: Iterable[int], may_die: Collection[int] = ()):
        self.comm, self.may_die = comm, may_die
        self.dead: set[int] = set()  # peers whose connection has broken
        self.received_bytes = self.sent_bytes = 0  # of payloads
        self.owed = ""  # the call for which peers wait: an error names it if the rank forgets it
        self.buffers: Callable[[int, tuple[Any, ...], Sequence[Size]], Buffers] = fresh
        self._peers = [peer for peer in peers if peer != comm.rank]
        self._pending: dict[int, _Pending] = {}  # by peer, in the order in which they are looked at
        self._to_myself: deque[ReceivedMessage] = deque()
        self._received: Counter[int] = Counter()  # messages, by peer
        self._sent: dict[int, deque[tuple[list[Work], Sequence[torch.Tensor]]]] = {}
        self._released: Counter[int] = Counter()  # messages that are no longer in `_sent`, by peer
        self._sends_of: Counter[int] = Counter()  # memory → sends that use it

    def send(self, dst: int, body: tuple[Any, ...], payload: Sequence[torch.Tensor] = ()) -> None:
        """Send a message to `dst` and return at once. Leave `payload` unchanged while `is_sending`:
        until a later message from `dst` has come, at the latest."""
        if dst == self.comm.rank:
            self._to_myself.append(ReceivedMessage(dst, body, [x.clone() for x in payload]))
            return
        if dst in self.dead:
            return
        sizes = tuple([(dtype_name(x.dtype), x.numel()) for x in payload])
        header = tuple(PayloadHeader(self._received[dst], sizes, body))
        try:
            works = self.comm.post(Send(header, dst), *(Send(x, dst) for x in payload))
        except (RankDied, RuntimeError):
            if dst not in self.may_die:
                raise
            self._drop_peer(dst)
            return
        self.sent_bytes += sum([x.nbytes for x in payload])
        self._sent.setdefault(dst, deque()).append((works, payload))
        self._sends_of.update(map(_memory, payload))
        self._release_moved(dst)

    def receive(self, timeout_s: float | None = None) -> ReceivedMessage | None:
        """Wait for the next message, header and payload. None once `timeout_s` seconds have passed,
        or once another peer is found to be dead."""
        if self._to_myself:
            return self._to_myself.popleft()
        if not self._pending:
            for src in self._peers:
                self._post_receive(src)
        until_s = None if timeout_s is None else self.comm.now() + timeout_s
        while True:
            pending = self._first(until_s)
            if pending is None:
                return None
            try:
                pending.works.popleft().wait()
            except RankDied:
                if pending.src not in self.may_die:
                    raise
                self._drop_peer(pending.src)
                return None
            message = self._advance(pending)
            if message is not None:
                return message

    def _first(self, until_s: float | None) -> _Pending | None:
        """Wait for the next part of any peer's message."""
        works = {pending.works[0]: pending for pending in self._pending.values()}
        if len(works) == 1 and until_s is None:
            return next(iter(works.values()))  # its `wait` does
        left_s = None if until_s is None else max(until_s - self.comm.now(), 0.0)
        work = self.comm.wait_any(list(works), left_s)
        return None if work is None else works[work]

    def _advance(self, pending: _Pending) -> ReceivedMessage | None:
        """Process a received part of a message. Returns the message if that was the last part."""
        if pending.message is None:
            pending.message = self._open(pending.src, PayloadHeader(*pending.header[0]))
            posted = self.comm.post(*(Recv(x, pending.src) for x in pending.message.payload))
            pending.works.extend(posted)
        if pending.works:
            return None
        self._received[pending.src] += 1
        self._post_receive(pending.src)
        self.received_bytes += sum([x.nbytes for x in pending.message.payload])
        return pending.message

    def _open(self, src: int, header: PayloadHeader) -> ReceivedMessage:
        """Process a header: return its message, with memory for the payload."""
        self._release(src, header.received)
        sizes = [(getattr(torch, dtype), numel) for dtype, numel in header.sizes]
        payload = [torch.empty(numel, dtype=dtype, device=self.comm.device) if x is None else x
                   for (dtype, numel), x in zip(
                       sizes, self.buffers(src, header.body, sizes), strict=True)]
        return ReceivedMessage(src, header.body, payload)

    def _post_receive(self, src: int) -> None:
        """Post the receive of the next message from `src`, after those of the other peers."""
        self._pending.pop(src, None)
        self._pending[src] = _Pending(self.comm, src, self.owed)

    def _drop_peer(self, peer: int) -> None:
        """The connection to `peer` has broken."""
        self.dead.add(peer)
        if peer in self._pending:
            _cancel(self._pending.pop(peer).works)
        for works, _ in self._sent.pop(peer, ()):
            _cancel(works)

    def is_sending(self, x: torch.Tensor) -> bool:
        """Is `x` perhaps being sent? Then it must not change."""
        return self._sends_of[_memory(x)] > 0

    def _release(self, dst: int, count: int) -> None:
        """`dst` has received my first `count` messages: their memory may be used again."""
        sent = self._sent.get(dst)
        while sent and self._released[dst] < count:
            works, payload = sent.popleft()
            for work in works:
                work.wait()
            self._released[dst] += 1
            for memory in map(_memory, payload):
                self._sends_of[memory] -= 1
                if not self._sends_of[memory]:
                    del self._sends_of[memory]

    def _release_moved(self, dst: int) -> None:
        """Release the oldest complete sends to `dst`, a peer that may never send a message."""
        sent = self._sent[dst]
        while len(sent) > MOST_SENT:
            works = sent[0][0]
            while works and (done := self.comm.wait_any(works[:1], 0.0)):
                done.cancel()  # it may have failed: a receive will tell
                works.remove(done)
            if works:
                return
            self._release(dst, self._released[dst] + 1)

    def detach_all(self) -> None:
        """Allow the rank to return while messages are under way."""
        for pending in self._pending.values():
            _detach(pending.works)
        for sent in self._sent.values():
            for works, _ in sent:
                _detach(works)

    def close(self) -> None:
        """Call it last. Before: peers receive all that I have sent, unless they may die. After:
        no receive is pending, no send under way."""
        for pending in self._pending.values():
            _cancel(pending.works)
        for dst, sent in self._sent.items():
            if dst in self.may_die:  # a wait for a dead peer would not end
                for works, _ in sent:
                    _cancel(works)
            else:
                self._release(dst, self._released[dst] + len(sent))
        self._pending, self._sent = {}, {}
        self.buffers = fresh  # which breaks a reference cycle


def fresh(src: int, body: tuple[Any, ...], sizes: Sequence[Size]) -> Buffers:
    """Have all received into fresh memory, see `Endpoint.buffers`."""
    return [None] * len(sizes)


def _detach(works: Iterable[Work]) -> None:
    for work in works:
        work._detach()


def _cancel(works: Iterable[Work]) -> None:
    for work in works:
        work.cancel()


def _memory(x: torch.Tensor) -> int:
    """The same number for all views of the same memory, as long as one is there."""
    return x.untyped_storage()._cdata  # type: ignore[no-any-return]
