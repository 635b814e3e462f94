"""Training steps that others have measured, each beside the planner's prediction."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from dtlab import cost
from dtlab.models import SHAPES, Shape, gpt_shape
from dtlab.parallel.planner import (
    COMPILED,
    DEVICES,
    EAGER,
    H100,
    MEGATRON,
    RECIPES,
    Layout,
    Plan,
    Recipe,
    Software,
    predict,
    wires,
)
from dtlab.parallel.planner.device import servers
from dtlab.published.figure import MATCH, OPEN, Published

NARAYANAN = "Narayanan et al. (Megatron-LM), SC 2021"
KORTHIKANTI = "Korthikanti et al., Reducing Activation Recomputation, 2022"
TORCHTITAN = "torchtitan, benchmarks/llama3_h100_202412"
LLAMA_3 = "Grattafiori et al., The Llama 3 Herd of Models, 2024, table 4"

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


def megatron_plan(_printed: float, layers: int, hidden: int, heads: int, tp: int, pp: int,
                  gpus: int, batch: int, micro_batch: int | None, stage: int) -> Plan:
    """Return the predicted plan of a row of those tables, with full recomputation and without
    chunks; ZeRO 3 as it was then: one ring a group, and nothing overlapped. If the table doesn't
    say the micro-batch: the best one."""
    topology, dp = servers("a100", gpus // 8), gpus // tp // pp
    wire = wires(topology, rails=stage < 3)
    return max((predict(gpt_shape(layers, hidden, heads), topology, Layout(
        {"pp": pp, "dp": dp, "tp": tp}, b, batch // dp // b, stage=stage, recompute="full",
        overlap=stage < 3), software=MEGATRON, wire=wire)
        for b in ([micro_batch] if micro_batch else (1, 2, 4, 8, 16)) if batch % (dp * b) == 0),
        key=lambda plan: (not plan.why_not, plan.device_flops))


def megatron_pairs() -> list[tuple[bool, bool]]:
    """Return, for the two layouts of each model and number of GPUs in table 2, whether the first
    one was faster, and whether it is predicted to be."""
    pairs = [(a, b) for a, b in combinations(MEGATRON_TABLE_2, 2)
             if a[0] == b[0] and a[6] == b[6]]
    return [(a[-1] > b[-1], megatron_plan(*a[:-1]).device_flops
             > megatron_plan(*b[:-1]).device_flops) for a, b in pairs]


# torchtitan: model, servers, layout, software, recipe; tokens a second and GPU, GiB.
_FLOAT32, _FLOAT8 = RECIPES["float32 parameters, bf16 copies"], Recipe("fp8", 2, 4, 4, 8, 4)


def _fsdp(ranks: int) -> Layout:
    return Layout({"dp": ranks}, 2, 1, stage=3, recompute="selective")


def _three_axes(schedule: str, chunks: int) -> Layout:
    return Layout({"pp": 8, "dp": 8, "tp": 8}, 1, 32, schedule, chunks, 3, "full", True,
                  balanced=True, gather_once=True)


TORCHTITAN_ROWS: list[tuple[str, int, Layout, Software, Recipe, float, float | None]] = [
    ("Llama 3 8B", 1, _fsdp(8), EAGER, _FLOAT32, 5762, 82.4),
    ("Llama 3 8B", 1, _fsdp(8), COMPILED, _FLOAT32, 6667, 77.0),
    ("Llama 3 8B", 16, _fsdp(128), EAGER, _FLOAT32, 5605, 67.0),
    ("Llama 3 8B", 16, _fsdp(128), COMPILED, _FLOAT32, 6514, 62.0),
    ("Llama 3 70B", 32, Layout({"dp": 32, "tp": 8}, 16, 1, "1F1B", 1, 3, "full", True),
     COMPILED, _FLOAT8, 829, None),
    ("Llama 3 405B", 64, _three_axes("1F1B", 1), COMPILED, _FLOAT8, 100, 82.5),
    ("Llama 3 405B", 64, _three_axes("interleaved", 2), COMPILED, _FLOAT8, 128, 72.7)]


def torchtitan_plan(model: str, hosts: int, layout: Layout, software: Software, recipe: Recipe
                    ) -> Plan:
    """Return the predicted plan of a row of its tables, on GPUs of 96 GB and 500 W."""
    return predict(SHAPES[model], servers("h100-96", hosts), layout, device=DEVICES["h100-96"],
                   precision=recipe, software=software)


# Llama 3 405 B: GPUs, mesh, positions, micro-batches; TFLOP/s a GPU.
LLAMA_3_ROWS = [(8192, {"pp": 16, "dp": 64, "tp": 8}, 8192, 32, 430),
                (16_384, {"pp": 16, "dp": 128, "tp": 8}, 8192, 16, 400),
                (16_384, {"pp": 16, "dp": 8, "cp": 16, "tp": 8}, 131_072, 16, 380)]


def llama_3_plan(gpus: int, mesh: dict[str, int], positions: int, micro_batches: int) -> Plan:
    """Return the predicted plan of a row of its table, with two layers a chunk."""
    layout = Layout(mesh, 1, micro_batches, "interleaved", 4, 1, "selective", True, balanced=True)
    return predict(SHAPES["Llama 3 405B"]._replace(positions=positions),
                   servers("h100", gpus // 8), layout, device=H100,
                   precision="bf16, float32 gradients", software=COMPILED)


def step_rows() -> list[Published]:
    return [*_megatron(), *_korthikanti(), *_torchtitan(), *_llama_3()]


def _megatron() -> list[Published]:
    def billions(row: tuple[Any, ...]) -> Callable[[], float]:
        return lambda: gpt_shape(*row[1:4]).parameters / 1e9

    def flops(row: tuple[Any, ...]) -> Callable[[], float]:
        return lambda: megatron_plan(*row[:-1]).device_flops / 1e12

    rows = [Published(NARAYANAN, f"table 1: {row[0]} B parameters", row[0], "billion",
                      billions(row), 0.051) for row in MEGATRON_TABLE_1]
    rows += [Published(NARAYANAN, f"table 1: {row[0]} B parameters on {row[6]} A100, predicted",
                       row[-1], "TFLOP/s", flops(row), 0.08 * row[-1]) for row in MEGATRON_TABLE_1]
    rows += [Published(NARAYANAN, f"table 2: {row[0]} B parameters on {row[6]} A100, "
                                  f"{'ZeRO 3' if row[9] else 'tp=8'}, predicted", row[-1],
                       "TFLOP/s", flops(row), (0.17 if row[9] else 0.08) * row[-1])
             for row in MEGATRON_TABLE_2]
    return [*rows, Published(
        NARAYANAN, "table 2: which of two layouts on the same GPUs is faster, right", 5, "pairs",
        lambda: sum(measured == predicted for measured, predicted in megatron_pairs()), 0)]


def _korthikanti() -> list[Published]:
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
        return lambda: predict(shape, servers("a100", pp), layout, software=MEGATRON).step_s

    shapes = {"22 B": (gpt_shape(48, 6144, 64), 1, 4, 4, 1), "175 B":
              (gpt_shape(96, 12288, 96), 8, 64, 1, 3), "530 B":
              (gpt_shape(105, 20480, 128), 35, 280, 1, 3), "1 T":
              (gpt_shape(128, 25600, 160), 64, 512, 1, 1)}
    both_ways = (("full recomputation", False), ("sequence parallel, selective", True))
    rows = []
    for name, printed in {"22 B": (59.25, 9.5625), "175 B": (66.84, 12.35)}.items():
        shape, pp, _, micro, chunks = shapes[name]
        rows += [Published(KORTHIKANTI, f"figure 1: {name}, activations, "
                                        f"{how if both else 'all kept'}", gib, "GiB",
                           activations(shape, micro, pp, chunks, both), 0.005)
                 for gib, (how, both) in zip(printed, both_ways, strict=True)]
    for name, printed in {"22 B": (1.42, 1.10), "175 B": (18.13, 13.75), "530 B": (49.05, 37.83),
                          "1 T": (94.42, 71.49)}.items():
        shape, pp, batch, micro, chunks = shapes[name]
        rows += [Published(KORTHIKANTI, f"table 5: {name}, {how}, predicted", seconds, "s",
                           step(shape, pp, batch, micro, chunks, both), 0.11 * seconds)
                 for seconds, (how, both) in zip(printed, both_ways, strict=True)]
    return rows


def _torchtitan() -> list[Published]:
    rows = []
    for model, hosts, layout, software, recipe, tokens, gib in TORCHTITAN_ROWS:
        of = model, hosts, layout, software, recipe
        how = "compiled" if software is COMPILED else "eager"
        what = f"{model} on {8 * hosts} H100 of 96 GB, {layout}, {how}"

        def rate(of: tuple[Any, ...] = of) -> float:
            found = torchtitan_plan(*of)
            tokens = found.layout.batch * SHAPES[of[0]].positions
            return float(tokens / found.step_s / of[1] / 8)

        def used(of: tuple[Any, ...] = of) -> float:
            return torchtitan_plan(*of).memory_bytes / 2**30

        known = recipe is _FLOAT32  # eight-bit products: what else casting costs isn't modelled
        rows.append(Published(TORCHTITAN, f"{what}, predicted", tokens, "tokens/s a GPU", rate,
                              0.05 * tokens, MATCH if known else OPEN))
        if gib is not None:
            rows.append(Published(TORCHTITAN, f"{what}, memory, predicted", gib, "GiB", used,
                                  0.22 * gib, MATCH if known else OPEN))
    return rows


def _llama_3() -> list[Published]:
    def flops(row: tuple[Any, ...]) -> Callable[[], float]:
        return lambda: llama_3_plan(*row[:-1]).efficiency * H100.peak_flops["bf16"] / 1e12

    return [Published(LLAMA_3, f"405 B on {row[0]} H100, {row[2]:,} positions, predicted", row[-1],
                      "TFLOP/s", flops(row), 0.1 * row[-1]) for row in LLAMA_3_ROWS]
