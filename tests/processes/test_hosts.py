"""Ranks on several hosts: gathered, on one clock, of one version, and outliving a host."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dtlab
from dtlab.errors import ConfigError
from dtlab.processes import hosts
from dtlab.testbed import HostResult, Testbed
from tests.parallel.training import difference, one_device

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def possible() -> None:
    try:
        Testbed().close()
    except ConfigError as refused:
        pytest.skip(str(refused))


def script(folder: Path, source: str) -> str:
    """The path of a program that finds dtlab and the tests of this checkout."""
    path = folder / "lesson.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(source))
    return str(path)


def told(result: HostResult) -> list[object]:
    """What a host printed as JSON, a line each."""
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines() if line.startswith(("[", "{"))]


# ---- on a testbed --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("count", "racks", "each"), [(2, 2, 2), (4, 2, 1)])
def test_hosts_gather_values_and_bytes_cross_the_uplink(
        possible: None, tmp_path: Path, count: int, racks: int, each: int) -> None:
    path = script(tmp_path, f"""
        import json, dtlab, torch

        N, HALF = 200_000, {count * each // 2}

        def add_up(comm, algorithm, options):
            x = torch.full((N,), comm.rank + 1.0)
            dtlab.collectives.all_reduce(comm, x, algorithm=algorithm, **options)
            return comm.rank, x.min().item(), x.max().item()

        for algorithm, options in (("ring", {{}}), ("hierarchical", {{"group": HALF}})):
            result = dtlab.run(add_up, algorithm, options)
            up = sum(m.nbytes for m in result.trace.transfers if m.src < HALF <= m.dst)
            print(json.dumps([result.values, up]) + "\\n", end="", flush=True)
        """)
    with Testbed(count, racks) as testbed:
        results = testbed.run(["torchrun", "--nproc-per-node", str(each), path], timeout=100)
        carried = testbed.uplink_bytes(0)
    p, n = count * each, 4 * 200_000
    total = p * (p + 1) / 2
    values = [[rank, total, total] for rank in range(p)]
    expected = [[values, 2 * (p - 1) * n / p], [values, n]]  # bytes up from the first rack
    for result in results:
        lines = told(result)
        assert len(lines) == 2 * each
        assert all(line in expected for line in lines)
    needed = sum(up for _, up in expected)
    assert needed < carried < 1.2 * needed + 500_000  # headers, and what torch itself sends


@pytest.mark.slow
def test_clocks_of_hosts_are_aligned_to_within_what_the_trace_says(
        possible: None, tmp_path: Path) -> None:
    path = script(tmp_path, f"""
        import json, os, time

        real = time.perf_counter
        ahead = {{"host0": 0.0, "host1": 1000.0, "host2": -50.0}}[os.uname().nodename]
        time.perf_counter = lambda: real() + ahead
        import dtlab, torch

        def lesson(comm):
            dtlab.collectives.all_reduce(comm, torch.ones(9))
            before, now, after = real(), comm.now(), real()
            return now - after, now - before  # between these lies its clock's distance from real

        result = dtlab.run(lesson)
        if os.environ["RANK"] == "0":
            result.trace.to_chrome({str(tmp_path / "trace.json")!r})
            print(json.dumps([result.values, result.trace.clock_uncertainty_s]))
        """)
    with Testbed(3) as testbed:
        first, *_ = testbed.run(["torchrun", "--nproc-per-node", "2", path], timeout=100)
    ((values, uncertainty_s),) = told(first)
    assert uncertainty_s[:2] == [0.0, 0.0]
    low, high = values[0]
    for (least, most), within_s in zip(values, uncertainty_s, strict=True):
        assert least - high <= within_s + 1e-9  # 1e-9: rounding
        assert most - low >= -within_s - 1e-9
    assert all(0 < within_s < 10 for within_s in uncertainty_s[2:])
    assert uncertainty_s[2] == uncertainty_s[3] != uncertainty_s[4] == uncertainty_s[5]
    written = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert written["clock_uncertainty_us"] == [1e6 * within_s for within_s in uncertainty_s]


@pytest.mark.slow
def test_versions_that_differ_are_named_on_every_host_before_anything_runs(
        possible: None, tmp_path: Path) -> None:
    path = script(tmp_path, f"""
        import os, sys
        import dtlab
        from dtlab.cli import main

        if os.uname().nodename == "host1":
            dtlab.__version__ = "0.0.1"
        sys.argv = ["dtlab", "train", "--mesh", "dp=2", "--save", {str(tmp_path / "saved")!r}]
        main()
        """)
    with Testbed(2) as testbed:
        results = testbed.run(["torchrun", "--nproc-per-node", "1", path], timeout=100)
    sentence = (f"dtlab: dtlab is {dtlab.__version__} on host0, but 0.0.1 on host1; install the "
                f"same on all hosts")
    assert all(sentence in result.output.splitlines() for result in results)
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_the_job_goes_on_from_its_checkpoint_when_a_host_is_lost(
        possible: None, tmp_path: Path, how: str) -> None:
    steps = 30
    path = script(tmp_path, f"""
        import os, time
        from pathlib import Path
        import dtlab, torch
        from dtlab.parallel import DataParallel, full_state_dict, load, save
        from tests.parallel.training import MODELS, OPTIMIZERS, batch_of, loss_of, shard_of

        folder = Path({str(tmp_path)!r})
        make, options = OPTIMIZERS["adam"]

        def train(comm):
            module = MODELS["mlp"](torch.float64)
            model = DataParallel(module, comm)
            optimizer = make(module.parameters(), **options)
            saved = folder / "checkpoint"
            first = load(saved, model, optimizer)["step"] if saved.exists() else 0
            for step in range(first, {steps}):
                if step == 12 and comm.size == 2:
                    (folder / f"host{{comm.rank}}").touch()
                    time.sleep(2)  # now host 1 is lost
                optimizer.zero_grad()
                shard = shard_of(batch_of("mlp", step), comm.rank, comm.size)
                model.backward(loss_of(model, shard), len(shard[-1]))
                optimizer.step()
                if step % 5 == 4:
                    save(saved, model, optimizer, extra={{"step": step + 1}})
            return comm.size, first, full_state_dict(model)

        values = dtlab.run(train).values
        if os.environ["RANK"] == "0":
            torch.save(values, folder / "values.pt")
        """)
    patience = ("join_timeout=60,last_call_timeout=1,close_timeout=1,keep_alive_interval=1,"
                "keep_alive_max_attempt=2")
    command = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3",
               "--rdzv-conf", patience, path]
    with Testbed(2) as testbed:
        # Linux tries for 15 minutes before it gives up a connection that is cut; here, 3 seconds.
        testbed.run(["sh", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2"])
        survivor, lost = (testbed.start(host, command) for host in range(2))
        said: list[str] = []
        for process, lines in ((survivor, said), (lost, [])):
            assert process.stdout is not None
            threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
        until = time.monotonic() + 90
        while not all((tmp_path / f"host{host}").exists() for host in range(2)):
            assert time.monotonic() < until, said
            time.sleep(0.02)
        getattr(testbed, how)(1)
        assert survivor.wait(90) == 0, said
    ((size, first, parameters),) = torch.load(tmp_path / "values.pt")
    assert (size, first) == (1, 10)
    assert difference(parameters, one_device("mlp", "adam", steps)) < 1e-10


@pytest.mark.slow
def test_a_rank_that_is_cut_off_ends_by_itself_like_those_that_wait_for_it(
        possible: None, tmp_path: Path) -> None:
    """Host 1 takes its link down: no connection breaks, and the store's host never answers."""
    path = script(tmp_path, f"""
        import os, subprocess
        from pathlib import Path
        import dtlab, torch
        from dtlab.processes import monitor

        monitor._ANSWER_S = 2.0

        def train(comm):
            for step in range(10_000):
                if comm.rank == 1 and step == 5:
                    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
                dtlab.collectives.all_reduce(comm, torch.ones(9))

        try:
            dtlab.run(train, timeout=8)
        except dtlab.RunTimeout as error:
            (Path({str(tmp_path)!r}) / os.uname().nodename).write_text(str(error))
        """)
    with Testbed(2) as testbed:
        for host in range(2):
            testbed.start(host, ["torchrun", "--nproc-per-node", "1", path])
        until = time.monotonic() + 60
        while len(told := [*tmp_path.glob("host?")]) < 2 or not all(f.read_text() for f in told):
            assert time.monotonic() < until, told
            time.sleep(0.05)
    ends, cut_off = ((tmp_path / f"host{host}").read_text() for host in range(2))
    assert "did not end within its timeout of 8 s" in ends
    assert re.search(r"\n +0 +exchange in all_reduce +1 ", ends)
    assert re.search(r"\n +1 +running", ends)
    assert cut_off == ("rank 1: the process group's store is gone: it has not answered for 2 s; "
                       "its host is lost, or the network to it")


# ---- who does not come ---------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_whose_partner_does_not_come_end_by_themselves(tmp_path: Path) -> None:
    path = script(tmp_path, """
        import os, sys
        import dtlab
        from dtlab.processes import torchrun

        torchrun.JOIN_S = 2.0
        os.environ |= dict(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=sys.argv[2], TORCHELASTIC_RUN_ID="job")
        try:
            dtlab.run(lambda comm: comm.rank)
        except dtlab.RunTimeout as error:
            print(error)
        """)

    def run_alone(rank: int, port: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, path, str(rank), str(port)], capture_output=True,
                              text=True, timeout=100)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = run_alone(0, port).stderr
    assert "EADDRINUSE" in said
    assert "TCPStore(" not in said  # the sentence, without a traceback of torch's before it
    for rank in range(2):
        done = run_alone(rank, port)
        assert done.stdout == (
            f"rank {rank} on {socket.gethostname()}: not all of 2 ranks came to 127.0.0.1:{port} "
            f"within 2 s; start the others, with the same address and number of hosts, or see why "
            f"they can't reach it\n"), done.stderr


