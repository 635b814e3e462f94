"""Curves are the closed forms; crossovers are where they cross."""

import networkx as nx
import numpy as np
import pytest

from dtlab import cost, plots
from dtlab.collectives import ALGORITHMS
from dtlab.plots.network import layout_of
from dtlab.plots.picture import styled
from dtlab.topology import from_graph, uniform
from dtlab.topology.graphs import join


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_a_curve_is_the_closed_form(algorithm: str) -> None:
    picture = plots.cost_curves("all_reduce", [algorithm], 6, 1e-6, 1e-9, 1e-10)
    labels = (algorithm, f"{algorithm} (at most)")  # some forms are bounds
    line = next(line for line in picture.axes[0].lines if line.get_label() in labels)
    for size, time in np.asarray(line.get_xydata()):
        predicted = cost.time_s("all_reduce", algorithm, 6, int(size), 1e-6, 1e-9, 1e-10)
        assert time == pytest.approx(predicted, rel=1e-12)


@pytest.mark.parametrize("p", [4, 5, 8, 100])
def test_at_a_crossover_the_fastest_changes(p: int) -> None:
    alpha, beta = 5e-6, 1e-10
    names = list(ALGORITHMS["all_reduce"])

    def times(nbytes: float) -> dict[str, float]:
        return {a: cost.time_s("all_reduce", a, p, int(nbytes), alpha, beta) for a in names}

    found = plots.crossovers("all_reduce", names, p, alpha, beta)
    assert found
    for turn in found:
        for nbytes, leaders in ((turn.nbytes, turn.after), (turn.nbytes * 0.998, turn.before)):
            least = min(times(nbytes).values())
            assert all(times(nbytes)[name] <= least * 1.002 for name in leaders.split(" = "))
        new, old = turn.after.split(" = ")[0], turn.before.split(" = ")[0]
        assert times(turn.nbytes)[new] < times(turn.nbytes)[old]
        assert times(turn.nbytes * 0.998)[new] >= times(turn.nbytes * 0.998)[old]


def test_rounding_between_elements_overtakes_nobody() -> None:
    names = ["halving_doubling", "binary_blocks"]  # the same for 8 ranks, cut in another order
    assert plots.crossovers("all_reduce", names, 8, 5e-6, 1e-10) == []


def test_a_crossover_lies_where_algebra_says() -> None:
    p, alpha, beta = 8, 5e-6, 1e-10  # 6(α + nβ) = 14(α + nβ/8), so 4.25nβ = 8α
    (turn,) = plots.crossovers("all_reduce", ["tree", "ring"], p, alpha, beta)
    assert (turn.before, turn.after) == ("tree", "ring")
    assert turn.nbytes == pytest.approx(8 * alpha / (4.25 * beta), rel=2e-3)


def test_equals_are_named_together() -> None:
    assert plots.crossovers("broadcast", ["flat", "binomial"], 2, 1e-6, 1e-9) == []
    assert "flat = binomial" in plots.cost_curves("broadcast", ["flat", "binomial"], 2).alt


@pytest.mark.parametrize("alpha", [0.0, 1e-7, 1e-3])
@pytest.mark.parametrize("beta", [0.0, 1e-12, 1e-6])
@pytest.mark.parametrize("algorithms", [None, ["tree", "ring"]])
def test_no_curve_crosses_the_legend(
    alpha: float, beta: float, algorithms: list[str] | None
) -> None:
    picture = plots.cost_curves("all_reduce", algorithms, 8, alpha, beta, times=(1e-6, 1e2))
    with styled():
        picture.canvas.draw()
    (axes,) = picture.axes
    legend = axes.get_legend()
    assert legend is not None
    box = legend.get_window_extent()
    assert axes.bbox.x1 <= box.x0
    assert box.x1 <= picture.bbox.x1
    assert box.y0 >= 0


def test_the_fit_reports_its_error_at_sizes_it_has_not_seen() -> None:
    sizes, held_out = [100, 10_000], [1000, 10**6]
    times = [1e-5 + n * 1e-9 for n in sizes]
    off = [(1e-5 + n * 1e-9) / 1.25 for n in held_out]  # the line predicts a quarter too much
    assert "off by 25%" in plots.fit(1e-5, 1e-9, sizes, times, (held_out, off)).alt


def test_hosts_stand_below_their_switches_or_without_any_in_a_circle() -> None:
    places = layout_of(uniform(40, 1e-6, 1e9).graph())
    assert places["switch"][1] > max(y for node, (_, y) in places.items() if node != "switch")
    assert len(set(places.values())) == 41
    ring = nx.DiGraph()
    for rank in range(6):
        ring.add_edge(rank, (rank + 1) % 6, latency_s=0.0, bandwidth_Bps=1e9)
    x, y = np.array(list(layout_of(ring).values())).T
    assert np.hypot(x - 0.5, y - 0.5) == pytest.approx(0.5)


def test_links_of_two_speeds_are_told_apart() -> None:
    graph = nx.DiGraph()
    for rank, rack in ((0, "A"), (1, "A"), (2, "B")):
        join(graph, rank, rack, 1e-6, 1e10)
    for rack in "AB":
        join(graph, rack, "spine", 2e-6, 4e10)
    assert plots.topology(from_graph(graph, "racks")).alt == (
        "Racks cluster: 3 ranks · 3 other nodes · links: 40 GB/s, 2 µs; 10 GB/s, 1 µs.")
    places = layout_of(graph)
    assert places["spine"][1] > places["A"][1] > places[0][1]
