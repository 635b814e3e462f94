"""The order of keys on one server. Worker and server number them alike, so a request names keys by
their numbers.

Thousands of small keys would cost thousands of small steps. So small dense keys of one dtype that
are made together form one *block*; a big one, a table, or what a cut has left of a key is a block
of its own. A *run*, (first, last), is the keys first to last − 1 of one block: they travel as one
tensor, and the server works on them as on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from dtlab.ps.packing import grouped
from dtlab.ps.partition import Key, Spec

Run = tuple[int, int]


class Shard(NamedTuple):
    """The part of a key that one server holds; numel: its elements."""

    key: Key
    spec: Spec
    numel: int

    @property
    def is_whole(self) -> bool:
        """Is it all of a dense key?"""
        return not self.spec.table and self.numel == self.spec.units


class KeyIndex:
    """The keys of one server in their order."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.number_of: dict[Key, int] = {}  # key → its number
        self._begin: list[int] = [0]  # by key, the elements before it
        self._blocks: set[int] = set()  # the keys with which one begins

    def add(self, shards: Sequence[Shard]) -> list[Run]:
        """Add shards that were made together. Returns their blocks."""
        whole = [shard for shard in shards if shard.is_whole]
        groups = grouped([(shard.spec.dtype, shard.numel) for shard in whole])
        blocks = [[whole[i] for i in group] for group in groups]
        blocks += [[shard] for shard in shards if not shard.is_whole]
        return [self._add_block(block) for block in blocks]

    def _add_block(self, block: Sequence[Shard]) -> Run:
        first = len(self.keys)
        self._blocks.add(first)
        for key, _, numel in block:
            self.number_of[key] = len(self.keys)
            self.keys.append(key)
            self._begin.append(self._begin[-1] + numel)
        return first, len(self.keys)

    def numel(self, run: Run) -> int:
        """The elements of `run`."""
        return self._begin[run[1]] - self._begin[run[0]]

    def numels(self, run: Run) -> list[int]:
        """The elements of each key."""
        begin = self._begin[run[0] : run[1] + 1]
        return [b - a for a, b in pairwise(begin)]

    def runs(self, numbers: Iterable[int]) -> list[Run]:
        """The runs that these keys, ascending, make."""
        runs: list[Run] = []
        for number in numbers:
            if runs and runs[-1][1] == number and number not in self._blocks:
                runs[-1] = runs[-1][0], number + 1
            else:
                runs.append((number, number + 1))
        return runs
