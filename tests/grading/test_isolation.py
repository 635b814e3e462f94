"""What a submission's processes can see and do, in each sandbox that works here."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest

from dtlab import ConfigError, cost, run
from dtlab.grading import isolation
from dtlab.grading.absent import Absent
from dtlab.grading.isolation import SANDBOXES, check_secrets, choose_sandbox, environment
from dtlab.grading.judge import prepare_to_fork
from dtlab.grading.rank_server import RankServer
from dtlab.grading.system_calls import can_restrict
from dtlab.grading.untrusted_process import UntrustedProcess
from dtlab.parallel import pipeline

pytestmark = pytest.mark.skipif(not can_restrict(), reason="only Linux has libseccomp")
ROOT = Path(__file__).resolve().parents[2]
NEW_FILES = [str(ROOT / "new"), "/tmp/new", "/dev/shm/new", "/home/learner/new", "/new", "new"]

# Each is tried; what it says is what came of it.
FORBIDDEN = {
    "write": "[open(path, 'w') for path in NEW_FILES]",
    "make a folder": "os.mkdir('/tmp/new')",
    "make a link": "os.symlink('some data', '/tmp/new')",
    "make a shared memory": "os.memfd_create('new')",
    "lock a file": "fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)",
    "open a socket": "socket.socket()",
    "open a pair of sockets": "socket.socketpair()",
    "start a program": "subprocess.run(['true'])",
    "start a process": "os.fork()",
    "begin a session": "os.setsid()",
    "kill its parent": "os.kill(os.getppid(), 9)",
    "kill all": "os.kill(-1, 9)",
    "stop its group": "os.killpg(0, 19)",
    "change its priority": "os.nice(1)",
    "take System V memory": "call('shmget', 1, 4096, 0o1666)",
    "trace its parent": "call('ptrace', 16, os.getppid(), 0, 0)",
    "read its parent's memory": "call('process_vm_readv', os.getppid(), 0, 0, 0, 0, 0)",
    "read its parent's clock": "time.clock_gettime(~os.getppid() << 3 | 2)",
    "count all threads": "call('sysinfo', ctypes.create_string_buffer(256))",
    "name itself": "call('prctl', 15, b'new', 0, 0, 0)",
}
PRELUDE = f"""
import ctypes, fcntl, gc, os, socket, subprocess, sys, time
import dtlab
NEW_FILES = {NEW_FILES}
def call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
"""


def sandbox_or_skip(name: str) -> str:
    try:
        return choose_sandbox(name)
    except ConfigError as error:
        pytest.skip(str(error))


def said(sandbox: str, expressions: list[str]) -> list[str]:
    """What each expression gives, or raises, in a process of the sandbox."""
    cells = [[n, f"<{n}>", f"{PRELUDE}\nraise Exception(repr({text}))"]
             for n, text in enumerate(expressions)]

    def judge(comm):
        prepare_to_fork()
        with RankServer(sandbox) as server:
            process = UntrustedProcess(server, "cells", cells=cells, names=[])
            frame = process.recv(60)
            while frame.kind != "done":
                frame = process.recv(60)
            process.end()
            return frame.fields["troubles"]

    troubles = run(judge, ranks=1, trace=False, echo=False).values[0]
    return [troubles[str(n)].removeprefix("the cell raised ") for n in range(len(cells))]


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
def test_what_is_forbidden_raises_in_every_sandbox(sandbox):
    outcomes = said(sandbox_or_skip(sandbox), list(FORBIDDEN.values()))
    for what, came in zip(FORBIDDEN, outcomes, strict=True):
        assert came.startswith(("PermissionError", "OSError", "FileNotFoundError")), (what, came)


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_an_answers_cell_may_import_matplotlib(sandbox):
    assert said(sandbox_or_skip(sandbox), ["__import__('matplotlib.pyplot').__name__"]) == [
        "Exception: 'matplotlib'"]


def test_bubblewrap_shows_nothing_of_the_machine(monkeypatch):
    monkeypatch.setenv("A_SECRET", "of the teacher")
    package = str(isolation.PACKAGE)
    (home, processes, beside, oracles, secret, user, host) = said(sandbox_or_skip("bubblewrap"), [
        "os.listdir(os.path.expanduser('~'))",
        "os.path.exists('/proc/self')",
        f"os.listdir({str(ROOT)!r})",
        f"os.listdir({package + '/grading/exercises'!r})",
        "os.environ.get('A_SECRET')",
        "[os.path.exists(p) for p in ('/etc/passwd', '/root/.bashrc', '/home/learner/..')]",
        "os.uname().nodename",
    ])
    assert home == "Exception: []"
    assert processes == "Exception: False"
    assert "solutions" not in beside
    assert "tests" not in beside
    assert oracles == "Exception: []"
    assert secret == "Exception: None"
    assert user == "Exception: [False, False, True]"
    assert host == "Exception: 'sandbox'"


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
def test_a_rank_never_held_a_case_nor_the_checks(sandbox):
    (modules, cases) = said(sandbox_or_skip(sandbox), [
        "[name for name in sys.modules if name.startswith('dtlab.grading.exercises.')]",
        "[x for x in gc.get_objects() if type(x).__name__ in ('Case', 'Check', 'Exercise')]",
    ])
    assert modules == "Exception: []"
    assert cases == "Exception: []"


def test_of_this_package_a_rank_finds_names_and_no_functions():
    (kind, module, called, folder, read) = said(sandbox_or_skip("bubblewrap"), [
        "type(dtlab.topology.cycles.edge_disjoint_cycles).__name__",
        "__import__('dtlab.no.such', fromlist=['x']).anything is not None",
        "dtlab.parallel.pipeline.one_f_one_b(2, 4)",
        "sorted(os.listdir(os.path.dirname(dtlab.__file__)))",
        "open(dtlab.__file__.replace('__init__', 'collectives/__init__')).read()",
    ])
    assert kind == "Exception: 'Absent'"
    assert module == "Exception: True"
    assert called == "NotYourOwn: the answer calls dtlab.parallel.pipeline.one_f_one_b"
    assert not {"collectives", "cost", "parallel", "ps", "topology"} & set(folder.split("'"))
    assert read.startswith("FileNotFoundError")


def test_what_is_absent_becomes_the_real_thing_where_that_is_present():
    absent = Absent("dtlab.cost", "time_s")
    assert pickle.loads(pickle.dumps(absent)) is cost.time_s
    assert pickle.loads(pickle.dumps(Absent("dtlab.parallel", "pipeline").one_f_one_b)) is (
        pipeline.one_f_one_b)


def test_the_environment_is_the_same_for_all():
    assert set(environment()) - set(isolation._SAME_CPU) == {
        "PATH", "HOME", "LANG", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE",
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MPLCONFIGDIR"}


def test_without_a_sandbox_grading_refuses_and_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(isolation, "_obstacle", lambda name: "is not installed")
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*--sandbox none"):
        choose_sandbox()
    with pytest.raises(ConfigError, match=f"choose {', '.join(SANDBOXES)}"):
        choose_sandbox("walls")


def test_nobody_needs_what_is_secret_to_be_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "SECRET", tmp_path / "none")
    for folder in tmp_path.parents:
        if not folder.stat().st_mode & stat.S_IXOTH:
            monkeypatch.setattr(isolation, "_hidden_from_others",
                                lambda path: not path.stat().st_mode & 0o5)
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigError, match=f"chmod -R go-rwx {tmp_path}"):
        check_secrets([tmp_path])
    os.chmod(tmp_path, 0o700)
    check_secrets([tmp_path])


def test_nobody_is_nobody():
    (user, killed) = said(sandbox_or_skip("nobody"), ["os.getuid()", FORBIDDEN["kill its parent"]])
    assert user == f"Exception: {isolation.NOBODY}"
    assert killed.startswith("PermissionError")
