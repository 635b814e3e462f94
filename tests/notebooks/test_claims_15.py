"""What chapter 15 says in prose is true; each sentence is looked up there, then recomputed. What it
says of a torus: test_claims_15_torus.py."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from dtlab import Goodput, cost, goodput
from dtlab.published.failures import INTERRUPTIONS

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = nbformat.read(ROOT / "notebooks" / "15_everything_fails.ipynb", as_version=4)
PER_NODE_DAY = 6.5 / 1000


def source(name: str) -> str:
    (text,) = [cell.source for cell in NOTEBOOK.cells if cell.id == name]
    return str(text)


def output(name: str) -> str:
    """What the cell of this name prints."""
    (text,) = [cell.outputs[0].text for cell in NOTEBOOK.cells if cell.id == name]
    return str(text)


def hours(gpus: float) -> float:
    return cost.job_mttf_s(gpus / 8, PER_NODE_DAY) / 3600


def test_how_long_jobs_last(prose: str) -> None:
    assert f"{hours(16_384):.1f}" == "1.8"
    assert source("guess-compare").count("1.8 hours") == 5
    assert f"{hours(8) / 24:.0f}" == "154"  # days
    assert f"{hours(1_231):.1f}" == "24.0"
    assert round(16_384 / 1_231) == 13
    assert round(hours(131_072) * 60) == 14  # minutes
    assert "one in 3.09 hours. So the rule, with another cluster's r, is right" in prose
    assert f"{54 * 24 / 419:.2f}" == "3.09"
    assert 1 < 3.09 / hours(16_384) < 2
    assert "7.9 hours at 1,024 GPUs, where 1/N gives 28.8, and 47.7 days at 8, where it gives 154" \
        in prose
    assert f"{hours(1024):.1f}" == "28.8"


def test_the_first_picture_shows_what_the_text_says(prose: str) -> None:
    assert "one of them fails every four hours on average" in prose
    assert cost.job_mttf_s(8, 0.75) == 4 * 3600
    day, other = (goodput(8, 0.75, 120, restart_s, interval_s, repair_s=3600, **more)
                  for restart_s, interval_s, more in (
                      (600, 1800, {}), (60, 3600, {"answer": "shrink", "copy_s": 60})))
    assert "The same failures as in section 1, with shrink for an answer" in prose

    def gone(run: Goodput) -> list[tuple[int, float]]:
        return [(place, start_s) for place in range(8) for start_s, _, kind in run.row(place)
                if kind == "absent" and start_s < 86_400]

    assert gone(day) == gone(other)
    assert len(gone(day)) == 5


def test_a_job_that_barely_gets_on(prose: str) -> None:
    assert "39 % of the time is useful at best" in prose
    assert "a model in which recovery is safe promises 48 %" in prose
    case = 300, 1800, 3600
    assert round(100 * cost.useful_share(cost.daly_interval_s(300, 3600), *case)) == 39
    assert round(100 * cost.availability(cost.availability_interval_s(*case), *case)) == 48
    assert "save_s=300, restart_s=1800, mttf_s=3600" in source("interval-picture")
    shares = re.findall(r"share ([.\d]+), availability ([.\d]+)", output("interval-numbers"))
    young, daly, best = ([float(text) for text in pair] for pair in shares)
    assert daly[0] == max(young[0], daly[0], best[0])
    assert best[1] == max(young[1], daly[1], best[1])
    assert max(daly[0] - best[0], best[1] - daly[1]) < 0.001  # "flat at the top"


def test_the_month(prose: str) -> None:
    rows = {name.strip(): [float(x) for x in re.findall(r"([.\d]+)%", rest)] for name, rest in
            re.findall(r"^(.{28})(.*%)$", output("month-print"), re.M)}
    form = float(re.search(r"closed form of the first: ([.\d]+)%", output("month-print"))[1])
    assert abs(rows["restart, spares at once"][0] - form) < 0.5
    assert "Without spares almost all of the month is lost" in prose
    assert rows["restart, no spares"][0] < 3
    assert "Twenty spares are as good as any number of them: three or four nodes are away" in prose
    assert rows["restart, 20 spares"] == rows["restart, spares at once"]
    assert 3 < 6 / hours(16_384) < 4
    assert "Four hundred failures, and shrink and replicas lose about a tenth" in prose
    month = goodput(2048, PER_NODE_DAY, 60, 600)
    assert 380 < month.failures < 420
    for name in ("shrink", "replicas of 16 nodes"):
        assert rows[name][0] == pytest.approx(91, abs=1)
    assert "What they lose is mostly *saving*".replace("*", "") in prose
    saving = 100 * month.save_s / (month.save_s + month.interval_s)
    assert saving > (100 - rows["shrink"][0]) / 2
    assert saving > (100 - rows["replicas of 16 nodes"][0]) / 2


def test_the_errors_in_the_paper(prose: str) -> None:
    assert "148 of 419 is 35.3 %, not 30.1, and the kinds of GPU trouble add up to 64.0 %" in prose
    assert sum(INTERRUPTIONS.values()) == 419
    assert round(100 * INTERRUPTIONS["faulty GPU"] / 419, 1) == 35.3
    assert re.search(r"all kinds of GPU trouble .* ours 63.96", output("paper-rows"))
    assert output("paper-rows").count("disagrees") == 5
    assert "Played for a year, 0.821 is 0.834" in prose
    assert "0.821 share, ours 0.8339" in output("paper-rows")


def test_the_figures_of_the_torus_are_those_that_the_other_file_proves(prose: str) -> None:
    proved = (Path(__file__).parent / "test_claims_15_torus.py").read_text()
    section = prose[prose.index("A torus with a dead node"):prose.index("Who restarts what")]
    for figure in re.findall(r"\d+\.\d\d", section):
        assert figure in proved, figure
    assert "8.82 ms" in output("torus-remedies")
    assert 2 < 19.04 / 8.82 < 29.90 / 8.82 < 3.5
    assert round(100 * 32 / 1088) == 3
