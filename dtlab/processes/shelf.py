"""The shelf: memory that all ranks of a run can read, for what is large.

On one host a tensor need not travel through sockets: whoever sends it lays it on the shelf, and
tells the other, in a message, where it lies. Two ways: a *gift* is a copy, which its reader has for
as long as it keeps it; what lies on the shelf already, its owner only *shows*, and leaves it
unchanged until its readers have said that they have read it. As NCCL and MPI do between processes
of one host; a push or a pull then costs one copy, or none.

The shelf is the rest of the board's file. Each rank owns a stretch of it, much longer than memory
is, and cuts it into blocks; pages nobody has written take no memory. A block begins with a word
that says whether it is in use: its owner sets it, and whoever has it last clears it, when Python
drops the last tensor that lies in it. So nobody asks, and nobody waits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from dtlab.cores import several_cores
from dtlab.processes.lane import is_plain

if TYPE_CHECKING:
    from dtlab.processes.communicator import GlooComm

POSSIBLE = hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")  # Linux has both
_HEAD = 4096  # of a block: its word; then, on a page's edge, what it holds
_GRAIN = 1 << 14  # a block's length is a multiple of it
_STRETCH = 1 << 40  # bytes of the file, for each rank
LIMIT_BYTES = 1 << 30  # of memory that one rank's blocks may take
_LOOKS = 8  # at blocks that may be free, before another one is cut


# Where something lies: its block's offset in the file and length, where in the block, how many
# bytes. A plain tuple, which pickles fast.
Place = tuple[int, int, int, int]


class Shelf:
    """The shelf as rank `rank` sees it."""

    def __init__(self, fd: int, begin: int, ranks: int, rank: int):
        """`fd` stays open: it is the shelf's from here on. begin: where in the file it begins."""
        begin = -(-begin // _GRAIN) * _GRAIN
        self._fd, self._next = fd, begin + rank * _STRETCH
        end = begin + ranks * _STRETCH
        if os.fstat(fd).st_size < end:
            with contextlib.suppress(OSError):  # files may not be so long here: see `_free`
                os.ftruncate(fd, end)
        self._maps: dict[int, mmap.mmap] = {}  # block → its memory, mine or another's
        self._mine: dict[int, deque[int]] = defaultdict(deque)  # length → my blocks
        self._taken = 0  # bytes in my blocks
        self._shown: dict[int, tuple[int, int]] = {}  # address of a block of mine → block, length

    def empty(self, dtype: torch.dtype, numel: int) -> torch.Tensor | None:
        """A vector on the shelf, its elements not set; None if there is no room."""
        nbytes = numel * dtype.itemsize
        block = self._free(nbytes)
        if block is None:
            return None
        x = self._tensor(block, _HEAD, nbytes).view(dtype)
        self._shown[x.data_ptr()] = block, len(self._maps[block])
        return x

    def lay(self, x: torch.Tensor) -> tuple[Place, bool] | None:
        """Where the vector `x` can be read: where it is, or else a copy, a gift. Is it one? None:
        no room."""
        base = x.untyped_storage().data_ptr()
        shown = self._shown.get(base)
        if shown is not None and shown[0] in self._maps and is_plain(x):
            return (*shown, _HEAD + x.data_ptr() - base, x.nbytes), False
        block = self._free(x.nbytes)
        if block is None:
            return None
        memory = self._maps[block]
        with several_cores(x.nbytes):
            torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=_HEAD).copy_(x.detach())
        return (block, len(memory), _HEAD, x.nbytes), True

    def take_back(self, place: Place) -> None:
        """The gift that was laid there will not be read."""
        self._maps[place[0]][0] = 0

    def look(self, place: Place, gift: bool) -> torch.Tensor:
        """What lies there, as bytes. A gift is the caller's for as long as it is kept."""
        block, length, at, nbytes = place
        if block not in self._maps:
            self._maps[block] = mmap.mmap(self._fd, length, offset=block)
        if gift:
            return self._tensor(block, at, nbytes)
        return torch.frombuffer(self._maps[block], dtype=torch.uint8, count=nbytes, offset=at)

    def _tensor(self, block: int, at: int, nbytes: int) -> torch.Tensor:
        """Bytes of a block, which is free again once no tensor lies in it."""
        memory = self._maps[block]
        array = np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=at)
        weakref.finalize(array, _release, memory, os.getpid()).atexit = False
        return torch.from_numpy(array)

    def _free(self, nbytes: int) -> int | None:
        """A block of mine that nobody has, with room for so many bytes; now it is in use. None if
        memory is short, or there is nothing to be laid anywhere."""
        if not nbytes:
            return None
        length = -(-(_HEAD + nbytes) // _GRAIN) * _GRAIN
        blocks = self._mine[length]
        for _ in range(min(len(blocks), _LOOKS)):  # each of them has its turn
            blocks.rotate(-1)
            memory = self._maps[blocks[-1]]
            if not memory[0]:
                memory[0] = 1
                return blocks[-1]
        if self._taken + length > LIMIT_BYTES:
            self._clear()
            if self._taken + length > LIMIT_BYTES:
                return None
        block = self._next
        try:
            memory = self._maps[block] = mmap.mmap(self._fd, length, offset=block)
        except (OSError, ValueError):  # no memory, or the file ends before: then tensors travel
            return None
        self._next += length
        blocks.append(block)
        self._taken += length
        memory[0] = 1
        return block

    def _clear(self) -> None:
        """Give back the memory of blocks that nobody has."""
        for length, blocks in self._mine.items():
            idle = [block for block in blocks if not self._maps[block][0]]
            for block in idle:
                self._maps.pop(block).madvise(mmap.MADV_REMOVE)
                blocks.remove(block)
            self._taken -= length * len(idle)


class Passing:
    """The shelf as one communicator uses it: what goes over it stands in the trace."""

    def __init__(self, comm: GlooComm, shelf: Shelf):
        self._comm = comm
        self.empty, self.lay, self.take_back = shelf.empty, shelf.lay, shelf.take_back
        self._look = shelf.look

    def passed(self, place: Place, dst: int) -> None:
        """Rank `dst` has been told of `place`."""
        self._note(True, dst, place[-1], time.perf_counter())

    def read(
        self, place: Place, gift: bool, src: int, into: torch.Tensor | None
    ) -> torch.Tensor:
        """What rank `src` has laid there for me, as bytes: copied `into`, a flat tensor; a gift
        can also be had as it is."""
        begun_s = time.perf_counter()
        found = self._look(place, gift)
        if into is not None:
            with several_cores(into.nbytes):
                found = into.view(torch.uint8).copy_(found)
        self._note(False, src, place[-1], begun_s)
        return found

    def _note(self, sends: bool, peer: int, nbytes: int, begun_s: float) -> None:
        comm = self._comm
        if comm.end.traced and comm.visible:
            comm.end.rows.append((sends, comm.members[peer], comm.context, nbytes, begun_s,
                                  time.perf_counter(), comm.label))


def _release(memory: mmap.mmap, pid: int) -> None:
    """Whoever had this block is done with it. A lock is a memory fence: what they read of it, they
    have read before. (A forked child has its parent's tensors, too, but not its say.)"""
    with threading.Lock():
        if os.getpid() == pid:
            memory[0] = 0
