"""What chapter 01 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import pytest

from dtlab import ConfigError, cost
from dtlab.models import SHAPES

near = pytest.approx


def all_reduce_s(n: int) -> float:
    return cost.time_s("all_reduce", "halving_doubling", n, 100_000_000, 5e-6, 1e-10)


def test_the_times_that_were_published(prose: str) -> None:
    assert "3072 A100s at 163 TFLOP/s each: 84 days" in prose
    days = cost.training_time_s(1008e9, 450e9, 3072, 163e12, recompute=True) / 86_400
    assert days == near(84, abs=0.5)
    assert "estimate 34 days for GPT-3 on 1024 A100s" in prose
    days = cost.training_time_s(175e9, 300e9, 1024, 140e12, recompute=True) / 86_400
    assert days == near(34, abs=0.5)
    assert "a third more than our 25 days, because it counts 8 operations, not 6" in prose
    assert near(34, rel=0.02) == 25 * 8 / 6
    assert "39 % in the example of section 1, not 52 %" in prose
    assert (near(0.52, abs=0.005), near(0.39, abs=0.005)) == (163 / 312, 163 / 312 * 6 / 8)


def test_what_brings_gpt3_below_a_week(prose: str) -> None:
    def days(devices: int = 1024, flops: float = 312e12, share: float = 0.45,
             recompute: bool = True) -> float:
        return cost.training_time_s(175e9, 300e9, devices, flops, share, recompute) / 86_400

    assert "with 5,000 of them it takes less than a week" in prose
    assert near(7, abs=0.1) == days(devices=5000) < 7
    assert "4,096, the slider's next step, take 8.5 days, 8,192 take 4.2" in prose
    assert (round(days(4096), 1), round(days(8192), 1)) == (8.5, 4.2)
    assert "a utilization of 100 % (15 days) nor H100s (11 days)" in prose
    assert "keeping the activations (25 days)" in prose
    assert [round(d) for d in (days(share=1.0), days(flops=989e12), days(recompute=False))
            ] == [15, 11, 25]


def test_the_all_reduce_does_not_grow_with_the_devices(prose: str) -> None:
    assert "from 16 devices on the all-reduce takes about 20 ms, however many more" in prose
    assert [all_reduce_s(n) for n in (16, 64, 256, 1024)] == [near(19.5e-3, rel=0.05)] * 4
    assert "at 1024 devices computing takes 2 ms" in prose
    assert near(2e-3, rel=0.03) == 2.0 / 1024
    assert "Weak scaling looks wonderful, 99 %" in prose
    assert 2 / (2 + all_reduce_s(1024)) == near(0.99, abs=0.001)
    assert "Each device sends and receives its 100 MB about twice" in prose
    sent = cost.sent_bytes("all_reduce", "halving_doubling", 1024, 100_000_000)
    assert max(sent) == near(2e8, rel=0.01)


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "GPT-3's state takes 2.8 TB" in prose
    assert "70 GB each fit (chapter 13), but only 10 GB are left" in prose
    state = cost.model_state_bytes(SHAPES["GPT-3"].parameters)
    assert (state, state / 40) == (2.8e12, 70e9)


@pytest.mark.parametrize("devices", [1, 2, 8, 1024])
@pytest.mark.parametrize("serial", [0.0, 0.05, 0.5, 1.0])
def test_amdahl_and_gustafson_are_the_two_ends_of_one_law(devices: int, serial: float) -> None:
    speedup = cost.amdahl_speedup(serial, devices)
    assert 1 <= speedup <= (devices if serial == 0 else min(devices, 1 / serial) + 1e-9)
    # Of work that has grown so that one device would take n − (n−1)s, what is serial is s of that.
    grown = cost.gustafson_speedup(serial, devices)
    assert cost.amdahl_speedup(serial / grown, devices) == near(grown)


@pytest.mark.parametrize("options", [{"efficiency": 1.5}, {"devices": 0}, {"tokens": float("nan")},
                                     {"parameters": "7 B"}, {"device_flops": True}])
def test_training_time_names_what_makes_no_sense(options: dict[str, object]) -> None:
    good: dict[str, object] = {"parameters": 1e9, "tokens": 1e9, "devices": 8, "device_flops": 1e12}
    with pytest.raises(ConfigError, match=next(iter(options))):
        cost.training_time_s(**(good | options))  # type: ignore[arg-type]
