"""Where all keys are, as a worker knows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.ps import checks
from dtlab.ps.partition import Key, Placement, Spec, Units, positions
from dtlab.ps.parts import Bundle, Memory, Part, Parts
from dtlab.ps.places import Piece, Places, Run

PLANS = 64  # keep so many


class Slot(NamedTuple):
    """One run of a request. `which`: of the request's tensors, one a key; where: see `Part`."""

    run: Run
    keys: list[Key]
    which: Sequence[int]
    numels: list[int]
    where: Any = None


class Plan(NamedTuple):
    """How a request for these keys is cut up. Made once: requests come again and again."""

    keys: tuple[Key, ...]
    specs: list[Spec]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    slots: dict[int, list[Slot]]  # by server
    age: object  # it holds for this one: see `Layout`

    def cut(self, tensors: Sequence[torch.Tensor]) -> dict[int, Parts]:
        """By server, the parts of whole keys; the tensors are those of the keys, contiguous."""
        return {server: [self._part(slot, tensors) for slot in slots]
                for server, slots in self.slots.items()}

    def _part(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> Part | Bundle:
        if len(slot.keys) == 1:
            i = slot.which[0]
            spec, x = self.specs[i], tensors[i]
            flat = x.view(spec.units, spec.width) if spec.table else x.view(-1)
            flat = flat.detach() if flat.requires_grad else flat
            return Part(slot.run, slot.keys, flat, slot.where)
        all_of_them = slot.which == range(len(tensors))
        xs = tensors if all_of_them else [tensors[i] for i in slot.which]
        return Bundle(slot.run, slot.keys, xs, slot.numels)


class Room(Mapping[Key, torch.Tensor]):
    """Tensors for some keys, see `Node.room`. `parts`: they are cut up once and for all."""

    def __init__(self, plan: Plan, memory: Memory):
        self.plan = plan
        found: dict[int, torch.Tensor] = {}
        memories: dict[int, list[torch.Tensor | None]] = {}
        for server, slots in plan.slots.items():
            for slot in slots:
                lying = None
                if len(slot.keys) > 1:
                    dtype = plan.dtypes[slot.which[0]]
                    lying = memory((dtype, sum(slot.numels)))
                    pieces = torch.unsafe_split_with_sizes(lying, slot.numels)
                    found.update(zip(slot.which, pieces, strict=True))
                memories.setdefault(server, []).append(lying)
        self.tensors = {
            key: (found[i] if i in found else memory((spec.dtype, math.prod(spec.shape)))
                  ).view(spec.shape)
            for i, (key, spec) in enumerate(zip(plan.keys, plan.specs, strict=True))}
        self.parts = plan.cut(list(self.tensors.values()))
        for server, found_parts in self.parts.items():
            for part, lying in zip(found_parts, memories[server], strict=True):
                if isinstance(part, Bundle):
                    part.spot = lying

    def __getitem__(self, key: Key) -> torch.Tensor:
        return self.tensors[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Layout:
    """All keys, their servers, and their places there."""

    def __init__(self) -> None:
        self.specs: dict[Key, Spec] = {}
        self.batches: list[dict[Key, Spec]] = []
        self.placement: Placement = {}
        self.places: dict[int, Places] = {}  # by server
        self.age = object()  # another one whenever the servers change
        self._plans: dict[tuple[Key, ...], Plan] = {}

    def add(self, specs: dict[Key, Spec], placement: Placement) -> dict[int, list[Piece]]:
        """These keys were made together. Returns, by server, what it holds of them, in order."""
        self.batches.append(specs)
        self.specs |= specs
        self.placement |= placement
        pieces: dict[int, list[Piece]] = {}
        for key, spec in specs.items():
            for server, units in placement[key]:
                piece = Piece(key, spec, len(units) * spec.width)
                pieces.setdefault(server, []).append(piece)
        return {server: self._number(server, found) for server, found in pieces.items()}

    def move(self, placements: Sequence[Placement]) -> None:
        """From here on each batch is placed so."""
        batches, self.batches, self.places, self._plans = self.batches, [], {}, {}
        self.age = object()
        for specs, placement in zip(batches, placements, strict=True):
            self.add(specs, placement)

    def plan(self, rank: int, keys: tuple[Key, ...]) -> Plan:
        """How to cut up a request for these keys; `ConfigError` if one is unknown."""
        plan = self._plans.get(keys)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = self._plans[keys] = self._made(rank, keys)
        return plan

    def some_rows(self, key: Key, index: torch.Tensor, x: torch.Tensor,
                  tell_all: bool = False) -> dict[int, Parts]:
        """By server, the parts of rows `index` of a table; x: their values, (rows, width).

        tell_all: also for servers that hold none of these, so that all count the same updates.
        """
        numbers = index.numpy(force=True)
        found: dict[int, Parts] = {}
        for server, units in self.placement[key]:
            here = np.flatnonzero(_within(numbers, units))
            if len(here) or tell_all:
                rows = positions(numbers[here], units)
                place = self.places[server].of[key]
                where = torch.as_tensor(here) if len(here) < len(x) else slice(0, len(x))
                part = Part((place, place + 1), [key], x, where, rows)
                found[server] = [part]
        return found

    def _number(self, server: int, pieces: list[Piece]) -> list[Piece]:
        places = self.places.setdefault(server, Places())
        places.add(pieces)
        return sorted(pieces, key=lambda piece: places.of[piece.key])

    def _made(self, rank: int, keys: tuple[Key, ...]) -> Plan:
        specs = [checks.known(rank, key, self.specs) for key in keys]
        wanted: dict[int, list[tuple[int, int, Any]]] = {}  # by server: place, which, where
        for i, key in enumerate(keys):
            for server, units in self.placement[key]:
                place = self.places[server].of[key]
                wanted.setdefault(server, []).append((place, i, _where(units)))
        slots = {}
        for server, found in wanted.items():
            by_place = {place: (i, where) for place, i, where in found}
            runs = self.places[server].runs(sorted(by_place))
            slots[server] = [self._slot(self.places[server], run, by_place) for run in runs]
        return Plan(keys, specs, [spec.shape for spec in specs], [spec.dtype for spec in specs],
                    slots, self.age)

    def _slot(self, places: Places, run: Run, by_place: dict[int, tuple[int, Any]]) -> Slot:
        which: Sequence[int] = [by_place[place][0] for place in range(*run)]
        if which == [*range(len(which))]:
            which = range(len(which))
        return Slot(run, places.keys[slice(*run)], which, places.numels(run), by_place[run[0]][1])


def _where(units: Units) -> Any:
    if isinstance(units, range):
        return slice(units.start, units.stop)
    return torch.as_tensor(units)


def _within(numbers: np.ndarray, units: Units) -> np.ndarray:
    if isinstance(units, range):
        return (numbers >= units.start) & (numbers < units.stop)
    return np.isin(numbers, units)
