"""How the nodes of a parameter server write to each other, on `Comm` alone.

A *letter* is a small object (who wants what), and its *wires*: the tensors themselves, never
pickled. All of it is posted at once, so a letter that has begun to arrive ends arriving whatever
its sender does next; that is why nodes never wait for a send, and why two that write to each other
at the same time don't block.
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
    marked: bool  # a last word follows the wires, so you may read others' letters meanwhile
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
        self._arriving: dict[int, tuple[tuple[Any, ...], list[Work], list[torch.Tensor]]] = {}

    def send(self, dst: int, body: tuple[Any, ...], wires: Sequence[torch.Tensor] = (),
             marked: bool = False) -> None:
        """Post a letter to `dst` and return at once. Leave `wires` unchanged until they are there:
        see `lends`."""
        if dst == self.comm.rank:
            self.to_myself(body, [wire.clone() for wire in wires])
            return
        marked = marked and any(wire.nbytes >= BIG_BYTES for wire in wires)
        sizes = tuple((str(wire.dtype)[6:], wire.numel()) for wire in wires)
        letter = (self.seen[dst], sizes, marked, body)
        last = [Send(None, dst)] if marked else []
        works = self.comm.post(Send(letter, dst), *(Send(wire, dst) for wire in wires), *last)
        self._kept.setdefault(dst, deque()).append((works, list(wires)))
        for wire in wires:
            self._lent[id(wire)] += 1
            self.sent_bytes += wire.nbytes

    def receive(self) -> tuple[int, tuple[Any, ...], list[torch.Tensor]]:
        """Wait for the next letter that is complete: its sender, its body, its wires."""
        while True:
            inbox: list[Any] = []
            src = self.comm.recv(inbox)
            if inbox[0] is None:  # the last word: all of it is here
                body, works, wires = self._arriving.pop(src)
                break
            letter = Letter(*inbox[0])
            self._release(src, letter.seen)
            sizes = [(getattr(torch, name), numel) for name, numel in letter.wires]
            body, wires = letter.body, self.room(src, letter.body, sizes)
            works = self.comm.post(*(Recv(wire, src) for wire in wires)) if wires else []
            if not letter.marked:
                break
            self._arriving[src] = body, works, wires
        for work in works:
            work.wait()
        self.seen[src] += 1
        self.received_bytes += sum(wire.nbytes for wire in wires)
        return src, body, wires

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
