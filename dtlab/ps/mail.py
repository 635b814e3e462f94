"""How the nodes of a parameter server write to each other, on `Comm` alone.

A *letter* is a small object (who wants what), and its *wires*: the tensors themselves, never
pickled. Both are posted at once, so a letter that has begun to arrive ends arriving whatever its
sender does next; that is why nodes never wait for a send before they read what others wrote, and
why two that write to each other at the same time don't block.

A server must take in what several workers send at the same time side by side, not one after the
other, or the faster ports would idle. So a large push is *marked*: the server makes room for its
wires and reads on; its sender says a last word when they have left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dtlab.comm import Comm, Recv, Send, Work

BIG_BYTES = 1 << 16  # tensors from this size up travel alone, and side by side with others' letters
Size = tuple[torch.dtype, int]  # of a flat tensor: its dtype and number of elements


class Letter(NamedTuple):
    """What goes ahead of the wires. Written as a plain tuple, which pickles to fewer bytes."""

    seen: int  # letters that I have had from you, so that you may forget them
    wires: tuple[tuple[str, int], ...]  # dtype and elements of each tensor that follows
    marked: bool  # a last word will follow the wires, so you may read others' letters meanwhile
    body: tuple[Any, ...]


class Mail:
    """One node's letter box.

    `room`: (sender, body, sizes) → where the wires shall go. `to_myself`: takes what a node that
    serves and works at once writes to itself."""

    def __init__(self, comm: Comm):
        self.comm = comm
        self.seen: Counter[int] = Counter()
        self.received_bytes = self.sent_bytes = 0
        self.room: Callable[[int, tuple[Any, ...], list[Size]], list[torch.Tensor]] = self.fresh
        self.to_myself: Callable[[tuple[Any, ...], list[torch.Tensor]], None]
        self._kept: dict[int, deque[tuple[list[Work], list[torch.Tensor]]]] = {}
        self._released: Counter[int] = Counter()
        self._lent: Counter[int] = Counter()  # tensors that may still be on their way
        self._asked = False  # for the next letter; then:
        self._inbox: list[Any]
        self._next: Work
        self._leaving: dict[int, list[Work]] = {}  # wires of marked letters
        self._arriving: dict[int, tuple[tuple[Any, ...], list[Work], list[torch.Tensor]]] = {}

    def send(self, dst: int, body: tuple[Any, ...], wires: Sequence[torch.Tensor] = (),
             marked: bool = False) -> None:
        """Post a letter to `dst` and return at once. Leave `wires` unchanged until they are there:
        see `lends`."""
        if dst == self.comm.rank:
            self.to_myself(body, [wire.clone() for wire in wires])
            return
        self._last_word(dst)
        marked = marked and any(wire.nbytes >= BIG_BYTES for wire in wires)
        sizes = tuple((str(wire.dtype)[6:], wire.numel()) for wire in wires)
        letter = (self.seen[dst], sizes, marked, body)
        works = self.comm.post(Send(letter, dst), *(Send(wire, dst) for wire in wires))
        if marked:
            self._leaving[dst] = works
        self._kept.setdefault(dst, deque()).append((works, list(wires)))
        for wire in wires:
            self._lent[id(wire)] += 1
            self.sent_bytes += wire.nbytes

    def receive(self) -> tuple[int, tuple[Any, ...], list[torch.Tensor], list[Work]]:
        """Wait for the next letter: its sender, its body, its wires, and what to wait for before
        these are read. For a marked one that is nothing, for its wires have come before."""
        while True:
            self._ask_for_more()
            src = self._next.wait()
            if found := self._opened(src):
                return found

    def receive_within(
        self, seconds: float
    ) -> tuple[int, tuple[Any, ...], list[torch.Tensor], list[Work]] | None:
        """`receive`, but None if there is no letter within so many seconds."""
        until_s = self.comm.now() + seconds
        while True:
            self._ask_for_more()
            if not self.comm.wait_for(self._next, max(until_s - self.comm.now(), 0.0)):
                return None
            if found := self._opened(self._next.wait()):
                return found

    def _ask_for_more(self) -> None:
        for dst in list(self._leaving):
            self._last_word(dst)
        if not self._asked:
            self._asked, self._inbox = True, []
            self._next = self.comm.irecv(self._inbox)

    def _opened(self, src: int) -> tuple[int, tuple[Any, ...], list[torch.Tensor],
                                         list[Work]] | None:
        """The letter whose first part has come from `src`; None if more of it will follow."""
        self._asked = False
        if self._inbox[0] is None:
            body, works, wires = self._arriving.pop(src)
        else:
            letter = Letter(*self._inbox[0])
            self._release(src, letter.seen)
            sizes = [(getattr(torch, name), numel) for name, numel in letter.wires]
            body, wires = letter.body, self.room(src, letter.body, sizes)
            works = self.comm.post(*(Recv(wire, src) for wire in wires)) if wires else []
            if letter.marked:
                self._arriving[src] = body, works, wires
                return None
        self.seen[src] += 1
        self.received_bytes += sum(wire.nbytes for wire in wires)
        return src, body, wires, works

    def _last_word(self, dst: int) -> None:
        """If a marked letter to `dst` is on its way: wait until it has left, and say so."""
        works = self._leaving.pop(dst, None)
        if works is not None:
            for work in works:
                work.wait()
            works.append(self.comm.isend(None, dst))

    def lends(self, x: torch.Tensor) -> bool:
        """May `x` still be on its way to someone? Then it must not change."""
        return self._lent[id(x)] > 0

    def flush(self) -> None:
        """Wait until every letter has arrived. For the end, when all are being read."""
        for dst, kept in self._kept.items():
            self._release(dst, self._released[dst] + len(kept))

    def _release(self, dst: int, seen: int) -> None:
        """`dst` has had my first `seen` letters: they are over."""
        kept = self._kept.get(dst)
        while kept and self._released[dst] < seen:
            works, wires = kept.popleft()
            self._released[dst] += 1
            for work in works:
                work.wait()
            for wire in wires:
                self._lent[id(wire)] -= 1
                if not self._lent[id(wire)]:
                    del self._lent[id(wire)]

    def fresh(self, src: int, body: tuple[Any, ...], sizes: list[Size]) -> list[torch.Tensor]:
        """New memory for what comes."""
        return [torch.empty(numel, dtype=dtype, device=self.comm.device) for dtype, numel in sizes]


def together(sizes: Sequence[Size]) -> list[list[int]]:
    """Which flat tensors share a wire: big ones go alone, small ones of one dtype in one go.

    >>> together([(torch.float32, 3), (torch.float32, 1 << 20), (torch.float32, 5)])
    [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    small: dict[torch.dtype, list[int]] = {}
    for place, (dtype, numel) in enumerate(sizes):
        if numel * dtype.itemsize >= BIG_BYTES:
            groups.append([place])
        elif dtype in small:
            small[dtype].append(place)
        else:
            small[dtype] = [place]
            groups.append(small[dtype])
    return groups


def pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flat tensors as wires; those that travel alone are not copied."""
    sizes = [(x.dtype, x.numel()) for x in tensors]
    return [tensors[group[0]] if len(group) == 1 else torch.cat([tensors[i] for i in group])
            for group in together(sizes)]


def unpack(wires: Sequence[torch.Tensor], sizes: Sequence[Size]) -> list[torch.Tensor]:
    """The tensors that `pack` has packed, as views of the wires."""
    found: dict[int, torch.Tensor] = {}
    for wire, group in zip(wires, together(sizes), strict=True):
        parts = wire.split([sizes[i][1] for i in group]) if len(group) > 1 else [wire]
        found.update(zip(group, parts, strict=True))
    return [found[place] for place in range(len(sizes))]
