"""What chapter 13 says in prose is true; each sentence is looked up there, then recomputed."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import pytest
import torch

from dtlab import cost, simulate
from dtlab.models import SHAPES
from tests.notebooks.chapter import Chapter

CHAPTER = Chapter("13")
printed = CHAPTER.printed
GB = 1e9


@cache
def chapter() -> dict[str, Any]:
    """What the chapter's own cells define, without what they run."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for name in ("setup", "model", "state", "stage2-timeline", "ledger-run", "activations-run"):
        exec(re.split(r"^(?:for|step|NAMES|print)\b", CHAPTER.source(name), flags=re.M)[0], space)
    return space


@cache
def history(stage: int, samples: int = 2) -> Any:
    space = chapter()
    measure = partial(space["history_of"], samples=samples, prepare=lambda gpt: None)
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
    assert printed("state").count("together 16 bytes") == 2
    assert "These are two recipes of several. With gradients in float32" in prose
    assert "it is 18 bytes" in prose
    assert cost.model_state_bytes(1, gradient_bytes=4) == 18


def test_bf16_would_round_a_step_of_a_thousandth_away(prose: str) -> None:
    assert "may change a weight by a thousandth, and bf16 has only 8 binary digits" in prose
    weight = torch.ones((), dtype=torch.bfloat16)
    assert weight + 0.001 * weight == weight
    assert weight.float() + 0.001 != weight


def test_gpt_3_needs_stage_3_on_64_gpus_of_80_gb(prose: str) -> None:
    assert "GPT-3's 350 GB fit on no device of 80 GB, however many ranks there are" in prose
    assert "stage 3 needs 64 (of the powers of two)" in prose
    psi = SHAPES["GPT-3"].parameters
    assert cost.model_state_bytes(psi, 2**20, 2) > 2 * psi == 350 * GB
    fits = [2**k for k in range(10) if cost.model_state_bytes(psi, 2**k, 3) <= 80 * GB]
    assert fits[0] == 64
    assert "With float32 gradients GPT-3 needs 64 GPUs, too" in prose
    fits = [2**k for k in range(10)
            if cost.model_state_bytes(psi, 2**k, 3, gradient_bytes=4) <= 80 * GB]
    assert fits[0] == 64


def test_what_teaching_material_prints_is_right_for_32_ranks(prose: str) -> None:
    assert "Ours are 29.3 and 15.5. The printed ones are right for 32 ranks" in prose
    for stage, ours, printed in ((1, 29.3, 30.6), (2, 15.5, 17.1)):
        assert round(cost.model_state_bytes(7e9, 64, stage) / GB, 1) == ours
        assert round(cost.model_state_bytes(7e9, 32, stage) / GB, 1) == printed


def test_the_answers_to_the_open_questions(prose: str) -> None:
    assert "80/16 = 5 billion" in prose
    assert "14.5 billion. Stage 2: 2 + 14/8 = 3.75, 21.3 billion." in prose
    assert "Stage 3: 2 bytes, 40 billion" in prose
    for stage, billions in ((0, 5), (1, 14.5), (2, 21.3), (3, 40)):
        assert 80 / cost.model_state_bytes(1, 8, stage) == pytest.approx(billions, abs=0.05)
    assert "it frees two thirds, 10.5 of 16 bytes, and sends no byte more" in prose
    assert 16 - cost.model_state_bytes(1, 8, 1) == 10.5 == pytest.approx(16 * 2 / 3, rel=0.02)
    assert cost.zero_sent_bytes(1, 8, 1) == cost.zero_sent_bytes(1, 8, 0)


# ---- the ledger --------------------------------------------------------------------------------


def test_where_each_peak_is(prose: str) -> None:
    assert "Data parallelism's peak is early in backward: most activations are still there" in prose
    assert "The peaks of stages 2 and 3 are there, too. Stage 1's is at the end" in prose
    for stage in (0, 2, 3):
        peak = max(history(stage), key=lambda kinds: sum(kinds.values()))
        most = max(kinds["activations"] for kinds in history(stage))
        assert 0.75 * most < peak["activations"] < most
        assert peak["gradients"] > history(stage)[0]["gradients"]
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


def test_the_prefetch_is_one_unit_ahead_and_forward_ends_with_none(prose: str) -> None:
    assert "Block 2, and block 3 is on its way" in prose
    assert "When forward has ended, no parameter is left" in prose
    lines = printed("stage3-whole").splitlines()
    *blocks, after = [line.partition(":")[2].strip() for line in lines]
    for number, there in enumerate(blocks[:-1], start=1):
        assert there == f"root, block {number}, (block {number + 1} on its way)"
    assert (blocks[-1], after) == ("root, block 5", "none")


def test_stage_3_peaks_between_a_quarter_and_half_of_data_parallelism() -> None:
    plain, three = (max(sum(kinds.values()) for kinds in history(stage)) for stage in (0, 3))
    assert 0.25 < three / plain < 0.5
    assert printed("guess-compare").strip().endswith(f"It is B: {100 * three / plain:.0f} %.")


def test_activations_are_not_sharded_and_recomputing_helps(prose: str) -> None:
    """The question is about DDP, and so is the answer."""
    assert "by how much does stage 3 lower DDP's peak with 64 samples?" in prose
    assert "By 20 %; with 2 samples it is 58 %. (Against stage 1 it is 6 % and 30 %" in prose
    two, plain, again = ([float(x) for x in line.split()[-3:]]
                         for line in printed("activations-run").splitlines()[1:])  # peaks, in MB
    for (zero, one, three), of_ddp, of_stage_1 in ((two, 58, 30), (plain, 20, 6)):
        assert round(100 * (1 - three / zero)) == of_ddp
        assert round(100 * (1 - three / one)) == of_stage_1
    assert ("more than four fifths of what stage 3 holds is activations, which belong to a rank's "
            "own samples") in prose
    large = max(history(3, 64), key=lambda kinds: sum(kinds.values()))
    assert large["activations"] > 0.8 * sum(large.values())
    assert again[2] < 0.5 * plain[2]


def test_one_unit_holds_more_parameters_than_no_zero(prose: str) -> None:
    assert "so more bytes of parameters than without ZeRO, and a peak above stage 1's" in prose
    (_, _), (whole, peak) = (map(float, re.findall(r"([\d.]+) MB", line))
                             for line in printed("wrapping").splitlines())
    assert whole > max(kinds["parameters"] for kinds in history(0)) / 1e6
    assert peak > max(sum(kinds.values()) for kinds in history(1)) / 1e6


def test_everything_agrees_with_one_device() -> None:
    assert printed("equal").count("within 1e-12") == 3
