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
from collections.abc import Iterable
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
# So much of it is mapped at once, or one block, if that is longer: Python opens a file a mapping.
_WINDOW = 1 << 26
LIMIT_BYTES = 1 << 30  # of memory that one rank's blocks may take
_LOOKS = 8  # at blocks that may be free, before another one is cut


# Where something lies: its block's offset in the file and length, where in the block, how many
# bytes. A plain tuple, which pickles fast.
Place = tuple[int, int, int, int]


class Shelf:
    """The shelf as rank `rank` sees it."""

    def __init__(self, fd: int, begin: int, ranks: int, rank: int):
        """`fd` stays open: it is the shelf's from here on. begin: where in the file it begins."""
        begin = -(-begin // _WINDOW) * _WINDOW
        self._fd, self._next = fd, begin + rank * _STRETCH
        end = begin + ranks * _STRETCH
        if os.fstat(fd).st_size < end:
            with contextlib.suppress(OSError):  # files may not be so long here: see `_cut`
                os.ftruncate(fd, end)
        self._windows: dict[int, mmap.mmap] = {}  # where in the file → memory, mine or another's
        self._mine: dict[int, deque[int]] = defaultdict(deque)  # length → my blocks
        self._taken = 0  # bytes of memory in my blocks
        self._hollow: set[int] = set()  # my blocks that have none
        self._left: list[torch.Tensor] = []  # see `keep`
        self._shown: dict[int, tuple[int, int]] = {}  # address of a block of mine → block, length

    def empty(self, dtype: torch.dtype, numel: int) -> torch.Tensor | None:
        """A vector on the shelf, its elements not set; None if there is no room."""
        nbytes = numel * dtype.itemsize
        found = self._free(nbytes)
        if found is None:
            return None
        x = self._tensor(*found, _HEAD, nbytes).view(dtype)
        self._shown[x.data_ptr()] = found
        return x

    def lay(self, x: torch.Tensor) -> tuple[Place, bool] | None:
        """Where the vector `x` can be read: where it is, or else a copy, a gift. Is it one? None:
        no room."""
        base = x.untyped_storage().data_ptr()
        shown = self._shown.get(base)
        if shown is not None and is_plain(x):
            return (*shown, _HEAD + x.data_ptr() - base, x.nbytes), False
        found = self._free(x.nbytes)
        if found is None:
            return None
        memory, at = self._memory(*found)
        with several_cores(x.nbytes):
            torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=at + _HEAD).copy_(
                x.detach())
        return (*found, _HEAD, x.nbytes), True

    def take_back(self, place: Place) -> None:
        """The gift that was laid there will not be read."""
        memory, at = self._memory(*place[:2])
        memory[at] = 0

    def keep(self, shown: Iterable[torch.Tensor]) -> None:
        """Their owner ends, and does not wait until all have read them: they stay."""
        self._left += shown

    def look(self, place: Place, gift: bool) -> torch.Tensor:
        """What lies there, as bytes. A gift is the caller's for as long as it is kept."""
        block, length, begin, nbytes = place
        if gift:
            return self._tensor(block, length, begin, nbytes)
        memory, at = self._memory(block, length)
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=at + begin)

    def _memory(self, block: int, length: int) -> tuple[mmap.mmap, int]:
        """The memory in which a block lies, and where in it."""
        start = block - block % _WINDOW
        memory = self._windows.get(start)
        if memory is None:
            nbytes = -(-(block + length - start) // _WINDOW) * _WINDOW
            memory = self._windows[start] = mmap.mmap(self._fd, nbytes, offset=start)
        return memory, block - start

    def _tensor(self, block: int, length: int, begin: int, nbytes: int) -> torch.Tensor:
        """Bytes of a block, which is free again once no tensor lies in it."""
        memory, at = self._memory(block, length)
        array = np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=at + begin)
        weakref.finalize(array, _release, memory, at, os.getpid()).atexit = False
        return torch.from_numpy(array)

    def _free(self, nbytes: int) -> tuple[int, int] | None:
        """A block of mine that nobody has, with room for so many bytes, and its length; now it is
        in use. None if memory is short, or there is nothing to be laid anywhere."""
        if not nbytes:
            return None
        length = -(-(_HEAD + nbytes) // _GRAIN) * _GRAIN
        blocks = self._mine[length]
        for _ in range(min(len(blocks), _LOOKS)):  # each of them has its turn
            blocks.rotate(-1)
            if blocks[-1] in self._hollow or self._is_idle(blocks[-1], length):
                break
        else:
            if not self._cut(length):
                return None
        block = blocks[-1]
        if block in self._hollow:
            if self._taken + length > LIMIT_BYTES:
                self._clear()
            if self._taken + length > LIMIT_BYTES:
                return None
            self._hollow.remove(block)
            self._taken += length
        memory, at = self._memory(block, length)
        memory[at] = 1
        return block, length

    def _is_idle(self, block: int, length: int) -> bool:
        memory, at = self._memory(block, length)
        return not memory[at]

    def _cut(self, length: int) -> bool:
        """Another block, hollow, the last of its length. Was that possible?"""
        block = self._next
        if block % _WINDOW + length > _WINDOW:  # it would not fit: let it begin a window
            block = -(-block // _WINDOW) * _WINDOW
        try:
            self._memory(block, length)
        except (OSError, ValueError):  # no memory, or the file ends before: then tensors travel
            return False
        self._next = block + length
        self._mine[length].append(block)
        self._hollow.add(block)
        return True

    def _clear(self) -> None:
        """Give back the memory of blocks that nobody has."""
        for length, blocks in self._mine.items():
            for block in blocks:
                if block not in self._hollow and self._is_idle(block, length):
                    memory, at = self._memory(block, length)
                    memory.madvise(mmap.MADV_REMOVE, at, length)
                    self._hollow.add(block)
                    self._taken -= length


class Passing:
    """The shelf as one communicator uses it: what goes over it stands in the trace."""

    def __init__(self, comm: GlooComm, shelf: Shelf):
        self._comm = comm
        self.empty, self.lay, self.take_back = shelf.empty, shelf.lay, shelf.take_back
        self.keep, self._look = shelf.keep, shelf.look

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


def _release(memory: mmap.mmap, at: int, pid: int) -> None:
    """Whoever had this block is done with it. A lock is a memory fence: what they read of it, they
    have read before. (A forked child has its parent's tensors, too, but not its say.)"""
    with threading.Lock():
        if os.getpid() == pid:
            memory[at] = 0
