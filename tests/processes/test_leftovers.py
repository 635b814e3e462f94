"""Nothing is left behind, nothing listens beyond loopback, and nobody disturbs anybody."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from dtlab import Comm, RankDied, run
from dtlab.collectives import all_reduce
from dtlab.processes.fork_server import fork_server
from tests.processes.shared import SOON_S, alive, wait_until_gone

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
# A process that a shell starts in the background ignores Ctrl-C, and so do all that it starts.
PREAMBLE = """import dtlab, os, signal, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def script(source: str, **how: Any) -> subprocess.Popen[str]:
    """A user's own process, running this source. It says "ready" when it is."""
    return subprocess.Popen(
        [sys.executable, "-u", "-W", "error", "-c", PREAMBLE + textwrap.dedent(source)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how,
    )


@contextlib.contextmanager
def endless_run(ranks: int = 3) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A user whose ranks are busy, and all processes that this takes: first the server."""
    with script(f"""
        def busy(comm):
            if comm.rank == 0:
                print("ready")
            x = torch.ones(1000)
            while True:
                dtlab.collectives.all_reduce(comm, x, "max")
        try:
            dtlab.run(busy, ranks={ranks}, timeout=100)
        except KeyboardInterrupt:
            print("interrupted", dtlab.run(lambda comm: comm.rank, ranks=2).values)
            """) as user:
        try:
            assert user.stdout is not None
            assert "ready" in user.stdout.readline()
            started = [child.pid for child in psutil.Process(user.pid).children(recursive=True)]
            assert len(started) == ranks + 1
            yield user, started
        finally:
            user.kill()


# ---- processes ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_when_the_user_is_killed_all_are_gone_soon() -> None:
    with endless_run() as (user, started):
        user.kill()
        user.wait()
        wait_until_gone(started)


@pytest.mark.slow
def test_when_the_server_is_killed_the_ranks_go_and_the_user_hears_of_it() -> None:
    with endless_run() as (user, started):
        os.kill(started[0], signal.SIGKILL)
        _, errors = user.communicate(timeout=20)
        assert "RankDied" in errors
        assert not any(map(alive, started))


@pytest.mark.slow
def test_ctrl_c_stops_all_ranks_and_the_next_run_works() -> None:
    with endless_run() as (user, started):
        began = time.monotonic()
        user.send_signal(signal.SIGINT)
        assert user.stdout is not None
        assert user.stdout.readline().strip() == "interrupted [0, 1]"
        assert time.monotonic() - began < SOON_S  # to stop, and the next run
        assert not any(map(alive, started[1:]))
        assert user.wait(timeout=10) == 0
        wait_until_gone(started)


@pytest.mark.slow
def test_a_session_that_nobody_closed_ends_with_its_user() -> None:
    with script("""
        session = dtlab.Session(ranks=2)
        print("ready", session.run(lambda comm: os.getpid()).values)
        os.kill(os.getpid(), 9)
        """) as user:
        out, errors = user.communicate(timeout=30)
    assert "ready" in out, errors
    pids = [int(word.strip("[],")) for word in out.split()[1:]]
    wait_until_gone(pids)


def test_no_process_outlives_its_run_nor_does_what_it_started() -> None:
    def start(comm: Comm) -> list[int]:
        return [os.getpid(), subprocess.Popen(["sleep", "300"]).pid]

    for pids in run(start, ranks=2).values:
        wait_until_gone(pids)
    server = psutil.Process(fork_server().pid)
    until = time.monotonic() + SOON_S
    while server.children():  # it has yet to reap them
        assert time.monotonic() < until


def test_a_killed_server_is_replaced() -> None:
    run(lambda comm: None, ranks=1)
    before = fork_server().pid
    os.kill(before, signal.SIGKILL)
    wait_until_gone([before])
    assert run(lambda comm: comm.rank, ranks=2).values == [0, 1]
    assert fork_server().pid != before


def test_a_death_in_the_first_seconds_of_a_server_is_heard_of_at_once() -> None:
    """A server that is idle imports for seconds what ranks may need; not while it has ranks."""
    def dies(comm: Comm) -> None:
        if comm.rank == 1:
            time.sleep(0.8)
            os._exit(5)
        comm.recv(torch.zeros(1), 1)

    fork_server().close()
    with pytest.raises(RankDied, match="rank 1 died: its process ended with exit code 5"):
        run(dies, ranks=2)


def test_ranks_of_a_program_that_trains_find_loaded_what_optimizers_need() -> None:
    """Otherwise each rank of its first runs would import it, for more than a second."""
    import dtlab.parallel  # noqa: F401  as such a program does

    fork_server().close()
    assert run(lambda comm: "torch._dynamo" in sys.modules, ranks=2).values == [True, True]


def test_ctrl_c_and_the_end_need_not_wait_until_the_server_has_imported() -> None:
    import dtlab.parallel  # noqa: F401

    fork_server().close()
    began = time.monotonic()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run(lambda comm: time.sleep(20), ranks=2)
    fork_server().close()
    assert time.monotonic() - began < 2


def test_a_fork_of_the_user_starts_its_own_server() -> None:
    with script("""
        dtlab.run(lambda comm: None, ranks=1)
        from dtlab.processes.fork_server import fork_server
        mine = fork_server().pid
        child = os.fork()
        if child == 0:
            ok = dtlab.run(lambda comm: comm.rank, ranks=2).values == [0, 1]
            os._exit(0 if ok and fork_server().pid != mine else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert dtlab.run(lambda comm: comm.rank, ranks=2).values == [0, 1]
        print("ready")
        """) as user:
        out, errors = user.communicate(timeout=60)
    assert "ready" in out, errors
    assert not errors  # and nothing is left open at the end


# ---- files, sockets, memory ---------------------------------------------------------------------


def test_no_file_and_no_open_file_is_left(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others use /tmp meanwhile
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the ranks

    def big(comm: Comm, x: torch.Tensor) -> torch.Tensor:
        all_reduce(comm, y := x[:1000].clone())
        dist.barrier()
        return x + y.sum()

    def look() -> tuple[set[str], set[str], int]:
        files, shared = os.listdir(tmp_path), os.listdir("/dev/shm")
        return set(files), set(shared), len(os.listdir("/proc/self/fd"))

    def fails(comm: Comm) -> None:
        raise ValueError

    run(big, torch.ones(100_000), ranks=2)
    before = look()
    for _ in range(5):
        run(big, torch.ones(100_000), ranks=2)
        with pytest.raises(Exception, match="ValueError"):
            run(fails, ranks=2)
    files, shared, descriptors = look()
    ours = ("dtlab", "torch", "gloo", "pymp", "sem.", "listener")
    assert not files - before[0]
    assert not [name for name in shared - before[1] if name.startswith(ours)]
    assert descriptors <= before[2]


def bound(pids: set[int]) -> tuple[set[tuple[str, int]], set[str]]:
    """Inet addresses, and names of unix sockets, at which these have sockets: psutil reads the
    kernel's tables."""
    inet, unix = set(), set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for found in psutil.Process(pid).net_connections("all"):
                (unix if found.family == socket.AF_UNIX else inet).add(found.laddr)
    return inet, unix


def is_loopback(address: tuple[str, int]) -> bool:
    found = ipaddress.ip_address(address[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def test_nothing_is_bound_beyond_loopback_at_any_time() -> None:
    """Looked at again and again, while ranks meet, talk and part."""
    def talk(comm: Comm) -> None:
        all_reduce(comm, torch.ones(10))
        dist.all_reduce(torch.ones(10))
        dist.new_group([0])
        comm.split(0)
        time.sleep(0.3)

    run(talk, ranks=1)  # the server is there
    seen_inet: set[tuple[str, int]] = set()
    seen_unix: set[str] = set()
    child = os.fork()
    if child == 0:  # a fork starts its own server, so that start is watched too
        try:
            for _ in range(3):
                run(talk, ranks=3, echo=False)
        finally:
            os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        with contextlib.suppress(psutil.Error, OSError):
            pids = {p.pid for p in psutil.Process(child).children(recursive=True)} | {child}
            inet, unix = bound(pids)
            seen_inet.update(inet)
            seen_unix.update(unix)
    assert len(seen_inet) > 6  # it did look
    assert [address for address in seen_inet if not is_loopback(address)] == []
    assert [name for name in seen_unix if "dtlab" in name or "torch" in name] == []


def test_the_watch_for_sockets_would_notice() -> None:
    with socket.socket() as everywhere, socket.socket() as local:
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        local.bind(("127.0.0.1", 0))
        local.listen()
        inet, _ = bound({os.getpid()})
    assert set(map(is_loopback, inet)) == {False, True}


# ---- others -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_of_many_users_at_once_do_not_clash() -> None:
    with script("""
        def use():
            for n in range(3):
                def f(comm):
                    x = torch.full((100,), float(n))
                    return dtlab.collectives.all_reduce(comm, x).sum().item()
                assert dtlab.run(f, ranks=3, echo=False).values == [300.0 * n] * 3
        users = []
        for _ in range(5):  # of one origin: names drawn at random would be the same
            users.append(os.fork())
            if users[-1] == 0:
                use()
                os._exit(0)
        assert [os.waitpid(user, 0)[1] for user in users] == [0] * 5
        print("ready")
        """) as origin:
        out, errors = origin.communicate(timeout=110)
    assert "ready" in out, errors
