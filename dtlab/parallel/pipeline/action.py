"""The actions of a rank in a pipeline.

An action is written as torch.distributed.pipelining writes it: stage, kind, micro-batch, as in 2F5.

| kind | what it computes                              | after                                    |
|------|-----------------------------------------------|------------------------------------------|
| F    | the forward pass                              | F of the stage before                    |
| B    | the full backward: both gradients             | its F, and B or I of the stage after     |
| I    | the gradient of its input only                | its F, and B or I of the stage after     |
| W    | the gradient of its weights                   | its I                                    |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Rows = Sequence[Sequence["Action"]]  # by rank, in order


class Action(NamedTuple):
    """The action `kind` of `stage` on micro-batch `micro`."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    def neighbour(self, step: int, stages: int) -> int | None:
        """Return the stage before this one (step −1) or after it (1) on the way of activations or,
        in B and I, of gradients; None at the ends, and for W, which hands on nothing."""
        stage = self.stage + (step if self.kind == "F" else -step)
        return stage if self.kind != "W" and 0 <= stage < stages else None

    def needs(self, stages: int) -> list[tuple[Action, ...]]:
        """Return what must be done before: one action of each tuple."""
        stage, kind, micro = self
        if kind == "F":
            return [(Action(stage - 1, "F", micro),)] if stage else []
        if kind == "W":
            return [(Action(stage, "I", micro),)]
        before: list[tuple[Action, ...]] = [(Action(stage, "F", micro),)]
        if stage < stages - 1:
            before.append((Action(stage + 1, "B", micro), Action(stage + 1, "I", micro)))
        return before


def ranks_of(rows: Rows) -> dict[int, int]:
    """Return the rank of each stage."""
    return {action.stage: rank for rank, row in enumerate(rows) for action in row}


def run_in_order(rows: Rows, stages: int) -> Iterator[tuple[int, int]]:
    """(rank, number of its action), in an order in which all that an action needs comes before it;
    ends where nothing can go on."""
    done: set[Action] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(any(a in done for a in one)
                                              for one in row[at[rank]].needs(stages)):
                done.add(row[at[rank]])
                yield rank, at[rank]
                at[rank] += 1
                moved = True
