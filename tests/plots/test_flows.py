"""Live flows: a link's style follows its load, and the picture says what the simulator did."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

import dtlab
from dtlab import Comm, plots, simulate
from dtlab.plots.flows import _STYLES, _width_pt, draw_flows
from dtlab.plots.link_geometry import geometry_of
from dtlab.plots.palette import luminance, rank_color
from dtlab.recording import LinkHistory
from dtlab.topology import (
    Topology,
    fat_tree,
    named,
    racks,
    send_together,
    torus,
    v100_nvlink,
    with_link,
    with_traffic,
)
from tests.plots.color_vision import EYES, least_difference

CLUSTER = racks(2, 2, oversubscription=2, latency_s=0.25, bandwidth_Bps=1e6)
RUN = simulate(send_together, {(0, 2): 10**6, (1, 3): 2 * 10**6}, network=CLUSTER)


def lanes(history: LinkHistory, at_s: float) -> dict[tuple[object, object], tuple[str, float]]:
    """(from, to) → (colour, width) as drawn at that time."""
    picture = draw_flows(history, at_s)
    (drawn,) = [c for c in picture.axes[0].collections if isinstance(c, LineCollection)]
    looks = list(zip(map(to_hex, drawn.get_colors()), drawn.get_linewidths(), strict=True))
    found = {}
    for path, look in zip(drawn.get_paths(), looks, strict=True):
        (number,) = [n for n, lane in geometry_of(history).lanes.items()
                     if np.array_equal(lane, path.vertices)]
        found[history.links[number]] = look
    return found


def test_links_are_darker_and_thicker_the_more_they_carry() -> None:
    history = LinkHistory(CLUSTER, RUN.trace)
    drawn = lanes(history, 2.0)  # both flows move, at half speed each
    idle, half, full = drawn["spine", "rack0"], drawn[0, "rack0"], drawn["rack0", "spine"]
    assert idle[1] < half[1] < full[1]
    assert luminance(idle[0]) > luminance(half[0]) > luminance(full[0])
    later = lanes(history, 3.5)  # one has ended
    assert later[0, "rack0"] == idle
    assert later[1, "rack0"] == full
    assert len(drawn) == len(CLUSTER.capacity_Bps)


@pytest.mark.parametrize("eye", EYES)
def test_degrees_of_load_differ_to_any_eye_and_in_width(eye: str) -> None:
    assert least_difference([color for _, color, _ in _STYLES], eye) > 15
    widths = [_width_pt(min(limit, 1.0)) for limit in (0.0, 0.5, 1.0)]
    assert widths == sorted(set(widths))
    shades = [luminance(color) for _, color, _ in _STYLES]
    assert shades == sorted(shades, reverse=True)  # they tell the order without their hue


@pytest.mark.parametrize("cluster", [racks(2, 4), v100_nvlink(), torus(4, 4), fat_tree(4)],
                         ids=lambda c: c.name)
def test_the_two_directions_of_a_link_are_lanes_side_by_side(cluster: Topology) -> None:
    history = LinkHistory(cluster, dtlab.Trace(cluster.ranks, virtual=True))
    number = {link: n for n, link in enumerate(history.links)}
    for (a, b), n in number.items():
        there, back = geometry_of(history).lanes[n], geometry_of(history).lanes[number[b, a]][::-1]
        gaps = np.hypot(*(there - back).T)
        assert gaps.min() > 0.05  # inches
        along, across = there[-1] - there[0], (back - there).mean(axis=0)
        assert along[0] * across[1] - along[1] * across[0] > 0  # each on its own right-hand side


def test_words_tell_who_moves_how_fast_and_what_is_full() -> None:
    early, late = plots.flows(CLUSTER, RUN.trace, 2.0).alt, plots.flows(CLUSTER, RUN.trace, 3.5).alt
    assert "2 messages on the move · full: rack0 → spine, spine → rack1." in early
    assert "0 → 2, 1 → 3: 500 kB/s." in early
    assert "1 message on the move" in late
    assert "1 → 3: 1 MB/s." in late
    assert "no bytes are on the move" in plots.flows(CLUSTER, RUN.trace, 0.1).alt  # latency
    assert plots.flows(CLUSTER, RUN.trace).alt == plots.flows(CLUSTER, RUN.trace, 1.0).alt


def test_a_failed_link_is_named_and_what_others_leave_is_full_when_it_is_used_up() -> None:
    broken = with_link(CLUSTER, "rack0", "spine", bandwidth_Bps=0, at_s=1.5)
    mended = with_link(broken, "rack0", "spine", bandwidth_Bps=1e6, at_s=9.0)
    run = simulate(send_together, {(0, 2): 10**6}, network=mended)
    assert "failed: rack0 → spine" in plots.flows(mended, run.trace, 5.0).alt
    beside = with_traffic(CLUSTER, 1, 3, 0.75e6)
    run = simulate(send_together, {(0, 2): 10**6}, network=beside)
    assert "full: rack0 → spine" in plots.flows(beside, run.trace, 2.0).alt


def test_mean_loads_are_bytes_over_capacity_and_time() -> None:
    history = LinkHistory(CLUSTER, RUN.trace)
    crossed = dtlab.topology.link_bytes(CLUSTER, RUN.trace)
    means = {link: crossed[link] / (1e6 * history.end_s) for link in crossed}
    told = plots.link_loads(CLUSTER, RUN.trace, list(crossed)).alt
    for (a, b), mean in means.items():
        assert f"{a} → {b} {mean:.0%}" in told


def test_the_busiest_links_come_first_and_those_alike_are_told_of_once() -> None:
    history = LinkHistory(CLUSTER, RUN.trace)
    assert [name for name, _ in history.busiest] == [
        "rack0 → spine (and 1 alike)", "1 → rack0 (and 1 alike)", "0 → rack0 (and 1 alike)"]


def test_hosts_keep_their_colours() -> None:
    picture = plots.flows(CLUSTER, RUN.trace)
    (hosts,) = [c for c in picture.axes[0].collections if len(c.get_offsets()) == 4]
    assert [to_hex(c) for c in hosts.get_facecolors()] == [rank_color(r) for r in range(4)]


def test_a_thousand_ranks_can_be_drawn() -> None:
    cluster = named("racks:32x32")

    def shift(comm: Comm) -> None:
        comm.sendrecv(torch.empty(1000, device="meta"), (comm.rank + 1) % comm.size,
                      torch.empty(1000, device="meta"), (comm.rank - 1) % comm.size)

    run = simulate(shift, network=cluster)
    # Those who leave their rack are still on their way to its spine.
    assert f"{32 * 31} messages on the move" in plots.flows(cluster, run.trace).alt
