"""One server's memory: for each run of keys their weights, the rule's state, and the gradients
that have come for updates not yet made.

A block begins as one entry. As all rules work element by element, one step for many keys equals
many steps for one; as soon as some keys of an entry are asked for alone, it is cut there, and each
half goes on with the history that both have had.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from dtlab.checks import short
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps.index import KeyIndex, Run, Shard
from dtlab.ps.partition import Key, Spec
from dtlab.ps.updates import State, Update

NOW = -1  # the bucket of gradients that belong to no clock


class Sum:
    """Gradients of one entry that will make one update together."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None  # of dense gradients
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a table: which, and theirs
        self.weights: dict[int, tuple[float, int]] = {}  # by worker: of its pushes, their number
        self.weight = 0.0  # of all pushes
        self.count = 0

    def add(self, comm: Comm, worker: int, g: torch.Tensor, rows: torch.Tensor | None,
            weight: float) -> None:
        """Add `worker`'s gradient `g`, which may be changed. Halves are added up as float32: a sum,
        or a product with a weight, may be too large for them though the mean is not."""
        g = g.to(torch.promote_types(g.dtype, torch.float32))
        self.count += 1
        before, pushes = self.weights.get(worker, (0.0, 0))
        self.weights[worker] = before + weight, pushes + 1
        self.weight += weight
        if weight != 1:
            g = g * weight
        if rows is not None:
            self.rows.append((rows, g))
        elif self.total is None:
            self.total = g
        else:
            comm.accumulate_(self.total, g)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that have a gradient, each once, and the sum of theirs."""
        rows, grads = joined([r for r, _ in self.rows]), joined([g for _, g in self.rows])
        once, inverse = rows.unique(return_inverse=True)
        if len(once) == len(rows):
            return rows, grads
        return once, grads.new_zeros(len(once), *grads.shape[1:]).index_add_(0, inverse, grads)

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle, as for `Entry`."""
        return vars(self) | {"total": own(self.total)}

    def cut(self, at: int) -> Sum:
        """Keep the first `at` elements. Returns the others."""
        rest = Sum()
        rest.weights, rest.weight, rest.count = dict(self.weights), self.weight, self.count
        if self.total is not None:
            self.total, rest.total = self.total[:at], self.total[at:]
        return rest


class Entry:
    """The shards of one key or several, end to end, that have always been pulled and pushed
    together. `value` is flat, or (rows, width) for a table."""

    def __init__(self, run: Run, value: torch.Tensor, rule: Update):
        self.first, self.last = run
        self.value, self.rule = value, rule
        self.state: State = {}
        self.version = 0  # updates so far
        self.read: dict[int, int] = {}  # worker → the version that it pulled last
        self.sums: dict[int, Sum] = {}  # by clock, or `NOW`

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle, without the rest of memory that was cut off."""
        return vars(self) | {"value": own(self.value),
                             "state": {name: own(x) for name, x in self.state.items()}}

    @property
    def count(self) -> int:
        """The number of keys."""
        return self.last - self.first

    @property
    def is_table(self) -> bool:
        """Are its rows pulled and pushed one by one?"""
        return self.value.ndim == 2

    @property
    def numbers(self) -> torch.Tensor:
        """The weights, as rules take them."""
        return _real(self.value)

    def pull(self, worker: int, rows: torch.Tensor | None) -> torch.Tensor:
        """Return what `worker` shall be sent, flat; not a copy unless of some rows."""
        self.read[worker] = self.version
        looked_at = rows if self.rule.looks_back else None
        self._on(looked_at, lambda w, state: self.rule.pulled(w, state, worker))
        return (self.value if rows is None else self.value.index_select(0, rows)).view(-1)

    def push(self, comm: Comm, worker: int, g: torch.Tensor, rows: torch.Tensor | None,
             weight: float, bucket: int) -> Sum:
        """Put `worker`'s gradient, flat, to those of `bucket`. Returns them."""
        staleness = self.version - self.read.get(worker, 0)
        if self.is_table:
            g = g.view(-1, self.value.shape[1])
            if rows is None:
                rows = torch.arange(len(g), device="cpu")
        g = _real(g)
        found: list[torch.Tensor] = []
        looked_at = rows if self.rule.looks_back else None
        self._on(looked_at, lambda w, state: found.append(
            self.rule.prepare(g, w, state, worker, staleness)))
        gathered = self.sums.setdefault(bucket, Sum())
        gathered.add(comm, worker, found[0], rows, weight)
        return gathered

    def update(self, bucket: int, absent: int = 0) -> None:
        """Make the update of `bucket`: with the mean over all pushes; of gradients within a clock,
        over the workers, each with the sum of its pushes. `absent`: workers that took part in that
        without a gradient for this key; theirs count as zero."""
        gathered = self.sums.pop(bucket)
        self.version += 1
        count, weight = gathered.count, gathered.weight
        if bucket != NOW and self.rule.takes == "gradients":
            count, weight = len(gathered.weights), absent + sum(
                total / pushes for total, pushes in gathered.weights.values())
        rows, total = gathered.gathered() if gathered.rows else (None, gathered.total)
        assert total is not None
        if weight != 1:
            total /= weight
        mean = total.to(self.numbers.dtype)

        def step(w: torch.Tensor, state: State) -> None:
            result: object = self.rule.step_(  # type: ignore[func-returns-value]
                w, mean, state, count)
            if result is not None:
                raise ConfigError(f"{type(self.rule).__name__}.step_ returned {short(result)}, "
                                  f"which nobody reads; change w in place, as w.sub_(g) does")
            _check(self.rule, w, state)

        self._on(rows, step)

    def cut(self, number: int, at: int) -> Entry:
        """Keep the keys before `number`, which are the first `at` elements. Returns the others."""
        rest = Entry((number, self.last), self.value[at:], self.rule)
        self.last, self.value = number, self.value[:at]
        rest.version, rest.read = self.version, dict(self.read)
        rest.sums = {bucket: gathered.cut(at) for bucket, gathered in self.sums.items()}
        for name, x in self.state.items():
            tensor = isinstance(x, torch.Tensor)
            self.state[name], rest.state[name] = (x[:at], x[at:]) if tensor else (x, x)
        return rest

    def history(self) -> tuple[Any, ...]:
        """Return version, reads and numbers: entries with equal ones may be joined."""
        numbers = {name: None if isinstance(x, torch.Tensor) else x
                   for name, x in self.state.items()}
        return self.version, self.read, numbers

    def _on(self, rows: torch.Tensor | None,
            work: Callable[[torch.Tensor, State], object]) -> None:
        """Let the rule work on all, or on these rows alone: the others keep weights and state, as
        with torch.optim.SparseAdam."""
        if rows is None:
            work(self.numbers, self.state)
            return
        w = self.numbers.index_select(0, rows)
        state = {name: x.index_select(0, rows) if isinstance(x, torch.Tensor) else x
                 for name, x in self.state.items()}
        work(w, state)
        self.numbers.index_copy_(0, rows, w)
        for name, x in state.items():
            if isinstance(x, torch.Tensor):
                if name not in self.state:
                    self.state[name] = torch.zeros_like(self.numbers)
                self.state[name].index_copy_(0, rows, x)
            else:
                self.state[name] = x


