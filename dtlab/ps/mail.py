"""How the nodes of a parameter server write to each other.

A *letter* is a small object (who wants what), and its *wires*: the tensors themselves, never
pickled. Both are posted at once, so a letter that has begun to arrive ends arriving whatever its
sender does next; that is why nodes never wait for a send before they read what others wrote, and
why two that write to each other at the same time don't block. Where nodes can read each other's
memory (`shared`, see `dtlab.processes.shelf`), wires need not travel: the letter says where they
lie. How letters themselves get there, their `Carrier` knows.

A server must take in what several workers send at the same time side by side, not one after the
other, or the faster ports would idle. So a large push is *marked*: the server makes room for its
wires and reads on; its sender says a last word when they have left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dtlab.comm import Comm, Recv, Work
from dtlab.errors import RankDied
from dtlab.patience import arrived, wait_any
from dtlab.ps import packing
from dtlab.ps.carrier import Carrier
from dtlab.ps.packing import Size, dtype_name

SPARE = 4  # keep so many tensors of a size for reuse
Laid = tuple[Any, bool]  # where something lies, and is it a gift?
Rooms = list[torch.Tensor | None]  # where wires shall go; None: anywhere


class Letter(NamedTuple):
    """What goes ahead of the wires. Written as a plain tuple, which pickles to fewer bytes."""

    seen: int  # letters that I have had from you, so that you may forget them
    wires: tuple[tuple[str, int], ...]  # dtype and elements of each tensor that follows
    marked: bool  # a last word will follow the wires, so you may read others' letters meanwhile
    body: tuple[Any, ...]
    laid: tuple[Laid | None, ...]  # for each wire, where it lies; None: it follows


class Received(NamedTuple):
    """A letter as its reader gets it. `works`: what to wait for before the wires are read.
    `borrowed`: the memory of those that stay their sender's, see `Mail.borrows`."""

    src: int
    body: tuple[Any, ...]
    wires: list[torch.Tensor]
    works: list[Work]
    borrowed: frozenset[int] = frozenset()


class Line:
    """The next letter from one sender: first its first part, then its wires."""

    def __init__(self, comm: Comm, src: int):
        self.inbox: list[Any] = []
        self.works: list[Work] = [comm.irecv(self.inbox, src)]
        self.letter: Received | None = None


