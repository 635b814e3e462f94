"""Ordinary users have few open files and no privileges; start-up has a time limit of its own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

from dtlab.comm import Comm
from dtlab.errors import ConfigError, RunTimeout
from dtlab.processes.fork_server import fork_server
from dtlab.processes.process_group import join_group
from dtlab.processes.run import run
from dtlab.processes.shared_status import SharedStatus
from dtlab.processes.watchdog import Watchdog
from dtlab.ranks.serialization import memory_file

PROGRAM = """
import json, resource, sys
files, ranks, timeout = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
import dtlab, torch
from dtlab.collectives import all_reduce

def sum_up(comm):
    return all_reduce(comm, torch.ones(4)).sum().item()

try:
    print(set(dtlab.run(sum_up, ranks=ranks, timeout=timeout).values))
except dtlab.DtlabError as error:
    print(type(error).__name__, error)
"""


def unprivileged(files: int, ranks: int, timeout: float = 60.0) -> str:
    """What a fresh process without any capability prints, which may hold so many files open."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([files, ranks, timeout])]
    if os.geteuid() == 0:  # root may keep more files on their way between processes than others
        if shutil.which("setpriv") is None:
            pytest.skip("runs as root, and setpriv, which drops privileges, is not installed")
        command = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", *command]
    found = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    return found.stdout.strip() or found.stderr


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("files", "ranks"), [(1024, 32), (256, 16)])
def test_an_ordinary_user_runs_as_many_ranks(files: int, ranks: int) -> None:
    assert unprivileged(files, ranks) == f"{{{4.0 * ranks}}}"


def test_however_few_files_may_be_open_it_runs_or_says_so() -> None:
    """What ranks return comes in files, too."""
    fork_server()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened, said = len(os.listdir("/proc/self/fd")), []
    try:
        for files in range(opened + 8, opened + 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
            try:
                said.append(str(run(lambda comm: comm.rank, ranks=4).values))
            except ConfigError as error:
                said.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert said[-1] == "[0, 1, 2, 3]"
    assert [s for s in said if "open files" not in s and s != said[-1]] == []


def refused(*_: object, **__: object) -> NoReturn:
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_system_that_starts_not_even_the_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server().close()
    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(ConfigError, match=r"for rank 0: Resource .*ulimit -u"):
        run(lambda comm: comm.rank, ranks=3)


def test_a_system_that_starts_no_more_processes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent("""
        import os
        forks = iter([os.fork])
        def fork():
            for real in forks:
                return real()
            raise BlockingIOError(11, "Resource temporarily unavailable")
        os.fork = fork"""))
    fork_server().close()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    try:
        with pytest.raises(ConfigError, match=r"for rank 1: Resource .*ulimit -u") as said:
            run(lambda comm: comm.rank, ranks=3)
        assert said.value.__context__ is None  # nothing else went wrong
    finally:
        fork_server().close()


@pytest.mark.parametrize(("torchs", "ours"), [
    ("[enforce fail at device.cc:84] ifa. Unable to find address for: lo", "lo; .*bring"),
    ("Resource temporarily unavailable", "ulimit -u"),
])
def test_what_torch_lacks_to_form_a_group_is_named(
    torchs: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(torchs)

    monkeypatch.setattr(dist, "init_process_group", fails)
    with pytest.raises(ConfigError, match=f"^torch can't form the process group: .*{ours}"):
        join_group("gloo", None, 0, 1)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("files", "ranks"), [(64, 16), (24, 4)])
def test_too_few_open_files_are_named(files: int, ranks: int) -> None:
    said = unprivileged(files, ranks)
    assert said.startswith(f"ConfigError {ranks} ranks need more open files than you may have, "
                           f"{files} (ulimit -n)"), said


def test_the_start_of_ranks_does_not_count_as_time_of_the_run() -> None:
    watchdog = Watchdog(SharedStatus(memory_file("test"), 1), timeout=1e-6)
    time.sleep(0.01)
    watchdog.check(lambda rank: "")  # not ready yet: nothing to complain about
    watchdog.start()
    time.sleep(0.01)
    with pytest.raises(RunTimeout, match="its timeout of 1e-06 s"):
        watchdog.check(lambda rank: "")


def test_a_rank_gives_back_the_memory_of_large_tensors() -> None:
    """Sizes change from step to step, and small tensors stay: no step may find what was freed too
    small, by a few bytes, for the next."""
    def grown_bytes(comm: Comm) -> int:
        process, kept = psutil.Process(), []
        before = process.memory_info().rss
        for step in range(50):
            large = torch.zeros(5_000_000 + 1000 * step, dtype=torch.float64)
            kept.append(torch.zeros(40_000 + step))
            del large
        return int(process.memory_info().rss - before)

    (grown,) = run(grown_bytes, ranks=1).values
    assert grown < 200_000_000  # a large one has 40 MB, and fifty have 2 GB


def test_limits_of_time_are_ordered_so_that_the_inner_one_speaks_first() -> None:
    """Else an outer limit ends what an inner one would have named."""
    from dtlab.processes import launcher, monitor, rank_monitor, survivors, torchrun, watchdog

    limits = [
        survivors._LOOK_EVERY_S,  # survivors look whether one of them has died
        watchdog._LOOK_EVERY_S,  # the watchdog looks for a deadlock …
        watchdog._STILL_S,  # … and calls it one
        rank_monitor.GRACE_S,  # a broken connection waits for the death that explains it
        monitor._PATIENCE_S,  # under torchrun, for the rank that raised
        60.0,  # the run's own limit, unless told otherwise
        watchdog._START_LIMIT_S,  # ranks get ready
        torchrun.JOIN_S,  # hosts find each other
        survivors.FOREVER.total_seconds(),  # Gloo gives up, and breaks all connections
    ]
    assert limits == sorted(limits)
    assert len(set(limits)) == len(limits)
    assert launcher._BUFFER_S < rank_monitor.GRACE_S  # shown before the error


def test_a_limit_on_the_size_of_files_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"a file larger than you may have \(ulimit -f\)"):
            run(lambda comm: comm.rank, ranks=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
