"""The sandbox: its ranks have groups, streams and works as everywhere, and every message counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtlab import ConfigError, Recv, Send, run
from dtlab.collectives import all_reduce, barrier, broadcast
from dtlab.grading.case import Case, Outcome, Submission
from dtlab.grading.judge import prepare_to_fork
from dtlab.grading.learner_check import make_submission
from dtlab.grading.rank_server import RankServer
from dtlab.grading.sandbox import Sandbox
from dtlab.grading.untrusted_process import UntrustedProcess
from dtlab.topology import uniform

N = 6  # elements of each rank's float32 vector


def outcome_of(function: Callable[..., Any], ranks: int = 4, **options: Any) -> Outcome:
    """What comes of `function(comm, x)` in the sandbox; x holds the rank's number."""
    args = [(torch.full((N,), float(rank)),) for rank in range(ranks)]
    submission = make_submission(function, "function")
    return run(_in_the_judges_process, submission, args, options, ranks=1, trace=False,
               echo=False).values[0]


def _in_the_judges_process(comm: Any, submission: Submission, args: Any, options: Any) -> Outcome:
    prepare_to_fork()
    server = RankServer("none", ("collectives", "cost"))
    sandbox = Sandbox(submission, server)
    try:
        return sandbox.run_case(Case("a case", args, **{"library": True, "clock": True} | options))
    finally:
        sandbox.close()


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"test_sandbox.py:{function.__code__.co_firstlineno + offset} in {function.__name__}"


# ---- groups and streams ------------------------------------------------------------------------


def overlapped(comm, x):
    sums, works = [], []
    for members in ([0, 1, 2], [1, 2, 3]):
        if comm.rank not in members:
            continue
        group = comm.subgroup(members)
        for times in (1, 10):
            sums.append(x * times)
            works.append(group.begin(all_reduce, sums[-1]))
    own = x.clone()
    all_reduce(comm, own)  # meanwhile, on all ranks
    for work, total in zip(works, sums, strict=True):
        assert work.wait() is total
    return own[0].item(), *(total[0].item() for total in sums)


def test_two_overlapped_all_reduces_on_each_of_two_overlapping_groups_give_the_right_sums():
    outcome = outcome_of(overlapped)
    assert outcome.failure is None
    assert outcome.values == [(6, 3, 30), (6, 3, 30, 6, 60), (6, 3, 30, 6, 60), (6, 6, 60)]


def test_the_messages_of_streams_are_counted_like_any_other():
    outcome = outcome_of(overlapped)
    ring = {p: 2 * (p - 1) * 4 * N for p in (3, 4)}  # all ranks together
    assert outcome.trace.sent_bytes() == ring[4] + 4 * ring[3]
    assert outcome.trace.messages() == 2 * 3 * 4 + 4 * 2 * 2 * 3
    # A port starts one message a second: the ranks of both groups send 6 + 4 · 4.
    assert outcome.elapsed_s == 22


def test_equal_submissions_give_equal_outcomes():
    first, second = outcome_of(overlapped), outcome_of(overlapped)
    assert first.failure is second.failure is None
    assert first.trace.transfers == second.trace.transfers
    assert first.elapsed_s == second.elapsed_s


def test_what_is_begun_on_one_communicator_runs_in_order():
    def in_order(comm, x):
        log = []

        def step(stream, name, seconds):
            with stream.compute(name, seconds):
                pass
            log.append((name, stream.now()))

        works = [comm.begin(step, name, seconds=s) for name, s in (("a", 3.0), ("b", 1.0))]
        with comm.compute("own", 2.0):
            pass
        log.append(("own", comm.now()))
        for work in works:
            work.wait()
        return log

    assert outcome_of(in_order, 2, clock=True).values == [[("own", 2), ("a", 3), ("b", 4)]] * 2


def test_streams_begin_streams_and_split_and_use_their_ranks_communicator():
    def nested(comm, x):
        def outer(stream, x):
            work = stream.begin(all_reduce, x)
            half = stream.split(stream.rank % 2)
            y = torch.tensor([float(stream.rank)])
            all_reduce(half, y)
            barrier(comm.subgroup(range(comm.size)))
            work.wait()
            return x[0].item(), y.item()

        return [work.wait() for work in [comm.begin(outer, x), comm.begin(outer, x * 2)]]

    outcome = outcome_of(nested)
    assert outcome.failure is None
    assert outcome.values == [[(6, r), (12, r)] for r in (2, 4, 2, 4)]


