"""Which rank trains on which samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dtlab.collectives.registry import check_comm
from dtlab.comm import Comm
from dtlab.errors import ConfigError


class BatchSampler:
    """The batches of one epoch, as this rank sees them: lists of indices, for example for
    torch.utils.data.DataLoader(…, batch_sampler=…).

    Every sample of `length` is seen once an epoch, by one rank: none is dropped, none repeated. All
    ranks have equally many batches; together they hold `batch` samples, in the last one what is
    left, cut as evenly as it goes. So shards may differ by one sample, and in the last batch a rank
    may have none: use `model.backward(loss, samples)`.
    The order follows from `seed` and `epoch`, which you count; `shuffle=False` keeps it.
    """

    def __init__(self, length: int, batch: int, comm: Comm, *, shuffle: bool = True, seed: int = 0):
        for name, value in (("length", length), ("batch", batch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"BatchSampler: {name} must be a whole number of at least 1, not "
                                  f"{value!r}")
        check_comm(comm, "BatchSampler(length, batch, comm)")
        if batch < comm.size:
            raise ConfigError(f"BatchSampler: a batch of {batch} is too small for {comm.size} "
                              f"ranks; some would have no sample in any batch")
        self.length, self.batch, self.comm = length, batch, comm
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def __len__(self) -> int:
        return -(-self.length // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.length)
        if self.shuffle:
            random = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
            order = torch.randperm(self.length, generator=random)
        for whole in order.split(self.batch):
            yield whole.tensor_split(self.comm.size)[self.comm.rank].tolist()
