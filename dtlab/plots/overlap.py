"""Backward and the reductions beside it: how much of a training step only communicates."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dtlab.errors import ConfigError
from dtlab.plots.palette import ALARM, FAINT, INK, PAPER, QUIET, ink_on, mix
from dtlab.plots.picture import Picture, clock_name, page
from dtlab.trace import Trace, check_is_trace
from dtlab.units import seconds_text, time_unit

WIDTH_IN = 11.0
_KINDS = {"forward": FAINT, "backward": QUIET}
_BUCKETS = (INK, mix(INK, PAPER, 0.28))  # in turn: a bucket is no rank, and has no rank's colour


class TrainingStep(NamedTuple):
    """One training step of rank 0, in seconds from its beginning.

    work: (start, end, "forward" or "backward") of each layer. reductions: (start, end, bytes sent)
    of each. end: when the last of all ends.
    """

    work: list[tuple[float, float, str]]
    reductions: list[tuple[float, float, int]]
    end: float

    @property
    def exposed_s(self) -> float:
        """The seconds from the end of backward to the end of the step."""
        return self.end - self.work[-1][1]


def step_of(trace: Trace) -> TrainingStep:
    """The step of rank 0 in `trace`, in which layers are marked by `charge_compute`, and gradients
    travel by rings. Raises `ConfigError` if no layer is marked."""
    check_is_trace(trace)
    marks = [span for span in trace.spans if span.rank == 0 and span.label in _KINDS]
    if not marks:
        raise ConfigError("overlap: no layer is marked in this trace; use parallel.charge_compute")
    begin = marks[0].start_s
    sends = [m for m in trace.transfers if m.src == 0 and begin <= m.start_s]
    waits = [w.start_s for w in trace.waits if w.rank == 0 and w.stream == 0]
    work = []
    for mark, following in pairwise([*marks, None]):
        assert mark is not None
        until = [w for w in waits if w >= mark.end_s][:1]
        if following is not None:
            until.append(following.start_s)
        end = max(mark.end_s, min(until, default=mark.end_s))
        work.append((mark.start_s - begin, end - begin, mark.label))
    per_ring = 2 * (trace.ranks - 1)
    rings = [sends[i : i + per_ring] for i in range(0, len(sends), per_ring)]
    reductions = [(min(m.start_s for m in ring) - begin, max(m.end_s for m in ring) - begin,
                   sum(m.nbytes for m in ring)) for ring in rings]
    end = max([work[-1][1], *(end for _, end, _ in reductions)])
    return TrainingStep(work, reductions, end)


def overlap(traces: Mapping[str, Trace], title: str = "Backward, and what travels beside it", *,
            note: str = "") -> Picture:
    """A panel for each trace of one training step, all to one scale: above, what rank 0 computes;
    below, its all-reduces, numbered; in red what is exposed, when it only communicates.

    note: stands beside the figures. Raises `ConfigError` for a trace without marked layers.
    """
    if not traces:
        raise ConfigError("overlap needs at least one trace")
    steps = {name: step_of(trace) for name, trace in traces.items()}
    longest = max(step.end for step in steps.values())
    seconds, unit = time_unit(longest)
    scale = 1 / seconds
    clocks = {clock_name(trace.virtual) for trace in traces.values()}
    heading = f"{title} ({' and '.join(sorted(clocks))})"
    figures = " · ".join(f"{name}: {seconds_text(step.exposed_s)} exposed"
                         for name, step in steps.items())
    summary = f"{figures} · {note}" if note else figures
    height_in = 2.4 + 1.15 * len(steps)
    with page(WIDTH_IN, height_in, heading, summary) as picture:
        axes = picture.place(left=2.1, right=0.4, bottom=1.2, top=1.0)
        for row, (name, step) in enumerate(steps.items()):
            _draw(axes, 2.4 * row, step, scale)
            for down, text in ((0, f"{name}\ncompute"), (1, "all-reduces")):
                axes.text(-0.012, 2.4 * row + down, text, ha="right", va="center", size=12,
                          transform=axes.get_yaxis_transform(), color=INK)
        axes.set_xlim(0, 1.02 * longest * scale)
        axes.set_ylim(2.4 * len(steps) - 0.8, -0.7)
        axes.set_yticks([])
        axes.set_xlabel(f"{unit} since the step began")
        picture.explain([*(Patch(facecolor=color, label=kind) for kind, color in _KINDS.items()),
                         Patch(facecolor=INK, label="an all-reduce, numbered"),
                         Patch(facecolor="none", edgecolor=ALARM, hatch="///",
                               label="exposed: only communication")], 4)
    words = "; ".join(f"{name}: backward ends after {seconds_text(step.work[-1][1])}, the last of "
                      f"{len(step.reductions)} all-reduces after {seconds_text(step.end)}"
                      for name, step in steps.items())
    picture.alt = f"{heading}: {summary}. {words}."
    return picture


def _draw(axes: Axes, y: float, step: TrainingStep, scale: float) -> None:
    for start, end, kind in step.work:
        axes.barh(y, (end - start) * scale, left=start * scale, height=0.8, color=_KINDS[kind],
                  edgecolor=PAPER, linewidth=0.6)
    for kind in _KINDS:
        spans = [(start, end) for start, end, label in step.work if label == kind]
        if spans:
            middle = (spans[0][0] + spans[-1][1]) / 2 * scale
            axes.text(middle, y, kind, ha="center", va="center", size=11,
                      color=ink_on(_KINDS[kind]))
    for number, (start, end, _) in enumerate(step.reductions, 1):
        color = _BUCKETS[(number - 1) % 2]
        thin = (end - start) < 0.01 * step.end
        axes.barh(y + 1, (end - start) * scale, left=start * scale, height=0.8, color=color,
                  edgecolor=color if thin else PAPER, linewidth=0.6)
        if (end - start) > 0.03 * step.end:
            axes.text((start + end) / 2 * scale, y + 1, str(number), ha="center", va="center",
                      size=11, color=ink_on(color))
    if step.exposed_s > 0:
        axes.barh(y, step.exposed_s * scale, left=step.work[-1][1] * scale, height=0.8,
                  color="none", edgecolor=ALARM, hatch="///", linewidth=1.2)
