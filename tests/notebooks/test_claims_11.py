"""What chapter 11 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import pytest
import torch

from dtlab import Comm, ConfigError, cost, plots, simulate
from dtlab.collectives import all_reduce
from dtlab.models import SHAPES
from dtlab.parallel import Mesh
from dtlab.plots.mesh import crossings, machines_of
from dtlab.topology import compose, nvswitch, racks

CLUSTER = compose(nvswitch(8, bandwidth_Bps=300e9), racks(1, 2, bandwidth_Bps=12.5e9))


def test_the_order_of_the_axes_is_all_that_changes(prose: str) -> None:
    assert "Two machines of 8 GPUs, joined by one port of 12.5 GB/s each" in prose

    def a_layer(comm: Comm, axes: dict[str, int]) -> None:
        x = torch.empty(2048 * 8192, dtype=torch.bfloat16, device="meta")
        all_reduce(Mesh(comm, **axes)["tp"], x, algorithm="ring")

    near, far = (simulate(a_layer, axes, network=CLUSTER, trace=False).elapsed_s
                 for axes in ({"dp": 2, "tp": 8}, {"tp": 8, "dp": 2}))
    assert far > 20 * near
    assert "each group lies half here and half there" in prose
    assert machines_of(CLUSTER) == [list(range(8)), list(range(8, 16))]
    assert crossings({"tp": 8, "dp": 2}, machines_of(CLUSTER)) == {"tp": (0, 2), "dp": (8, 0)}
    assert crossings({"dp": 2, "tp": 8}, machines_of(CLUSTER)) == {"tp": (2, 0), "dp": (0, 8)}


def test_a_mesh_is_drawn_on_the_machines_that_there_are() -> None:
    picture = plots.mesh({"pp": 2, "dp": 2, "tp": 4}, CLUSTER)
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts[:2] == ["0", "0,0,0"]
    assert texts[-2:] == ["15", "1,1,3"]
    with pytest.raises(ConfigError, match=r"has 4 ranks, but .* has 16"):
        plots.mesh({"tp": 4}, CLUSTER)


def test_four_all_reduces_a_layer(prose: str) -> None:
    assert "Four all-reduces of b·s·h elements a layer" in prose
    for t in (2, 4, 8):
        one = 2 * (t - 1) / t * 3 * 16 * 64
        assert cost.tensor_parallel_bytes(t, 3, 16, 64, itemsize=1) == 4 * one


def test_the_parts_of_a_layer_that_tensor_parallelism_leaves(prose: str) -> None:
    assert "10 of the 34 bytes that a layer keeps for each element of b·s·h" in prose
    def kept(**options: object) -> float:
        return cost.activation_bytes(1, 100, 10**6, 1, recompute="selective",  # type: ignore[arg-type]
                                     **options) / (100 * 10**6)

    assert kept() == pytest.approx(34)
    assert kept(tensor=8) == pytest.approx(10 + 24 / 8)
    assert kept(tensor=8, sequence=True) == pytest.approx(34 / 8)


def test_numbers_of_real_models(prose: str) -> None:
    assert "128,256 of them for Llama 3" in prose
    assert SHAPES["Llama 3 70B"].vocab == 128_256


def test_the_picture_says_what_moves() -> None:
    forward, backward = (plots.sharded_matrix("MLP", 4, back, 1000, 100).alt
                         for back in (False, True))
    whole = 1000 * 100 * 2
    assert f"{2 * 3 / 4 * whole / 1e3:.0f} kB" in forward
    assert forward.index("copy_to: nothing moves") < forward.index("reduce_from: all-reduce")
    assert backward.index("reduce_from: nothing moves") < backward.index("copy_to: all-reduce")
