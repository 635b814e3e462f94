"""Answers that want to harm, cheat or hang: none gets points, and the check always comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from dtlab import Recv, Send
from dtlab.processes.fork_server import fork_server
from tests.exercises.answers import first_hint, judged, solution

SHARED = {}
right_shift = solution("shift")


def loops_for_ever(comm, x):
    while True:
        pass


def sleeps(comm, x):
    time.sleep(1000)


def loops_in_messages(comm, x):
    while True:
        comm.isend(x, (comm.rank + 1) % comm.size)


def exits(comm, x):
    os._exit(0)


def says_goodbye(comm, x):
    sys.exit("bye")


def crashes(comm, x):
    os.kill(os.getpid(), 11)


def closes_everything(comm, x):
    os.closerange(0, 256)
    return right_shift(comm, x)


def kills_its_parent(comm, x):
    os.kill(os.getppid(), 9)
    time.sleep(1000)


def takes_all_memory(comm, x):
    return torch.ones(1 << 36)


def returns_what_cannot_be_shown(comm, x):
    class Trap:
        def __repr__(self):
            raise RuntimeError("trap")

    return Trap()


def shares_globals(comm, x):
    SHARED[comm.rank] = x.clone()
    while len(SHARED) < comm.size:
        time.sleep(0.01)
    x.copy_(sum(SHARED.values()))


def patches_torch(comm, x):
    torch.equal = torch.allclose = lambda *a, **k: True
    torch.Tensor.__ne__ = lambda a, b: torch.zeros(1, dtype=torch.bool)
    torch.Tensor.nonzero = lambda a: []


def patches_the_grader(comm, x):
    import dtlab.grading.exercise as exercise
    import dtlab.grading.sandboxed_rank as sandboxed_rank

    exercise.verdict_of = None
    sandboxed_rank.encode = lambda value, blobs: None


def forgets_to_wait(comm, x):
    works = comm.post(Send(x.clone(), (comm.rank + 1) % comm.size), Recv(x))
    works[1].wait()
    return x


def answers_beside(comm, x):
    comm.begin(right_shift, x).cancel()
    return x


ENDLESS = "had not ended in time"


@pytest.mark.parametrize(("answer", "hint"), [
    (loops_for_ever, "The last line seen: test_hostile_answers.py:"),
    (sleeps, ENDLESS),
    (loops_in_messages, ENDLESS),
    (exits, "process ended before"),
    (says_goodbye, ""),
    (crashes, "process ended before"),
    (closes_everything, "process ended before"),
    (kills_its_parent, ""),
    (takes_all_memory, ""),
    (returns_what_cannot_be_shown, ""),
    (shares_globals, ENDLESS),
    (patches_torch, ""),
    (patches_the_grader, ""),
    (forgets_to_wait, "This line began it: test_hostile_answers.py:"),
    (answers_beside, ""),
], ids=lambda v: getattr(v, "__name__", ""))
def test_a_hostile_answer_gets_nothing_and_stops_nothing(answer, hint):
    began = time.monotonic()
    report = judged("shift", answer)
    took_s = time.monotonic() - began
    assert report.points == 0
    assert hint in first_hint(report)
    assert took_s < 30  # a generous limit for a busy machine; 2.5 s, then the end
    assert left_behind() == []


def left_behind(within_s: float = 10.0) -> list[str]:
    """Processes that outlive the check. All that a check starts is in the fork server's session."""
    server = fork_server().pid
    until = time.monotonic() + within_s
    while True:
        alive = [name for pid, name in everyone() if pid != server and session(pid) == server]
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.1)


def everyone() -> list[tuple[int, str]]:
    return [
        (p.pid, p.info["name"])
        for p in psutil.process_iter(["name", "status"])
        if p.info["status"] != psutil.STATUS_ZOMBIE
    ]


def session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def test_a_process_that_an_answer_starts_ends_with_it():
    def starts_a_process(comm, x):
        subprocess.Popen(["sleep", "1000"])
        raise ValueError

    assert judged("shift", starts_a_process).points == 0
    assert left_behind() == []


def test_files_cannot_be_shared_between_ranks(tmp_path):
    def shares_a_file(comm, x):
        (tmp_path / str(comm.rank)).write_text(str(x.tolist()))
        return right_shift(comm, x)

    report = judged("shift", shares_a_file)
    assert report.points == 0
    assert "PermissionError" in report.rows[0].actual


def test_a_hundred_megabytes_of_prints_are_cut_and_cost_nothing():
    def prints_a_flood(comm, x):
        for _ in range(100 if comm.size == 8 else 0):
            print("x" * 1_000_000)
        return right_shift(comm, x)

    def prints_and_fails(comm, x):
        print("x" * 100_000_000)
        raise ValueError("after the flood")

    assert judged("shift", prints_a_flood).points == 6
    report = judged("shift", prints_and_fails)
    assert len(report.printed) < 5_000
    assert "more characters" in report.printed


def test_what_is_written_below_python_goes_nowhere(capfd):
    def writes_to_the_terminal(comm, x):
        os.write(1, b"noise")
        os.write(2, b"noise")
        return right_shift(comm, x)

    assert judged("shift", writes_to_the_terminal).points == 6
    assert "noise" not in "".join(capfd.readouterr())


def test_globals_are_fresh_in_every_case():
    calls = []

    def only_once(comm, x):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("called before")
        return right_shift(comm, x)

    assert judged("shift", only_once).points == 6


def test_a_notebook_that_patched_torch_is_judged_by_the_real_one(monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    monkeypatch.setattr(torch, "allclose", lambda *_, **__: True)

    def does_nothing(comm, x):
        return x

    assert judged("shift", does_nothing).points <= 1  # a rank alone may return its own


def test_checks_may_run_in_threads_at_once():
    found = []
    answer = solution("hello-ranks")
    threads = [
        threading.Thread(target=lambda: found.append(judged("hello-ranks", answer).points))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [4, 4, 4]


@pytest.mark.parametrize(("exercise", "answer", "actual"), [
    ("find-rings", lambda *_: [torch.zeros(50_000_000, dtype=torch.bool)] * 2, "returned [["),
    ("one-f-one-b", lambda p, m: [["0F0 " * 900_000]], "900,000 actions"),
    ("restart-bits", lambda job, disk: job._ask(
        job._plan, disk.data, torch.arange(4), torch.ones(30_000_000, 1, 1, dtype=torch.bool), 0.1,
        job.weights(), job.optimizer.velocities), "ConfigError: a step on weights of other shapes"),
], ids=["each number is looked at", "a text of many actions", "a mask that broadcasts"])
def test_what_returns_takes_no_time_or_memory_of_the_judge(exercise, answer, actual):
    began = time.monotonic()
    assert judged(exercise, answer).rows[0].actual.startswith(actual)
    assert time.monotonic() - began < 30
