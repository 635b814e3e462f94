"""What chapter 15b says in prose is true: each sentence is looked up there, then recomputed. Of a
torus: test_claims_15b_torus.py."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from dtlab import Failures, Goodput, cost, goodput
from dtlab.published.failures import INTERRUPTIONS
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("15b")
printed, source = CHAPTER.printed, CHAPTER.source
PER_NODE_DAY = 6.5 / 1000
MTTF_S = cost.job_mttf_s(2048, PER_NODE_DAY)


def useful(minutes: float) -> int:
    return round(100 * cost.useful_share(60 * minutes, 60, 600, MTTF_S))


def hours(gpus: float) -> float:
    return cost.job_mttf_s(gpus / 8, PER_NODE_DAY) / 3600


def test_the_first_picture_is_the_day_of_chapter_15_with_another_answer(prose: str) -> None:
    assert "This is the first day of chapter 15 again, with another answer" in prose
    day = Chapter("15").code_with("day = goodput(")
    assert source("month-picture") == day.replace("=3600)", '=3600, answer="shrink")')
    case = {"save_s": 120, "restart_s": 600, "interval_s": 1800, "repair_s": 3600}
    restart, shrink = (goodput(8, 0.75, **case, answer=answer) for answer in ("restart", "shrink"))

    def gone(run: Goodput) -> list[tuple[int, float]]:
        return [(place, start_s) for place in range(8) for start_s, _, kind in run.row(place)
                if kind == "absent" and start_s < 86_400]

    assert gone(restart) == gone(shrink)
    assert len(gone(restart)) == 5
    assert "79.9 % of the month is productive, not 68.3 %" in prose
    assert f"{shrink.share:.1%} {restart.share:.1%}" == "79.9% 68.3%"


def test_the_guess(prose: str) -> None:
    assert f"{hours(16_384):.1f}" == "1.8"
    assert "a failure every 1.8 hours. A save takes one minute, a restart ten" in prose
    said = source("guess-compare")
    assert [useful(minutes) for minutes in (1, 60, 110, 15)] == [45, 67, 52, 79]
    assert all(f"{share} %" in said for share in (45, 67, 52, 79))
    assert useful(cost.daly_interval_s(60, MTTF_S) / 60) == 79


def test_the_interval_goes_with_the_square_root(prose: str) -> None:
    assert "Half: the interval goes with the square root of the MTTF" in prose
    small, large = (cost.daly_interval_s(60, 3600 * hours(gpus)) for gpus in (4096, 16_384))
    assert 1.9 < small / large < 2.1
    assert "at 65,536 GPUs nearly half of the time is lost" in prose
    share = cost.useful_share(cost.daly_interval_s(60, 3600 * hours(65_536)), 60, 600,
                              3600 * hours(65_536))
    assert 0.5 < share < 0.55
    assert "For 64 GPUs restart: by the rule a failure every 19 days" in prose
    assert round(hours(64) / 24) == 19


def test_saves_that_are_rare(prose: str) -> None:
    rows = {hour: [float(x) for x in re.findall(r"([.\d]+)%", line)] for hour, line in
            re.findall(r"([.\d]+) h(.*)", printed("month-rarely"))}
    assert "restart from the disk loses three quarters of the time, the others two or three " \
        "hundredths" in prose
    disk, copies, shrink, replicas = rows["4"]
    assert disk == pytest.approx(25, abs=2)
    assert [round(100 - share) for share in (copies, shrink, replicas)] == [2, 3, 3]
    assert "its twenty idle spares are 1 % of the nodes; count them, and hardly anything " \
        "is between the two" in prose
    assert round(100 * 20 / 2048) == 1
    assert copies * 2048 / 2068 == pytest.approx(shrink, abs=0.2)


def test_which_failures_count(prose: str) -> None:
    rows = [[float(x) for x in re.findall(r"[.\d]+", line[33:])]
            for line in printed("together-table").splitlines()[1:]]
    alone, weibull, racks, bad, replaced = rows
    assert "The law of a single node hardly matters" in prose
    assert weibull[1:] == pytest.approx(alone[1:], abs=0.2)
    assert "If all were new, they would come about twice as often in their first month" in prose
    failures, draws, found, nodes = Failures(PER_NODE_DAY, "weibull"), random.Random(0), 0, 2048
    for _ in range(nodes):
        age_s = failures.lifetime_s(draws, bad=False)
        while age_s < 30 * 86_400:
            found, age_s = found + 1, age_s + failures.lifetime_s(draws, bad=False)
    assert found / (nodes * 30 * PER_NODE_DAY) == pytest.approx(2, abs=0.2)
    assert "Failures by racks are fewer events" in prose
    assert racks[0] < 0.7 * alone[0]
    assert all(more > less for more, less in zip(racks[1:], alone[1:], strict=True))
    assert "add an eighth to the failures" in prose
    assert bad[0] / alone[0] == pytest.approx(1 + 1 / 8, abs=0.02)
    assert "wins back more than half of what they cost" in prose
    assert replaced[1] - bad[1] > (alone[1] - bad[1]) / 2


def test_shrink_goes_back_to_the_disk_more_often_if_racks_fail(prose: str) -> None:
    assert "shrink goes back to the disk more often: its redone part grows" in prose
    alone, racks = (goodput(2048, failures, 60, 600, repair_s=6 * 3600, answer="shrink", copy_s=60,
                            copy_restart_s=60).shares["redone"]
                    for failures in (Failures(PER_NODE_DAY), Failures(
                        PER_NODE_DAY / 2, rack=16, rack_per_day=PER_NODE_DAY / 2)))
    assert racks > alone


def test_a_restart_that_takes_too_long(prose: str) -> None:
    assert "most restarts of six hours are struck by the next failure" in prose
    assert 1 - 2.718281828 ** (-6 / hours(16_384)) > 0.9
    assert "a restart of 12 hours: 0.1% productive" in printed("breaks-run")


def test_a_job_that_barely_gets_on(prose: str) -> None:
    assert "39 % of the time is useful at best" in prose
    assert "a model in which recovery is safe promises 48 %" in prose
    case = 300, 1800, 3600
    assert round(100 * cost.useful_share(cost.daly_interval_s(300, 3600), *case)) == 39
    assert round(100 * cost.availability(cost.availability_interval_s(*case), *case)) == 48
    assert "save_s=300, restart_s=1800, mttf_s=3600" in source("interval-picture")
    shares = re.findall(r"share ([.\d]+), availability ([.\d]+)", printed("interval-numbers"))
    young, daly, best = ([float(text) for text in pair] for pair in shares)
    assert daly[0] == max(young[0], daly[0], best[0])
    assert best[1] == max(young[1], daly[1], best[1])
    assert max(daly[0] - best[0], best[1] - daly[1]) < 0.001  # "flat at the top"


def test_the_month(prose: str) -> None:
    rows = {name.strip(): [float(x) for x in re.findall(r"([.\d]+)%", rest)] for name, rest in
            re.findall(r"^(.{28})(.*%)$", printed("month-print"), re.M)}
    form = float(re.search(r"closed form of the first: ([.\d]+)%", printed("month-print"))[1])
    assert abs(rows["restart, spares at once"][0] - form) < 0.5
    assert "Without spares almost all of the month is lost" in prose
    assert rows["restart, no spares"][0] < 3
    assert "Twenty spares are as good as any number of them: three or four nodes are away" in prose
    assert rows["restart, 20 spares"] == rows["restart, spares at once"]
    assert 3 < 6 / hours(16_384) < 4
    assert "In spite of four hundred failures, they lose about a tenth, and so does restart with " \
        "copies and spares" in prose
    month = goodput(2048, PER_NODE_DAY, 60, 600)
    assert 380 < month.failures < 420
    assert "What these three lose is mostly saving" in prose
    saving = 100 * month.save_s / (month.save_s + month.interval_s)
    for name in ("shrink", "replicas of 16 nodes", "the same, copies in memory"):
        assert rows[name][0] == pytest.approx(91.5, abs=1)
        assert saving > (100 - rows[name][0]) / 2
    assert "With copies in memory, hardly any work is done again" in prose
    assert rows["the same, copies in memory"][1] < 0.5


def test_the_errors_in_the_paper(prose: str) -> None:
    assert "148 of 419 is 35.3 %, not 30.1, and the kinds of GPU trouble add up to 64.0 %" in prose
    assert sum(INTERRUPTIONS.values()) == 419
    assert round(100 * INTERRUPTIONS["faulty GPU"] / 419, 1) == 35.3
    assert re.search(r"all kinds of GPU trouble .* ours 63.96", printed("paper-rows"))
    assert printed("paper-rows").count("disagrees") == 5
    assert "Played for a year, 0.821 is 0.834" in prose
    assert "0.821 share, ours 0.8339" in printed("paper-rows")


def test_the_figures_of_the_torus_are_those_that_the_other_file_proves(prose: str) -> None:
    proved = (Path(__file__).parent / "test_claims_15b_torus.py").read_text()
    section = prose[prose.index("A torus with a dead node"):prose.index("What breaks, and why")]
    for figure in re.findall(r"\d+\.\d\d", section):
        assert figure in proved, figure
    assert "8.82 ms" in printed("torus-remedies")
    assert 2 < 19.04 / 8.82 < 29.90 / 8.82 < 3.5
    assert round(100 * 32 / 1088) == 3
