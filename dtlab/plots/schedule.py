"""A pipeline schedule in time: what each rank does when, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dtlab.parallel.pipeline import Action, Schedule, Timing
from dtlab.plots.palette import FAINT, HUES, INK, PAPER, QUIET, ink_on, line_style, mix
from dtlab.plots.picture import Picture, clock_name, page
from dtlab.trace import Trace

WIDTH_IN = 11.0
KINDS = {"F": ("forward", HUES[0]), "B": ("full backward", HUES[2]),
         "I": ("input gradient", HUES[4]), "W": ("weight gradient", HUES[1])}
Spans = Sequence[Sequence[tuple[Action, float, float]]]  # by rank


def schedule(plan: Schedule, *, F: float = 1.0, B: float = 2.0, W: float | None = None,
             comm: float = 0.0, trace: Trace | None = None, title: str = "", held: bool = True,
             room: int = 0) -> Picture:
    """Ranks × time: a block for each action, with its micro-batch; darker in later chunks.

    F, B, W, comm: as in `Schedule.time`. trace: of a run of `Pipeline`, drawn on the same axis,
    from its first action on. held: below, the micro-batches whose activations each rank holds.
    room: as high as for this many ranks, at least; fewer have higher rows. Raises `ConfigError` if
    the schedule can't run.
    """
    timing = plan.time(F, B, W, comm)
    panels: dict[str, Spans] = {"planned": timing.spans}
    if trace is not None:
        panels[clock_name(trace.virtual)] = spans_of(trace, plan)
    end = max(end for spans in panels.values() for row in spans for *_, end in row)
    figures = figures_of(timing)
    what = title or f"{plan.ranks} ranks, {plan.micro_batches} micro-batches"
    heading = f"{what} ({' and '.join(panels)})"
    room = max(room, plan.ranks)
    rows_in = 0.42 * room * len(panels) + 0.35 * len(panels)
    height_in = 2.1 + rows_in + (1.5 if held else 0.0)
    with page(WIDTH_IN, height_in, heading, figures) as picture:
        bottom = 2.05 if held else 0.65
        axes = picture.place(left=1.55, right=0.3, bottom=bottom, top=1.4)
        _draw_panels(axes, panels, plan, end)
        if held:
            below = picture.place(left=1.55, right=0.3, bottom=0.65,
                               top=height_in - 0.65 - 1.15)
            _draw_held(below, timing, plan, end)
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel("time (s)")
        present = {action.kind for row in plan.rows for action in row}
        handles = [Patch(facecolor=color, edgecolor=PAPER, label=f"{kind}: {name}")
                   for kind, (name, color) in KINDS.items() if kind in present]
        handles += _chunk_handles(len(plan.stages_of(0)))
        picture.legend(handles=handles, loc="upper left", ncols=len(handles), frameon=False,
                       fontsize=10.5, borderaxespad=0, columnspacing=1.4,
                       bbox_to_anchor=(1.55 / WIDTH_IN, 1 - 0.97 / height_in))
    idle = "; ".join(f"rank {rank} works {sum(e - s for _, s, e in row):.4g} s and holds at most "
                     f"{timing.held[rank]:.3g}" for rank, row in enumerate(timing.spans))
    picture.alt = f"{heading}: {figures}. {idle}."
    return picture


def figures_of(timing: Timing) -> str:
    """Time, bubble and the most held, in a line."""
    return (f"elapsed {timing.elapsed:.4g} s · bubble {timing.bubble:.4g} s, "
            f"{timing.bubble_fraction:.1%} of the time · most held "
            f"{max(timing.held):.3g} micro-batches")


def color_of(action: Action, plan: Schedule) -> str:
    """The colour of a block: its kind's, darker in later chunks."""
    chunks = plan.stages_of(plan.rank_of[action.stage])
    return _darker(KINDS[action.kind][1], chunks.index(action.stage), len(chunks))


