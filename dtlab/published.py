"""Figures that others have published, each beside what our own formulas and models give.

A row is a source, what it prints, how we compute it, and how the two must compare: *must match*;
*must disagree*, where the printed figure is known to be wrong; *open*, where we can't tell yet.
`dtlab show published` prints all of them, a test holds each to its word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dtlab import cost
from dtlab.models import GPT, GPTConfig, Shape, gpt_shape
from dtlab.parallel import Layout, Plan, pipeline, predict
from dtlab.parallel.planner import wires
from dtlab.topology import Topology, compose, nvswitch, uniform

MATCH, DISAGREE, OPEN = "must match", "must disagree", "open"
ZERO = "Rajbhandari et al., ZeRO, SC 2020"


class Published(NamedTuple):
    """One figure. `tolerance` is in its own unit, for what the source has rounded away."""

    source: str
    what: str
    printed: float
    unit: str
    compute: Callable[[], float]
    tolerance: float
    verdict: str = MATCH

    @property
    def agrees(self) -> bool:
        """Is what we compute the printed figure, within the tolerance?"""
        return abs(self.compute() - self.printed) <= self.tolerance

    @property
    def holds(self) -> bool:
        """Do the two compare as the verdict says? Of what is open, nothing is said."""
        return self.verdict == OPEN or self.agrees == (self.verdict == MATCH)


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


# Narayanan et al. 2021. Billions of parameters (as printed), layers, hidden, heads, tensor and
# pipeline ranks, GPUs, batch, micro-batch (None: it isn't said), stage of ZeRO; TFLOP/s a GPU.
MEGATRON_TABLE_1 = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, None, 0, 137),
    (3.6, 30, 3072, 32, 2, 1, 64, 512, None, 0, 138),
    (7.5, 36, 4096, 32, 4, 1, 128, 512, None, 0, 142),
    (18.4, 40, 6144, 48, 8, 1, 256, 1024, None, 0, 135),
    (39.1, 48, 8192, 64, 8, 2, 512, 1536, None, 0, 138),
    (76.1, 60, 10240, 80, 8, 4, 1024, 1792, None, 0, 140),
    (145.6, 80, 12288, 96, 8, 8, 1536, 2304, None, 0, 148),
    (310.1, 96, 16384, 128, 8, 16, 1920, 2160, None, 0, 155),
    (529.6, 105, 20480, 128, 8, 35, 2520, 2520, None, 0, 163),
    (1008.0, 128, 25600, 160, 8, 64, 3072, 3072, None, 0, 163)]
MEGATRON_TABLE_2 = [
    *((174.6, 96, 12288, 96, 1, 1, gpus, 1536, micro, 3, flops)
      for gpus, micro, flops in ((384, 4, 144), (768, 2, 88), (1536, 1, 44))),
    *((174.6, 96, 12288, 96, 8, 12, gpus, 1536, 1, 0, flops)
      for gpus, flops in ((384, 153), (768, 149), (1536, 141))),
    *((529.6, 105, 20480, 128, 1, 1, gpus, batch, micro, 3, flops)
      for gpus, batch, micro, flops in ((640, 2560, 4, 138), (1120, 2240, 2, 98),
                                        (2240, 2240, 1, 48))),
    *((529.6, 105, 20480, 128, 8, 35, gpus, 2240, 1, 0, flops)
      for gpus, flops in ((560, 171), (1120, 167), (2240, 159)))]


def dgx_a100(gpus: int) -> Topology:
    """DGX A100 servers, each GPU with a network card of 200 Gb/s, on a network without bottleneck.
    """
    if gpus <= 8:
        return nvswitch(gpus)
    return compose(nvswitch(8), uniform(gpus // 8, 3e-6, 200e9), nic_Bps=25e9)


def megatron_plan(_printed: float, layers: int, hidden: int, heads: int, tp: int, pp: int,
                  gpus: int, batch: int, micro_batch: int | None, stage: int) -> Plan:
    """What a row of those tables is predicted to take, with full recomputation and without chunks.
    Where the micro-batch isn't said: the best one."""
    topology, dp = dgx_a100(gpus), gpus // tp // pp
    wire = wires(topology)
    return max((predict(gpt_shape(layers, hidden, heads), topology, Layout(
        {"pp": pp, "dp": dp, "tp": tp}, b, batch // dp // b, stage=stage, recompute="full"),
        wire=wire) for b in ([micro_batch] if micro_batch else (1, 2, 4, 8, 16))
        if batch % (dp * b) == 0), key=lambda plan: (not plan.why_not, plan.device_flops))


def _planner() -> list[Published]:
    """Its prediction has one constant, fitted to table 5 of Korthikanti et al. as a whole."""
    megatron = "Narayanan et al. (Megatron-LM), SC 2021"
    korthikanti = "Korthikanti et al., Reducing Activation Recomputation, 2022"

    def billions(layers: int, hidden: int, heads: int) -> Callable[[], float]:
        return lambda: gpt_shape(layers, hidden, heads).parameters / 1e9

    def flops(row: tuple[Any, ...]) -> Callable[[], float]:
        return lambda: megatron_plan(*row[:-1]).device_flops / 1e12

    def activations(shape: Shape, batch: int, pp: int, chunks: int, both: bool
                    ) -> Callable[[], float]:
        return lambda: cost.activation_bytes(
            batch, shape.positions, shape.hidden, shape.heads, shape.layers, tensor=8,
            sequence=both, recompute="selective" if both else "none"
        ) * cost.micro_batches_in_flight("interleaved", pp, 8 * pp, chunks) / pp / 2**30

    def step(shape: Shape, pp: int, batch: int, micro: int, chunks: int, both: bool
             ) -> Callable[[], float]:
        layout = Layout({"pp": pp, "tp": 8}, micro, batch // micro,
                        "interleaved" if chunks > 1 else "1F1B", chunks,
                        recompute="selective" if both else "full", sequence=both)
        return lambda: predict(shape, dgx_a100(8 * pp), layout).step_s

    rows = [Published(megatron, f"table 1: {row[0]} B parameters", row[0], "billion",
                      billions(*row[1:4]), 0.051) for row in MEGATRON_TABLE_1]
    rows += [Published(megatron, f"table 1: {row[0]} B parameters on {row[6]} A100, predicted",
                       row[-1], "TFLOP/s", flops(row), 0.13 * row[-1]) for row in MEGATRON_TABLE_1]
    rows += [Published(megatron, f"table 2: {row[0]} B parameters on {row[6]} A100, "
                                 f"{'ZeRO 3' if row[9] else 'tp=8'}, predicted", row[-1], "TFLOP/s",
                       flops(row), 0.1 * row[-1], OPEN if row[9] else MATCH)
             for row in MEGATRON_TABLE_2]
    shapes = {"22 B": (gpt_shape(48, 6144, 64), 1, 4, 4, 1), "175 B":
              (gpt_shape(96, 12288, 96), 8, 64, 1, 3), "530 B":
              (gpt_shape(105, 20480, 128), 35, 280, 1, 3), "1 T":
              (gpt_shape(128, 25600, 160), 64, 512, 1, 1)}
    for name, printed in {"22 B": (59.25, 9.5625), "175 B": (66.84, 12.35)}.items():
        shape, pp, _, micro, chunks = shapes[name]
        rows += [Published(korthikanti, f"figure 1: {name}, activations, {how}", gib, "GiB",
                           activations(shape, micro, pp, chunks, both), 0.005)
                 for gib, how, both in zip(printed, ("all kept", "sequence parallel, selective"),
                                           (False, True), strict=True)]
    for name, printed in {"22 B": (1.42, 1.10), "175 B": (18.13, 13.75), "530 B": (49.05, 37.83),
                          "1 T": (94.42, 71.49)}.items():
        shape, pp, batch, micro, chunks = shapes[name]
        rows += [Published(korthikanti, f"table 5: {name}, {how}, predicted", seconds, "s",
                           step(shape, pp, batch, micro, chunks, both), 0.1 * seconds)
                 for seconds, how, both in zip(printed, ("full recomputation",
                                                         "sequence parallel, selective"),
                                               (False, True), strict=True)]
    return rows


PUBLISHED: list[Published] = [*_zero(), *_models(), *_scale_out(), *_training_times(),
                              *_pipelines(), *_planner()]
