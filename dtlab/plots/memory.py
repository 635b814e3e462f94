"""The memory of a rank: predicted, a bar for each stage of ZeRO; measured, over a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from dtlab import cost
from dtlab.checks import check_choice
from dtlab.errors import ConfigError
from dtlab.models import SHAPES
from dtlab.plots.palette import ALARM, HUES, INK, PAPER, QUIET
from dtlab.plots.picture import MARGIN_IN, Picture, fit_text, page
from dtlab.plots.shapes import draw_stack
from dtlab.units import bytes_text, count_text

# Bytes of a bf16 parameter's gradient and of its optimizer state, its float32 copy included.
RECIPES = {"Adam, bf16 gradients": (2, 12), "Adam, float32 gradients": (4, 12),
           "Adam in 8 bits, bf16 gradients": (2, 6), "SGD with momentum, bf16 gradients": (2, 8),
           "SGD, bf16 gradients": (2, 4)}
STAGES = {0: "data parallel", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
KINDS = ("parameters", "gradients", "optimizer state", "activations", "buffers")
_LOOKS = dict(zip(KINDS, ((HUES[0], ""), (HUES[1], "//"), (HUES[2], ""), (HUES[4], ".."),
                          (HUES[6], "xx")), strict=True))
History = Sequence[tuple[float, Mapping[str, int]]]


def rank_memory(model: str = "7.5 B", ranks: int = 64, stage: int = 0,
                recipe: str = "Adam, bf16 gradients", batch: int = 0, recompute: str = "none"
                ) -> dict[str, float]:
    """Bytes by kind on each of `ranks` ranks that train `model`, one of `dtlab.models.SHAPES`, with
    bf16 parameters: `cost.model_state_bytes` and `cost.activation_bytes`.

    recipe: one of `RECIPES`: the bytes of a gradient and of the optimizer's state.
    batch: samples a rank; 0 leaves activations out. Raises `ConfigError` for what doesn't exist.
    """
    check_choice("model", model, SHAPES)
    check_choice("recipe", recipe, RECIPES)
    shape = SHAPES[model]
    gradient, optimizer = RECIPES[recipe]
    state = partial(cost.model_state_bytes, shape.parameters, ranks, stage)
    return {
        "parameters": state(2, 0, 0), "gradients": state(0, gradient, 0),
        "optimizer state": state(0, 0, optimizer),
        "activations": cost.activation_bytes(batch, shape.positions, shape.hidden, shape.heads,
                                             shape.layers, recompute=recompute)}


def model_memory(
    model: str = "7.5 B", ranks: int = 64, stage: int = 0, recipe: str = "Adam, bf16 gradients",
    batch: int = 0, recompute: str = "none", device_bytes: float = 80e9) -> Picture:
    """A bar for plain data parallelism and for each stage: what `rank_memory` says that a rank
    holds, whether a device of `device_bytes` has room for it, and what a rank sends in a step."""
    bars = {s: rank_memory(model, ranks, s, recipe, batch, recompute) for s in STAGES}
    if stage not in bars or not device_bytes > 0:
        raise ConfigError("model_memory needs a stage from 0 to 3, and device_bytes above 0")
    totals = {s: sum(bar.values()) for s, bar in bars.items()}
    shape = SHAPES[model]
    heading = (f"{model} on {count_text(ranks, 'rank')}, {STAGES[stage]}: "
               f"{bytes_text(totals[stage])} a rank (predicted)")
    samples = (f"{count_text(batch, 'sample')} of {shape.positions:,} positions a rank, "
               f"recomputed: {recompute}" if batch else "without activations")
    note = f"{shape.parameters / 1e9:.4g} billion parameters in bf16 · {recipe} · {samples}"
    with page(11.0, 5.4, heading, note) as picture:
        axes = picture.place(left=1.85, right=3.0, bottom=1.35, top=1.15)
        _draw_stages(axes, bars, stage)
        axes.axvline(device_bytes / 1e9, color=ALARM, linewidth=2.5, linestyle=(0, (4, 2)))
        most = max(*totals.values(), device_bytes) / 1e9
        axes.set_xlim(0, 1.03 * most)
        right = device_bytes / 1e9 > 0.75 * most
        axes.annotate(f"device: {bytes_text(device_bytes)}", (device_bytes / 1e9, 1),
                      (-4 if right else 4, 3), textcoords="offset points", size=12, color=ALARM,
                      xycoords=("data", "axes fraction"), ha="right" if right else "left")
        lines = []
        for s, total in totals.items():
            fits = "fits" if total <= device_bytes else "too much"
            sent = cost.zero_sent_bytes(shape.parameters, ranks, s,
                                        gradient_itemsize=RECIPES[recipe][0])
            text = f"{bytes_text(total)}, {fits}"
            _beside(axes, s, text, f"sends {bytes_text(sent)} a step", bold=s == stage)
            lines.append(f"{STAGES[s]} {text}, sends {bytes_text(sent)} a step")
        axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.2), ncols=4, handlelength=1.6,
                    columnspacing=1.4)
    kinds = ", ".join(f"{kind} {bytes_text(n)}" for kind, n in bars[stage].items() if n)
    picture.alt = (f"{heading}. {note}. {kinds}. Device {bytes_text(device_bytes)}: "
                   f"{'; '.join(lines)}.")
    return picture


def _draw_stages(axes: Axes, bars: Mapping[int, Mapping[str, float]], chosen: int) -> None:
    shown = [kind for kind in KINDS[:4] if any(bar[kind] for bar in bars.values())]
    for row, bar in bars.items():
        draw_stack(axes, row, [(kind, bar[kind] / 1e9, *_LOOKS[kind]) for kind in shown],
                   height=0.56, named=not row)
    axes.barh(chosen, sum(bars[chosen].values()) / 1e9, height=0.56, fill=False, edgecolor=INK,
              linewidth=2.5)
    axes.set_ylim(3.6, -0.6)
    axes.set_yticks([*STAGES], [("▶ " if s == chosen else "") + name
                                for s, name in STAGES.items()])
    axes.set_xlabel("GB a rank", loc="right")


def _beside(axes: Axes, row: int, first: str, second: str, *, bold: bool) -> None:
    for text, up, weight, color in ((first, 8, "bold" if bold else "normal", INK),
                                    (second, -9, "normal", QUIET)):
        axes.annotate(text, (1, row), (10, up), xycoords=("axes fraction", "data"), color=color,
                      textcoords="offset points", va="center", size=13, weight=weight)


def memory_ledger(histories: Mapping[str, History], title: str = "What is alive") -> Picture:
    """A panel for each `MemoryMeter.history`: bytes by kind, one on the other, from operation to
    operation of a rank, all to one scale. Raises `ConfigError` without a history."""
    if not histories or not all(histories.values()):
        raise ConfigError("memory_ledger needs at least one history, with an entry")
    peaks = {name: max(sum(kinds.values()) for _, kinds in history)
             for name, history in histories.items()}
    heading = f"{title} (measured)"
    note = " · ".join(f"{name}: peak {bytes_text(peak)}" for name, peak in peaks.items())
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
                       if max(peaks.values()) >= s or s == 1.0)
    with page(11.0, 5.0, heading, note) as picture:
        panels = picture.subplots(1, len(histories), sharey=True, squeeze=False)[0]
        picture.subplots_adjust(left=0.085, right=1 - MARGIN_IN / 11, bottom=0.25, top=0.76,
                                wspace=0.06)
        for axes, (name, history) in zip(panels, histories.items(), strict=True):
            stacks = np.array([[kinds[kind] / scale for _, kinds in history] for kind in KINDS])
            areas = axes.stackplot(np.arange(len(history)), stacks, step="post", labels=KINDS,
                                   colors=[color for color, _ in _LOOKS.values()])
            for area, (_, hatch) in zip(areas, _LOOKS.values(), strict=True):
                area.set(hatch=hatch, edgecolor=PAPER, linewidth=0)
            axes.axhline(peaks[name] / scale, color=INK, linewidth=1.5, linestyle=(0, (5, 2)))
            axes.set_xlim(0, max(1, len(history) - 1))
            axes.set_xlabel("operation")
            fit_text(axes.set_title(name, size=14, color=INK, loc="left"), 9.6 / len(histories))
        panels[0].set_ylabel(f"{unit} alive")
        panels[0].set_ylim(0, 1.06 * max(peaks.values()) / scale)
        picture.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=5,
                       handlelength=1.6)
    ends = "; ".join(f"{name}: at its peak " + ", ".join(
        f"{kind} {bytes_text(nbytes)}" for kind, nbytes in max(
            (kinds for _, kinds in history), key=lambda kinds: sum(kinds.values())).items())
        for name, history in histories.items())
    picture.alt = f"{heading}. {note}. {ends}."
    return picture
