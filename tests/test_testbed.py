"""The testbed: hosts of namespaces, which share no network and of which nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dtlab.errors import ConfigError, RunTimeout
from dtlab.testbed import Testbed
from tests.commands import call

TALK = """
import socket, sys
name = socket.gethostname()
if name == "host0":
    server = socket.create_server(("host0", 5000), backlog=9)
    for _ in range(int(sys.argv[1]) - 1):
        other, (address, _) = server.accept()
        print(other.makefile().read(), "at", address)
else:
    while True:
        try:
            with socket.create_connection(("host0", 5000)) as s:
                s.sendall(name.encode())
            break
        except ConnectionRefusedError:
            pass
"""


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    try:
        Testbed().close()
    except ConfigError as refused:
        pytest.skip(str(refused))


def outside() -> tuple[str, ...]:
    """What a testbed could leave on this machine."""
    asked = (["ip", "-o", "link"], ["ip", "netns"], ["hostname"],
             ["cat", "/proc/self/mounts", "/etc/hosts"])
    return tuple(subprocess.run(words, capture_output=True, text=True).stdout for words in asked)


def running(mark: str) -> list[psutil.Process]:
    """The processes whose command line holds this word, whichever namespace they are in."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass  # it has ended
    return found


def await_running(mark: str, wanted: int) -> None:
    until = time.monotonic() + 60
    while len(running(mark)) != wanted:
        assert time.monotonic() < until, running(mark)
        time.sleep(0.02)


@pytest.fixture
def mark() -> str:
    """An argument for `sleep` by which this test's processes are known."""
    return f"{1e6 + os.getpid():.0f}.{time.monotonic_ns() % 10**9:09d}"


@pytest.mark.parametrize(("hosts", "racks"), [(2, 1), (4, 2), (6, 3)])
def test_hosts_have_names_and_reach_each_other(hosts: int, racks: int) -> None:
    before = outside()
    with Testbed(hosts, racks) as testbed:
        assert outside() == before  # not even while it is there
        first, *others = testbed.run([sys.executable, "-c", TALK, str(hosts)], timeout=60)
    assert sorted(first.output.splitlines()) == [f"host{h} at 10.0.0.{h + 1}"
                                                 for h in range(1, hosts)]
    assert [(other.exit_code, other.output) for other in others] == [(0, "")] * (hosts - 1)
    assert outside() == before


def test_links_have_the_bandwidth_asked_for_in_both_directions() -> None:
    with Testbed(4, 2, bandwidth_Bps=50e6, uplink_Bps=3.125e6) as testbed:
        for result in testbed.run(["tc", "qdisc", "show", "dev", "eth0"]):
            assert "tbf" in result.output
            assert "rate 400Mbit" in result.output
        switches = testbed._in_box("tc qdisc show")
        assert switches.count("rate 400Mbit") == 4
        assert switches.count("rate 25Mbit") == 4
        assert testbed.topology.ranks == 4
        bandwidths = {(a, b): data["bandwidth_Bps"]
                      for a, b, data in testbed.topology.graph().edges(data=True)}
        assert bandwidths["rack0", "spine"] == bandwidths["spine", "rack1"] == 3.125e6
        assert bandwidths[0, "rack0"] == bandwidths["rack1", 3] == 50e6


def test_two_testbeds_at_once_know_nothing_of_each_other() -> None:
    with Testbed(2) as one, Testbed(3) as two:
        names = [[r.output for r in testbed.run(["sh", "-c", "hostname; grep -c host /etc/hosts"])]
                 for testbed in (one, two)]
    assert names == [[f"host{h}\n{hosts + 1}\n" for h in range(hosts)] for hosts in (2, 3)]


def test_a_host_whose_link_is_cut_is_reached_again_once_it_is_restored() -> None:
    state = ["sh", "-c", "ip -brief link show eth0 | awk '{print $2}'"]
    with Testbed(2) as testbed:
        assert [r.output for r in testbed.run(state)] == ["UP\n", "UP\n"]
        testbed.cut(1)
        here, there = testbed.run(state)  # a host goes on without a network
        assert here.output == "UP\n"
        assert there.output.endswith("DOWN\n")
        testbed.restore(1)
        testbed.run([sys.executable, "-c", TALK, "2"], timeout=60)


def test_a_killed_host_loses_its_processes_and_no_other_does(mark: str) -> None:
    with Testbed(2) as testbed:
        killed, other = (testbed.start(h, ["sh", "-c", f"sleep {mark} & exec sleep {mark}"])
                         for h in range(2))
        await_running(mark, 4)
        testbed.kill(0)
        assert killed.wait(10) == -signal.SIGKILL
        assert len(running(mark)) == 2
        assert other.poll() is None
        for act in testbed.kill, testbed.cut, testbed.restore:
            with pytest.raises(ConfigError, match="host must be 1 or less, not 2"):
                act(2)
    assert running(mark) == []


def test_nothing_is_left_of_a_command_that_takes_too_long(mark: str) -> None:
    with Testbed(2) as testbed:
        with pytest.raises(RunTimeout, match=r"sleep did not end within 0\.2 s on host 0"):
            testbed.run(["sleep", mark], timeout=0.2)
        assert running(mark) == []


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_testbed_that_is_killed(sent: signal.Signals, mark: str) -> None:
    before = outside()
    process = subprocess.Popen(
        [sys.executable, "-m", "dtlab", "testbed", "--hosts", "4", "--racks", "2", "sh", "-c",
         f"sleep {mark} & setsid sleep {mark}"], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await_running(mark, 8)
        process.send_signal(sent)
        assert process.wait(20) in (-sent, 130)
        await_running(mark, 0)
    finally:
        process.kill()
        process.wait()
    assert outside() == before


def test_an_ordinary_user_has_a_testbed_too_where_the_kernel_gives_namespaces() -> None:
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if subprocess.run([*user, "unshare", "--user", "--map-root-user", "true"],
                      capture_output=True).returncode:
        pytest.skip("this kernel gives namespaces to root alone")
    done = subprocess.run([*user, sys.executable, "-m", "dtlab", "testbed", "hostname"],
                          capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["[host 0] host0", "[host 1] host1"], done.stderr


# ---- the command line ----------------------------------------------------------------------------


def test_output_is_labelled_and_a_failure_is_told() -> None:
    result = call("testbed", "--hosts", "3", "sh", "-c", 'hostname; [ "$(hostname)" != host1 ]')
    assert sorted(result.stdout.splitlines()) == [f"[host {h}] host{h}" for h in range(3)]
    assert result.stderr == "dtlab: sh ended on host 1 with exit code 1\n"
    assert result.exit_code == 1


def test_a_script_reads_what_came_of_it() -> None:
    result = call("testbed", "--json", "--", "sh", "-c",
                  "echo --hosts $PET_NNODES $PET_RDZV_ENDPOINT")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [
        {"host": host, "exit_code": 0, "output": "--hosts 2 host0:29500\n"} for host in range(2)]


def test_a_command_that_does_not_exist_fails_on_every_host() -> None:
    result = call("testbed", "no-such-command")
    assert result.exit_code == 1
    assert result.stdout.count("no-such-command") == 2


def test_a_kernel_without_netem_says_so() -> None:
    result = call("testbed", "--latency", "1ms", "tc", "qdisc", "show", "dev", "eth0")
    if result.exit_code:
        assert (result.exit_code, result.stdout) == (2, "")
        assert "this kernel has no netem, so links can't be given a latency" in result.stderr
    else:
        assert result.stdout.count("delay 1ms") == 2
