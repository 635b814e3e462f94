"""What chapter 13 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from dtlab import Comm, cost, simulate
from dtlab.models import SHAPES
from dtlab.parallel import MemoryMeter
from dtlab.parallel.zero import zero
from dtlab.topology import uniform

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = nbformat.read(ROOT / "notebooks" / "13_zero.ipynb", as_version=4)
GB = 1e9


@cache
def chapter() -> dict[str, Any]:
    """What the chapter's own cells define, without what they run."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for name in ("setup", "model", "state", "stage3-timeline", "ledger-run", "activations-run"):
        (cell,) = [cell for cell in NOTEBOOK.cells if cell.id == name]
        exec(re.split(r"^(?:for|step|NAMES|print)\b", cell.source, flags=re.M)[0], space)
    return space


def output(name: str) -> str:
    (cell,) = [cell for cell in NOTEBOOK.cells if cell.id == name]
    return "".join(out.get("text", "") for out in cell.outputs)


@cache
def history(stage: int, samples: int = 2, recomputed: bool = False) -> Any:
    space = chapter()
    prepare = space["recomputing"] if recomputed else lambda gpt: None
    measure = partial(space["history_of"], samples=samples, prepare=prepare)
    return [kinds for _, kinds in simulate(measure, stage, network=space["on"](4)).values[0]]


def peak_at(stage: int) -> float:
    """Where in a step the peak is: 0 at its begin, 1 at its end."""
    totals = [sum(kinds.values()) for kinds in history(stage)]
    return totals.index(max(totals)) / len(totals)


# ---- bytes -------------------------------------------------------------------------------------


def test_sixteen_bytes_a_parameter_and_120_gb(prose: str) -> None:
    assert "takes 15 GB in bf16" in prose
    assert cost.model_state_bytes(7.5e9, 1, 0, 2, 0, 0) == 15 * GB
    assert "take 120 GB, of which 90 GB are optimizer state" in prose
    assert cost.model_state_bytes(7.5e9) == 120 * GB
    assert cost.model_state_bytes(7.5e9, 1, 0, 0, 0) == 90 * GB
    assert "1.9 GB instead of 120" in prose
    assert "for 64 ranks 12 % more than for 8" in prose
    assert int(100 * (63 / 64) / (7 / 8)) == 112
    assert round(cost.model_state_bytes(7.5e9, 64, 3) / GB, 1) == 1.9
    assert output("state").count("together 16 bytes") == 2


def test_bf16_would_round_a_step_of_a_thousandth_away(prose: str) -> None:
    assert "may change a weight by a thousandth, and bf16 has only 8 binary digits" in prose
    weight = torch.ones((), dtype=torch.bfloat16)
    assert weight + 0.001 * weight == weight
    assert weight.float() + 0.001 != weight


