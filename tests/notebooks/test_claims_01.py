"""What chapter 01 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import re

import pytest

from dtlab import ConfigError, cost
from dtlab.models import SHAPES
from dtlab.widgets import TrainingTimeExplorer
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("01")
printed = CHAPTER.printed
near = pytest.approx


def knobs() -> dict[str, tuple[float, float, float, int]]:
    """Utilization on one device, scale factor, their product, minutes, as the chapter prints."""
    rows = {}
    for line in printed("knob-run").splitlines():
        name, alone, scale, both, minutes = re.fullmatch(
            r"(.*?) +([\d.]+)% × +([\d.]+)% = +([\d.]+)%: +(\d+) minutes", line).groups()
        rows[name] = float(alone) / 100, float(scale) / 100, float(both) / 100, int(minutes)
    return rows


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
    assert "of the slider's steps 4,096 take 8.5 days, 8,192 take 4.2" in prose
    assert (round(days(4096), 1), round(days(8192), 1)) == (8.5, 4.2)
    steps = [devices for _, devices in TrainingTimeExplorer().devices.options]
    assert steps[steps.index(4096) + 1] == 8192
    assert "a utilization of 100 % (15 days) nor H100s (11 days)" in prose
    assert "keeping the activations (25 days)" in prose
    assert [round(d) for d in (days(share=1.0), days(flops=989e12), days(recompute=False))
            ] == [15, 11, 25]


def test_the_all_reduce_does_not_grow_with_the_devices(prose: str) -> None:
    assert "from 16 devices on the all-reduce takes about 20 ms, as long as their number" in prose
    assert [all_reduce_s(2**k) for k in range(4, 13)] == [near(19.5e-3, rel=0.05)] * 9
    assert [all_reduce_s(n) for n in (17, 100, 1000)] == [near(39.5e-3, rel=0.05)] * 3  # folded
    assert "at 1024 devices computing takes 2 ms" in prose
    assert near(2e-3, rel=0.03) == 2.0 / 1024
    assert "Strong scaling falls below 50 % between 64 and 256 devices" in prose
    strong_64, strong_256 = (2 / n / (2 / n + all_reduce_s(n)) for n in (64, 256))
    assert strong_64 > 0.5 > strong_256
    assert "Weak scaling looks wonderful, 99 %" in prose
    assert 2 / (2 + all_reduce_s(1024)) == near(0.99, abs=0.001)
    assert "Each device sends and receives its 100 MB about twice" in prose
    sent = cost.sent_bytes("all_reduce", "halving_doubling", 1024, 100_000_000)
    assert max(sent) == near(2e8, rel=0.01)


def test_sixteen_bytes_a_parameter_are_one_recipe(prose: str) -> None:
    assert "A usual recipe takes 16" in prose
    assert cost.model_state_bytes(1) == 2 + 2 + 12 == 16
    assert "with gradients in 32 bits there are 18 bytes" in prose
    assert cost.model_state_bytes(1, gradient_bytes=4) == 18


def test_a_doubled_gradient_doubles_a_step_of_sgd_and_none_of_adam(prose: str) -> None:
    assert "With SGD it is as if the learning rate had doubled" in prose
    assert "by the root of its second, so a constant factor cancels" in prose
    assert re.findall(r"goes ([\d.]+) times", printed("doubled")) == ["2.000", "1.000"]


def test_overlap_moves_the_limit_of_strong_scaling(prose: str) -> None:
    assert "the limit of a step that computes first and sends afterwards" in prose
    rows = {int(n): [float(x) for x in rest] for n, *rest in re.findall(
        r"(\d+) devices: after backward +([\d.]+)%, overlapped +([\d.]+)%, at best +([\d.]+)%",
        printed("overlap"))}
    assert "20 ms of messages fit beside 21 ms of backward" in prose
    assert (all_reduce_s(64), 2 / 64 * 2 / 3) == (near(0.020, rel=0.02), near(0.021, rel=0.02))
    assert "96 % instead of 61, and 100 at best" in prose
    assert [round(x) for x in rows[64]] == [61, 96, 100]
    assert "the last of the 16 parts leaves when backward has ended, and takes 1.3 ms" in prose
    part_s = cost.time_s("all_reduce", "halving_doubling", 64, 100_000_000 // 16, 5e-6, 1e-10)
    assert part_s == near(1.3e-3, abs=5e-5)
    assert rows[64][1] / 100 == near(2 / 64 / (2 / 64 + part_s), abs=2e-3)
    assert "On 256 devices backward takes 5 ms; the messages still take 20" in prose
    assert (all_reduce_s(256), 2 / 256 * 2 / 3) == (near(0.020, rel=0.01), near(0.005, rel=0.05))
    assert rows[256][2] < 50
    for after_backward, overlapped, best in rows.values():
        assert after_backward < overlapped <= best


def test_weak_scaling_in_samples_a_second_is_the_efficiency_of_the_times() -> None:
    by_rate = dict(re.findall(r"(\d+) devices, .* = ([\d.]+)%", printed("throughput")))
    by_time = dict(re.findall(r"(\d+) devices: .*weak .*efficiency +([\d.]+)%", printed("scaling")))
    assert {n: by_time[n] for n in by_rate} == by_rate
    rates = re.findall(r"([\d,]+) samples/s", printed("throughput"))
    assert int(rates[-1].replace(",", "")) == near(1024 * 1024 / (2 + all_reduce_s(1024)), rel=1e-3)


def test_each_knob_turns_the_product_of_two_utilizations(prose: str) -> None:
    assert "its utilization was 50 %" in prose
    rows = knobs()
    for name, (alone, scale, both, minutes) in rows.items():
        assert both == near(alone * scale, abs=1e-3)
        bits16, devices = name == "mixed precision", 256 if "256" in name else 64
        seconds = cost.training_time_s(25e6, 100e9, devices, 312e12 if bits16 else 156e12, both)
        assert minutes == near(seconds / 60, rel=0.03)
    minutes = {name: row[-1] for name, row in rows.items()}
    base = minutes["64 devices, strong scaling"]
    assert "Mixed precision halves the time" in prose
    assert minutes["mixed precision"] == near(base / 2, abs=1) == min(minutes.values())
    assert "A tenth less time to compute is only 6 % less in all" in prose
    assert 1 - minutes["fusion saves a tenth"] / base == near(0.06, abs=0.005)
    assert "Four times as many devices are not twice as fast" in prose
    assert 1.5 < base / minutes["data: 256 devices"] < 2
    assert "fast wires inside machines bring most of what 64 devices can give" in prose
    assert rows["topology: machines of 8, a torus"][1] > 0.9
    assert "One device as the server is the worst" in prose
    assert "the gradients of 63 others pass its one port" in prose
    server = minutes["one device as the server"]
    assert server == max(minutes.values())
    assert "a step takes 25 times as long" in prose
    assert server / base == near(25, abs=0.5)
    assert "In the same machines dividing the model takes longer than data parallelism" in prose
    for name in ("tensor, in machines of 8", "pipeline, in machines of 8"):
        assert minutes[name] > minutes["topology: machines of 8, a torus"]
    assert "on the flat network it takes fifteen times as long as data parallelism" in prose
    assert minutes["tensor, without machines"] / base == near(15, abs=0.5)


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
