"""Moves CUDA tensors over NCCL.

The messages of an NCCL communicator wait for one another, in the order in which they began on each
rank, and a GPU's kernel that waits can hold up others. Ours must not: a rank may post a receive
first, and then compute and send what it is answered to. So each direction between two ranks has an
NCCL communicator of its own, and a thread, which begins a message once both ranks are there.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtlab.processes.communicator import tag_of
from dtlab.processes.endpoint import ProcessEndpoint
from dtlab.processes.survivors import FOREVER
from dtlab.processes.transport import Operation, WatchedHandle

_LOOK_EVERY_S = 0.01


class NcclTransport:
    """See `Transport`. One for each communicator: no other one has this `context`."""

    def __init__(self, end: ProcessEndpoint, context: tuple[Any, ...]):
        self._endpoint, self._context = end, context
        self._directions: dict[tuple[bool, int], Direction] = {}

    def start(self, operations: Sequence[Operation]) -> list[WatchedHandle]:
        """See `Transport`."""
        handles = []
        for sends, x, peer, _ in operations:
            if (sends, peer) not in self._directions:
                self._directions[sends, peer] = Direction(self._endpoint, sends, peer,
                                                          self._context)
            handles.append(self._directions[sends, peer].start(x))
        return handles

    def release(self, handles: Sequence[Any], nbytes: int) -> None:
        """See `Transport`: nothing waits for what has moved."""


class Direction:
    """Messages from this rank to `peer`, or from it: an NCCL communicator of two, and a thread."""

    def __init__(self, end: ProcessEndpoint, sends: bool, peer: int, context: tuple[Any, ...]):
        self.endpoint, self.sends, self.peer = end, sends, peer
        src, dst = (end.rank, peer) if sends else (peer, end.rank)
        self.tag = tag_of((*context, "nccl", src, dst))
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._group: Any = None
        end.directions.append(self)
        self.thread = end.threads.start(self._serve, f"NCCL, {src} to {dst}")

    def start(self, x: torch.Tensor) -> WatchedHandle:
        """Move `x`, once the caller's CUDA stream has done all that it was asked to before."""
        return WatchedHandle(_Move(self, x), lambda wait, _: self._tasks.put(wait))

    def finish(self) -> None:
        """Let the communicator go; nothing is under way."""
        self._tasks.put(None)

    def move(self, x: torch.Tensor) -> None:
        """On the thread, meet the other rank, over Gloo, then move `x`."""
        for tells in (self.sends, not self.sends):
            with self.endpoint.lock:
                byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
                handle = self.endpoint.transport.start([(tells, byte, self.peer, self.tag)])[0]
            handle.wait()
        if self._group is None:
            self._group = self.new_group()
        work = self._group.send([x], 1, 0) if self.sends else self._group.recv([x], 0, 0)
        work.wait()  # the CUDA stream waits
        torch.cuda.current_stream().synchronize()

    def new_group(self) -> Any:
        """A process group of the two ranks, over NCCL, that torch.distributed knows nothing of."""
        self._store = PollingStore(f"dtlab/nccl/{self.tag}",
                                   dist.distributed_c10d._get_default_store())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER  # the launcher watches over time
        return dist.ProcessGroupNCCL(self._store, 0 if self.sends else 1, 2, options)

    def _serve(self) -> None:
        torch.cuda.set_device(self.endpoint.device)
        with torch.cuda.stream(torch.cuda.Stream(self.endpoint.device)):
            while (task := self._tasks.get()) is not None:
                task()
                del task  # keeps no tensor
        if self._group is not None:
            self._group.abort()


class _Move:
    """One message of a direction."""

    def __init__(self, direction: Direction, x: torch.Tensor):
        self._direction = direction
        self._x = x.detach().reshape(-1).view(torch.uint8)  # NCCL knows only some dtypes
        self._ready = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        """Move `x`, on the direction's thread; return once it has moved."""
        self._ready.synchronize()
        self._direction.move(self._x)


class PollingStore(dist.Store):
    """A part of `store` whose waits let the process's other threads use `store`."""

    def __init__(self, name: str, store: dist.Store):
        super().__init__()
        self._part = dist.PrefixStore(name, store)

    def get(self, key: str) -> bytes:
        """The value under `key`, once there is one."""
        while not self._part.check([key]):
            time.sleep(_LOOK_EVERY_S)
        return self._part.get(key)

    def set(self, key: str, value: str) -> None:
        """Write `value` under `key`."""
        self._part.set(key, value)

    def check(self, keys: list[str]) -> bool:
        """Are all `keys` there?"""
        return self._part.check(keys)
