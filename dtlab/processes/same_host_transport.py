"""Large tensors between processes of one host: the receiver copies them out of the sender's memory.

Gloo copies every byte twice, into the kernel and out of it. Linux lets a process read another one's
memory (process_vm_readv), which is one copy; Open MPI and TensorPipe do so, too, and call it
cross-memory attach. The sender sends the address over Gloo and waits for an acknowledgement; the
receiver reads on a thread, so that no order of waiting can block two ranks.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dtlab.processes.object_frames import unused_tag
from dtlab.processes.transport import GlooTransport, TransportHandle, WatchedHandle

LARGE_BYTES = 2 << 20  # below, the two small messages cost more than the second copy
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, -1


class SameHostTransport(GlooTransport):
    """Moves CPU tensors between ranks of one host.

    start_thread: starts a thread that runs a function of this name.
    """

    def __init__(self, group: Any, start_thread: Callable[[Callable[[], None], str], object],
                 ranks: Sequence[int] | None = None):
        super().__init__(group, ranks)
        self._start_thread = start_thread
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_long(_ANY_PROCESS), 0, 0, 0)

    def _start(self, sends: bool, x: torch.Tensor, peer: int, tag: int) -> Any:
        if x.nbytes < LARGE_BYTES:
            return super()._start(sends, x, peer, tag)
        if not sends:
            where = torch.empty(3, dtype=torch.int64, device="cpu")
            handle = super()._start(False, where, peer, tag)
            return WatchedHandle(_RecvHandle(handle, where, x, self._start_one),
                                 self._start_thread)
        read_tag = unused_tag(answer=True)
        where = torch.tensor([os.getpid(), x.data_ptr(), read_tag], device="cpu")
        word = torch.empty(1, dtype=torch.uint8, device="cpu")
        read = super()._start(False, word, peer, read_tag)
        return _SendHandle(super()._start(True, where, peer, tag), read, x)

    def _start_one(self, sends: bool, x: torch.Tensor, peer: int, tag: int) -> TransportHandle:
        return super()._start(sends, x, peer, tag)  # type: ignore[no-any-return]


class _Area(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read_memory(pid: int, address: int, into: torch.Tensor) -> None:
    """Fill the contiguous tensor `into` from the memory of process `pid`. Raises `RuntimeError`."""
    done = 0
    while done < into.nbytes:  # the kernel reads at most 2 GB at a time
        local = _Area(into.data_ptr() + done, into.nbytes - done)
        remote = _Area(address + done, into.nbytes - done)
        count = _process_vm_readv()(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            reason = os.strerror(ctypes.get_errno())
            raise RuntimeError(f"Connection closed: can't read from process {pid} ({reason})")
        done += count


@cache
def _process_vm_readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    return function


@cache
def is_possible() -> bool:
    """May processes of this host read each other's memory? The same answer in all of them."""
    if sys.platform != "linux":
        return False
    if _PTRACE_SCOPE.exists() and _PTRACE_SCOPE.read_text().strip() not in ("0", "1"):
        return False
    try:  # a container may forbid the call altogether
        word = torch.zeros(1, device="cpu")
        read_memory(os.getpid(), word.data_ptr(), torch.zeros_like(word))
    except (RuntimeError, AttributeError):
        return False
    return True


class _SendHandle:
    """The send of a tensor: done once the receiver has read it."""

    def __init__(self, where: TransportHandle, read: TransportHandle, x: torch.Tensor):
        self._where, self._read = where, read
        self._x: torch.Tensor | None = x

    def wait(self) -> None:
        """Wait until the tensor has been read."""
        self._where.wait()
        self._read.wait()
        self._x = None  # the handle may live longer than the message


class _RecvHandle:
    """The receive of a tensor: `handle` brings `where` it lies in the sender's memory."""

    def __init__(self, handle: Any, where: torch.Tensor, into: torch.Tensor,
                 start: Callable[..., TransportHandle]):
        self._handle, self._where, self._start = handle, where, start
        self._into: torch.Tensor | None = into

    def wait(self) -> None:
        """Read it, and say so."""
        self._handle.wait()
        pid, address, read_tag = self._where.tolist()
        assert self._into is not None
        read_memory(pid, address, self._into)
        self._into = None
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._start(True, word, self._handle._source_rank(), read_tag).wait()

    def _source_rank(self) -> int:
        return self._handle._source_rank()  # type: ignore[no-any-return]