@pytest.mark.parametrize(("stage", "sent"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_traffic_is_two_or_three_crossings(prose: str, stage: int, sent: int, ranks: int) -> None:
    assert "Traffic is 2, 2 and 3 times (N−1)/N·Ψ elements" in prose
    assert cost.zero_sent_bytes(1, ranks, stage, 1) == pytest.approx(sent * (ranks - 1) / ranks)


def test_gpt_3_needs_stage_3_on_64_gpus_of_80_gb(prose: str) -> None:
    assert "GPT-3's 350 GB fit on no device however many ranks there are" in prose
    assert "stage 3 needs 64 (of the powers of two)" in prose
    psi = SHAPES["GPT-3"].parameters
    assert cost.model_state_bytes(psi, 2**20, 2) > 2 * psi == 350 * GB
    fits = [2**k for k in range(10) if cost.model_state_bytes(psi, 2**k, 3) <= 80 * GB]
    assert fits[0] == 64


def test_what_teaching_material_prints_is_right_for_32_ranks(prose: str) -> None:
    assert "Ours are 29.3 and 15.5. The printed ones are right for 32 ranks" in prose
    for stage, ours, printed in ((1, 29.3, 30.6), (2, 15.5, 17.1)):
        assert round(cost.model_state_bytes(7e9, 64, stage) / GB, 1) == ours
        assert round(cost.model_state_bytes(7e9, 32, stage) / GB, 1) == printed


def test_offload_is_for_few_ranks(prose: str) -> None:
    assert "7.5 B need 30 GB on the device instead of 120" in prose
    assert cost.model_state_bytes(7.5e9, 1, 2, optimizer_bytes=0) == 30 * GB


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "80/16 = 5 billion" in prose
    assert "14.5 billion. Stage 2: 2 + 14/8 = 3.75, 21.3 billion." in prose
    assert "Stage 3: 2 bytes, 40 billion" in prose
    for stage, billions in ((0, 5), (1, 14.5), (2, 21.3), (3, 40)):
        assert 80 / cost.model_state_bytes(1, 8, stage) == pytest.approx(billions, abs=0.05)
    assert "is 29.5 GB, 1.18 s; stage 3 44.3 GB, 1.77 s" in prose
    for stage, gigabytes, seconds in ((2, 29.5, 1.18), (3, 44.3, 1.77)):
        sent = cost.zero_sent_bytes(7.5e9, 64, stage)
        assert round(sent / GB, 1) == gigabytes
        assert round(sent / 25e9, 2) == seconds


@pytest.mark.parametrize("kept", [False, True])
def test_micro_batches_of_stage_3(prose: str, kept: bool) -> None:
    assert "24Ψ(N−1)/N instead of 3" in prose
    assert "one, 17Ψ(N−1)/N" in prose
    space = chapter()

    def train(comm: Comm, steps: int) -> int:
        model, optimizer = zero(space["GPT"](space["CONFIG"]), comm, 3, algorithm="ring")
        for _ in range(steps):
            for micro in range(8):
                model._reduces = not kept or micro == 7  # as `no_sync` does
                space["loss_of"](model, space["tokens_of"](comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(unit.numel for unit in model.units)

    once, twice = (simulate(train, n, network=space["on"](2)) for n in (1, 2))
    sent = twice.trace.sent_bytes(0) - once.trace.sent_bytes(0)
    assert sent == (17 if kept else 24) * 4 * once.values[0] / 2


# ---- the ledger --------------------------------------------------------------------------------


def test_where_each_peak_is(prose: str) -> None:
    assert "Data parallelism's peak is where backward begins" in prose
    assert "So are those of stages 2 and 3. Stage 1's is at the end of backward" in prose
    assert max(peak_at(stage) for stage in (0, 2, 3)) < 0.5 < 0.7 < peak_at(1)


def test_two_layers_and_the_root_are_whole_and_half_way_only_shards(prose: str) -> None:
    assert "two layers and the root are whole at a time" in prose
    assert "between forward and backward, only shards are left" in prose
    gpt = chapter()["GPT"](chapter()["CONFIG"])
    block = 4 * sum(p.numel() for p in gpt.blocks[0].parameters())
    everything = 4 * sum(p.numel() for p in gpt.parameters())
    root = everything - len(gpt.blocks) * block
    parameters = [kinds["parameters"] for kinds in history(3)]
    assert max(parameters) == everything / 4 + 2 * block + root
    middle = parameters[len(parameters) // 4 : len(parameters) // 2]
    assert min(middle) == everything / 4


def test_activations_are_not_sharded_and_recomputing_helps(prose: str) -> None:
    assert "By 6 %; with 2 samples it is 30 %" in prose
    for samples, percent in ((2, 30), (64, 6)):
        one, three = (max(sum(k.values()) for k in history(stage, samples)) for stage in (1, 3))
        assert round(100 * (1 - three / one)) == percent
    assert "nearly all is activations, which belong to a rank's own samples" in prose
    large = max(history(3, 64), key=lambda kinds: sum(kinds.values()))
    assert large["activations"] > 0.8 * sum(large.values())
    plain, again = (max(sum(k.values()) for k in history(3, 64, r)) for r in (False, True))
    assert again < 0.5 * plain


def test_stage_3_exposes_only_its_ends(prose: str) -> None:
    assert "with short layers it exposes the most" in prose
    assert "it exposes the least once layers take longer than their messages" in prose
    rows = [[float(x) for x in re.findall(r"[\d.]+", line)] for line in
            output("exposed").splitlines()[1:]]
    (_, *short), (_, *long) = rows
    assert long[0] == short[0] == max(long)
    assert short[2] == max(short)
    assert long[2] == min(long)


# ---- what needs all shards ---------------------------------------------------------------------


def test_clipping_each_by_its_own_norm_turns_the_gradient(prose: str) -> None:
    assert "every shard would be scaled by another factor" in prose
    lines = output("clip-run").splitlines()
    whole = lines[0].split()[-1]
    own = [float(re.findall(r"shards ([\d.]+),", line)[0]) for line in lines[1:]]
    assert all(line.endswith(whole) for line in lines[1:])
    assert len(set(own)) == 3
    assert sum(norm**2 for norm in own) ** 0.5 == pytest.approx(float(whole), rel=1e-5)


def test_everything_agrees_with_one_device_and_with_torch() -> None:
    assert output("equal").count("within 1e-12") == 3
    assert "never stopped: True" in output("checkpoint-run")
    assert output("torch-zero-redundancy").count("1e-12: True") == 2
    assert "tokens.weight" in output("torch-zero-redundancy")


def test_the_root_is_freed_after_a_forward_without_gradients(prose: str) -> None:
    assert "Ours frees it always, and gathers it once more in backward" in prose
    space = chapter()

    def whole_bytes(comm: Comm) -> int:
        model, optimizer = zero(space["GPT"](space["CONFIG"]), comm, 3)
        with torch.no_grad(), MemoryMeter(model, optimizer):
            model(space["tokens_of"](0))
        return sum(unit.numel for unit in model.units if unit.whole is not None)

    assert simulate(whole_bytes, network=uniform(2, 1e-6, 1e9)).values == [0, 0]
