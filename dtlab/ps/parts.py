"""Which part of a worker's tensors belongs to which server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.ps.mail import together, unpack
from dtlab.ps.partition import Key, Placement, Spec, Units, positions


class Part(NamedTuple):
    """What one server holds of one key, and where that is in the worker's tensor.

    x: the worker's tensor, as (units, width) for a table, else flat. where: its part there, a slice
    or positions. rows: the rows' numbers in the server's piece; None: all of the piece.
    """

    key: Key
    x: torch.Tensor
    where: Any
    rows: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """The part, flat: a view where it can be one."""
        return self.x[self.where].reshape(-1)

    def spot(self) -> torch.Tensor | None:
        """Where the part can be received into directly; None: nowhere."""
        if not isinstance(self.where, slice):
            return None
        view = self.x[self.where]
        return view.view(-1) if view.is_contiguous() else None

    def write(self, value: torch.Tensor) -> None:
        """Put `value`, flat, in its place, unless it is there already."""
        spot = self.spot()
        if spot is not None and spot.data_ptr() == value.data_ptr() and not value.is_meta:
            return
        view = self.x[self.where]
        self.x[self.where] = value.view(view.shape)


class Layout:
    """Where all keys are, as a worker knows it."""

    def __init__(self) -> None:
        self.specs: dict[Key, Spec] = {}
        self.batches: list[dict[Key, Spec]] = []
        self.placement: Placement = {}

    def add(self, specs: dict[Key, Spec], placement: Placement) -> None:
        """These keys were made together."""
        self.batches.append(specs)
        self.specs |= specs
        self.placement |= placement

    def whole(self, tensors: Mapping[Key, torch.Tensor]) -> dict[int, list[Part]]:
        """By server, the parts of whole keys; the tensors are contiguous."""
        found: dict[int, list[Part]] = {}
        for key, x in tensors.items():
            spec = self.specs[key]
            flat = x.view(spec.units, spec.width) if spec.table else x.view(-1)
            for server, units in self.placement[key]:
                found.setdefault(server, []).append(Part(key, flat, _where(units)))
        return found

    def some_rows(self, key: Key, index: torch.Tensor, x: torch.Tensor,
                  tell_all: bool = False) -> dict[int, list[Part]]:
        """By server, the parts of rows `index` of a table; x: their values, (rows, width).

        tell_all: also for servers that hold none of these, so that all count the same updates.
        """
        numbers = index.numpy(force=True)
        found = {}
        for server, units in self.placement[key]:
            here = np.flatnonzero(_within(numbers, units))
            if len(here) or tell_all:
                rows = positions(numbers[here], units)
                found[server] = [Part(key, x, torch.as_tensor(here), rows)]
        return found


def rooms(parts: list[Part], fresh: list[torch.Tensor]) -> list[torch.Tensor]:
    """For an answer with these parts: the places to receive into, `fresh` ones where need be."""
    groups = together([(part.x.dtype, _numel(part)) for part in parts])
    return [spot if len(group) == 1 and (spot := parts[group[0]].spot()) is not None else new
            for group, new in zip(groups, fresh, strict=True)]


def place(parts: list[Part], wires: list[torch.Tensor]) -> None:
    """Put the answer in its place."""
    sizes = [(part.x.dtype, _numel(part)) for part in parts]
    for part, value in zip(parts, unpack(wires, sizes), strict=True):
        part.write(value)


def both(one: dict[int, list[Part]], two: dict[int, list[Part]]) -> dict[int, list[Part]]:
    """Parts of two kinds in one request a server."""
    return {server: [*one.get(server, []), *two.get(server, [])]
            for server in sorted({*one, *two})}


def row_numbers(parts: list[Part]) -> Iterator[torch.Tensor]:
    """The rows that are asked for, where not all are."""
    return (part.rows for part in parts if part.rows is not None)


def _where(units: Units) -> Any:
    if isinstance(units, range):
        return slice(units.start, units.stop)
    return torch.as_tensor(units)


def _within(numbers: np.ndarray, units: Units) -> np.ndarray:
    if isinstance(units, range):
        return (numbers >= units.start) & (numbers < units.stop)
    return np.isin(numbers, units)


def _numel(part: Part) -> int:
    width = part.x.shape[1] if part.x.ndim == 2 else 1
    where = part.where
    count: int = where.stop - where.start if isinstance(where, slice) else len(where)
    return count * width
