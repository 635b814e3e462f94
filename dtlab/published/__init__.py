"""Figures that others have published, each beside what our own formulas and models give.

A row is a source, what it prints, how we compute it, and how the two must compare: *must match*;
*must disagree*, where the printed figure is known to be wrong; *open*, where we can't tell yet.
`dtlab show published` prints all of them, a test holds each to its word.
"""

from __future__ import annotations

from collections.abc import Callable

from dtlab import cost
from dtlab.models import GPT, GPTConfig
from dtlab.parallel import pipeline
from dtlab.published.failures import failure_rows
from dtlab.published.figure import DISAGREE, MATCH, OPEN, Published
from dtlab.published.fsdp import fsdp_rows
from dtlab.published.layouts import layout_rows
from dtlab.published.nemo import nemo_rows
from dtlab.published.steps import MEGATRON_TABLE_1, MEGATRON_TABLE_2, megatron_plan, step_rows

__all__ = ["DISAGREE", "MATCH", "MEGATRON_TABLE_1", "MEGATRON_TABLE_2", "OPEN", "PUBLISHED",
           "Published", "megatron_plan"]
ZERO = "Rajbhandari et al., ZeRO, SC 2020"


def _state_gb(parameters: float, ranks: int, stage: int) -> Callable[[], float]:
    return lambda: cost.model_state_bytes(parameters, ranks, stage) / 1e9


def _parameters(layers: int, hidden: int, heads: int) -> Callable[[], float]:
    config = GPTConfig(layers, hidden, heads, vocab=50257, context=1024)
    return lambda: sum(p.numel() for p in GPT(config, device="meta").parameters())


def _rounds(algorithm: str, ranks: int) -> Callable[[], float]:
    return lambda: cost.rounds("all_reduce", algorithm, ranks, 100_000_000)


def _zero() -> list[Published]:
    rows = [Published(ZERO, f"figure 1: 7.5 B parameters, 64 ranks, stage {stage}", printed, "GB",
                      _state_gb(7.5e9, 64, stage), 0.05)
            for stage, printed in enumerate((120, 31.4, 16.6, 1.9))]
    table_1 = {4: (896, 704, 512), 64: (536, 284, 32), 1024: (513, 257, 2)}  # it truncates
    rows += [Published(ZERO, f"table I: 128 B parameters, {ranks} ranks, stage {stage}", printed,
                       "GB", _state_gb(128e9, ranks, stage), 0.99)
             for ranks, figures in table_1.items() for stage, printed in enumerate(figures, 1)]
    rows += [Published("Hugging Face, The Ultra-Scale Playbook, 2025",
                       f"{billions} B parameters, mixed precision with Adam", printed, "GB",
                       _state_gb(billions * 1e9, 1, 0), 0.5)
             for billions, printed in ((1, 16), (7, 112), (70, 1120), (405, 6480))]
    rows += [Published("teaching material, where it began is not known",
                       f"7 B parameters, 64 ranks, stage {stage}", printed, "GB",
                       _state_gb(7e9, 64, stage), 0.05, DISAGREE)
             for stage, printed in ((1, 30.6), (2, 17.1))]
    return rows


def _models() -> list[Published]:
    sizes = {"small": (12, 768, 12, 124_439_808), "medium": (24, 1024, 16, 354_823_168),
             "large": (36, 1280, 20, 774_030_080), "XL": (48, 1600, 25, 1_557_611_200)}
    return [Published("OpenAI's GPT-2 checkpoints", f"GPT-2 {name}", printed, "parameters",
                      _parameters(layers, hidden, heads), 0)
            for name, (layers, hidden, heads, printed) in sizes.items()]


def _scale_out() -> list[Published]:
    sony, tencent = "Mikami et al. (Sony), 2018", "Jia et al. (Tencent), 2018"
    return [
        Published(sony, "torus of 34 × 32: steps", 128, "steps", _rounds("torus", 1088), 0),
        Published(sony, "ring of 1088: steps", 2174, "steps", _rounds("ring", 1088), 0),
        Published(sony, "torus of 68 × 32: steps", 196, "steps",
                  lambda: 2 * (68 - 1) + 2 * (32 - 1), 0),
        Published(sony, "ring of 2176: steps", 4350, "steps", _rounds("ring", 2176), 0),
        Published(tencent, "hierarchical, 1024 in groups of 16: steps", 186, "steps",
                  lambda: 4 * (16 - 1) + 2 * (1024 // 16 - 1), 0),
        Published("common lecture notes", "a 2D torus of 34 × 32 takes 2(X − 1) steps", 66, "steps",
                  _rounds("torus", 1088), 0, DISAGREE),
    ]


def _training_times() -> list[Published]:
    megatron = "Narayanan et al. (Megatron-LM), SC 2021"

    def days(parameters: float, tokens: float, devices: int, flops: float) -> Callable[[], float]:
        return lambda: cost.training_time_s(parameters, tokens, devices, flops, recompute=True
                                            ) / 86_400

    return [
        Published(megatron, "1008 B parameters, 450 B tokens, 3072 A100 at 163 TFLOP/s each", 84,
                  "days", days(1008e9, 450e9, 3072, 163e12), 0.5),
        Published(megatron, "GPT-3, 300 B tokens, 1024 A100 at 140 TFLOP/s each", 34, "days",
                  days(175e9, 300e9, 1024, 140e12), 0.5),
    ]


def _pipelines() -> list[Published]:
    """Its times are milliseconds of F, of the input's gradient, of W, and of a message."""
    paper = "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024"
    tables = {("1.5 B", 8, 24): ((18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
              ("14.6 B", 16, 48): ((11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672))}

    def bubble(generate: Callable[[int, int], pipeline.Schedule], p: int, m: int,
               times: tuple[float, ...]) -> Callable[[], float]:
        forward, inputs, weights, comm = times
        return lambda: generate(p, m).time(F=forward, B=inputs + weights, W=weights, comm=comm
                                           ).bubble_fraction

    rows = [Published(paper, f"tables 5 and 6: {name}, {size} on {p} ranks, {m} micro-batches",
                      printed, "bubble rate", bubble(generate, p, m, times), 5e-5)
            for (size, p, m), (times, rates) in tables.items()
            for (name, generate), printed in zip(
                {"1F1B": pipeline.one_f_one_b, "ZB-H1": pipeline.zb_h1, "ZB-H2": pipeline.zb_h2
                 }.items(), rates, strict=True)]
    return [*rows, Published(
        "teaching material, where it began is not known",
        "interleaved 1F1B, 4 ranks, 8 micro-batches, 2 chunks", 0.19, "bubble fraction",
        lambda: pipeline.interleaved(4, 8, 2).time().bubble_fraction, 0.005, DISAGREE)]


PUBLISHED: list[Published] = [*_zero(), *_models(), *_scale_out(), *_training_times(),
                              *_pipelines(), *step_rows(), *layout_rows(), *fsdp_rows(),
                              *nemo_rows(), *failure_rows()]