def test_a_pending_receive_from_anyone_never_catches_a_collectives_message():
    def waits_for_anyone(comm, x):
        y = torch.empty(N)
        work = comm.irecv(y) if comm.rank == 0 else None
        all_reduce(comm, x)
        if comm.rank == 1:
            comm.send(x * 0 + 7, 0)
        return (work.wait(), y[0].item()) if work else x[0].item()

    assert outcome_of(waits_for_anyone, 3).values == [(1, 7), 3, 3]


def test_a_collective_that_meets_another_is_named_also_in_a_stream():
    def differs(comm, x):
        comm.begin(broadcast if comm.rank else all_reduce, x).wait()

    failure = outcome_of(differs, 2).failure
    assert failure.error == "ShapeMismatch"
    assert "broadcast(" in failure.message
    assert "all_reduce(" in failure.message


# ---- works -------------------------------------------------------------------------------------


def test_wait_any_returns_the_first_that_is_done_or_none():
    def first_come(comm, x):
        if comm.rank:
            with comm.compute("work", 5.0 - comm.rank):
                pass
            comm.send(x, 0)
            return None
        works = [comm.irecv(torch.empty(N), src) for src in (1, 2)]
        works.append(comm.begin(lambda stream: stream.recv(torch.empty(N), 3)))
        none, order = comm.wait_any(works, 0.5), []
        while works:
            work = comm.wait_any(works)
            order.append(works.index(work))
            work.wait()
            works.remove(work)
        return none, order

    def in_stream(comm, x):  # rank 3 sends on the stream's communicator
        if comm.rank == 3:
            comm.begin(lambda stream: stream.send(x, 0)).wait()
            return None
        return first_come(comm, x)

    assert outcome_of(in_stream, clock=True).values[0] == (None, [2, 1, 0])


def test_what_wait_any_returns_is_waited_for_unless_it_failed():
    def waits(comm, x):
        x = x * 0
        if comm.rank == 0:
            comm.send(x + 1, 1)
        elif comm.rank == 1:
            comm.wait_any([comm.irecv(x, 0)])
        return x.sum().item()

    def fails(comm, x):
        comm.wait_any([comm.begin(lambda stream: 1 / 0)])

    assert outcome_of(waits).values[:2] == [0.0, float(N)]
    assert outcome_of(fails).failure.error == "ZeroDivisionError"


def received_into_what_has_not_left(comm, x):
    peer = comm.rank ^ 1
    for _ in range(2):  # what was waited for, or is gone, is free
        sent = comm.isend(x.clone(), peer)
        comm.recv(x, peer)
        sent.wait()
    work = comm.isend(x, peer)
    comm.recv(x[1:], peer)
    work.wait()


def test_a_receive_into_what_has_not_left_yet_is_refused():
    failure = outcome_of(received_into_what_has_not_left, 2).failure
    assert "receives into the tensor that it is sending" in str(failure)


def test_a_cancelled_receive_still_takes_its_message():
    def cancels(comm, x):
        if comm.rank == 1:
            comm.send(x, 0)
            comm.send(2 * x, 0)
            return None
        into = torch.zeros(N)
        comm.irecv(torch.zeros(N), 1).cancel()
        comm.recv(into, 1)
        return into[0].item()

    assert outcome_of(cancels, 2).values[0] == 2


def forgets_a_send(comm, x):
    comm.isend(x, (comm.rank + 1) % comm.size)
    y = torch.empty_like(x)
    comm.recv(y, (comm.rank - 1) % comm.size)
    return y


def forgets_what_it_began(comm, x):
    comm.begin(all_reduce, x)


def forgets_a_receive(comm, x):
    comm.post(Recv(x.clone(), 1 - comm.rank), Send(x, 1 - comm.rank))[1].wait()
    return x


@pytest.mark.parametrize(("function", "what"), [
    (forgets_a_send, "the send to rank 1"),
    (forgets_what_it_began, "the function that begin has begun"),
    (forgets_a_receive, "the receive from rank 1"),
])
def test_work_that_nobody_waited_for_fails_with_the_line_that_began_it(function, what):
    failure = outcome_of(function, 2).failure
    assert (failure.kind, failure.rank, failure.message) == ("pending", 0, what)
    assert failure.at == line_of(function, 1)


def raises(stream):
    raise KeyError("gone")


