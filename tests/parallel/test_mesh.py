"""Ranks on a grid."""

from __future__ import annotations

import functools
import operator
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtlab
from dtlab.collectives import all_reduce
from dtlab.parallel import Mesh
from dtlab.parallel.mesh import groups
from tests.parallel.training import on


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_groups_are_those_of_a_grid_whose_last_axis_varies_fastest(
        sizes: list[int], data: st.DataObject) -> None:
    axes = {f"a{i}": size for i, size in enumerate(sizes)}
    names = data.draw(st.lists(st.sampled_from(sorted(axes)), min_size=1, unique=True))
    found = groups(axes, *names)
    assert sorted(functools.reduce(operator.iadd, found, [])) == list(range(prod(sizes)))
    grid = torch.arange(prod(sizes)).view(*sizes)
    for group in found:
        places = [(grid == rank).nonzero()[0].tolist() for rank in group]
        others = [i for i, name in enumerate(axes) if name not in names]
        assert len({tuple(place[i] for i in others) for place in places}) == 1
        order = [[place[list(axes).index(name)] for name in names] for place in places]
        assert order == sorted(order)


@pytest.mark.parametrize("backend", ["gloo", "simulator"])
def test_each_axis_has_communicators_of_its_own(backend: str) -> None:
    def fn(comm: dtlab.Comm) -> tuple[object, ...]:
        mesh = Mesh(comm, pp=2, dp=1, tp=3)
        sums = [float(all_reduce(mesh[axes], torch.tensor([float(comm.rank)])))
                for axes in ("tp", "pp", "dp", ("pp", "tp"), ("tp", "pp"))]
        return mesh.coordinates, sums, mesh["tp", "pp"].rank, mesh["pp"].axes

    values = on(backend, fn, ranks=6).values
    assert values[4] == ({"pp": 1, "dp": 0, "tp": 1}, [12.0, 5.0, 4.0, 15.0, 15.0], 3, ("pp",))


@pytest.mark.parametrize(("axes", "says"), [
    ({"dp": 2, "tp": 2}, "a mesh of dp=2 · tp=2 has 4 ranks, but the communicator has 6"),
    ({}, "at least one axis"), ({"tp": 0}, "'tp' must be a whole number"),
    ({"tp": 6.0}, "'tp' must be a whole number"), ({"tp": True}, "'tp' must be a whole number")])
def test_a_mesh_that_does_not_fit_says_so(axes: dict[str, int], says: str) -> None:
    with pytest.raises(dtlab.ConfigError, match=says):
        on("simulator", lambda comm: Mesh(comm, **axes), ranks=6)


def test_an_unknown_axis_says_which_there_are() -> None:
    with pytest.raises(dtlab.ConfigError, match="no axis 'pp'; its axes are dp, tp"):
        on("simulator", lambda comm: Mesh(comm, dp=1, tp=2)["pp"], ranks=2)
    with pytest.raises(dtlab.ConfigError, match="Mesh needs a communicator"):
        Mesh(4, tp=4)  # type: ignore[arg-type]
