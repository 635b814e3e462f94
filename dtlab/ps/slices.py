"""Slices of a worker's tensors: what one server holds of them, and where that is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dtlab.ps.index import Run
from dtlab.ps.packing import Size, grouped, unpack
from dtlab.ps.partition import Key


@dataclass
class Slice:
    """The shard of one key on one server, and where that is in the worker's tensor.

    x: the worker's tensor, as (units, width) for a table, else flat. where: the slice's place in
    it, a Python slice or positions. rows: the rows' numbers in the server's shard; None: all of it.
    """

    run: Run  # where the server holds it
    keys: Sequence[Key]
    x: torch.Tensor
    where: Any
    rows: torch.Tensor | None = None

    @cached_property
    def size(self) -> Size:
        """The dtype and the number of elements that travel."""
        width = self.x.shape[1] if self.x.ndim == 2 else 1
        where = self.where
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        return self.x.dtype, count * width

    def read(self) -> torch.Tensor:
        """The slice, flat: a view where it can be one."""
        return self.x[self.where].reshape(-1)

    @cached_property
    def receive_buffer(self) -> torch.Tensor | None:
        """Where the slice can be received into directly; None: nowhere."""
        if not isinstance(self.where, slice):
            return None
        view = self.x[self.where]
        return view.view(-1) if view.is_contiguous() else None

    def write(self, value: torch.Tensor) -> None:
        """Put `value`, flat, in its place."""
        view = self.x[self.where]
        self.x[self.where] = value.view(view.shape)

    def tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Every key, and what is to be looked at of it."""
        yield self.keys[0], self.x

    def without(self, bad: Collection[Key]) -> list[Slice | Bundle]:
        """Return what is left without these keys."""
        return [] if self.keys[0] in bad else [self]


@dataclass
class Bundle:
    """The same for several small keys of a run. xs: theirs, contiguous; numels: their elements.
    receive_buffer: the memory in which they lie end to end, if they do."""

    run: Run
    keys: Sequence[Key]
    xs: Sequence[torch.Tensor]
    numels: Sequence[int]
    receive_buffer: torch.Tensor | None = None

    @cached_property
    def size(self) -> Size:
        """The dtype and the number of elements that travel."""
        return self.xs[0].dtype, sum(self.numels)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """End to end; a copy unless they lie so already."""
        if self.receive_buffer is not None:
            return self.receive_buffer
        return torch.cat(self._flat())

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Put `value`, flat, in its place."""
        torch.split_with_sizes_copy(value, list(self.numels), out=self._flat())

    def tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Every key, and what is to be looked at of it."""
        return zip(self.keys, self.xs, strict=True)

    def without(self, bad: Collection[Key]) -> list[Slice | Bundle]:
        """Return what is left without these keys."""
        left: list[Slice | Bundle] = []
        begin = 0
        for end in [*(i for i, key in enumerate(self.keys) if key in bad), len(self.keys)]:
            if begin < end:
                run = self.run[0] + begin, self.run[0] + end
                left.append(Bundle(run, self.keys[begin:end], self.xs[begin:end],
                                   self.numels[begin:end]))
            begin = end + 1
        return left

    def _flat(self) -> list[torch.Tensor]:
        return [x if x.ndim == 1 else x.view(-1) for x in self.xs]


Slices = list[Slice | Bundle]


def write_all(slices: Slices, payload: list[torch.Tensor]) -> None:
    """Put a reply in its place, what has not been received there."""
    sizes = [each.size for each in slices]
    values = unpack(payload, sizes)
    for x, group, buffer in zip(payload, grouped(sizes), receive_buffers(slices), strict=True):
        if buffer is not x:
            for i in group:
                slices[i].write(values[i])


def row_numbers(slices: Slices) -> Iterator[torch.Tensor]:
    """The rows that are asked for, where not all are."""
    return (each.rows for each in slices if isinstance(each, Slice) and each.rows is not None)


def counts(slices: Iterable[Slice | Bundle]) -> tuple[int | None, ...]:
    """Count the rows of each that are asked for; None: all that the server holds."""
    return tuple(len(each.rows) if isinstance(each, Slice) and each.rows is not None else None
                 for each in slices)


def receive_buffers(slices: Slices) -> list[torch.Tensor | None]:
    """Return for each tensor of a reply with these slices a place to receive it; None: anywhere."""
    groups = grouped([each.size for each in slices])
    return [slices[group[0]].receive_buffer if len(group) == 1 else None for group in groups]