def client(server: dist.TCPStore) -> dist.Store:
    """A rank's own connection to the store."""
    return dist.TCPStore("127.0.0.1", server.port, is_master=False)


def meet(server: dist.TCPStore, size: int, tag: str) -> list[dist.Store]:
    """All ranks meet, the others before rank 0; returns each one's part of the store."""
    parts: list[dist.Store] = [server] * size

    def rank(r: int) -> None:
        parts[r] = hosts._meet(client(server), r, size, f"{tag} {r}", 60)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in reversed(threads):
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(60)
    return parts


def test_ranks_that_are_restarted_share_nothing_with_the_dead() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for r in (2, 0):  # of three ranks, these two had come, and died: rank 1 was missing
        with pytest.raises(dist.DistError):
            hosts._meet(client(server), r, 3, "dead", 0.2)
    for size in (4, 2, 3):
        for rank, part in enumerate(meet(server, size, f"of {size}")):
            part.set(f"from {rank}", "x")
            assert [part.get(f"about/{r}").decode() for r in range(size)] == [
                f"of {size} {r}" for r in range(size)]
        newest = meet(server, size, "again")
        assert not any(part.check([f"from {r}"]) for part in newest for r in range(size))
        newest[0].set("news", "x")
        assert all(part.get("news") == b"x" for part in newest)


