"""What training occupies and sends, compared with what the papers print."""

from __future__ import annotations

from typing import Any

import pytest

from dtlab import ConfigError, cost
from dtlab.models import GPT, SHAPES, GPTConfig

# Korthikanti et al. 2022, §4: 5as/h, and the share of activations that selective recomputation
# saves, of GPT-3 and of a model of 530 B.
PRINTED = {"175 B": (96, 12_288, 80, 0.70), "530 B": (128, 20_480, 64, 0.65)}


@pytest.mark.parametrize("model", PRINTED)
def test_activations_are_those_of_the_paper(model: str) -> None:
    heads, hidden, scores, saved = PRINTED[model]
    unit = 2048 * hidden  # sbh of one sample
    whole, selective, full = (cost.activation_bytes(1, 2048, hidden, heads, recompute=how)
                              for how in ("none", "selective", "full"))
    assert whole == (34 + scores) * unit
    assert selective == 34 * unit
    assert 1 - selective / whole == pytest.approx(saved, abs=0.005)
    assert full == 2 * unit


def test_tensor_parallel_ranks_share_all_but_ten_and_sequence_parallel_ones_all() -> None:
    unit = 3 * 2048 * 12_288
    for t in (1, 2, 8):
        alone, both = (cost.activation_bytes(3, 2048, 12_288, 96, tensor=t, sequence=sequence)
                       for sequence in (False, True))
        assert alone == pytest.approx(unit * (10 + 24 / t + 80 / t))
        assert both == pytest.approx(unit * 114 / t)
    assert cost.activation_bytes(1, 8, 8, 2, layers=7) == 7 * cost.activation_bytes(1, 8, 8, 2)


@pytest.mark.parametrize("options", [{"heads": 0}, {"batch": -1}, {"hidden": 2.5}, {"layers": True},
                                     {"recompute": "some"}])
def test_nonsense_is_a_config_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"whole number|no recompute option"):
        cost.activation_bytes(**{"batch": 1, "positions": 8, "hidden": 8, "heads": 2} | options)
    with pytest.raises(ConfigError):
        cost.zero_sent_bytes(1, 1, 4)


@pytest.mark.parametrize(("stage", "sends"), [(0, 8), (1, 6), (2, 6), (3, 8)])
def test_float32_gradients_of_bf16_parameters_cross_in_four_bytes(stage: int, sends: int) -> None:
    """An all-reduce carries gradients both ways; a gather carries parameters."""
    assert cost.zero_sent_bytes(10, 2, stage, 2, gradient_itemsize=4) == sends * 10 / 2
    assert cost.zero_sent_bytes(10, 2, stage, 2, gradient_itemsize=2) == cost.zero_sent_bytes(
        10, 2, stage, 2)


def test_shapes_have_the_parameters_that_they_say() -> None:
    """Of Llama, with its key-value heads and its MLPs: table 3 of the paper, and config.json."""
    for name in ("GPT-2 small", "GPT-2 XL"):
        shape = SHAPES[name]
        gpt = GPT(GPTConfig(shape.layers, shape.hidden, shape.heads, shape.vocab, shape.positions),
                  device="meta")
        assert sum(p.numel() for p in gpt.parameters()) == shape.parameters
    for name, wide in (("8B", 14_336), ("70B", 28_672), ("405B", 53_248)):
        shape, kv_heads = SHAPES[f"Llama 3 {name}"], 8
        h, width = shape.hidden, shape.hidden // shape.heads
        layer = 2 * h * h + 2 * h * kv_heads * width + 3 * h * wide + 2 * h
        assert shape.layers * layer + h + 2 * shape.vocab * h == shape.parameters
    for name, printed in (("GPT-3", 175e9), ("7.5 B", 7.5e9)):
        shape = SHAPES[name]
        h = shape.hidden
        blocks = shape.layers * (12 * h * h + 13 * h)
        count = blocks + (shape.vocab + shape.positions) * h
        assert count == pytest.approx(printed, rel=0.005)
        assert shape.parameters == printed
