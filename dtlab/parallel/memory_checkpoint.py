"""Checkpoints in the memory of the ranks: when one dies, nothing has to be read from a disk.

Gemini (Wang et al., SOSP 2023) keeps them so after every step. ZeRO has one copy of the optimizer's
state, so the neighbour's memory is where the second one is.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from dtlab.collectives import broadcast_object
from dtlab.comm import Recv, Send
from dtlab.errors import ConfigError
from dtlab.parallel.checkpoint import restore
from dtlab.parallel.checkpoint_contents import (
    Optimizer,
    check_optimizer,
    contents_of,
    merged,
    names_by_group,
)
from dtlab.parallel.synchronized import DistributedModule, check_distributed

KEPT = 2  # a rank that dies while others save leaves the checkpoint before


class MemoryCheckpoint:
    """The last two checkpoints of a training: each rank keeps its own part, and that of the rank
    before it.

    Memory of a rank: twice the parts of two ranks, on the CPU. Traffic of `save`: one message from
    each rank to the next, as large as its part.
    """

    def __init__(self) -> None:
        self.number = 0  # how often all ranks have saved
        self._parts: dict[tuple[int, int, int], dict[str, Any]] = {}  # (number, rank, of how many)

    def save(self, model: DistributedModule, optimizer: Optimizer | None = None,
             extra: Any = None) -> None:
        """Keep what `parallel.save` would write, here and on the next rank. All ranks call it, and
        meet in a collective between two calls, as in a step of training.

        Raises `RankDied` if one of them does; the checkpoint before is still there.
        """
        check_distributed(model, "MemoryCheckpoint.save")
        comm = model.comm
        check_optimizer(model, optimizer)
        part = contents_of(model, optimizer, names_by_group(comm, model, optimizer), extra)
        parts = {(self.number + 1, comm.rank, comm.size): part}
        if comm.size > 1:
            before, received = (comm.rank - 1) % comm.size, []  # type: ignore[var-annotated]
            comm.collective("memory_checkpoint").exchange(
                Send(part, (comm.rank + 1) % comm.size), Recv(received, before))
            parts[self.number + 1, before, comm.size] = received[0]
        self.number += 1
        kept = {key: part for key, part in self._parts.items() if key[0] > self.number - KEPT}
        self._parts = kept | parts

    def load(self, model: DistributedModule, optimizer: Optimizer | None = None) -> Any:
        """Fill model and optimizer, on any number of ranks, with the newest checkpoint of which the
        ranks hold all parts, and save it anew. Returns its `extra`, as `parallel.load` does; None,
        with nothing filled, if not all of them have saved yet.

        Raises `ConfigError` on all ranks if parts are lost: two neighbours have died. Memory: all
        ranks' parts at once.
        """
        check_distributed(model, "MemoryCheckpoint.load")
        comm = model.comm
        held = comm._all_gather_objects(list(self._parts))
        owners = {key: rank for rank, keys in reversed([*enumerate(held)]) for key in keys}
        number, size = _newest(set(owners))
        # What only some have of a newer one must not be taken for a part of the next of its number.
        self.number = number
        self._parts = {key: part for key, part in self._parts.items() if key[0] <= number}
        if not number:
            return None
        parts = [broadcast_object(comm, self._parts.get((number, rank, size)),
                                  owners[number, rank, size]) for rank in range(size)]
        extra = restore(model, optimizer, lambda: merged(parts), "load")
        self.save(model, optimizer, extra)
        return deepcopy(extra)  # the caller may change it


def _newest(parts: set[tuple[int, int, int]]) -> tuple[int, int]:
    """Number and size of the newest checkpoint that is whole; 0 if nobody has taken a step since
    the first one, of which some may have no part."""
    lost: list[int] = []
    for number, size in sorted({(number, size) for number, _, size in parts}, reverse=True):
        missing = [rank for rank in range(size) if (number, rank, size) not in parts]
        if not missing:
            return number, size
        lost = missing
    if max((number for number, *_ in parts), default=0) > 1:
        raise ConfigError(f"load: the memory of the ranks holds no whole checkpoint: the parts of "
                          f"rank {' and '.join(map(str, lost))} died with them and their "
                          f"neighbours; load one from the disk")
    return 0, 0