def test_a_port_in_use_or_no_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        for port, why in ((other.getsockname()[1], "address already in use"), ("abc", "'abc'")):
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", str(port))
            with pytest.raises(ConfigError, match=f"rank 0 on .* at here, as MASTER_ADDR.*{why}"):
                hosts.join(0, 2, "here", 30)


def test_hosts_that_were_told_different_numbers_of_ranks_say_so(
        monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))

    def told(rank: int, size: int) -> str:
        with pytest.raises(ConfigError) as caught:
            hosts.join(rank, size, "here", 20)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        few, many = threads.map(told, (0, 1), (2, 3))
    host = socket.gethostname()
    assert few == (f"rank 0 on {host} was told of 2 ranks, but rank 1 on {host} of 3; give all the "
                   f"same WORLD_SIZE")
    assert many.startswith(f"rank 1 on {host} was told of 3 ranks, but rank 0 on {host} of 2; ")


@pytest.mark.parametrize("what", ["dtlab", "torch", "Python"])
def test_a_version_that_differs_is_named_with_its_host(what: str) -> None:
    mine = hosts.versions()
    other = mine | {what: "0.9"}
    hosts.check_same([("node1", *mine.values()), ("node2", *mine.values())])
    with pytest.raises(ConfigError) as caught:
        hosts.check_same([("node1", *mine.values()), ("node2", *mine.values()),
                          ("node3", *other.values())])
    assert str(caught.value) == (f"{what} is {mine[what]} on node1, but 0.9 on node3; install the "
                                 f"same on all hosts")
