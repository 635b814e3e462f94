"""What chapter 13b says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from dtlab import Comm, cost, run, simulate
from dtlab.models import GPT, GPTConfig
from dtlab.parallel import full_state_dict
from dtlab.parallel.zero import zero
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("13b")
printed = CHAPTER.printed
GB = 1e9


@cache
def chapter() -> dict[str, Any]:
    """What the chapter's own cells define, without what they run."""
    return CHAPTER.defined("setup", "model", "hide-gathers")


# ---- traffic -----------------------------------------------------------------------------------


def test_stage_3_keeps_a_64th(prose: str) -> None:
    assert "1.9 GB instead of 120" in prose
    assert round(cost.model_state_bytes(7.5e9, 64, 3) / GB, 1) == 1.9
    assert "for 64 ranks 12.5 % more than for 8" in prose
    assert (63 / 64) / (7 / 8) == 1.125


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "is 29.5 GB, 1.18 s; stage 3 44.3 GB, 1.77 s" in prose
    for stage, gigabytes, seconds in ((2, 29.5, 1.18), (3, 44.3, 1.77)):
        sent = cost.zero_sent_bytes(7.5e9, 64, stage)
        assert round(sent / GB, 1) == gigabytes
        assert round(sent / 25e9, 2) == seconds
    assert "6 + 12/8 = 7.5 bytes each, 52.5 GB; 27.5 GB are left" in prose
    assert cost.model_state_bytes(7e9, 8, 1, gradient_bytes=4) == 52.5 * GB == 80 * GB - 27.5 * GB


