"""What chapters 00 and 03 say in prose and no cell prints."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import dtlab
from dtlab import Comm, Deadlock, calibration, run, simulate
from dtlab.topology import uniform
from tests.notebooks.chapter import Chapter

FIRST, MESSAGES = Chapter("00"), Chapter("03")
ALPHA, BETA = 20e-6, 0.8e-9  # chapter 03's Ethernet
MB = 1_000_000


# ---- chapter 00 ---------------------------------------------------------------------------------


def test_hello_gives_the_same_in_the_simulator() -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec(FIRST.code_with("def hello"), scope)
    simulated = simulate(scope["hello"], network=uniform(4, 1e-6, 1e9), echo=False)
    assert simulated.values == [10, 11, 12, 13]
    assert scope["x"].item() == 10


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_around_never_has_two_messages_under_way(ranks: int) -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec(FIRST.code_with("def around"), scope)
    result = simulate(scope["around"], network=uniform(ranks, 5e-6, 10e9))
    assert result.values[0] == sum(range(ranks))
    moves = result.trace.transfers
    assert len(moves) == ranks
    for before, after in itertools.pairwise(moves):
        assert after.start_s >= before.end_s
    assert [m.end_s - m.start_s for m in moves] == pytest.approx([5.0004e-6] * ranks)


def test_a_run_gives_up_after_60_seconds() -> None:
    assert inspect.signature(run).parameters["timeout"].default == 60


def test_no_message_is_so_small_that_it_hides_the_deadlock() -> None:
    """Nor on processes: tests/processes/test_faults.py."""
    def send_first(comm: Comm, length: int) -> None:
        x = torch.zeros(length, dtype=torch.uint8)
        comm.send(x, (comm.rank + 1) % comm.size)
        comm.recv(x, (comm.rank - 1) % comm.size)

    for length in (0, 1, 1000):
        with pytest.raises(Deadlock):
            simulate(send_first, length, network=uniform(4, 1e-6, 1e9))


# ---- chapter 03 ---------------------------------------------------------------------------------


def one_message_s(nbytes: float) -> float:
    return ALPHA + nbytes * BETA


def test_a_message_of_alpha_over_beta_bytes_takes_twice_as_long_as_an_empty_one() -> None:
    half = round(ALPHA / BETA)
    network = uniform(2, ALPHA, 1 / BETA)
    (empty,), (full,) = simulate(calibration.ping_pong, [0, half], 1, network=network).values[0]
    assert full == pytest.approx(2 * empty, rel=1e-9)


def test_a_thousand_messages_take_25_times_as_long_as_one() -> None:
    assert 1000 * one_message_s(1000) / one_message_s(MB) == pytest.approx(25, rel=0.02)


def test_the_wrong_reading_of_b_gives_thirteen_minutes_and_a_factor_of_a_million() -> None:
    wrong_s = ALPHA + MB * BETA * MB
    assert wrong_s // 60 == 13
    assert wrong_s / one_message_s(MB) == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("work_s", [0.0, 1e-4, one_message_s(MB), 1e-3])
def test_work_before_wait_hides_the_message(work_s: float) -> None:
    def early(comm: Comm) -> None:
        x = torch.zeros(MB, dtype=torch.uint8)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            message = comm.irecv(x, 0)
            with comm.compute("work", seconds=work_s):
                pass
            message.wait()

    took_s = simulate(early, network=uniform(2, ALPHA, 1 / BETA)).elapsed_s
    assert took_s == pytest.approx(max(work_s, one_message_s(MB)), rel=1e-9)


def test_two_messages_posted_together_take_what_is_said() -> None:
    prose = MESSAGES.prose
    assert "the first one's bytes move: 1620 µs. One after the other they take 1640 µs" in prose
    assert "| shared port (o = α) | kα | α + 2nβ |" in prose

    def both(comm: Comm, nbytes: int) -> None:
        x = torch.zeros(nbytes, dtype=torch.uint8)
        if comm.rank == 0:
            comm.exchange(dtlab.Send(x, 1), dtlab.Send(x, 2))
        else:
            comm.recv(x, 0)

    for nbytes in (0, 1000, 25_000, MB):
        took_s = simulate(both, nbytes, network=uniform(3, ALPHA, 1 / BETA)).elapsed_s
        bytes_s = nbytes * BETA
        large = bytes_s >= ALPHA
        assert took_s == pytest.approx(ALPHA + 2 * bytes_s if large else 2 * ALPHA + bytes_s)


def test_a_careless_fit_loses_alpha_and_a_careful_one_does_not() -> None:
    sizes = np.array([4**k for k in range(2, 14)])
    careless, careful = [], []
    for seed in range(200):
        noise = 1 + 0.05 * np.random.default_rng(seed).standard_normal(len(sizes))
        times = (ALPHA + sizes * BETA) * noise
        careless.append(np.polyfit(sizes, times, 1)[1])
        careful.append(calibration.fit(sizes, times[:, None]).alpha)
    assert np.mean(np.array(careless) < 0) > 0.25, "often negative"
    assert np.abs(np.array(careful) / ALPHA - 1).max() < 0.1
    assert 0.05 * one_message_s(sizes[-1]) > 100 * ALPHA


def test_answers_to_the_first_question_to_carry_along() -> None:
    alpha, beta = 5e-6, 1 / 450e9
    assert alpha / beta == pytest.approx(2.25e6)
    assert (alpha + 40e3 * beta) * 1e6 == pytest.approx(5.09, abs=0.005)
    assert 40e3 * beta * 1e6 == pytest.approx(0.09, abs=0.005)
    assert (alpha + 50 * 40e3 * beta) * 1e6 == pytest.approx(9.4, abs=0.05)
    assert 50 * (alpha + 40e3 * beta) * 1e6 == pytest.approx(254, abs=0.5)


def test_ping_pong_sizes_span_a_quarter_of_a_million_and_the_test_goes_15_times_beyond() -> None:
    scope: dict[str, Any] = {}
    lines = MESSAGES.code_with("seen = [").splitlines()[:2]
    exec("\n".join(lines), scope)
    seen, held_out = scope["seen"], scope["held_out"]
    assert max(seen) / min(seen) == pytest.approx(250_000, rel=0.05)
    assert not set(seen) & set(held_out)
    assert 64e6 / max(seen) == pytest.approx(15, rel=0.02)


def test_one_port_postal_and_loggp_differ_in_what_empty_messages_posted_together_take() -> None:
    prose = MESSAGES.prose
    for row in ("one-port | kα | 2α + 2nβ", "LogGP | α + (k−1)o | α + 2nβ",
                "(o = 0) | α | α + 2nβ"):
        assert row in prose
    scope: dict[str, Any] = {"torch": torch, "Send": dtlab.Send, "Recv": dtlab.Recv}
    exec(MESSAGES.code_with("def several").split("\n\n\nfor")[0], scope)
    for k in (1, 2, 7, 32):
        for overhead_s in (ALPHA, 2e-6, 0.0):
            for nbytes in (0, MB):
                took = simulate(scope["several"], k, nbytes, network=uniform(2, ALPHA, 1 / BETA),
                                overhead_s=overhead_s)
                stream_s = (k - 1) * max(overhead_s, nbytes * BETA)
                assert took.elapsed_s == pytest.approx(ALPHA + nbytes * BETA + stream_s)
    assert "From 20 to 640 µs, for the same 32 messages" in prose
