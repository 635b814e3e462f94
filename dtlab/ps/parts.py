"""Which part of a worker's tensors belongs to which server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dtlab.ps.packing import Size, together, unpack
from dtlab.ps.partition import Key
from dtlab.ps.places import Run

Memory = Callable[[Size], torch.Tensor]  # memory of that size, its elements not set


@dataclass
class Part:
    """What one server holds of one key, and where that is in the worker's tensor.

    x: the worker's tensor, as (units, width) for a table, else flat. where: its part there, a slice
    or positions. rows: the rows' numbers in the server's piece; None: all of the piece.
    """

    run: Run  # where the server holds it
    keys: Sequence[Key]
    x: torch.Tensor
    where: Any
    rows: torch.Tensor | None = None

    @cached_property
    def size(self) -> Size:
        """Of what travels."""
        width = self.x.shape[1] if self.x.ndim == 2 else 1
        where = self.where
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        return self.x.dtype, count * width

    def read(self, memory: Memory) -> torch.Tensor:
        """The part, flat: a view where it can be one."""
        return (self.x if self._is_all else self.x[self.where]).reshape(-1)

    @property
    def _is_all(self) -> bool:
        """Is it the whole tensor?"""
        where = self.where
        return where.__class__ is slice and where.start == 0 and where.stop == len(self.x)

    @cached_property
    def spot(self) -> torch.Tensor | None:
        """Where the part can be received into directly; None: nowhere."""
        if not isinstance(self.where, slice):
            return None
        view = self.x if self._is_all else self.x[self.where]
        return view.view(-1) if view.is_contiguous() else None

    def write(self, value: torch.Tensor) -> None:
        """Put `value`, flat, in its place."""
        view = self.x[self.where]
        self.x[self.where] = value.view(view.shape)

    def tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Every key, and what is to be looked at of it."""
        yield self.keys[0], self.x

    def without(self, bad: Collection[Key]) -> list[Part | Bundle]:
        """What is left when these keys are left out."""
        return [] if self.keys[0] in bad else [self]


@dataclass
class Bundle:
    """The same for several small keys of a run. xs: theirs, contiguous; numels: their elements.
    spot: the memory in which they lie end to end, if they do."""

    run: Run
    keys: Sequence[Key]
    xs: Sequence[torch.Tensor]
    numels: Sequence[int]
    spot: torch.Tensor | None = None

    @cached_property
    def size(self) -> Size:
        """Of what travels."""
        return self.xs[0].dtype, sum(self.numels)

    @torch.no_grad()
    def read(self, memory: Memory) -> torch.Tensor:
        """End to end; in memory from `memory` unless they lie so already."""
        if self.spot is not None:
            return self.spot
        return torch.cat(self._flat(), out=memory(self.size))

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Put `value`, flat, in its place."""
        torch.split_with_sizes_copy(value, list(self.numels), out=self._flat())

    def tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Every key, and what is to be looked at of it."""
        return zip(self.keys, self.xs, strict=True)

    def without(self, bad: Collection[Key]) -> list[Part | Bundle]:
        """What is left when these keys are left out."""
        left: list[Part | Bundle] = []
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


Parts = list[Part | Bundle]


def place(parts: Parts, wires: list[torch.Tensor]) -> list[torch.Tensor]:
    """Put the answer in its place. Returns the wires whose memory is not needed any more."""
    sizes = [part.size for part in parts]
    values, left = unpack(wires, sizes), []
    for wire, group, spot in zip(wires, together(sizes), spots(parts), strict=True):
        if spot is wire:
            continue  # it is there already
        left.append(wire)
        for i in group:
            parts[i].write(values[i])
    return left


def both(one: dict[int, Parts], two: dict[int, Parts]) -> dict[int, Parts]:
    """Parts of two kinds in one request a server."""
    return {server: [*one.get(server, []), *two.get(server, [])]
            for server in sorted({*one, *two})}


def row_numbers(parts: Parts) -> Iterator[torch.Tensor]:
    """The rows that are asked for, where not all are."""
    return (part.rows for part in parts if isinstance(part, Part) and part.rows is not None)


def runs(parts: Iterable[Part | Bundle]) -> tuple[Run, ...]:
    """What a letter names them by."""
    return tuple(part.run for part in parts)


def counts(parts: Iterable[Part | Bundle]) -> tuple[int | None, ...]:
    """How many rows of each are asked for; None: all that the server holds."""
    return tuple(len(part.rows) if isinstance(part, Part) and part.rows is not None else None
                 for part in parts)


def spots(parts: Parts) -> list[torch.Tensor | None]:
    """By wire of an answer with these parts, where it can be received into; None: anywhere."""
    groups = together([part.size for part in parts])
    return [parts[group[0]].spot if len(group) == 1 else None for group in groups]