@pytest.mark.parametrize("kept", [False, True])
def test_micro_batches_of_stage_3(prose: str, kept: bool) -> None:
    assert "24Ψ(N−1)/N instead of 3" in prose
    assert "one, 17Ψ(N−1)/N" in prose
    space = chapter()

    def train(comm: Comm, steps: int) -> int:
        model, optimizer = zero(space["GPT"](space["CONFIG"]), comm, 3, algorithm="ring")
        for _ in range(steps):
            for micro in range(8):
                with model.no_sync() if kept and micro < 7 else nullcontext():
                    space["loss_of"](model, space["tokens_of"](comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(unit.numel for unit in model.units)

    once, twice = (simulate(train, n, network=space["on"](2)) for n in (1, 2))
    sent = twice.trace.sent_bytes(0) - once.trace.sent_bytes(0)
    assert sent == (17 if kept else 24) * 4 * once.values[0] / 2


# ---- what hides --------------------------------------------------------------------------------


def exposed() -> dict[str, tuple[float, float, float]]:
    """Milliseconds exposed with layers of 0.02 and 1 ms, and kB sent, as the chapter prints."""
    lines = [re.split(r"  +", line) for line in printed("hide-run").splitlines()[1:]]
    return {name: (float(short.split()[0]), float(long.split()[0]), float(sent.split()[0]))
            for name, short, long, sent in lines}


def test_what_each_stage_exposes(prose: str) -> None:
    rows = exposed()
    ours = {name: row for name, row in rows.items() if "hidden" not in name}
    assert "Stage 1 exposes all that it sends, however long the layers compute" in prose
    assert ours["stage 1"][0] == ours["stage 1"][1]
    assert "with short layers it exposes the most" in prose
    assert max(ours, key=lambda name: ours[name][0]) == "stage 3"
    assert "it exposes the least of the three once layers take longer" in prose
    assert min(ours, key=lambda name: ours[name][1]) == "stage 3"


def test_the_gathers_of_stage_2_hide_behind_the_next_forward(prose: str) -> None:
    rows = exposed()
    assert "With hidden gathers stage 2 exposes less than stage 3, and sends a third less" in prose
    hidden, three = rows["stage 2, hidden gathers"], rows["stage 3"]
    assert hidden[1] < three[1] < rows["stage 2"][1]
    assert hidden[2] == rows["stage 2"][2] == pytest.approx(three[2] * 2 / 3, rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2])
def test_hidden_gathers_train_the_same_parameters(stage: int) -> None:
    space = chapter()

    def train(comm: Comm, hidden: bool) -> dict[str, torch.Tensor]:
        gpt = space["GPT"](space["CONFIG"], dtype=torch.float64)
        model, optimizer = zero(gpt, comm, stage)
        under_way = space["hide_gathers"](model) if hidden else {}
        for step in range(3):
            space["train_step"](model, optimizer, space["tokens_of"](comm.rank, step))
        for work in under_way.values():
            work.wait()
        return full_state_dict(model)

    plain, hidden = (simulate(train, flag, network=space["on"](3)).values for flag in (False, True))
    assert all(space["difference"](a, b) == 0 for a, b in zip(plain, hidden, strict=True))


# ---- recipes -----------------------------------------------------------------------------------


def test_the_bytes_of_the_recipes(prose: str) -> None:
    assert "2 + 4 + 12 = 18 bytes, and with a sharded optimizer on d ranks 6 + 12/d" in prose
    for ranks in (1, 8, 64):
        kept = cost.model_state_bytes(1, ranks, 1, gradient_bytes=4)
        assert kept == pytest.approx(6 + 12 / ranks)
    assert "so the two bytes are half as much again" in prose
    rows = {line[:28].strip(): [float(x) for x in line[28:].split()]
            for line in printed("recipes-table").splitlines()[1:]}
    two, four = rows["bf16, bf16 gradients"], rows["bf16, float32 gradients"]
    more = [b / a - 1 for a, b in zip(two, four, strict=True)]
    assert more[1] == pytest.approx(0.5, abs=0.03) == max(more[:4])


def test_a_sum_in_bf16_drifts_and_one_in_float32_does_not(prose: str) -> None:
    assert "In float32 the errors of single gradients average out; in bf16" in prose
    rows = [tuple(map(float, re.findall(r"([\d.]+)%", line)))
            for line in printed("bf16-sums").splitlines()]
    assert rows[0][0] == rows[0][1]
    assert rows[0][0] < rows[1][0] < rows[2][0]
    assert rows[0][1] > rows[1][1] > rows[2][1]


def test_offload_is_for_few_ranks(prose: str) -> None:
    assert "7.5 B need 30 GB on the device instead of 120" in prose
    assert cost.model_state_bytes(7.5e9, 1, 2, optimizer_bytes=0) == 30 * GB


# ---- what needs all shards ---------------------------------------------------------------------


def test_clipping_each_by_its_own_norm_turns_the_gradient(prose: str) -> None:
    assert "every shard would be scaled by another factor" in prose
    lines = printed("clip-run").splitlines()
    whole = lines[0].split()[-1]
    own = [float(re.findall(r"shards ([\d.]+),", line)[0]) for line in lines[1:]]
    assert all(line.endswith(whole) for line in lines[1:])
    assert len(set(own)) == 3
    assert sum(norm**2 for norm in own) ** 0.5 == pytest.approx(float(whole), rel=1e-5)


def test_everything_agrees_with_one_device_and_with_torch() -> None:
    assert "never stopped: True" in printed("checkpoint-run")
    assert printed("torch-zero-redundancy").count("1e-12: True") == 2
    assert "tokens.weight" in printed("torch-zero-redundancy")


def _still_whole(comm: Comm) -> list[str]:
    """The parameters that a root told to reshard keeps after a forward without gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    gpt = GPT(GPTConfig(layers=2, hidden=32, heads=4, context=8))
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=init_device_mesh("cpu", (comm.size,)), reshard_after_forward=True)
    with torch.no_grad():
        gpt(torch.zeros(2, 8, dtype=torch.long))
    return [name for name, p in gpt.named_parameters() if not isinstance(p, DTensor)]


def test_a_root_that_is_told_to_reshard_does(prose: str) -> None:
    assert "Say `reshard_after_forward=True` to the root" in prose
    assert run(_still_whole, ranks=2, echo=False).values == [[], []]
