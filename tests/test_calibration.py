"""α and β: the ping-pong counts one way, and the line finds what it was drawn with."""

from __future__ import annotations

import numpy as np
import pytest

from dtlab import ConfigError, calibration, simulate
from dtlab.topology import uniform

SIZES = [0, 1, 100, 4096, 1_000_003]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ping_pong_gives_the_time_of_one_message(ranks: int) -> None:
    result = simulate(calibration.ping_pong, SIZES, 3, network=uniform(ranks, 7e-6, 2e9))
    expected = [[7e-6 + n / 2e9] * 3 for n in SIZES]
    for times, due in zip(result.values[0], expected, strict=True):
        assert times == pytest.approx(due, rel=1e-9)
    assert result.trace.messages() == 2 * len(SIZES) * 4  # 3 that count, and the one that warms up


def test_sizes_take_turns_in_changing_order() -> None:
    network = uniform(2, 1e-6, 1e9)
    trace = simulate(calibration.ping_pong, list(range(1, 9)), 5, network=network).trace
    balls = [m.nbytes for m in trace.transfers if m.src == 0]
    turns = [tuple(balls[i : i + 8]) for i in range(0, len(balls), 8)]
    assert all(sorted(turn) == list(range(1, 9)) for turn in turns)
    assert len(set(turns)) == len(turns)


@pytest.mark.parametrize(("alpha", "beta"), [(20e-6, 0.8e-9), (1e-6, 4e-11), (0.05, 1e-7)])
def test_the_fit_finds_the_line_also_beside_wild_repeats(alpha: float, beta: float) -> None:
    sizes = calibration.SIZES
    line = calibration.fit(sizes, [[alpha + n * beta] * 9 + [9.0] * 4 for n in sizes])
    assert line == pytest.approx((alpha, beta), rel=1e-9)
    assert line.time_s(1000) == pytest.approx(alpha + 1000 * beta)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([], []),
        ([8], [[1e-6]]),
        ([8, 8], [[1e-6], [2e-6]]),
        ([8, 16], [[1e-6]]),
        ([8, 16], [[1e-6], []]),
        ([8, 16], [[1e-6], [0.0]]),
        ([8, 16], [[1e-6], [float("nan")]]),
    ],
)
def test_what_has_no_line_is_refused(sizes: list[int], times: list[list[float]]) -> None:
    with pytest.raises(ConfigError, match="fit needs"):
        calibration.fit(sizes, times)


def test_two_real_processes_are_measured() -> None:
    times = calibration.measure([8, 65_536], repeats=3)
    assert np.shape(times) == (2, 3)
    assert np.min(times) > 0


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("overhead_s", [1e-6, 7e-6])
def test_in_a_burst_each_message_starts_an_overhead_after_the_one_before(
    ranks: int, overhead_s: float
) -> None:
    network = uniform(ranks, 7e-6, 2e9)
    result = simulate(calibration.burst, 5, 3, network=network, overhead_s=overhead_s)
    closed_s = 2 * 7e-6 + 4 * overhead_s + 2 * 16 / 2e9
    assert result.values[0] == pytest.approx([closed_s] * 3, rel=1e-9)
    found = simulate(calibration.overhead_s, 3, network=network, overhead_s=overhead_s).values[0]
    assert found == pytest.approx(overhead_s, rel=1e-6)


@pytest.mark.parametrize(("sizes", "repeats"), [([4], 0), ([4], -1), ([4], 2.5), ([-4], 3)])
def test_what_cannot_be_measured_is_refused(sizes, repeats) -> None:
    with pytest.raises(ConfigError, match=r"must be a whole number, [01] or more"):
        calibration.measure(sizes, repeats)
