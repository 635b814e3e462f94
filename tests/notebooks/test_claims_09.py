"""What chapter 09 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from dtlab import ps
from dtlab.ps.master import PATIENCE
from dtlab.recording import replica_run
from dtlab.recording.replica_run import LEASE_S
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("09")
printed = CHAPTER.printed


@pytest.fixture(scope="module")
def chapter() -> dict[str, Any]:
    """What the cells that only define things define."""
    space = CHAPTER.defined("setup", "zipf", "hot-readers", "every-body")
    exec(CHAPTER.source("hot-loads").split("\n\nhot = ")[0], space)
    return space


def test_the_hottest_word_is_more_than_a_servers_share(prose: str) -> None:
    assert "One word alone draws 13 % of all reads, more than a server's fair share of" in prose
    chance = 1 / np.arange(1, 1001)
    share = chance[0] / chance.sum()
    assert round(share, 2) == 0.13
    assert share > 1 / 8


def test_replicas_relieve_the_hot_server(prose: str) -> None:
    """The picture in words, which nbval draws again and compares."""
    assert "The busiest server has 1.7 times its share" in prose
    assert "with four copies, it is 13 % above the mean" in prose
    loads = [[int(reads) for reads in row.split(", ")]
             for row in re.findall(r"cop(?:y|ies): ([\d, ]+)[;.]", printed("hot-loads"))]
    assert [len(row) for row in loads] == [8, 8, 8]
    assert [sum(row) for row in loads] == [8 * 250] * 3
    one, two, four = (max(row) / 250 for row in loads)
    assert "goes from 1.7 times its share to 1.5" in prose
    assert (round(one, 1), round(two, 1)) == (1.7, 1.5)
    assert one > two > four
    assert round(four, 2) == 1.13


def test_a_newcomer_moves_s_in_s_plus_1_by_mod_and_1_in_s_plus_1_by_the_ring(prose: str) -> None:
    """That nothing moves between the others: tests/ps/test_partition.py."""
    assert "In general s/(s+1) of the keys, for s servers" in prose
    assert "about 1/(s+1), and nothing between the others" in prose
    rows = re.findall(r"(\d+) → +\d+ +([\d.]+)% +([\d.]+)%", printed("ring-moved"))
    assert len(rows) == 5
    for servers, mod, ring in ((int(s), float(mod) / 100, float(ring) / 100)
                               for s, mod, ring in rows):
        assert mod == pytest.approx(servers / (servers + 1), abs=0.035)
        assert ring == pytest.approx(1 / (servers + 1), abs=0.035)


def test_four_in_twenty_hashes_stay(prose: str) -> None:
    assert "just 4 leave the same remainder by 4 and by 5: four fifths move" in prose
    assert sum(h % 4 == h % 5 for h in range(20)) == 4


@pytest.mark.parametrize("vnodes", [4, 16, 64, 256])
def test_shares_scatter_by_about_one_over_the_root_of_v(prose: str, vnodes: int) -> None:
    from dtlab.plots.ring import arc_shares

    assert "With v points each, shares scatter by about 1/√v" in prose
    scatter = np.std(np.array(arc_shares(16, vnodes)) * 16)
    assert 0.5 / math.sqrt(vnodes) < scatter < 1.7 / math.sqrt(vnodes)


def test_a_chain_and_a_waiting_leader_take_as_long_and_answering_at_once_half(prose: str) -> None:
    assert "take about equally long here" in prose
    assert "Answering at once takes half of the time" in prose
    chain, leader, at_once = map(float, re.findall(r"takes +([\d.]+) ms", printed("copies-times")))
    assert chain == pytest.approx(leader, rel=0.05)
    assert at_once == pytest.approx(chain / 2, rel=0.05)


def test_the_leader_sends_a_push_to_every_follower_and_a_copy_of_a_chain_once(prose: str) -> None:
    assert ("it sends the push to every follower, while each copy of a chain but the last sends it "
            "once") in prose
    for rule, most in ((ps.Chain(), 1), (ps.Leader(), 2)):
        sent = [copy.sent_bytes for copy in replica_run(rule).values[:3]]
        assert sent[0] >= 20 * 4 * most
        assert sent[0] < 20 * 4 * (most + 0.5)


def test_the_death_in_the_still(prose: str) -> None:
    assert "Copy 0 falls silent at 27 ms" in prose
    assert "a worker waited for 34 ms until it was answered again: 27 until copy 0" in prose
    run = replica_run(ps.Chain(), victim=0, event=60)
    assert round(run.died_s * 1e3) == 27
    assert round(run.longest_s * 1e3) == 34
    assert run.longest_s > LEASE_S
    assert "The last sign of life reaches the master at 28 ms. It waits for 25 ms" in prose
    beat = [m for m in run.trace.transfers if (m.src, m.dst) == (0, 3)][-1]
    assert round(beat.end_s * 1e3) == 28
    assert PATIENCE * LEASE_S == 0.025
    assert beat.end_s + 0.025 < run.master_log.dead[0]
    assert "gives copy 0 up at 54 ms" in prose
    assert round(run.master_log.dead[0] * 1e3) == 54
    assert "the worker sends it again, to copy 1; copy 2 acknowledges it some 35 ms after" in prose
    early, passed_on = (next(told for told in replica_run(ps.Chain(), victim=0, event=event).replies
                             if told.worker == 5 and round(told.asked_s * 1e3, 1) == 20.8)
                        for event in (50, 56))
    assert early.replied_s - early.asked_s == pytest.approx(0.035, abs=0.002)
    assert passed_on.replied_s - passed_on.asked_s == pytest.approx(0.007, abs=0.001)
    assert run.acknowledged == run.counted == 20
    assert run.master_log.dead[0] > run.died_s + LEASE_S - LEASE_S / 3
    assert run.master_log.terms[1].from_s >= run.master_log.terms[0].until_s


def test_every_moment(prose: str) -> None:
    """The table of the chapter, which nbval computes again and compares."""
    assert "not one acknowledged push is lost, and none counts twice" in prose
    assert "loses a push if it dies in the short while between its answer and its" in prose
    assert "Its followers may die as they like" in prose
    rows = re.findall(r"^(.*?) +copy (\d) dies, (\d+) moments: +(\d+) +(\d+) +(\d+)$",
                      printed("every-table"), re.M)
    assert len(rows) == 3 * 3
    for rule, victim, *numbers in rows:
        moments, three, two, four = map(int, numbers)
        assert moments > 30
        assert three + two + four == moments
        assert four == 0
        if (rule, victim) == ("leader, answers at once", "0"):
            assert 0 < two < three / 10
        else:
            assert two == 0
    assert "About five hundred deaths" in prose
    deaths = sum(int(row[2]) - 1 for row in rows)  # the last of each is a run that it outlives
    assert deaths == pytest.approx(500, abs=10)


def test_a_pull_never_goes_back_and_a_peek_may(prose: str) -> None:
    assert "it reads a number from one copy and then a smaller one from another" in prose
    peek, pull = printed("breaks-stale").splitlines()
    assert re.search(r"backwards: (\d+) → (\d+)", peek)
    assert pull.endswith("backwards: never")