def _darker(color: str, chunk: int, chunks: int) -> str:
    return mix(color, INK, 0.45 * chunk / chunks)


def _chunk_handles(chunks: int) -> list[Patch]:
    """Build the legend of the chunks of a rank: the first and the last, if there are several."""
    return [Patch(facecolor=_darker(FAINT, chunk, chunks), edgecolor=PAPER,
                  label=f"chunk {chunk + 1}" + (f" of {chunks}" if chunk else ""))
            for chunk in ((0, chunks - 1) if chunks > 1 else ())]


def held_of(timing: Timing, plan: Schedule, rank: int) -> tuple[list[float], list[float]]:
    """Return when the activations that `rank` holds change, and to how many micro-batches."""
    change = {"F": 1.0, "B": -1.0, "W": -1.0}
    share = len(plan.stages_of(rank))
    moments, held = [0.0], [0.0]
    for action, start, stop in timing.spans[rank]:
        step = change.get(action.kind, 0.0)
        if step:
            moments.append(start if step > 0 else stop)
            held.append(held[-1] + step / share)
    return moments, held


def spans_of(trace: Trace, plan: Schedule) -> list[list[tuple[Action, float, float]]]:
    """Return each rank's actions in a run of `plan`, in seconds from the first action on."""
    known = {str(action): action for row in plan.rows for action in row}
    rows: list[list[tuple[Action, float, float]]] = [[] for _ in plan.rows]
    for span in trace.spans:
        if span.label in known and span.kind == "compute":
            rows[span.rank].append((known[span.label], span.start_s, span.end_s))
    begin = min((start for row in rows for _, start, _ in row), default=0.0)
    return [[(action, start - begin, end - begin) for action, start, end in row] for row in rows]


def _draw_panels(axes: Axes, panels: Mapping[str, Spans], plan: Schedule, end: float
                 ) -> None:
    """Draw a row a rank for each of `panels`: planned, simulated or measured."""
    ticks, labels = [], []
    for number, (name, spans) in enumerate(panels.items()):
        top = number * (plan.ranks + 0.9)
        for rank, row in enumerate(spans):
            y = top + rank
            ticks.append(y)
            labels.append(f"rank {rank}" if len(panels) == 1 else f"{name} {rank}")
            axes.barh(y, end, height=0.86, color=FAINT, alpha=0.45, linewidth=0)
            for action, start, stop in row:
                _draw_block(axes, y, action, start, stop, end, plan)
    axes.set_yticks(ticks, labels, fontsize=11)
    axes.set_ylim(ticks[-1] + 0.6, -0.6)
    axes.set_xlim(0, end)
    axes.tick_params(axis="y", length=0)


def _draw_block(axes: Axes, y: float, action: Action, start: float, stop: float, end: float,
                plan: Schedule) -> None:
    color = color_of(action, plan)
    axes.barh(y, stop - start, left=start, height=0.86, color=color, edgecolor=PAPER,
              linewidth=0.7)
    if (stop - start) / end > 0.011 * len(str(action.micro)):
        kind = action.kind if (stop - start) / end > 0.03 else ""
        axes.text((start + stop) / 2, y, f"{kind}{action.micro}", ha="center", va="center",
                  fontsize=9.5, color=ink_on(color))


def _draw_held(axes: Axes, timing: Timing, plan: Schedule, end: float) -> None:
    for rank in range(plan.ranks):
        moments, held = held_of(timing, plan, rank)
        style = line_style(rank)
        axes.step([*moments, end], [*held, held[-1]], where="post", color=style.color,
                  linestyle=style.dashes, linewidth=1.8, label=f"rank {rank}")
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.5 * max(timing.held))  # room for the legend
    axes.set_ylabel("held", color=QUIET, fontsize=11)
    axes.set_xlabel("time (s)")
    if plan.ranks <= 8:
        axes.legend(loc="upper right", ncols=plan.ranks, fontsize=9, frameon=False)
