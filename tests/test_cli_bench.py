"""`dtlab bench`: rows that say what they should. How fast anything is decides nothing here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import dtlab
from dtlab import cost
from dtlab.bench import calls, measure, measure_parallel
from dtlab.bench.parameter_server import FLAT, KEYS, ROWS
from dtlab.collectives import ALGORITHMS
from dtlab.models import GPTConfig
from tests.commands import assert_bad_input, call, data


@pytest.mark.parametrize("collective", list(ALGORITHMS))
def test_every_algorithm_is_measured_beside_torch(collective: str) -> None:
    nbytes = 0 if collective == "barrier" else 6000
    rows = measure(collective, nbytes, ranks=2, repeats=2)
    expected = [*ALGORITHMS[collective], *([] if "scan" in collective else ["torch"])]
    assert [row.algorithm for row in rows] == expected
    for row in rows:
        assert 0 < row.fastest_s <= row.time_s <= row.slowest_s
        assert row.elements == nbytes // 4
        if nbytes:
            assert row.algorithm_Bps == pytest.approx(nbytes / row.time_s)
            assert row.bus_Bps == pytest.approx(
                row.algorithm_Bps * cost.bus_factor(collective, 2))
        if row.algorithm == "torch":
            assert row.ratio == 1


def test_collectives_prints_nccl_tests_columns_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "bandwidth.png"
    result = call("bench", "collectives", "all_reduce", "-p", "2", "-n", "4kB,8kB",
                  "--repeats", "1", "-a", "ring", "--plot", picture)
    assert result.exit_code == 0, result.output
    for column in ("size(B)", "count", "time(us)", "algbw", "busbw", "Geometric mean"):
        assert column in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_collectives_as_json_has_a_row_for_each_size_and_contestant() -> None:
    rows = data("bench", "collectives", "broadcast", "-p", "2", "-n", "4kB,8kB", "--repeats", "1")
    assert len(rows) == 2 * (len(ALGORITHMS["broadcast"]) + 1)
    assert {"nbytes", "time_s", "algorithm_Bps", "bus_Bps", "ratio"} <= rows[0].keys()


@pytest.mark.slow
def test_launch_times_each_launcher_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "launch.png"
    rows = data("bench", "launch", "-p", "2", "--repeats", "1", "--plot", picture)
    names = [row["launcher"] for row in rows]
    assert names[0] == "dtlab.run"
    assert "torch.multiprocessing.spawn" in names
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ps_is_timed_beside_rpc_and_gloo() -> None:
    rows = data("bench", "ps", "-n", "4kB,1MB", "--repeats", "1")
    peers = ["dtlab.ps", "torch.distributed.rpc", "the same, over TCP", "bare Gloo"]
    assert [row["contestant"] for row in rows] == [*peers, *peers, KEYS, FLAT, ROWS]
    assert all(row["time_s"] > 0 for row in rows)
    assert rows[0]["ratio"] == rows[4]["ratio"] == 1


@pytest.mark.slow
def test_training_steps_are_timed_and_measured_beside_torchs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = GPTConfig(layers=4, hidden=64, heads=4, context=16)
    monkeypatch.setattr("dtlab.bench.measure_parallel", partial(measure_parallel, config=small))
    picture = tmp_path / "steps.png"
    found = data("bench", "parallel", "-p", "2", "--repeats", "1", "--plot", picture)
    rows = {row["contestant"]: row for row in found}
    assert rows["zero stage 3"]["peer"] == "torch FSDP2 fully_shard"
    assert all(row["time_s"] > 0 for row in rows.values())
    # Counts, not speed: what each keeps follows from the algorithm.
    assert rows["DataParallel overlap"]["peak_ratio"] < 1
    assert rows["zero stage 1"]["peak_ratio"] < 1
    assert rows["zero stage 3"]["peak_bytes"] < 0.85 * rows["DataParallel overlap"]["peak_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel", "-p", "two"], "--ranks takes numbers"),
        (["parallel", "--repeats", "0"], "1 or more"),
        (["ps", "-n", "5"], "5 bytes"),
        (["ps", "-n", "0"], "0 bytes"),
        (["ps", "--repeats", "0"], "1 or more"),
        (["collectives", "all_reduc"], "choose one of"),
        (["collectives", "all_reduce", "-a", "no"], "ring"),
        (["collectives", "all_reduce", "-n", "5"], "5 bytes"),
        (["collectives", "all_gather", "-p", "4", "-n", "20"], "multiple of 4"),
        (["collectives", "barrier", "-n", "1e99B"], "1e99B"),
        (["collectives", "all_reduce", "--repeats", "0"], "1 or more"),
        (["collectives", "all_reduce", "--ranks", "0"], "0"),
        (["collectives", "barrier", "--plot", "x.jpgg"], ".png"),
        (["launch", "--repeats", "0"], "1 or more"),
        (["launch", "--ranks", "-1"], "-1"),
        (["launch", "--plot", "/nowhere/x.png"], "/nowhere"),
    ],
)
def test_bad_input_is_told_in_one_sentence(words: list[str], told: str) -> None:
    assert_bad_input(call("bench", *words), told)


@pytest.mark.parametrize("collective", list(ALGORITHMS))
def test_a_prepared_call_is_the_collective_itself(collective: str) -> None:
    """Bytes moved by the call, made from (bytes, dtype) alone, are those of the closed form."""
    for algorithm in ALGORITHMS[collective]:
        network = dtlab.topology.uniform(4, 0.0, 1e9)
        result = dtlab.simulate(
            lambda comm, name=algorithm: calls.prepared(
                comm, collective, name, 4800, torch.float64)(),
            network=network,
        )
        sent = [result.trace.sent_bytes(rank) for rank in range(4)]
        assert sent == cost.sent_bytes(collective, algorithm, 4, 4800, 8)
