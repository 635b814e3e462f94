"""The duration of a training run, and whether the model fits, by the number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes

from dtlab import cost
from dtlab.checks import check_choice, check_number
from dtlab.models import SHAPES
from dtlab.plots.lines import Scale
from dtlab.plots.palette import ALARM, FAINT, HUES, INK, PAPER
from dtlab.plots.picture import Picture, page
from dtlab.units import bytes_text

DAY_S = 86_400


class Accelerator(NamedTuple):
    """An accelerator: dense 16-bit operations a second, and bytes of memory, by its data sheet."""

    flops: float
    memory_bytes: float


DEVICES = {"V100 (125 TFLOP/s, 32 GB)": Accelerator(125e12, 32e9),
           "A100 (312 TFLOP/s, 80 GB)": Accelerator(312e12, 80e9),
           "H100 (989 TFLOP/s, 80 GB)": Accelerator(989e12, 80e9)}


def days_text(seconds: float) -> str:
    """A long time: "84 days", "3.2 years", "5 hours"."""
    for unit, size in (("years", 365 * DAY_S), ("days", DAY_S), ("hours", 3600)):
        if seconds >= size:
            count = f"{seconds / size:,.3g}"
            return f"{count} {unit[:-1] if count == '1' else unit}"
    return f"{seconds / 60:.3g} minutes" if seconds >= 60 else f"{seconds:.3g} s"


def training_time(model: str | float, tokens: float, device: str, devices: int,
                  efficiency: float = 0.4, recompute: bool = False) -> Picture:
    """Left: days of training against the number of devices, as `cost.training_time_s` says. Right:
    bytes of parameters, gradients and Adam's state a device, with copies and with ZeRO 3.

    model: one of `dtlab.models.SHAPES`, or a number of parameters. device: one of `DEVICES`. Raises
    `ConfigError` for others, and numbers that make no sense.
    """
    if isinstance(model, str):
        check_choice("model", model, SHAPES, ", or give a number of parameters")
    else:
        check_number("model", model)
    check_choice("device", device, DEVICES)
    check_number("tokens", tokens)
    parameters = SHAPES[model].parameters if isinstance(model, str) else float(model)
    name = model if isinstance(model, str) else f"{model / 1e9:,.4g} B"
    rate, memory = DEVICES[device]

    def seconds(count: int) -> float:
        return cost.training_time_s(parameters, tokens, count, rate, efficiency, recompute)

    took = seconds(devices)
    counts = [2**k for k in range(16)]
    state = {"a copy each": cost.model_state_bytes(parameters),
             f"ZeRO 3, {devices:,}": cost.model_state_bytes(parameters, devices, 3)}
    heading = f"{name} parameters, {tokens / 1e9:,.10g} B tokens (predicted)"
    note = (f"{devices:,} devices at {efficiency:.0%}: {days_text(took)} · "
            f"{took * devices / 3600:,.0f} device-hours")
    with page(11, 4.6, heading, note) as picture:
        axes = picture.place(left=1.35, right=4.6, bottom=0.8, top=1.15)
        axes.plot(counts, [seconds(n) / DAY_S for n in counts], color=HUES[0])
        axes.plot([devices], [took / DAY_S], "o", color=HUES[0], markersize=10)
        Scale("devices", "{:,.0f}".format, 2, counts[::3]).apply(axes.xaxis)
        Scale("time (days)", "{:,.6g}".format).apply(axes.yaxis)
        axes.grid(True, which="major")
        _draw_state(picture.place(left=7.9, right=0.5, bottom=0.8, top=1.15), state, memory)
    words = "; ".join(f"{kind}: {bytes_text(n)}, {_fits(n, memory)}"
                      for kind, n in state.items())
    picture.alt = f"{heading}: {note}. {words}, of {bytes_text(memory)} on a device."
    return picture


def _fits(nbytes: float, memory: float) -> str:
    return "fits" if nbytes <= memory else "too large"


def _draw_state(axes: Axes, state: Mapping[str, float], memory: float) -> None:
    """Draw a bar for each way to keep the state, and a line at what a device has."""
    axes.bar(list(state), [n / 1e9 for n in state.values()], width=0.6,
             color=[ALARM if n > memory else HUES[2] for n in state.values()])
    top = 1.25 * max(memory, *state.values()) / 1e9
    for place, n in enumerate(state.values()):
        axes.text(place, n / 1e9 + 0.02 * top, f"{bytes_text(n)}\n{_fits(n, memory)}",
                  ha="center", va="bottom", size=11, color=INK,
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1}, zorder=5)
    axes.axhline(memory / 1e9, color=INK, linestyle=(0, (5, 2)), linewidth=1.5)
    axes.set_ylim(0, 1.12 * top)
    axes.set_ylabel("state (GB a device)")
    axes.grid(axis="y", color=FAINT)
