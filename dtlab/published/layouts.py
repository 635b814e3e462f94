"""Layouts of two models on 8 to 64 H100 that Hugging Face has measured, 425 that ran and 462 that
didn't, each beside the planner's prediction.

Source: The Ultra-Scale Playbook, 2025, figures of its interactive benchmarks: one step of each,
without repeats (the same layout measured twice can differ by several times). The 3 B rows gave the
numbers of `EAGER`, the 8 B rows check them; which terms there are was found looking at both. 4,096
positions, 256 samples a step, bf16 with float32 gradients, FlashAttention, 1F1B, sequence
parallelism beside tensor parallelism, no recomputation. A crash is not told from a lack of
memory.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from functools import cache
from importlib import resources
from itertools import combinations
from typing import NamedTuple

from dtlab.models import llama_shape
from dtlab.parallel.planner import EAGER, H100, Layout, Plan, Software, predict, wires
from dtlab.published.figure import Published
from dtlab.topology import Topology, compose, nvswitch, uniform

PLAYBOOK = "Hugging Face, The Ultra-Scale Playbook, 2025"
POSITIONS, SAMPLES = 4096, 256
MODELS = {"3B": llama_shape(28, 3072, 32, 8192, 131_072, POSITIONS, tied=True),
          "8B": llama_shape(32, 4096, 32, 14_336, 131_072, POSITIONS)}


class MeasuredLayout(NamedTuple):
    """step_s, memory_gb: as measured; None where it didn't run."""

    model: str
    gpus: int
    layout: Layout
    step_s: float | None
    memory_gb: float | None

    @property
    def clean(self) -> bool:
        """True if it ran without ZeRO 0 in a pipeline, where 39 of 58 rows take 0.5 s (two stages)
        or 1.0 to 1.2 s (more) longer for each micro-batch than with ZeRO 1, whatever they send; and
        below 68 GB, above which several collapse."""
        return (self.step_s is not None and (self.layout.stage == 1 or self.layout.pp == 1)
                and (self.memory_gb or 0) < 68)


@cache
def measured_layouts() -> list[MeasuredLayout]:
    """Return all rows."""
    text = resources.files("dtlab.published").joinpath("layouts.csv").read_text("utf-8")
    rows = []
    for row in csv.DictReader(text.splitlines()):
        dp, tp, pp, micro, count, stage, gpus = (int(row[name]) for name in (
            "dp", "tp", "pp", "mbs", "grad_acc", "zero", "gpus"))
        layout = Layout({"pp": pp, "dp": dp, "tp": tp}, micro, count, stage=stage if dp > 1 else 0,
                        sequence=tp > 1, balanced=True, regather=False)
        ran = row["status"] == "ok"
        step_s = SAMPLES * POSITIONS / float(row["tokens_per_s_per_gpu"]) / gpus if ran else None
        rows.append(MeasuredLayout(row["model"], gpus, layout, step_s,
                                   float(row["memory_gb"]) if ran and row["memory_gb"] else None))
    return rows


@cache
def cluster_of(gpus: int) -> Topology:
    """The measured cluster: an all-gather of 256 MB reaches 250 GB/s on one server; on 2, 4, 8 and
    64 it falls to 185, 119, 69 and 11, as a ring does on cards of 50 GB/s that take 50 µs."""
    server = nvswitch(8, bandwidth_Bps=250e9)
    return server if gpus == 8 else compose(server, uniform(gpus // 8, 50e-6, 400e9), nic_Bps=50e9)


@cache
def _wires(gpus: int):  # type: ignore[no-untyped-def]
    return wires(cluster_of(gpus))


def layout_plan(row: MeasuredLayout, software: Software = EAGER) -> Plan:
    """Return the predicted plan of a measured layout."""
    return predict(MODELS[row.model], cluster_of(row.gpus), row.layout, device=H100,
                   precision="bf16, float32 gradients", software=software, wire=_wires(row.gpus))


class Accuracy(NamedTuple):
    """step, memory: the median of the errors, as shares. pairs: of two layouts of one model on as
    many GPUs whose steps differ by more than a tenth, the share in the right order. chosen: by
    model and GPUs, the measured step of the layout predicted to be the fastest, over that of the
    fastest one. rows: how many."""

    step: float
    memory: float
    pairs: float
    chosen: dict[tuple[str, int], float]
    rows: int


def accuracy(rows: Iterable[MeasuredLayout], software: Software = EAGER) -> Accuracy:
    """Return the accuracy of predictions of `rows`, all of which ran."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    steps, memories = [], []
    for row in rows:
        plan = layout_plan(row, software)
        assert row.step_s is not None
        steps.append(abs(plan.step_s / row.step_s - 1))
        if row.memory_gb:
            memories.append(abs(plan.memory_bytes / 1e9 / row.memory_gb - 1))
        found.setdefault((row.model, row.gpus), []).append((row.step_s, plan.step_s))
    right = [(a - b) * (x - y) > 0 for group in found.values()
             for (a, x), (b, y) in combinations(group, 2) if max(a, b) > 1.1 * min(a, b)]
    chosen = {key: min(group, key=lambda pair: pair[1])[0] / min(group)[0]
              for key, group in found.items()}
    return Accuracy(statistics.median(steps), statistics.median(memories),
                    sum(right) / len(right), chosen, len(steps))


def fits_right() -> float:
    """Return the share of rows for which it is rightly predicted whether the layout runs."""
    rows = measured_layouts()
    return sum((row.step_s is not None) == (not layout_plan(row).why_not)
               for row in rows) / len(rows)


@cache
def _clean(model: str) -> Accuracy:
    return accuracy(row for row in measured_layouts() if row.clean and row.model == model)


def layout_rows() -> list[Published]:
    """Errors: printed is none, the tolerance what we allow."""
    return [*_clean_rows("3B"), *_clean_rows("8B"),
            Published(PLAYBOOK, "layouts, all rows: rightly said whether it runs", 1, "share",
                      fits_right, 0.1)]


def _clean_rows(model: str) -> list[Published]:
    what = f"layouts of {model}, clean rows"
    return [
        Published(PLAYBOOK, f"{what}: median error of the step", 0, "share",
                  lambda: _clean(model).step, 0.1),
        Published(PLAYBOOK, f"{what}: median error of memory", 0, "share",
                  lambda: _clean(model).memory, 0.1),
        Published(PLAYBOOK, f"{what}: pairs in the right order", 1, "share",
                  lambda: _clean(model).pairs, 0.1),
        Published(PLAYBOOK, f"{what}: the chosen one, over the fastest, at most", 1, "times",
                  lambda: max(_clean(model).chosen.values()), 0.06)]
