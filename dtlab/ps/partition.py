"""The partition of keys among servers. Every node computes the same answer, so none needs to ask.

The unit that is placed is an element of a dense tensor, a row of a table (an embedding), or, where
hashing decides, a whole dense key. A *shard* is what one server holds of one key: a range of its
units, or an array of their numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.checks import check_whole

Key = Hashable
Units = Any  # a range, or a sorted array of int64
Shards = dict[Key, list[tuple[int, Units]]]  # key → (server, its units), servers ascending


class Spec(NamedTuple):
    """The shape and dtype of a key. `table`: its rows are pulled and pushed one by one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    table: bool = False

    @property
    def width(self) -> int:
        """Elements a unit."""
        return math.prod(self.shape[1:]) if self.table else 1

    @property
    def units(self) -> int:
        """The number of units."""
        return self.shape[0] if self.table else math.prod(self.shape)


class MetaSpec(Spec):
    """The spec of a key without data, on the device "meta": only its messages' time counts."""


def has_data(specs: Iterable[Spec]) -> bool:
    """Do these keys hold data? All of a server's keys do, or none."""
    return not any(isinstance(spec, MetaSpec) for spec in specs)


@dataclass(frozen=True)
class Partition:
    """Before: keys and servers. After: which server holds which units. Equal in every process."""

    def place(self, specs: Mapping[Key, Spec], servers: Sequence[int]) -> Shards:
        """Place the keys, which were made together, on `servers` (ranks, ascending)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(Partition):
    """All keys end to end make one long vector, cut into equal ranges, one a server.

    Loads are equal to the element (for tables: to the row), and a big tensor is spread over all
    servers. Another number of servers moves almost every cut.
    Source: Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014.
    """

    def place(self, specs: Mapping[Key, Spec], servers: Sequence[int]) -> Shards:
        check_whole("the number of servers", len(servers))
        total = sum(spec.units * max(spec.width, 1) for spec in specs.values())
        cuts = [total * i // len(servers) for i in range(len(servers) + 1)]
        shards, begin = {}, 0
        for key, spec in specs.items():
            width = max(spec.width, 1)
            # A cut inside a row goes after it.
            edges = [min(max(-(-(cut - begin) // width), 0), spec.units) for cut in cuts]
            found = [(server, range(edges[i], edges[i + 1])) for i, server in enumerate(servers)]
            shards[key] = [shard for shard in found if len(shard[1])] or [(servers[0],
                                                                              range(0))]
            begin += spec.units * width
        return shards


@dataclass(frozen=True)
class Hash(Partition):
    """Key k is on server hash(k) mod n; each row of a table by itself.

    Simple, and even where keys are many and alike in size. Another number of servers moves most
    keys: all but about 1/(n+1) of them when one comes to n.
    """

    def place(self, specs: Mapping[Key, Spec], servers: Sequence[int]) -> Shards:
        def owner(hashes: np.ndarray) -> np.ndarray:
            return hashes % np.uint64(len(servers))

        return _by_hash(specs, servers, owner)


@dataclass(frozen=True)
class ConsistentHash(Partition):
    """Servers and keys lie on a ring of hashes; a key is on the next server round the ring.

    Each server lies there `vnodes` times, so that loads even out. A server that comes to n others
    takes about 1/(n+1) of the keys, and nothing else moves.
    Source: Karger et al., Consistent hashing and random trees, STOC 1997.
    """

    vnodes: int = 64

    def __post_init__(self) -> None:
        check_whole("ConsistentHash's vnodes", self.vnodes, 1, 2**16)

    def place(self, specs: Mapping[Key, Spec], servers: Sequence[int]) -> Shards:
        points, owners = ring_of(tuple(servers), self.vnodes)

        def owner(hashes: np.ndarray) -> np.ndarray:
            return owners[np.searchsorted(points, hashes) % len(points)]

        return _by_hash(specs, servers, owner)


def stable_hash(key: Key) -> int:
    """64 bits that depend on the key alone, not on the process as Python's `hash` does. Keys that
    are equal, as 1 and np.int64(1) are, have the same."""
    text = _text_of(key).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _text_of(key: Key) -> str:
    """Return `repr(key)`, of the plainest key that is equal to it.

    >>> _text_of(np.int64(1)), _text_of((True, 2.5, np.str_("w"))), _text_of(frozenset("ba"))
    ('1', "(1, 2.5, 'w')", "frozenset({'a', 'b'})")
    """
    if isinstance(key, np.floating):  # the item of a long one is itself
        key = float(key)
    if isinstance(key, np.generic):
        return _text_of(key.item())
    if isinstance(key, (int, float)):
        return repr(int(key) if isinstance(key, int) or key.is_integer() else float(key))
    if isinstance(key, str):
        return repr(str(key))
    if isinstance(key, tuple):
        return f"({', '.join(map(_text_of, key))}{',' * (len(key) == 1)})"
    if isinstance(key, frozenset):
        return f"frozenset({{{', '.join(sorted(map(_text_of, key)))}}})"
    return repr(key)


def row_hashes(key: Key, rows: int) -> np.ndarray:
    """A hash for each row of a table. Source of the mixing: Steele et al., SplitMix64, 2014."""
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        z = np.uint64(stable_hash(key)) + (np.arange(rows, dtype=np.uint64) + np.uint64(1)) * step
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=64)
def ring_of(servers: tuple[int, ...], vnodes: int) -> tuple[np.ndarray, np.ndarray]:
    """The ring: hashes in ascending order, and the server of each (as an index into `servers`)."""
    points = [(stable_hash(("server", server, v)), place)
              for place, server in enumerate(servers) for v in range(vnodes)]
    points.sort()
    return (np.array([p for p, _ in points], dtype=np.uint64),
            np.array([place for _, place in points], dtype=np.int64))


def _by_hash(specs: Mapping[Key, Spec], servers: Sequence[int],
             owner: Callable[[np.ndarray], np.ndarray]) -> Shards:
    check_whole("the number of servers", len(servers))
    shards: Shards = {}
    for key, spec in specs.items():
        if spec.table and spec.units:
            owners = owner(row_hashes(key, spec.units))
            found = [(server, np.flatnonzero(owners == place))
                      for place, server in enumerate(servers)]
            shards[key] = [shard for shard in found if len(shard[1])]
        else:
            place = int(owner(np.array([stable_hash(key)], dtype=np.uint64))[0])
            shards[key] = [(servers[place], range(spec.units))]
    return shards


def common(a: Units, b: Units) -> Units:
    """The units that are in both."""
    if isinstance(a, range) and isinstance(b, range):
        return range(max(a.start, b.start), max(min(a.stop, b.stop), max(a.start, b.start)))
    return np.intersect1d(np.asarray(a), np.asarray(b), assume_unique=True)


def positions(units: Units, within: Units) -> Any:
    """Return where `units` stand in the shard `within`: a slice, or a tensor of int64."""
    if isinstance(within, range):
        if isinstance(units, range):
            return slice(units.start - within.start, units.stop - within.start)
        return torch.from_numpy(np.asarray(units) - within.start)
    return torch.from_numpy(np.searchsorted(within, np.asarray(units)))
