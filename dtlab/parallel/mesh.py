"""Ranks as a grid: each axis is one kind of parallelism.

Mesh(comm, pp=2, dp=2, tp=2) numbers eight ranks as `arange(8).view(2, 2, 2)`: the last axis varies
fastest, so the ranks of a tp group are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dtlab.checks import check_whole, short
from dtlab.comm import Comm
from dtlab.errors import ConfigError


class Mesh:
    """The ranks of `comm` on a grid with named axes, in any order; the last one varies fastest.

    axes: {name: size}. coordinates: {name: this rank's place along it}. mesh["tp"]: the
    communicator of the ranks that differ from this one along "tp" only; mesh["dp", "tp"]: along
    both, numbered with the last name fastest. No message is sent. Raises `ConfigError` unless the
    sizes multiply to `comm.size`.
    """

    def __init__(self, comm: Comm, **axes: int):
        if not isinstance(comm, Comm):
            raise ConfigError(f"Mesh needs a communicator, then axes as in Mesh(comm, dp=2, tp=2); "
                              f"got {comm!r}")
        check_axes(axes, comm.size, "the communicator")
        self.comm, self.axes = comm, axes
        places = np.unravel_index(comm.rank, tuple(axes.values()))
        self.coordinates = {name: int(place) for name, place in zip(axes, places, strict=True)}

    def ranks(self, *names: str) -> list[int]:
        """The ranks of this rank's group along these axes."""
        return next(group for group in groups(self.axes, *names) if self.comm.rank in group)

    def __getitem__(self, names: str | tuple[str, ...]) -> Comm:
        names = names if isinstance(names, tuple) else (names,)
        group = self.comm.subgroup(self.ranks(*names)).labelled(self.comm.label)
        group.axes = names
        return group

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})"


def groups(axes: Mapping[str, int], *names: str) -> list[list[int]]:
    """All groups of ranks along the axes `names`, each numbered with the last name fastest.

    >>> groups({"dp": 2, "tp": 2}, "dp")
    [[0, 2], [1, 3]]
    """
    for name in names:
        if not isinstance(name, str) or name not in axes:
            raise ConfigError(f"the mesh has no axis {name!r}; its axes are {', '.join(axes)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"name one or more different axes of {', '.join(axes)}, not {names!r}")
    order = [*(name for name in axes if name not in names), *names]
    grid = np.arange(math.prod(axes.values())).reshape(*axes.values())
    grid = grid.transpose([list(axes).index(name) for name in order])
    rows: list[list[int]] = grid.reshape(-1, math.prod(axes[name] for name in names)).tolist()
    return rows


def check_axes(axes: Mapping[str, int], ranks: int, owner: str) -> None:
    """Raise `ConfigError` unless there is an axis, each has a size of at least 1, and the sizes
    multiply to the `ranks` that `owner` has."""
    if not isinstance(axes, Mapping):
        raise ConfigError(f"a mesh is a dictionary of axes and sizes, not {short(axes)}")
    if not axes:
        raise ConfigError("a mesh needs at least one axis, as in Mesh(comm, tp=4)")
    for name, size in axes.items():
        check_whole(f"the size of axis {name!r}", size)
    if math.prod(axes.values()) != ranks:
        product = " · ".join(f"{name}={size}" for name, size in axes.items())
        raise ConfigError(f"a mesh of {product} has {math.prod(axes.values())} ranks, but {owner} "
                          f"has {ranks}")
