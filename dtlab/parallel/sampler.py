"""The samples that each rank trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from dtlab.checks import check_flag, check_whole, short
from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.parallel.model_check import check_same
from dtlab.units import count_text


class BatchSampler:
    """The batches of one epoch, as this rank sees them: lists of indices, for example for
    torch.utils.data.DataLoader(…, batch_sampler=…).

    Every sample of `length` is seen once an epoch, by one rank: none is dropped, none repeated. All
    ranks have equally many batches, and in each of them at least one sample. A batch holds `batch`
    samples of all ranks, the last one what is left; if that is less than a sample a rank, the batch
    before takes it. It is cut as evenly as it goes: shards may differ by one sample, so use
    `model.backward(loss, samples)`.
    The order follows from `seed` and the epoch (see `set_epoch`); `shuffle=False` keeps it. All
    ranks make one, with equal arguments.
    """

    def __init__(self, length: int, batch: int, comm: Comm, *, shuffle: bool = True, seed: int = 0):
        for name, value, least in (("length", length, 1), ("batch", batch, 1), ("seed", seed, 0)):
            check_whole(f"BatchSampler: {name}", value, least, 2**40)
        check_flag("BatchSampler: shuffle", shuffle)
        check_comm(comm, "BatchSampler(length, batch, comm)")
        if batch < comm.size:
            raise ConfigError(f"BatchSampler: a batch of {batch} is too small for {comm.size} "
                              f"ranks; some would have no sample in any batch")
        self.length, self.batch, self.comm = length, batch, comm
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._next: dict[int, int] = {}  # by epoch: which sample its next iteration begins with
        self._seen: dict[int, list[int]] = {}  # how many before its first batch, and after each
        self._check_enough(length)
        check_same(comm.labelled("BatchSampler"), "BatchSampler: every rank gives equal arguments, "
                   "for it takes its part of one order",
                   {"length": f"is {length}", "batch": f"is {batch}", "shuffle": f"is {shuffle}",
                    "seed": f"is {seed}"})

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew for `epoch`, as torch's DistributedSampler does; all ranks call it."""
        check_whole("BatchSampler: epoch", epoch, 0, 2**40)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._cuts()) - 1

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.length, device="cpu")
        if self.shuffle:
            random = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
            order = torch.randperm(self.length, generator=random, device="cpu")
        cuts, self._next = self._cuts(), {}
        seen = cuts[:1]
        self._seen = {self.epoch: seen}
        for first, end in pairwise(cuts):
            seen.append(end)
            yield order[first:end].tensor_split(self.comm.size)[self.comm.rank].tolist()

    def state_dict(self, batches: int | None = None) -> dict[str, int | bool]:
        """Return where all ranks are in this epoch, for `load_state_dict` on any number of ranks.

        batches: on how many this run has trained, in this epoch. None: all that it has got; the
        workers of a DataLoader get more, ahead of training, so give a number if you have workers.
        Give the DataLoader a generator of its own, too: it draws a number when an iteration begins,
        so that dropout after a resume would differ from that of a run that never stopped.
        """
        seen = self._seen.get(self.epoch, [0])
        batches = len(seen) - 1 if batches is None else batches
        check_whole("BatchSampler: batches of this epoch so far", batches, 0, len(seen) - 1)
        return {"length": self.length, "shuffle": self.shuffle, "seed": self.seed,
                "epoch": self.epoch, "seen": seen[batches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the samples that were seen: the next iteration is the rest of that epoch, in
        batches of this sampler's size. Raises `ConfigError` if fewer are left than ranks."""
        if not isinstance(state, Mapping) or state.keys() != self.state_dict(0).keys():
            raise ConfigError(f"BatchSampler: {short(state)} is not what state_dict returns")
        if state["length"] != self.length:
            raise ConfigError(f"BatchSampler: the state is of {state['length']} samples, but there "
                              f"are {self.length}")
        for name, most in (("seed", 2**40), ("epoch", 2**40), ("seen", self.length)):
            check_whole(f"BatchSampler: the state's {name}", state[name], 0, most)
        check_flag("BatchSampler: the state's shuffle", state["shuffle"])
        self._check_enough(self.length - state["seen"])
        self.shuffle, self.seed, self.epoch = state["shuffle"], state["seed"], state["epoch"]
        self._seen, self._next = {self.epoch: [state["seen"]]}, {self.epoch: state["seen"]}

    def _cuts(self) -> list[int]:
        """Return where the batches of the next iteration begin, and where the last one ends."""
        firsts = [*range(self._next.get(self.epoch, 0), self.length, self.batch)]
        if len(firsts) > 1 and self.length - firsts[-1] < self.comm.size:
            firsts.pop()
        return [*firsts, self.length]

    def _check_enough(self, left: int) -> None:
        if 0 < left < self.comm.size:
            raise ConfigError(f"BatchSampler: {count_text(left, 'sample')} can't be shared by "
                              f"{self.comm.size} ranks; some would have none: take at most {left}")
