"""What chapter 08b says in prose is true: each sentence is looked up there, then compared with what
the chapter prints, which nbval has computed again, or recomputed with the chapter's own functions.
"""

from __future__ import annotations

import importlib
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dtlab import simulate
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("08b")
printed = CHAPTER.printed
DEFINITIONS = ("setup", "model", "train", "top-k-source", "feedback-source", "bits-int8",
               "bits-sign", "bits-two", "time-table", "diloco-adamw", "diloco-source",
               "diloco-sync", "momentum-paths", "momentum-train")
P, N = 8, 2410
WHOLE = 2 * (P - 1) / P * 4 * N


@pytest.fixture(scope="module")
def chapter() -> dict[str, Any]:
    """The chapter's functions."""
    return CHAPTER.defined(*DEFINITIONS, try_out=lambda *_: None)


def rows(*cell_ids: str) -> dict[str, tuple[float, float]]:
    """name → bytes a step and rank, loss after 100 steps, as the chapter prints them."""
    found = re.findall(r"^(.+?) +([\d,]+) B a step and rank; loss after 100 steps ([\d.]+)$",
                       "".join(map(printed, cell_ids)), re.M)
    return {name: (float(sent.replace(",", "")), float(loss)) for name, sent, loss in found}


def ends(chapter: dict[str, Any], exchange: Any, seed: int) -> float:
    result = simulate(partial(chapter["train"], seed=seed), exchange, network=chapter["network"],
                      trace=False)
    return float(result.values[0][-1])


def test_bytes_are_those_of_the_formulas(prose: str) -> None:
    assert "16,870 B" in prose
    found = rows("whole-run", "top-k-run", "feedback-run", "bits-run", "bits-two")
    assert found["whole gradients"][0] == pytest.approx(WHOLE, rel=1e-3) == 16870
    for share in (0.1, 0.01, 0.001):
        k = round(share * N)
        for rest in ("forgotten", "kept"):
            assert found[f"top {share:.1%}, rest {rest}"][0] == 8 * k * (P - 1)
        assert 8 * k * (P - 1) / WHOLE == pytest.approx(P * k / N)
    assert "Not by ten: by 1.25" in prose
    assert "on 64 ranks the largest 1 % would already be 64 %" in prose
    assert "By none! The loss is the same to both digits" in prose
    assert found["8 bits"][0] == pytest.approx(WHOLE, rel=0.01)
    assert "Now it is a quarter, for any p" in prose
    assert found["8 bits in two phases"][0] == pytest.approx(WHOLE / 4, rel=0.02)
    assert "It takes an eighth of the whole here" in prose
    assert found["1 bit, rest kept"][0] == pytest.approx(WHOLE / 8, rel=0.02)
    assert "they are equal at p = 64" in prose
    assert (64 - 1) / 8 == 2 * (64 - 1) / 64 * 4


@pytest.mark.parametrize("seed", [1, 2])  # 0 is printed
def test_what_is_kept_trains_as_well_as_the_whole_and_what_is_forgotten_does_not(
    prose: str, chapter: dict[str, Any], seed: int
) -> None:
    assert "with two others everything said holds as well" in prose
    whole = ends(chapter, chapter["whole"], seed)
    hundredth = ends(chapter, chapter["top_k"](0.01), seed)
    forgotten = ends(chapter, chapter["top_k_forgetful"](0.01), seed)
    assert hundredth < 1.1 * whole
    assert forgotten > 5 * whole
    assert "does better than one in a hundred without" in prose
    assert ends(chapter, chapter["top_k"](0.001), seed) < 0.5 * forgotten
    assert ends(chapter, chapter["one_bit"], seed) < 1.02 * whole
    assert ends(chapter, partial(chapter["one_bit"], feedback=False), seed) > 1.5 * whole
    for name in ("eight_bits", "eight_bits_in_two_phases"):
        assert ends(chapter, chapter[name], seed) == pytest.approx(whole, rel=0.01)


def test_what_is_late_does_not_need_a_smaller_step_here(
    prose: str, chapter: dict[str, Any]
) -> None:
    assert "top 1 % and top 0.1 % end lower still, at 0.04 and 0.15, and whole gradients" in prose
    chapter = chapter | {"train": partial(chapter["train"], lr=3.2)}
    late = [ends(chapter, chapter["top_k"](share), 0) for share in (0.01, 0.001)]
    assert late == [pytest.approx(0.04, abs=0.005), pytest.approx(0.15, abs=0.01)]
    assert ends(chapter, chapter["whole"], 0) > 10


def test_losses_that_the_text_names_are_those_that_are_printed(prose: str) -> None:
    found = rows("whole-run", "top-k-run", "feedback-run", "bits-run", "bits-two")
    assert "0.83 instead of 0.14" in prose
    assert found["top 1.0%, rest forgotten"][1] == 0.83
    for name in ("whole gradients", "top 1.0%, rest kept", "8 bits", "8 bits in two phases"):
        assert found[name][1] == 0.14
    assert "with the rest forgotten 0.25, with the rest kept 0.13" in prose
    assert found["1 bit, rest forgotten"][1] == 0.25
    assert found["1 bit, rest kept"][1] == 0.13
    assert "the norm of the memory is still half that of the sum of all gradients" in prose
    assert "53%" in printed("feedback-sum")


