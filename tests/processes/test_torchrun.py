"""Under torchrun, `run` uses torchrun's processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def torchrun(folder: Path, source: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    path = folder / "lesson.py"
    path.write_text("import dtlab, torch, sys\n" + textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={ranks}", str(path)],
        capture_output=True, text=True, timeout=150,
    )


def test_the_same_script_takes_its_ranks_from_torchrun(tmp_path: Path) -> None:
    done = torchrun(tmp_path, """
        def lesson(comm, n):
            x = torch.full((n,), comm.rank + 1.0)
            dtlab.collectives.all_reduce(comm, x)
            half = comm.split(comm.rank)
            comm.exchange(*(dtlab.Send({"from": comm.rank}, p)
                            for p in range(comm.size) if p != comm.rank),
                          *(dtlab.Recv([], p) for p in range(comm.size) if p != comm.rank))
            return comm.rank, comm.size, half.size, x.sum().item()

        for n in (4, 5):  # ranks= does not count: the processes are there
            result = dtlab.run(lesson, n, ranks=7)
            assert result.values == [(r, 3, 1, 6.0 * n) for r in range(3)], result.values
            assert result.trace.messages() == 3 * 4 + 6
            assert result.trace.clock_uncertainty_s == [0.0] * 3  # one host has one clock
            assert all(m.end_s >= m.start_s >= 0 for m in result.trace.transfers)
            print(f"all well on {result.ranks}\\n", end="", flush=True)  # one write
        """, ranks=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all well on 3") == 6


def test_a_failure_is_raised_on_all_ranks(tmp_path: Path) -> None:
    done = torchrun(tmp_path, """
        import time

        def lesson(comm):
            if comm.rank == 1:
                raise ValueError("on rank 1 only")

        try:
            dtlab.run(lambda comm: iter(lambda: 1, 2) if comm.rank == 1 else 2)
        except dtlab.RankFailed as error:
            assert "rank 1 returned a callable_iterator that can't be sent back" in str(error)
        try:
            dtlab.run(lesson)
        except dtlab.RankFailed as error:
            assert error.rank == 1
            assert "line" in error.traceback_text
            print("heard of it", flush=True)
            time.sleep(2)  # torchrun stops the others once one has failed
            sys.exit(3)
        """)
    assert done.returncode != 0
    assert done.stdout.count("heard of it") == 2, done.stderr
