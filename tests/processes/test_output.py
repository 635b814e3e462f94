"""What ranks print arrives labelled, in whole lines, in order per rank, and never too much."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from dtlab import Comm, RankFailed, run
from dtlab.ranks.output import RankOutput


def test_prints_arrive_labelled_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def speak(comm: Comm) -> None:
        for n in range(100):
            print(f"line {n} of {comm.rank}")
        print("no line end", end="")

    result = run(speak, ranks=3)
    shown = capsys.readouterr().out.splitlines()
    for rank in range(3):
        wanted = [f"line {n} of {rank}" for n in range(100)] + ["no line end"]
        assert [s for s in shown if s.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] {line}" for line in wanted]
        assert result.output[rank] == "".join(f"{line}\n" for line in wanted)
    assert len(shown) == 303


def test_lines_that_come_together_are_shown_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run(lambda comm: print("hello"), ranks=4)
    assert capsys.readouterr().out == "".join(f"[rank {rank}] hello\n" for rank in range(4))


def test_lines_are_shown_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher prints from the caller's own thread, so that a notebook gets it in its cell."""
    moments: list[float] = []

    def slow(comm: Comm) -> None:
        print("begin")
        time.sleep(1.5)
        print("end")

    screen = SimpleNamespace(write=lambda text: moments.append(time.monotonic()),
                             flush=lambda: None)
    with monkeypatch.context() as while_it_runs:
        while_it_runs.setattr(sys, "stdout", screen)
        run(slow, ranks=1)
    assert len(moments) == 2
    assert moments[1] - moments[0] > 0.7


def test_echo_false_only_collects(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda comm: print("psst"), ranks=2, echo=False).output == ["psst\n"] * 2
    assert capsys.readouterr().out == ""


def test_errors_warnings_c_code_and_children_count_as_output() -> None:
    def noisy(comm: Comm) -> None:
        print("to stderr", file=sys.stderr)
        warnings.warn("careful", stacklevel=1)
        ctypes.CDLL(None).puts(b"from C")
        subprocess.run(["echo", "from a child"], check=True)
        os.write(1, "ünïcode as bytes\n".encode())
        os.write(1, b"\xff no unicode\n")

    text = run(noisy, ranks=1, echo=False).output[0]
    for words in ("to stderr", "UserWarning: careful", "from C", "from a child",
                  "ünïcode as bytes", "� no unicode"):
        assert words in text


def test_of_a_progress_bar_the_last_state_remains() -> None:
    def bar(comm: Comm) -> None:
        for _ in tqdm(range(200), desc="epoch", mininterval=0):
            pass

    lines = run(bar, ranks=2, echo=False).output[1].splitlines()
    assert len(lines) == 1
    assert "epoch: 100%" in lines[0]


@pytest.mark.slow
def test_a_flood_is_cut_with_a_notice_and_never_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    def flood(comm: Comm) -> int:
        line_end = "" if comm.rank == 1 else "\n"
        for _ in range(1 if comm.rank == 2 else 100_000):
            print("x" * 999, end=line_end)
        return comm.rank

    result = run(flood, ranks=3, timeout=100)
    assert result.values == [0, 1, 2]
    assert max(map(len, result.output)) < 1_100_000
    assert "output cut" in result.output[0].splitlines()[-1]
    assert "output cut" not in result.output[2]
    assert len(capsys.readouterr().out) < 2_400_000


def test_what_was_printed_before_a_failure_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(comm: Comm) -> None:
        print("last words")
        raise ValueError

    with pytest.raises(RankFailed):
        run(fail, ranks=1)
    assert capsys.readouterr().out == "[rank 0] last words\n"


def test_without_a_stdout_what_ranks_print_is_still_collected(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run(lambda comm: print("here"), ranks=2).output == ["here\n"] * 2


def test_what_gloo_writes_of_a_broken_connection_is_left_out() -> None:
    shown: list[str] = []
    output = RankOutput(3, shown.append)
    output.feed("[/__w/pytorch/gloo/transport/tcp/debug_logger.cc:9] ERROR failed to connect, ret"
                "ry=1\n[rank3]:[E1128 08:46:32.19 ProcessGroupGloo.cpp:67] Gloo connectFullMesh\n"
                "[E1128 08:46:32.19 ProcessGroupGloo.cpp:67] Gloo connectFullMesh failed\n")
    output.feed("my own: ProcessGroupGloo.cpp:67] gloo/transport/tcp/debug_logger.cc: failed\n")
    assert shown == ["[rank 3] my own: ProcessGroupGloo.cpp:67] gloo/transport/tcp/debug_logger.cc:"
                     " failed\n"]
