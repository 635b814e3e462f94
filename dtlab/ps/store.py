"""One server's memory: for each piece of a key its weights, the rule's state, and the gradients
that have come for updates not yet made."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtlab.comm import Comm
from dtlab.ps.updates import State, Update

NOW = -1  # the bucket of gradients that belong to no clock


class Sum:
    """Gradients of one key that will make one update together."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None  # of dense gradients
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a table: which, and theirs
        self.weights: dict[int, float] = {}  # by worker
        self.count = 0

    def add(self, comm: Comm, worker: int, g: torch.Tensor, rows: torch.Tensor | None,
            weight: float) -> None:
        """Add `worker`'s gradient `g`, which is ours to change."""
        self.count += 1
        self.weights[worker] = weight
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
        rows, inverse = torch.cat([r for r, _ in self.rows]).unique(return_inverse=True)
        grads = torch.cat([g for _, g in self.rows])
        return rows, grads.new_zeros(len(rows), grads.shape[1]).index_add_(0, inverse, grads)


class Entry:
    """A piece of a key. `value` is flat, or (rows, width) for a table."""

    def __init__(self, value: torch.Tensor, rule: Update):
        self.value, self.rule = value, rule
        self.state: State = {}
        self.version = 0  # updates so far
        self.read: dict[int, int] = {}  # worker → the version that it pulled last
        self.sums: dict[int, Sum] = {}  # by clock, or `NOW`

    @property
    def is_table(self) -> bool:
        """Are its rows pulled and pushed one by one?"""
        return self.value.ndim == 2

    def pull(self, worker: int, rows: torch.Tensor | None) -> torch.Tensor:
        """What `worker` shall be sent, flat; not a copy unless of some rows."""
        self.read[worker] = self.version
        self._on(rows, lambda w, state: self.rule.pulled(w, state, worker))
        return (self.value if rows is None else self.value[rows]).view(-1)

    def push(self, comm: Comm, worker: int, g: torch.Tensor, rows: torch.Tensor | None,
             weight: float, bucket: int) -> Sum:
        """Put `worker`'s gradient, flat, to those of `bucket`. Returns them."""
        staleness = self.version - self.read.get(worker, 0)
        if self.is_table:
            g = g.view(-1, self.value.shape[1])
            if rows is None:
                rows = torch.arange(len(g))
        found: list[torch.Tensor] = []
        self._on(rows, lambda w, state: found.append(
            self.rule.prepare(g, w, state, worker, staleness)))
        gathered = self.sums.setdefault(bucket, Sum())
        gathered.add(comm, worker, found[0], rows, weight)
        return gathered

    def update(self, bucket: int, absent: int = 0) -> torch.Tensor | None:
        """Make the update of `bucket`. `absent`: workers that took part without a gradient for this
        key; theirs count as zero. Returns the gradient, which nobody needs any more."""
        gathered = self.sums.pop(bucket)
        self.version += 1
        weight = sum(gathered.weights.values())
        if self.rule.takes == "gradients":
            weight += absent
        rows, total = gathered.gathered() if gathered.rows else (None, gathered.total)
        assert total is not None
        if weight != 1:
            total /= weight
        count = len(gathered.weights)
        self._on(rows, lambda w, state: self.rule.step_(w, total, state, count))
        return gathered.total

    def _on(self, rows: torch.Tensor | None,
            work: Callable[[torch.Tensor, State], object]) -> None:
        """Let the rule work on all, or on these rows alone: the others keep weights and state, as
        with torch.optim.SparseAdam."""
        if rows is None:
            work(self.value, self.state)
            return
        w = self.value[rows]
        state = {name: x[rows] if isinstance(x, torch.Tensor) else x
                 for name, x in self.state.items()}
        work(w, state)
        self.value[rows] = w
        for name, x in state.items():
            if isinstance(x, torch.Tensor):
                if name not in self.state:
                    self.state[name] = torch.zeros_like(self.value)
                self.state[name][rows] = x
            else:
                self.state[name] = x
