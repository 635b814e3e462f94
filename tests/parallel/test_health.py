"""What goes wrong without an error is found, and the rank is named."""

from __future__ import annotations

import os
import pickle
import signal
import time
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtlab
from dtlab import Comm, RunTimeout
from dtlab.collectives import all_reduce
from dtlab.errors import NotFinite, SilentCorruption
from dtlab.parallel import DataParallel, check_replicas, watch_finite
from tests.parallel.training import batch_of, loss_of, on, one_step, wrapped


def flipped(comm: Comm, stage: int, victims: list[int], kind: str, bit: int) -> Any:
    """Some steps, with a bit that changes in the memory of `victims` after the third."""
    model, optimizer = wrapped(comm, stage, kind)
    for step in range(6):
        one_step(model, optimizer, step, kind)
        if step == 2 and comm.rank in victims:
            _, x = list(model.module.named_parameters())[1]
            x.data.reshape(-1).view(torch.int64)[3] ^= 1 << (bit + comm.rank)
        try:
            check_replicas(model)
        except SilentCorruption as error:
            return step, error.ranks, str(error)
    return None


@pytest.mark.parametrize(("stage", "victims", "named"), [
    (0, [2], [2]), (0, [0, 3], [0, 3]), (1, [1], [1]), (2, [4], [4]), (0, [], None)])
@pytest.mark.parametrize("bit", [0, 51])
def test_a_flipped_bit_is_found_at_once_and_the_rank_named(
        stage: int, victims: list[int], named: list[int] | None, bit: int) -> None:
    values = on("simulator", flipped, stage, victims, "mlp", bit, ranks=5).values
    for found in values:
        assert found == (named and (2, named, values[0][2]))
    if named:
        assert "the copies of '0.bias' differ: that of rank" in values[0][2]


def test_of_two_copies_nobody_knows_which_is_right() -> None:
    step, ranks, text = dtlab.run(flipped, 0, [1], "gpt", 7, ranks=2).values[0]
    assert (step, ranks) == (2, [0, 1])
    assert "can't be told" in text


def test_statistics_of_each_ranks_own_samples_are_no_corruption() -> None:
    def step(comm: Comm) -> bool:
        model = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), comm)
        model(torch.randn(4, 2) + comm.rank).sum().backward()
        check_replicas(model)
        return True

    assert on("simulator", step, ranks=3).values == [True] * 3


def test_parts_are_no_copies() -> None:
    with pytest.raises(dtlab.ConfigError, match="compares the copies of DataParallel and of zero"):
        on("simulator", flipped, 3, [], "mlp", 0, ranks=2)


class Faulty(nn.Module):
    """Divides by zero in step 2, on its way forward or back, on one rank."""

    def __init__(self, rank: int, back: bool):
        super().__init__()
        self.rank, self.back, self.step = rank, back, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if self.step != 2 or self.rank != 1:
            return x * 2
        if self.back:
            zero_ = x - x.detach()
            return x + zero_.abs().sqrt()  # whose derivative at 0 is infinite
        return x / 0


@pytest.mark.parametrize("back", [False, True])
def test_a_nan_is_traced_to_rank_step_and_layer(back: bool) -> None:
    def train(comm: Comm) -> None:
        module = nn.Sequential(nn.Linear(64, 8), Faulty(comm.rank, back), nn.Linear(8, 10)).double()
        model = DataParallel(module, comm)
        with watch_finite(module, comm):
            for step in range(4):
                loss_of(model, batch_of("mlp", step)).backward()

    what = "a gradient of" if back else "the output of"
    with pytest.raises(NotFinite, match=rf"rank 1, step 2: {what} '1' \(Faulty\)"):
        on("simulator", train, ranks=3)


def test_numbers_of_eight_bits_are_watched() -> None:
    class Narrow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x / x).to(torch.float8_e4m3fn)

    def fn(comm: Comm) -> None:
        module = Narrow()
        with watch_finite(module, comm):
            module(torch.ones(2))
            module(torch.zeros(2))

    with pytest.raises(NotFinite, match="step 1: the output of"):
        on("simulator", fn, ranks=1)