def test_the_error_of_a_begun_function_comes_out_of_wait():
    def catches(comm, x):
        try:
            comm.begin(raises).wait()
        except KeyError as error:
            return str(error)

    assert outcome_of(catches, 2).values == ["'gone'"] * 2


@pytest.mark.parametrize("ending", ["returns", "waits", "cancels"])
def test_an_error_that_nobody_waited_for_fails_the_case(ending):
    def leaves(comm, x):
        if comm.rank == 1:
            work = comm.begin(raises)
            if ending == "cancels":
                work.cancel()
        elif ending == "waits":
            comm.recv(x, 1)

    failure = outcome_of(leaves, 2).failure
    assert (failure.kind, failure.rank, failure.error) == ("raised", 1, "KeyError")
    assert failure.at == line_of(raises, 1)


def receives(stream, x):
    stream.recv(x, 1 - stream.rank)


def test_a_deadlock_shows_the_line_of_each_stream_or_the_one_that_began_it():
    def both_receive(comm, x):
        comm.begin(receives, x).wait()

    def one_is_missing(comm, x):
        if comm.rank:
            comm.begin(all_reduce, x).wait()

    details = outcome_of(both_receive, 2).failure.details
    for stream in ("recv (stream 1)", "wait for stream 1"):
        assert details.count(stream) == 2
    for line in (line_of(receives, 1), line_of(both_receive, 1)):
        assert details.count(line) == 2

    failure = outcome_of(one_is_missing, 2).failure
    assert failure.kind == "deadlock"
    assert "in all_reduce (stream 1)  0" in failure.details
    assert failure.details.count(line_of(one_is_missing, 2)) == 2  # of rank 1, and of its stream
    assert failure.details.count("test_sandbox.py") == 2


def test_a_stream_without_an_end_is_found_with_its_line():
    def loops(stream):
        while True:
            pass

    def begins_it(comm, x):
        comm.begin(loops).wait()

    failure = outcome_of(begins_it, 1).failure
    assert failure.kind == "hung"
    assert failure.at.endswith("in loops")


def test_requests_of_streams_count_towards_the_limit():
    def asks(stream):
        while True:
            stream.now()

    failure = outcome_of(lambda comm, x: comm.begin(asks).wait(), 1).failure
    assert (failure.kind, failure.rank) == ("limit", 0)


def test_what_is_under_way_takes_no_more_than_a_quarter_of_a_gigabyte_of_the_referee():
    def sends(comm, x):
        vast = torch.empty(10_000_000)
        while True:
            comm.isend(vast, 1 - comm.rank)

    assert "268,435,456 bytes" in outcome_of(sends, 2).failure.message


def test_a_thread_of_the_learners_own_gets_one_sentence():
    def threads(comm, x):
        said = []

        def sends():
            try:
                comm.send(x, 1 - comm.rank)
            except Exception as error:
                said.append(str(error))

        thread = threading.Thread(target=sends)
        thread.start()
        thread.join()
        return said[0]

    assert "begin this function" in outcome_of(threads, 2).values[0]


# ---- the clock, and what is asked for ------------------------------------------------------------


@pytest.mark.parametrize(("clock", "seen", "took"), [(False, 0.0, 1.0), (True, 6.0, 7.0)])
def test_the_clock_stands_still_unless_a_case_judges_time(clock, seen, took):
    def looks(comm, x):
        comm.sendrecv(x, 1 - comm.rank, x.clone(), 1 - comm.rank)
        with comm.compute("work", 5.0):
            pass
        work, refused = comm.irecv(x, 1 - comm.rank), False
        now = comm.now()
        try:
            comm.wait_any([work], 1.0)
        except ConfigError:
            refused = True
        work.cancel()
        return now, refused

    outcome = outcome_of(looks, 2, clock=clock)
    assert outcome.values == [(seen, not clock)] * 2
    assert outcome.elapsed_s == took


def oracle(rank):
    def answer(comm, number):
        with comm.compute("answer", 3.0):
            pass
        if number < 0:
            raise ConfigError("there is no such number")
        return 10 * rank + number

    return answer


def asks(comm, ask, x):
    try:
        ask(-1)
    except ConfigError as error:
        return ask(2), str(error)


