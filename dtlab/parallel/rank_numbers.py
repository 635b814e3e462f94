"""Numbers that know that they depend on the rank, for `types.check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_pytree_node

from dtlab.comm import Comm
from dtlab.parallel.mesh import Mesh


class RankNumber:
    """An int or float that differs from rank to rank along `axes`, as does what + − * / // % ** and
    abs make of it. Python computes `float(rank)`, `0.5 * rank`, `range(rank)`, `if rank` and seeds
    of generators without asking it, so that these are not seen: write `rank * 0.5`."""

    axes: frozenset[str]


class RankInt(RankNumber, int):
    pass


class RankFloat(RankNumber, float):
    pass


def rank_number(x: Any, axes: Iterable[str]) -> Any:
    """The number `x` as a `RankNumber`; anything else, such as NotImplemented, as it is."""
    if type(x) not in (int, float, RankInt, RankFloat):
        return x
    kind: Any = RankInt if isinstance(x, int) else RankFloat
    number = kind(x)
    number.axes = frozenset(axes)
    return number


def _operator(kind: type, name: str) -> Callable[..., Any]:
    """The method `name` of int or float, whose result depends on the rank, too."""

    def operate(self: Any, *others: Any) -> Any:
        floats = kind is int and any(isinstance(x, float) for x in others)
        made = getattr(float(self) if floats else kind(self), name)(*others)
        return rank_number(made, self.axes.union(*(getattr(x, "axes", ()) for x in others
                                                   if isinstance(x, RankNumber))))

    return operate


for _kind, _cls in ((int, RankInt), (float, RankFloat)):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        for _method in (f"__{_name}__", f"__r{_name}__", "__neg__", "__abs__"):
            setattr(_cls, _method, _operator(_kind, _method))


class Parts(tuple[Any, ...]):
    """A tuple that torch returns: `x.chunk(comm.size)[comm.rank]` depends on the rank, too."""

    def __getitem__(self, place: Any) -> Any:
        x = super().__getitem__(place)
        by_rank = isinstance(place, RankNumber) and isinstance(x, Tensor)
        return x[None][place * 0] if by_rank else x  # an index that the checker sees


register_pytree_node(Parts, lambda parts: (list(parts), None), lambda parts, _: Parts(parts))


def with_rank_number(comm: Comm, axes: Iterable[str]) -> Comm:
    """Return `comm`, whose rank is a `RankNumber`."""
    seen = comm.labelled(comm.label)
    seen.rank = rank_number(int(comm.rank), axes)
    return seen


class RankMesh(Mesh):
    """`mesh`, whose communicators' ranks and whose coordinates are `RankNumber`s."""

    def __init__(self, mesh: Mesh):
        self.comm, self.axes = with_rank_number(mesh.comm, mesh.axes), mesh.axes
        self.coordinates = {name: rank_number(place, [name])
                            for name, place in mesh.coordinates.items()}

    def __getitem__(self, names: str | tuple[str, ...]) -> Comm:
        group = super().__getitem__(names)
        return with_rank_number(group, group.axes)