class Mail:
    """One node's letter box.

    `room`: (sender, body, sizes) → where each wire shall go; None: anywhere. `to_myself`: takes
    what a node that serves and works at once writes to itself. `borrowing`: kinds of letters whose
    wires may stay where their senders show them, who leave them unchanged until I answer."""

    answers = True  # see `server.Outbox`

    def __init__(self, comm: Comm):
        self.comm = comm
        self._shared: Any = getattr(comm, "shared", None)
        self._carrier: Carrier = getattr(comm, "letters", None) or Carrier(comm)
        self.borrowing: tuple[str, ...] = ()
        self.borrowed: frozenset[int] = frozenset()  # memory that the letter at hand has shown
        self.seen: Counter[int] = Counter()
        self.received_bytes = self.sent_bytes = 0
        self.room: Callable[[int, tuple[Any, ...], list[Size]], Rooms] = anywhere
        self.to_myself: Callable[[tuple[Any, ...], list[torch.Tensor]], None] = _nobody
        self._kept: dict[int, deque[tuple[list[Work], list[torch.Tensor]]]] = {}
        self._released: Counter[int] = Counter()
        self._lent: Counter[int] = Counter()  # memory that may still be on its way
        self._spare: dict[Size, list[torch.Tensor]] = {}  # fresh memory costs as much as a copy
        self._lines: dict[int, Line] = {}  # for `receive_within`
        self.dead: set[int] = set()  # ranks whose connection has broken
        self._leaving: dict[int, list[Work]] = {}  # wires of marked letters
        self._arriving: dict[int, Received] = {}  # marked ones

    def send(self, dst: int, body: tuple[Any, ...], wires: Sequence[torch.Tensor] = (),
             marked: bool = False) -> None:
        """Post a letter to `dst` and return at once. Leave `wires` unchanged until they are there:
        see `lends`."""
        if dst == self.comm.rank:
            self.to_myself(body, [wire.clone() for wire in wires])
            return
        self._last_word(dst)
        if dst in self.dead:
            return
        self.sent_bytes += sum([wire.nbytes for wire in wires])
        laid = self._laid(wires)
        follow = [wire for wire, place in zip(wires, laid, strict=True) if place is None]
        marked = marked and any(wire.nbytes >= packing.BIG_BYTES for wire in follow)
        sizes = tuple([(dtype_name(wire.dtype), wire.numel()) for wire in wires])
        works = self._posted(dst, (self.seen[dst], sizes, marked, body, laid), follow)
        if works is None:
            return
        if marked:
            self._leaving[dst] = works
        lent = [wire for wire, place in zip(wires, laid, strict=True) if not (place and place[1])]
        self._kept.setdefault(dst, deque()).append((works, lent))
        for wire in lent:
            self._lent[_memory(wire)] += 1

    def _posted(self, dst: int, letter: tuple[Any, ...],
                follow: Sequence[torch.Tensor]) -> list[Work] | None:
        """The letter and the wires that follow it, on their way; None if `dst` is dead."""
        laid: Sequence[Laid | None] = letter[-1]
        try:
            works = self._carrier.send(letter, dst, follow)
        except RuntimeError:  # its connection has broken, which we have not been told yet
            for place, gift in filter(None, laid):
                if gift:
                    self._shared.take_back(place)
            if not self._lines:
                raise
            self.dead.add(dst)
            return None
        for place, _ in filter(None, laid):
            self._shared.passed(place, dst)
        return works

    def receive(self) -> Received:
        """Wait for the next letter. A marked one comes once its wires are there; of others, wait
        for `works` before you read the wires."""
        while True:
            src, letter = self._next()
            if letter is None:
                found = self._arriving.pop(src)
            else:
                marked, found = self._opened(src, letter)
                if marked:
                    self._arriving[src] = found
                    continue
            return self._read(found)

    def receive_from(self, src: int) -> Received:
        """The next letter from `src`, as `receive` gives it; never a marked one."""
        return self._read(self._opened(*self._next(src))[1])

    def expect(self, src: int) -> None:
        """The next letter that I ask for is one from `src`."""
        self._carrier.expect(src)

    def _next(self, src: int | None = None) -> tuple[int, Any]:
        for dst in list(self._leaving):
            self._last_word(dst)
        return self._carrier.receive(src)

    def recycle(self, wire: torch.Tensor) -> None:
        """Nobody needs `wire`, which came in a letter, any more: its memory serves for another."""
        own = wire._base is None and (wire.is_meta or wire.untyped_storage().resizable())
        if wire.nbytes >= packing.BIG_BYTES and own:
            spare = self._spare.setdefault((wire.dtype, wire.numel()), [])
            if len(spare) < SPARE:
                spare.append(wire)

    def receive_within(self, seconds: float) -> Received | None:
        """The next letter that is there with all its wires; None if there is none within so many
        seconds, or once another rank is found to be dead. One whose sender dies halfway, or is cut
        off, holds up none but that sender's; so each has a line of its own."""
        if not self._lines:
            self.listen()
        until_s, dead = self.comm.now() + seconds, len(self.dead)
        while True:
            for src, line in list(self._lines.items()):
                while all(arrived(work) for work in line.works):
                    if not self._has_come(src, line):
                        break
                    if line.letter is not None:
                        found = self._read(line.letter)
                        self._new_line(src)
                        return found
                    if line.inbox[0] is None:  # the wires had a line too
                        self._new_line(src)
                    else:
                        self._open_line(src, line)
                    if src not in self._lines:
                        break
                    line = self._lines[src]
            waiting = [work for line in self._lines.values() for work in line.works
                       if not arrived(work)]
            if len(self.dead) > dead or not wait_any(
                    self.comm, waiting, max(until_s - self.comm.now(), 0.0)):
                return None

    def listen(self) -> None:
        """From here on letters are read with `receive_within`, and any other node may die."""
        self._carrier = Carrier(self.comm)  # others may be waited for without an end
        for src in range(self.comm.size):
            if src != self.comm.rank:
                self._new_line(src)

    def _new_line(self, src: int) -> None:
        """A line for the next letter of `src`, behind the others' lines; none if it has died."""
        self._lines.pop(src, None)
        if src not in self.dead:
            self._lines[src] = Line(self.comm, src)

    def _open_line(self, src: int, line: Line) -> None:
        """Make room for the wires of the letter that has come; no line if its sender has died."""
        try:
            _, line.letter = self._opened(src, line.inbox[0])
            line.works = line.letter.works
        except RuntimeError:
            self.dead.add(src)
            del self._lines[src]

    def _has_come(self, src: int, line: Line) -> bool:
        """Is it here? Else its sender has died; then nothing will come from it any more."""
        try:
            for work in line.works:
                work.wait()
        except RankDied:
            self.dead.add(src)
            del self._lines[src]
            return False
        return True

    def _opened(self, src: int, letter: Any) -> tuple[bool, Received]:
        """Is the letter from `src` marked? And itself, its wires on their way."""
        seen, wires, marked, body, laid = Letter(*letter)
        self._release(src, seen)
        sizes = [(getattr(torch, dtype), numel) for dtype, numel in wires]
        places: list[torch.Tensor] = []
        follow, borrowed = [], set()
        for size, room, lies in zip(sizes, self.room(src, body, sizes), laid, strict=True):
            if lies is not None and room is None and (lies[1] or body[0] in self.borrowing):
                places.append(self._shared.read(*lies, src, None).view(size[0]))
                if not lies[1]:
                    borrowed.add(_memory(places[-1]))
                continue
            places.append(self.memory(size) if room is None else room)
            if lies is None:
                follow.append(places[-1])
            else:
                self._shared.read(*lies, src, places[-1])
        works = self.comm.post(*(Recv(place, src) for place in follow)) if follow else []
        return marked, Received(src, body, places, works, frozenset(borrowed))

    def _laid(self, wires: Sequence[torch.Tensor]) -> tuple[Laid | None, ...]:
        """Where these wires can be read; None for those that must travel."""
        if self._shared is None:
            return (None,) * len(wires)
        return tuple([self._shared.lay(wire) for wire in wires])

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x`; where nodes can read each other's memory, they can read this."""
        return self.empty((x.dtype, x.numel())).view(x.shape).copy_(x)

    def empty(self, size: Size) -> torch.Tensor:
        """A flat tensor, its elements not set; best where other nodes can read it."""
        found = None if self._shared is None else self._shared.empty(*size)
        if found is None:
            found = torch.empty(size[1], dtype=size[0], device=self.comm.device)
        return found

    def _read(self, letter: Received) -> Received:
        self.seen[letter.src] += 1
        self.received_bytes += sum(wire.nbytes for wire in letter.wires)
        return letter

    def _last_word(self, dst: int) -> None:
        """If a marked letter to `dst` is on its way: wait until it has left, and say so."""
        works = self._leaving.pop(dst, None)
        if works is not None:
            for work in works:
                work.wait()
            works += self._carrier.send(None, dst)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of tensors received and sent."""
        return self.received_bytes, self.sent_bytes

    def lends(self, x: torch.Tensor) -> bool:
        """May `x` still be on its way to someone? Then it must not change."""
        return self._lent[_memory(x)] > 0

    def borrows(self, x: torch.Tensor) -> bool:
        """Is this the memory of who sent the letter at hand? Then don't change it, and don't keep
        it beyond the answer."""
        return bool(self.borrowed) and _memory(x) in self.borrowed

    def flush(self) -> None:
        """Wait until every letter has arrived. For the end, when all are being read."""
        self._carrier.flush()
        for dst, kept in self._kept.items():
            if self._shared is not None:
                self._shared.keep([wire for _, wires in kept for wire in wires])
            self._release(dst, self._released[dst] + len(kept))
        self.room, self.to_myself = anywhere, _nobody  # else node and mail would hold each other

    def _release(self, dst: int, seen: int) -> None:
        """`dst` has had my first `seen` letters: they are over."""
        kept = self._kept.get(dst)
        while kept and self._released[dst] < seen:
            works, wires = kept.popleft()
            self._released[dst] += 1
            if dst not in self.dead:
                for work in works:
                    work.wait()
            for wire in wires:
                self._lent[_memory(wire)] -= 1
                if not self._lent[_memory(wire)]:
                    del self._lent[_memory(wire)]

    def memory(self, size: Size) -> torch.Tensor:
        """A flat tensor, its elements not set."""
        if spare := self._spare.get(size):
            return spare.pop()
        return torch.empty(size[1], dtype=size[0], device=self.comm.device)


def anywhere(src: int, body: tuple[Any, ...], sizes: list[Size]) -> Rooms:
    """See `Mail.room`."""
    return [None] * len(sizes)


def _nobody(body: tuple[Any, ...], wires: list[torch.Tensor]) -> None:
    """See `Mail.to_myself`."""


def _memory(x: torch.Tensor) -> int:
    """The same number for all views of the same memory, as long as one is there."""
    return x.untyped_storage()._cdata  # type: ignore[no-any-return]