class Scaled(nn.Module):
    """A module with a parameter of its own, which a frozen layer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x * self.scale)
        return y


@pytest.mark.parametrize(("part", "says"), [
    ("x", r"step 0: an input of 'the model' \(Scaled\) has 4 of 12"),
    ("scale", r"step 0: the output of 'the model' \(Scaled\) has 8 of 8"),
    ("head.bias", r"step 0: the output of 'head' \(Linear\) has 4 of 8"),
    ("loss", r"step 0: the gradient of the output of 'the model' \(Scaled\) has 8 of 8")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_no_layer_is_blamed_for_what_comes_from_outside_of_it(
        part: str, says: str, dtype: torch.dtype) -> None:
    def train(comm: Comm) -> None:
        module, x = Scaled().to(dtype), torch.ones(4, 3, dtype=dtype)
        with torch.no_grad():
            places = {"x": x.T, "loss": x.new_empty(1), **dict(module.named_parameters())}
            places[part][0] = torch.nan
        with watch_finite(module, comm):
            (module(x).abs().sum() * (torch.inf if part == "loss" else 1)).backward()

    with pytest.raises(NotFinite, match=says):
        on("simulator", train, ranks=1)


def test_a_straggler_has_low_scores() -> None:
    def work(comm: Comm) -> None:
        for step in range(8):
            slow = 2.0 if comm.rank == 1 else 3.0 if comm.rank == 2 and step >= 4 else 1.0
            with comm.compute("forward", slow):
                pass
            all_reduce(comm, torch.ones(4))

    speeds = on("simulator", work, ranks=4).trace.stragglers()
    assert [speed.rank for speed in speeds] == [0, 1, 2, 3]
    assert [speed.relative for speed in speeds] == pytest.approx([1, 0.5, 0.5, 1])
    assert [speed.absolute for speed in speeds] == pytest.approx([1, 1, 0.5, 1])


# ---- a rank that stands still -------------------------------------------------------------------


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize(("how", "said"), [
    ("asleep", "rank 2 stands still: it uses no processor time"),
    ("computes", "rank 2 is slow, not dead: it computes"),
    ("stopped", "rank 2 is stopped"),
    ("stopped in a message", "rank 2 is stopped"),
])
def test_the_rank_that_the_others_wait_for_is_named_with_its_stack(how: str, said: str) -> None:
    def hang(comm: Comm) -> None:
        all_reduce(comm, torch.ones(1000))
        if comm.rank == 2 and how == "asleep":
            stand_still(30)
        elif comm.rank == 2 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif comm.rank == 2 and how == "stopped in a message":
            Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        elif how == "stopped in a message":
            time.sleep(0.4)
        while comm.rank == 2 and how == "computes":
            torch.ones(1000).sum()
        all_reduce(comm, torch.ones(1000))

    with pytest.raises(RunTimeout) as error:
        dtlab.run(hang, ranks=4, timeout=1.5)
    text = str(error.value)
    assert said in text
    if how == "asleep":
        assert "the stack of rank 2:" in text
        assert text.index("in stand_still") < text.rindex("in hang")


def test_the_verdict_is_that_of_torchs_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same hang with torch's collective: the rank whose recorder has not seen the second one is
    the rank that we name."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")

    def recorded(comm: Comm) -> int:
        dist.all_reduce(torch.ones(9))
        work = dist.all_reduce(torch.ones(9), async_op=True) if comm.rank != 1 else None
        time.sleep(1)
        seen = len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"])
        time.sleep(1)
        work.wait() if work else dist.all_reduce(torch.ones(9))
        return seen

    def hang(comm: Comm) -> None:
        all_reduce(comm, torch.ones(9))
        time.sleep(30 * (comm.rank == 1))
        all_reduce(comm, torch.ones(9))

    seen = dtlab.run(recorded, ranks=3).values
    assert [rank for rank, count in enumerate(seen) if count < max(seen)] == [1]
    with pytest.raises(RunTimeout, match="because rank 1 stands still"):
        dtlab.run(hang, ranks=3, timeout=4)
