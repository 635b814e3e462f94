"""Training steps of nine GPTs, from 125 M to 70 B parameters, on 8 to 512 A100 and H100 with FSDP:
209 that MosaicML has measured, each beside the planner's prediction.

Source: llm-foundry, scripts/train/benchmarking, 2023 and 2024, all rows in bf16. Contexts of 512 to
65,536 positions, full recomputation or none; FlashAttention 1, its scripts' default then, which
reached 25 to 40 % of an A100's peak (Dao 2023, §1), of which the middle; of an H100 it is assumed
to reach the same share of FlashAttention 2. The rows of A100 with 80 GB gave `FOUNDRY`; the others
check it; but what full recomputation spares (`Software.early_stop`) was found looking at all.
Micro-batches were as large as fits, beside a loss whose kernel is fused. Up to 45 % too fast are
predicted 30 B on 8 and 70 B on 32 and 64 GPUs, which leave hardly any memory free, and 13 B in
micro-batches of 4,096 tokens on H100.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from typing import NamedTuple

from dtlab.models import gpt_shape
from dtlab.parallel.planner import A100, DEVICES, RECIPES, Layout, Plan, Software, predict
from dtlab.parallel.planner.device import servers
from dtlab.published.figure import Published

MOSAIC = "MosaicML, llm-foundry's training benchmarks, 2023 and 2024"
FOUNDRY = Software(0.82, source="llm-foundry's rows of A100 with 80 GB")
RECIPE = RECIPES["float32 parameters, bf16 copies"]._replace(loss=0)
FLASH_1 = 0.325 * A100.peak_flops["bf16"] / A100.attention_flops  # as a share of FlashAttention 2
SIZES = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12),
         "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40),
         "30b": (48, 7168, 56), "70b": (80, 8192, 64)}  # layers, hidden, heads


class MeasuredStep(NamedTuple):
    """tokens: a second and GPU, as measured."""

    device: str
    model: str
    positions: int
    gpus: int
    layout: Layout
    tokens: float


@cache
def measured_steps() -> list[MeasuredStep]:
    """Return all rows."""
    text = resources.files("dtlab.published").joinpath("fsdp.csv").read_text("utf-8")
    rows = []
    for row in csv.DictReader(text.splitlines()):
        gpus, micro, samples = (int(row[name]) for name in ("gpus", "micro_batch", "samples"))
        layout = Layout({"dp": gpus}, micro, samples // gpus // micro, stage=int(row["stage"]),
                        recompute=row["recompute"])
        rows.append(MeasuredStep(row["device"], row["model"], int(row["positions"]), gpus, layout,
                                 float(row["tokens_per_s_per_gpu"])))
    return rows


def measured_plan(row: MeasuredStep) -> Plan:
    """Return the predicted plan of a measured step."""
    device = DEVICES[row.device]
    shape = gpt_shape(*SIZES[row.model], 50_368, row.positions, "flash")
    return predict(shape, servers(row.device, row.gpus // 8), row.layout, software=FOUNDRY,
                   device=replace(device, attention_flops=FLASH_1 * device.attention_flops),
                   precision=RECIPE)


def ratio(row: MeasuredStep) -> float:
    """Predicted tokens a second over measured ones."""
    plan = measured_plan(row)
    return plan.layout.batch * row.positions / plan.step_s / row.gpus / row.tokens


def _error(device: str) -> float:
    return statistics.median(abs(ratio(row) - 1) for row in measured_steps()
                             if row.device == device)


def fsdp_rows() -> list[Published]:
    """Errors: printed is none, the tolerance what we allow."""
    return [*(Published(MOSAIC, f"steps with FSDP on {DEVICES[name].name}: median error", 0,
                        "share", partial(_error, name), 0.1)
              for name in ("a100", "a100-40", "h100")),
            Published(MOSAIC, "steps with FSDP: rows that are said to fit", 209, "rows",
                      lambda: sum(not measured_plan(row).why_not for row in measured_steps()), 0)]
