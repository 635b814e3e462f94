"""What the pictures of chapter 09 show is what has happened."""

from __future__ import annotations

import pytest
import torch
from matplotlib.collections import PathCollection

from dtlab import ps
from dtlab.plots import replicas, server_load
from dtlab.plots.ring import arc_shares
from dtlab.ps.partition import Spec
from dtlab.recording import replica_run


def test_replies_are_drawn_where_and_when() -> None:
    run = replica_run(ps.Chain(), cut_s=0.05, healed_s=0.1)
    axes = replicas(run, end_s=1.0).axes[0]
    drawn = {tuple(point) for kind in axes.collections if isinstance(kind, PathCollection)
             for point in kind.get_offsets().tolist()}
    row = {name.get_text(): place for name, place
           in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)}
    for reply in run.replies:
        assert (reply.replied_s * 1e3, row[f"worker {reply.worker}"]) in drawn


def test_the_words_say_who_dies_who_leads_and_what_is_lost() -> None:
    alt = replicas(replica_run(ps.Chain(), victim=0, event=60)).alt
    assert "copy 0 dies" in alt
    assert "copy 1 leads from" in alt
    assert "none lost" in alt
    assert "LOST: " in replicas(replica_run(ps.Leader(sync=False), cut_s=0.05)).alt


@pytest.mark.parametrize("vnodes", [1, 7, 64])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_arcs_make_up_the_ring_and_are_what_keys_see(servers: int, vnodes: int) -> None:
    shares = arc_shares(servers, vnodes)
    assert sum(shares) == pytest.approx(1)
    keys = {f"k{i}": Spec((1,), torch.float32) for i in range(3000)}
    placed = ps.ConsistentHash(vnodes).place(keys, range(servers))
    for server, share in enumerate(shares):
        found = sum(pieces[0][0] == server for pieces in placed.values()) / len(keys)
        assert found == pytest.approx(share, abs=0.05)


def test_bars_are_as_high_as_the_loads() -> None:
    picture = server_load({"before": [9, 1], "after": [5, 5]})
    heights = [[bar.get_height() for bar in axes.patches] for axes in picture.axes]
    assert heights == [[9, 1], [5, 5]]
    assert "busiest 1.8 × the mean" in picture.alt


def test_the_line_of_the_mean_does_not_strike_through_a_number() -> None:
    (axes,) = server_load({"before": [9, 1]}).axes
    (mean,) = axes.lines
    for number in axes.texts:
        assert number.get_zorder() > mean.get_zorder()
        assert number.get_bbox_patch().get_alpha() in (None, 1)
