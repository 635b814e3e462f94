"""The shards of each key, as a worker knows them, and the way requests are cut up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.errors import ConfigError
from dtlab.ps import checks
from dtlab.ps.index import KeyIndex, Run, Shard
from dtlab.ps.partition import Key, Shards, Spec, Units, has_data, positions
from dtlab.ps.slices import Bundle, Slice, Slices

PLANS = 64  # how many to keep


class Slot(NamedTuple):
    """One run of a request. `which`: of the request's tensors, one a key; where: see `Slice`."""

    run: Run
    keys: list[Key]
    which: list[int]
    numels: list[int]
    where: Any = None


class RequestPlan(NamedTuple):
    """The cuts of a request for these keys. Made once: requests come again and again."""

    keys: tuple[Key, ...]
    specs: list[Spec]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    is_meta: bool  # the keys hold no data
    slots: dict[int, list[Slot]]  # by server
    age: object  # it holds as long as this one of its `ShardMap` does

    def cut(self, tensors: Sequence[torch.Tensor]) -> dict[int, Slices]:
        """Return by server slices of whole keys; `tensors` are those of the keys, contiguous."""
        return {server: [self._slice(slot, tensors) for slot in slots]
                for server, slots in self.slots.items()}

    def _slice(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> Slice | Bundle:
        if len(slot.keys) == 1:
            i = slot.which[0]
            spec, x = self.specs[i], tensors[i]
            flat = x.view(spec.units, spec.width) if spec.table else x.view(-1)
            flat = flat.detach() if flat.requires_grad else flat
            return Slice(slot.run, slot.keys, flat, slot.where)
        return Bundle(slot.run, slot.keys, [tensors[i] for i in slot.which], slot.numels)


class Buffer(Mapping[Key, torch.Tensor]):
    """Tensors for some keys, see `Node.buffer`. `slices`: they are cut up once."""

    def __init__(self, plan: RequestPlan, device: torch.device):
        self.plan = plan
        xs = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in plan.specs]
        buffers: dict[tuple[int, Run], torch.Tensor] = {}
        for server, slots in plan.slots.items():
            for slot in slots:
                if len(slot.keys) > 1:
                    dtype = plan.dtypes[slot.which[0]]
                    buffer = torch.empty(sum(slot.numels), dtype=dtype, device=device)
                    buffers[server, slot.run] = buffer
                    views = torch.unsafe_split_with_sizes(buffer, slot.numels)
                    for i, view in zip(slot.which, views, strict=True):
                        xs[i] = view.view(plan.shapes[i])
        self.tensors = dict(zip(plan.keys, xs, strict=True))
        self.slices = plan.cut(xs)
        for server, found in self.slices.items():
            for each in found:
                if isinstance(each, Bundle):
                    each.receive_buffer = buffers[server, each.run]

    def __getitem__(self, key: Key) -> torch.Tensor:
        return self.tensors[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class ShardMap:
    """All keys, their servers, and their numbers there."""

    def __init__(self) -> None:
        self.specs: dict[Key, Spec] = {}
        self.batches: list[dict[Key, Spec]] = []
        self.shards: Shards = {}
        self.index: dict[int, KeyIndex] = {}  # by server
        self.age = object()  # another one whenever the servers change
        self._plans: dict[tuple[Key, ...], RequestPlan] = {}

    def add(self, specs: dict[Key, Spec], shards: Shards) -> dict[int, list[Shard]]:
        """Add these keys, made together. Returns, by server, what it holds of them, in order."""
        self.batches.append(specs)
        self.specs |= specs
        self.shards |= shards
        held: dict[int, list[Shard]] = {}
        for key, spec in specs.items():
            for server, units in shards[key]:
                shard = Shard(key, spec, len(units) * spec.width)
                held.setdefault(server, []).append(shard)
        return {server: self._number(server, found) for server, found in held.items()}

    def move(self, shards: Sequence[Shards]) -> None:
        """Give each batch these shards from here on."""
        batches, self.batches, self.index, self._plans = self.batches, [], {}, {}
        self.age = object()
        for specs, its in zip(batches, shards, strict=True):
            self.add(specs, its)

    def plan(self, rank: int, keys: tuple[Key, ...]) -> RequestPlan:
        """Plan how to cut up a request for these keys. Raises `ConfigError` if one is unknown."""
        plan = self._plans.get(keys)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = self._plans[keys] = self._new_plan(rank, keys)
        return plan

    def some_rows(self, key: Key, index: torch.Tensor, x: torch.Tensor,
                  tell_all: bool = False) -> dict[int, Slices]:
        """Return by server the slices of rows `index` of a table; x: their values, (rows, width).

        tell_all: also for servers that hold none of these, so that all count the same updates.
        """
        numbers = index.numpy(force=True)
        found: dict[int, Slices] = {}
        for server, units in self.shards[key]:
            here = np.flatnonzero(_within(numbers, units))
            if len(here) or tell_all:
                rows = positions(numbers[here], units)
                number = self.index[server].number_of[key]
                where = torch.from_numpy(here) if len(here) < len(x) else slice(0, len(x))
                part = Slice((number, number + 1), [key], x, where, rows)
                found[server] = [part]
        return found

    def _number(self, server: int, shards: list[Shard]) -> list[Shard]:
        index = self.index.setdefault(server, KeyIndex())
        index.add(shards)
        return sorted(shards, key=lambda shard: index.number_of[shard.key])

    def _new_plan(self, rank: int, keys: tuple[Key, ...]) -> RequestPlan:
        specs = [checks.spec_of(rank, key, self.specs) for key in keys]
        wanted: dict[int, list[tuple[int, int, Any]]] = {}  # by server: number, which, where
        for i, key in enumerate(keys):
            for server, units in self.shards[key]:
                number = self.index[server].number_of[key]
                where = positions(units, range(specs[i].units))
                wanted.setdefault(server, []).append((number, i, where))
        slots = {}
        for server, found in wanted.items():
            by_number = {number: (i, where) for number, i, where in found}
            runs = self.index[server].runs(sorted(by_number))
            slots[server] = [self._slot(self.index[server], run, by_number) for run in runs]
        return RequestPlan(keys, specs, [spec.shape for spec in specs],
                           [spec.dtype for spec in specs], not has_data(specs), slots, self.age)

    def _slot(self, index: KeyIndex, run: Run, by_number: dict[int, tuple[int, Any]]) -> Slot:
        which = [by_number[number][0] for number in range(*run)]
        return Slot(run, index.keys[slice(*run)], which, index.numels(run), by_number[run[0]][1])


def _within(numbers: np.ndarray, units: Units) -> np.ndarray:
    if isinstance(units, range):
        return (numbers >= units.start) & (numbers < units.stop)
    return np.isin(numbers, units)


def all_fit(rank: int, verb: str, plan: RequestPlan, tensors: Sequence[torch.Tensor]) -> None:
    """Check what `fits` does for all keys of a plan, in few steps."""
    types, shape, dtype = {*map(type, tensors)}, attrgetter("shape"), attrgetter("dtype")
    if not (all(issubclass(kind, torch.Tensor) for kind in types)
            and all(map(eq, map(shape, tensors), plan.shapes))
            and all(map(is_, map(dtype, tensors), plan.dtypes))
            and {*map(attrgetter("is_meta"), tensors)} <= {plan.is_meta}):
        for key, x, spec in zip(plan.keys, tensors, plan.specs, strict=True):
            checks.check_fit(rank, verb, key, x, spec)


def check_contiguous(rank: int, plan: RequestPlan, tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ConfigError` unless answers can be put into these as they come."""
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        key = next(key for key, x in zip(plan.keys, tensors, strict=True) if not x.is_contiguous())
        raise ConfigError(f"rank {rank}: pull needs a contiguous tensor in out[{key!r}]")
