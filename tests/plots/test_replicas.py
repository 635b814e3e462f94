"""What the pictures of chapter 09 show is what has happened, and the runs behind them end well."""

from __future__ import annotations

import pytest
import torch
from matplotlib.collections import PathCollection

from dtlab import ConfigError, ps
from dtlab.plots import hash_ring, replicas, server_load
from dtlab.plots.ring import arc_shares
from dtlab.ps.partition import Spec
from dtlab.recording import replica_run
from dtlab.recording.replica_run import FAR, MASTER, NEAR

STRONG = [ps.Chain(), ps.Leader(sync=True)]
WEAK = ps.Leader(sync=False)
CUTS_S = (0.012, 0.03, 0.05, 0.071, 0.09)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_no_death_loses_a_push_that_was_acknowledged(rule: ps.Replication, victim: int) -> None:
    for event in range(10, 125, 19):
        run = replica_run(rule, victim=victim, event=event)
        assert run.acknowledged == run.counted == 20
        assert run.refused == run.lost == 0
        assert list(run.master_log.dead) == [victim]
        assert run.died_s < run.master_log.dead[victim]


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("cut_s", CUTS_S)
@pytest.mark.parametrize("rule", STRONG, ids=repr)
def test_a_strong_store_that_is_cut_refuses_and_loses_nothing(
    rule: ps.Replication, cut_s: float, look: bool
) -> None:
    """`look`: with reads in between, which once got stuck when a copy came back."""
    run = replica_run(rule, cut_s=cut_s, healed_s=cut_s + 0.05, look=look)
    assert len(run.replies) == 20
    assert run.lost == 0
    assert run.acknowledged <= run.counted <= run.acknowledged + run.refused
    assert {reply.worker for reply in run.replies if not reply.acknowledged} <= {NEAR}
    assert run.master_log.overlaps() == []


def test_a_weak_store_that_is_cut_refuses_nothing_and_loses_what_one_side_acknowledged() -> None:
    for cut_s in CUTS_S[1:3]:
        run = replica_run(WEAK, cut_s=cut_s, healed_s=cut_s + 0.05)
        assert run.refused == 0
        assert run.lost > 0
        assert run.counted + run.lost == 20


def test_a_cut_shorter_than_the_lease_harms_nobody() -> None:
    for rule in (*STRONG, WEAK):
        run = replica_run(rule, cut_s=0.03, healed_s=0.04)
        assert (run.acknowledged, run.lost, run.master_log.dead) == (20, 0, {})


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
    assert "LOST: " in replicas(replica_run(WEAK, cut_s=0.05)).alt


def test_a_master_and_two_workers_stand_beside_the_copies() -> None:
    run = replica_run(ps.Chain())
    assert run.master_log.master == MASTER
    assert {reply.worker for reply in run.replies} == {FAR, NEAR}


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


@pytest.mark.parametrize("bad", [
    lambda: replica_run(ps.Chain(), victim=3), lambda: replica_run(ps.Chain(), cut_s=0.0),
    lambda: replica_run(ps.Chain(), cut_s=0.1, healed_s=0.05), lambda: hash_ring(4, (1,)),
    lambda: server_load({}), lambda: server_load({"x": []}),
])
def test_nonsense_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError):
        bad()  # type: ignore[operator]
