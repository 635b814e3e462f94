"""The communicator of GPUs: tensors over NCCL, everything else over Gloo.

NCCL has no receive from anyone, ignores tags, and wants the sends and receives that belong
together in one batch. So each communicator has its own NCCL group, and each `post` is a batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtlab.comm import Recv, Send, Work
from dtlab.errors import ConfigError
from dtlab.processes.communicator import GlooComm
from dtlab.processes.messages import Message


class _Batch:
    """What `batch_isend_irecv` returned: one wait for all of it."""

    def __init__(self, works: Sequence[Any]):
        self._works = works

    def wait(self) -> None:
        """Block until the data has moved (NCCL's own wait only makes the stream wait).

        Each message of the batch asks; the first one waits for all.
        """
        works, self._works = self._works, ()
        for work in works:
            work.wait()
        if works:
            torch.cuda.current_stream().synchronize()


class NcclComm(GlooComm):
    """A group of ranks, each with a GPU of its own."""

    _group: dist.ProcessGroup | None = None  # NCCL's; None: that of all ranks

    def post(self, *ops: Send | Recv) -> list[Work]:
        """Start all of `ops` together and return at once; wait for each with `Work.wait`."""
        for op in ops:
            self._check(op)
        posted: list[Work | None] = [None] * len(ops)
        moving = [place for place, op in enumerate(ops) if self._by_nccl(op)]
        batch = [self._announced(ops[place]) for place in moving]
        if batch:
            work = _Batch(dist.batch_isend_irecv([
                dist.P2POp(
                    dist.isend if m.sends else dist.irecv, m.wire, m.world, self._group
                )
                for m in batch
            ]))
            for place, message in zip(moving, batch, strict=True):
                message.handles = (work,)
                posted[place] = message
        for place, op in enumerate(ops):
            if posted[place] is None:
                posted[place] = super().post(op)[0]
        return [work for work in posted if work is not None]

    def _by_nccl(self, op: Send | Recv) -> bool:
        """Objects, and messages without bytes, go over Gloo: NCCL would not move them."""
        if not isinstance(op.x, torch.Tensor) or op.x.nbytes == 0:
            return False
        if isinstance(op, Recv) and op.src is None:
            raise ConfigError(
                f"rank {self.rank}: NCCL can't receive from anyone; name the sender, "
                f"or use backend='gloo'"
            )
        return True

    def _announced(self, op: Send | Recv) -> Message:
        """The message of `op`, numbered and on the ledger, not yet moving."""
        sends = isinstance(op, Send)
        peer = op.dst if isinstance(op, Send) else op.src
        assert peer is not None
        wire = op.x if op.x.is_contiguous() else op.x.detach().contiguous()
        message = Message(self, sends, peer, wire, None if sends else op.x, op.x.nbytes)
        with self.end.lock:
            message.number = self.way(peer, sends).announce(self.header(op.x))
            message.posted_s = time.perf_counter()
            self.end.posted(message)
        return message

    def _form(self, ranks: Sequence[int], context: tuple[Any, ...]) -> NcclComm:
        members = [self.members[rank] for rank in ranks]
        comm = NcclComm(self.end, members, self._derived(context))
        comm._group = dist.new_group(members, backend="nccl", use_local_synchronization=True)
        return comm