def test_the_times(prose: str) -> None:
    rows = {int(ranks): [float(x) for x in ms] for ranks, *ms in re.findall(
        r"(\d+) +(\d+) ms +(\d+) ms +(\d+) ms", printed("time-table"))}
    ring, sparse, two = rows[8]
    assert "one entry in a thousand takes 1 ms instead of 144" in prose
    assert (ring, sparse) == (144, 1)
    assert two == pytest.approx(ring / 4, rel=0.02)
    assert "With 64 it takes a thirteenth of the ring's time" in prose
    assert rows[64][0] / rows[64][1] == pytest.approx(13, abs=0.6)
    assert "that takes more than twice as long" in prose
    assert 2 < rows[4096][1] / rows[4096][0] < 3


@pytest.mark.parametrize("seed", [1, 2])  # 0 is printed
def test_diloco_sends_a_hth_of_the_bytes_for_a_loss_of_the_same_order(
    prose: str, chapter: dict[str, Any], seed: int
) -> None:
    data = chapter["data"]
    mixed = [data.shard(rank, 8) for rank in range(8)]

    def loss(name: str, *args: Any, **options: Any) -> tuple[float, int]:
        result = simulate(partial(chapter[name], seed=seed, **options), mixed, *args,
                          network=chapter["network"])
        return result.values[0], result.trace.sent_bytes(0)

    together, often = loss("synchronous")
    seldom, few = loss("diloco", 32)
    assert "two others say the same" in prose
    assert "With H = 32 and a thirty-second of the bytes, DiLoCo is close" in prose
    assert often == 32 * few
    assert seldom < 1.35 * together
    assert "with H = 8 it is even ahead" in prose
    assert loss("diloco", 8)[0] < together
    assert "Plain averaging has no such lengthening, and stays behind" in prose
    assert loss("diloco", 32, outer_lr=1.0, momentum=0.0)[0] > 1.3 * seldom
    assert "with five times the step, it is ahead of all" in prose
    assert loss("synchronous", lr=0.05)[0] < 0.6 * loss("diloco", 8)[0]


def test_adamw_is_that_of_torch(chapter: dict[str, Any]) -> None:
    w = torch.linspace(-1, 1, 7, dtype=torch.float64)
    theirs = w.clone().requires_grad_()
    optimizer, state = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.01), {}
    for step in range(5):
        theirs.grad = torch.sin(theirs.detach() * (step + 1))
        chapter["adamw_"](w, theirs.grad, state, 0.01)
        optimizer.step()
    assert torch.allclose(w, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_the_outer_step_is_nesterov_momentum_of_torch(chapter: dict[str, Any]) -> None:
    """Against torch.optim.SGD(nesterov=True), on the gradients w − x that a run makes."""
    outer = [torch.randn(5, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
             for i in range(4)]
    theirs = torch.ones(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    w, velocity = torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for d in outer:
        theirs.grad = d.clone()
        optimizer.step()
        velocity = 0.9 * velocity + d
        w = w - 0.7 * (d + 0.9 * velocity)
    assert torch.allclose(w, theirs.detach())
    source = CHAPTER.source("diloco-source")
    assert "velocity = momentum * velocity + outer" in source
    assert "w = w - outer_lr * (outer + momentum * velocity)" in source


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_asynchrony_is_momentum(prose: str, chapter: dict[str, Any], workers: int) -> None:
    assert "SGD with momentum 1 − 1/M and a step of η/M" in prose
    promised = chapter["momentum_path"](1 - 1 / workers, 0.1 / workers, v=-0.1)
    assert abs(chapter["mean_path"](workers) - promised).max() < 0.0065
    w, held = [1.0], 1.0  # the two equations of the text, iterated
    for _ in range(60):
        w.append(w[-1] - 0.1 * held)
        held = (1 - 1 / workers) * held + w[-1] / workers
    assert np.allclose(w, promised, rtol=1e-12, atol=1e-12)


def test_more_workers_less_momentum(prose: str, chapter: dict[str, Any]) -> None:
    assert "One and four workers don't mind. The 16, which have 0.94 already, do" in prose
    one, four, many = ([float(loss) for loss in row] for row in re.findall(
        r"0.0 ([\d.]+), 0.5 ([\d.]+), 0.9 ([\d.]+)", printed("momentum-run")))
    assert max(one + four) - min(one + four) < 0.02
    assert many == sorted(many)
    assert many[2] > many[0] + 0.1


def test_what_the_libraries_have_is_there(prose: str) -> None:
    hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    for module, name in ((f"{hooks}.default_hooks", "fp16_compress_hook"),
                         (f"{hooks}.default_hooks", "bf16_compress_hook"),
                         (f"{hooks}.powerSGD_hook", "powerSGD_hook"),
                         (f"{hooks}.quantization_hooks", "quantization_pertensor_hook"),
                         ("torch.distributed.optim", "PostLocalSGDOptimizer"),
                         ("torch.distributed.algorithms.model_averaging.averagers",
                          "PeriodicModelAverager")):
        assert name in prose
        assert hasattr(importlib.import_module(module), name)
