"""What chapter 09b says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dtlab import Comm, cost, ps, simulate
from dtlab.collectives import all_reduce
from dtlab.models import MLP
from dtlab.ps.replication import Replication
from dtlab.recording import replica_run
from dtlab.recording.replica_run import FAR, MASTER, NEAR
from dtlab.topology import uniform
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("09b")
printed, source = CHAPTER.printed, CHAPTER.source


def test_a_cut_makes_the_strong_refuse_and_the_weak_differ(prose: str) -> None:
    assert "strong consistency may make the servers unavailable is true" in prose
    assert "one reads 8 and the other 11, and only 6 of these pushes are the same" in prose
    for rule in (ps.Chain(), ps.Leader()):
        run = replica_run(rule, cut_s=0.05, healed_s=0.1, look=True)
        assert run.refused > 0
        assert run.lost == 0
    run = replica_run(ps.Leader(sync=False), cut_s=0.05, healed_s=0.1, look=True)
    near, far = ([t.weight for t in run.values[worker].replies if t.replied_s <= 0.1]
                 for worker in (NEAR, FAR))
    assert (far[-1], near[-1]) == (8, 11)
    common = [t for t in run.replies if t.replied_s <= 0.05]
    assert len(common) == 6
    assert run.lost == 5
    assert "worker 5's weight goes back" in prose
    weights = [t.weight for t in run.values[NEAR].replies]
    assert any(b < a for a, b in pairwise(weights) if a and b)
    assert run.values[MASTER].overlaps() == []


def test_a_push_without_a_number_counts_twice(prose: str) -> None:
    assert "Without numbers a push counted twice" in prose
    space = CHAPTER.defined("again-toy")
    for numbered, total in ((False, 4), (True, 3)):
        assert simulate(space["impatient"], numbered,
                        network=uniform(2, 1e-4, 1e9)).values[0] == total


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 13])
def test_it_removes_the_hot_spot(prose: str, workers: int) -> None:
    assert "What it removes is the hot spot" in prose

    def one_server(comm: Comm) -> None:
        ps.aggregate(comm, torch.empty(1000 * 13, device="meta"), "on_cpu")

    def ring(comm: Comm) -> None:
        all_reduce(comm, torch.empty(1000 * 13, device="meta"), algorithm="ring")

    def busiest(fn: Any, ranks: int) -> float:
        trace = simulate(fn, network=uniform(ranks, 0, 1e9)).trace
        return max(trace.sent_bytes(rank) for rank in range(ranks)) / 52_000

    assert busiest(one_server, workers + 1) == workers
    assert busiest(ring, workers) == pytest.approx(2 * (workers - 1) / workers, rel=0.01)
    assert cost.rounds("all_reduce", "ring", workers, 4000) == 2 * (workers - 1)


def test_of_three_copies_one_writes_and_what_it_wrote_is_resumed(
    prose: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "all of them die before the fortieth step" in prose
    assert "One file a checkpoint. All copies read the same log" in prose
    space: dict[str, Any] = {"where": tmp_path, "model": MLP((64, 32, 10))}
    for name in ("setup", "torn-train", "torn-tear", "torn-cut"):
        exec(source(name).replace("Path(tempfile.mkdtemp())", "where"), space)
    told = capsys.readouterr().out.splitlines()
    assert "all copies of server 0 have died" in told[-4]
    assert told[-3:-1] == ["server0-clock00000020.ckpt", "server0-clock00000030.ckpt"]
    assert told[-1] == "resumed after step 30; the same weights as without the accident: True"


def test_dtlabs_quorum_counts_workers_not_copies(prose: str) -> None:
    assert "that counts workers, and closes a clock when nine of ten have passed it" in prose
    assert ps.Quorum(0.9).quorum(10) == 9
    assert isinstance(ps.Quorum(), ps.Consistency)
    assert not isinstance(ps.Quorum(), Replication)


def test_two_leaders_at_a_time_but_never_in_one_term_and_equal_waits_elect_nobody(
    prose: str,
) -> None:
    assert "while it is cut off, the old leader goes on leading its term" in prose
    found = re.findall(r"1.4 s: copy (\d) leads term (\d), ([\d.]+) to ([\d.]+)",
                       printed("elect-run"))
    (old, new) = [(int(copy), int(term), float(a), float(b)) for copy, term, a, b in found]
    assert old[0] != new[0]
    assert old[1] < new[1]
    assert new[2] < old[3] == 1.4  # it stepped down when the link healed
    assert "If all wait equally long" in prose
    elected = re.findall(r"ten elections: (\d+) have a leader within 2 s", printed("elect-run"))
    assert elected[0] == "0"
    assert 0 < int(elected[1]) < 10
    assert elected[2:] == ["10", "10"]


def test_reads_are_never_old_if_r_and_w_are_more_than_n(prose: str) -> None:
    assert "With R + W > 3 no read is ever older than what was acknowledged before it" in prose
    rows = re.findall(r"(\d)  (\d)   (True|False) +([\d.]+) ms +([\d.]+) ms +(\d+)%",
                      printed("rw-run"))
    assert len(rows) == 6
    for w, r, overlap, write, read, old in rows:
        assert (overlap == "True") == (int(w) + int(r) > 3)
        assert int(old) == 0 or overlap == "False"
        assert float(write) == pytest.approx({1: 0.4, 2: 20.4, 3: 90.4}[int(w)])
        assert float(read) == pytest.approx({1: 0.4, 2: 90.4, 3: 90.4}[int(r)])
    assert [row[-1] for row in rows].count("0") == 4
    assert "W = 1 and R = 2 read nothing old here" in prose
    assert "any two majorities of the same t copies share at least one" in prose
    for copies in range(1, 7):  # each R share a copy with each W exactly if R + W > N
        for w in range(1, copies + 1):
            for r in range(1, copies + 1):
                shared = all({*one} & {*other} for one in combinations(range(copies), w)
                             for other in combinations(range(copies), r))
                assert shared == (r + w > copies)