def _check(rule: Update, w: torch.Tensor, state: State) -> None:
    """Raise `ConfigError` for a state that can't be cut where `w` is."""
    for name, x in state.items():
        if not (x.shape == w.shape if isinstance(x, torch.Tensor) else isinstance(x, (int, float))):
            raise ConfigError(f"{type(rule).__name__}'s state[{name!r}] is {short(x)}; servers cut "
                              f"and move keys, so a state is a number, or a tensor shaped like w")


class Store:
    """All entries of one server, in order of their keys' numbers."""

    def __init__(self, rule: Update):
        self._rule, self.index = rule, KeyIndex()
        self.entries: list[Entry] = []

    def add(self, shards: Sequence[Shard]) -> list[Entry]:
        """Add shards that were made together. Returns their entries, without values yet."""
        new = [Entry(run, torch.empty(0, device="cpu"), self._rule)
               for run in self.index.add(shards)]
        self.entries += new
        return new

    def at(self, run: Run) -> list[Entry]:
        """The entries of these keys and no others."""
        first, last = self._edge(run[0]), self._edge(run[1])
        return self.entries[first:last]

    def keys(self, run: Run) -> list[Key]:
        """The keys of a run, or of an entry."""
        return self.index.keys[slice(*run)]

    def values(self, run: Run) -> torch.Tensor:
        """The weights of a run, or of a table (rows, width); not a copy if in one entry."""
        return joined([entry.value for entry in self.at(run)])

    def one_by_one(self) -> dict[Key, Entry]:
        """An entry a key."""
        for number in range(len(self.index.keys)):
            self._edge(number)
        return dict(zip(self.index.keys, self.entries, strict=True))

    def replace(self, entries: Mapping[Key, Entry], batches: Sequence[Mapping[Key, Spec]]) -> None:
        """Hold these keys from now on; side by side where they are of one batch, and together
        where they have the same history. None of them waits for an update."""
        self.index, self.entries = KeyIndex(), []
        for specs in batches:
            shards = [Shard(key, spec, entries[key].value.numel())
                      for key, spec in specs.items() if key in entries]
            for run in self.index.add(shards):
                mine = [entries[key] for key in self.keys(run)]
                for number, entry in enumerate(mine, run[0]):
                    entry.first, entry.last = number, number + 1
                self.entries += [_join(list(alike))
                                 for _, alike in groupby(mine, key=Entry.history)]

    def _edge(self, number: int) -> int:
        """Find the entry that begins at `number`; cut one there if none does."""
        i = bisect_left(self.entries, number, key=attrgetter("first"))
        if i < len(self.entries) and self.entries[i].first == number:
            return i
        before = self.entries[i - 1]
        if before.last > number:
            at = self.index.numel((before.first, number))
            self.entries.insert(i, before.cut(number, at))
        return i


def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """End to end; not a copy if there is one only."""
    return values[0] if len(values) == 1 else torch.cat(list(values))


def own(x: Any) -> Any:
    """Return `x`, in memory that it shares with none if it is a tensor."""
    shares = isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() > x.nbytes
    return x.clone() if shares else x


def _real(x: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, as torch's optimizers take them."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _join(alike: Sequence[Entry]) -> Entry:
    """One entry of several with the same history."""
    first = alike[0]
    if len(alike) > 1:
        first.last, first.value = alike[-1].last, joined([entry.value for entry in alike])
        for name, x in first.state.items():
            if isinstance(x, torch.Tensor):
                first.state[name] = joined([entry.state[name] for entry in alike])
    return first