def test_the_referee_counts_questions_and_their_time_but_over_gloo_the_rank_answers():
    outcome = outcome_of(asks, 2, oracle=oracle)
    assert outcome.values == [(rank * 10 + 2, "there is no such number") for rank in (0, 1)]
    assert (outcome.asked, outcome.elapsed_s) == ([2, 2], 6.0)
    real = outcome_of(asks, 2, oracle=oracle, gloo=True)
    assert (real.values, real.asked) == (outcome.values, [0, 0])


@pytest.mark.parametrize(("number", "said"), [(-1, "there is no such number"), ("a", "TypeError")])
def test_an_oracles_error_is_the_learners_exception(number, said):
    failure = outcome_of(lambda comm, ask, x: ask(number), 1, oracle=oracle).failure
    assert (failure.kind, failure.error) == ("raised", "ConfigError")
    assert said in failure.message


def test_a_message_that_does_not_fit_fails_the_case_though_nobody_waits_for_it():
    def notices(comm, x):
        pair = comm.subgroup([0, 1])
        if comm.rank == 0:
            work = comm.isend(x, 1)
            pair.send(x, 1)
            return work.cancel()
        pair.recv(x, 0)
        work = comm.irecv(x[:1].clone(), 0)
        noticed = comm.wait_any([work]) is work
        work.cancel()
        return noticed

    assert outcome_of(notices, 2).failure.error == "ShapeMismatch"


@pytest.mark.parametrize("library", [False, True])
def test_split_tells_no_more_than_who_is_with_whom(library):
    def splits(comm, x, *keys):
        return [comm.split(0, key).size for key in keys]

    def said(*keys):
        failure = outcome_of(lambda comm, x: splits(comm, x, *keys), 2, library=library).failure
        return failure and failure.message

    assert said(1, -1, 2) is None
    for keys in ((3,), (-3,), (0, 1, 0, 1, 0)):
        assert "split is not for sending" in said(*keys)


def test_what_ranks_say_of_their_messages_over_gloo_is_of_the_right_kinds():
    def forges(comm, x):
        from dtlab.processes.recorder import Recorder

        rows = [(sends, 1 - comm.rank, 0, "8", 0, 0, 7, 0) for sends in (True, False)]
        Recorder.rows = lambda *_: (rows, [], [])

    (message, _) = outcome_of(forges, 2, gloo=True).trace.transfers
    assert (message.nbytes, message.label) == (8, "7")


# ---- the rest ----------------------------------------------------------------------------------


def test_the_memory_of_streams_is_measured():
    def copies(stream, x):
        y = torch.cat([x] * 1000)
        stream.now()
        return y[0].item()

    def idle(comm, x):
        return comm.begin(lambda stream: stream.now()).wait()

    measured = outcome_of(lambda comm, x: comm.begin(copies, x).wait(), 2, meter=True)
    assert measured.peak_bytes == [4 * N * 1000] * 2
    assert outcome_of(idle, 2, meter=True).peak_bytes == [0, 0]


def test_auto_chooses_by_the_cases_network_not_by_this_machine():
    def asks(comm, x):
        return comm.machine.alpha, comm.machine.beta

    assert outcome_of(asks, 3, cluster=uniform(3, 0.5, 8.0)).values == [(0.5, 0.125)] * 3


def test_a_process_is_starved_also_if_only_its_second_thread_would_run():
    counts = """
import threading, time
def count():
    while True:
        pass
threading.Thread(target=count, daemon=True).start()
time.sleep(100)
"""

    def judge(comm):
        prepare_to_fork()
        with RankServer("none") as server:
            process = UntrustedProcess(server, "cells", cells=[[0, "<cell>", counts]], names=[])
            until_s = time.monotonic() + 20  # to start the thread
            while process._processor_s() < 0.1 and time.monotonic() < until_s:
                time.sleep(0.05)
            try:
                return process._would_run()
            finally:
                process.end()

    assert run(judge, ranks=1, echo=False).values == [True]


def test_a_limit_counts_what_a_process_computes_not_what_it_waits_for_a_processor():
    computes = "import time\nuntil_s = time.process_time() + 0.8\n" \
               "while time.process_time() < until_s:\n    pass"

    def judge(comm):
        prepare_to_fork()
        with RankServer("none") as server:
            process = UntrustedProcess(server, "cells", cells=[[0, "<cell>", computes]], names=[])
            process._since_s -= 2.0  # as if it had waited so long
            try:
                return [process.recv(2.0).kind for _ in range(2)]
            finally:
                process.end()

    assert run(judge, ranks=1, echo=False).values == [["begin", "done"]]
