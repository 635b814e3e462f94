"""The step time of each layout, term by term: a bar for each, the fastest on top."""

from __future__ import annotations

from collections.abc import Sequence

from dtlab.errors import ConfigError
from dtlab.parallel.planner import Plan
from dtlab.plots.palette import HUES, INK, QUIET
from dtlab.plots.picture import Picture, page
from dtlab.plots.shapes import draw_stack
from dtlab.units import bytes_text

# What is drawn as one: name, the planner's terms, look.
_GROUPS = (
    ("products, attention", ("matrix products", "output layer", "attention"), HUES[0], ""),
    ("memory traffic", ("memory traffic", "optimizer"), HUES[2], ""),
    ("launches", ("launches",), HUES[3], ""),
    ("recomputation", ("recomputation",), HUES[1], "//"),
    ("tensor, context, experts", ("tensor parallel", "context parallel", "experts"), HUES[4], ".."),
    ("bubble and its messages", ("bubble", "pipeline messages"), HUES[6], "xx"),
    ("parameters", ("parameters",), HUES[5], "\\\\"),
    ("gradients", ("gradients",), HUES[7], "--"),
)


def plans(shown: Sequence[Plan], title: str = "Layouts", note: str = "",
          simulated: Sequence[float | None] = (), *, rows: int = 0) -> Picture:
    """A bar for each of `shown`, which all fit: the seconds of its step by term. rows: room for so
    many, at least.

    simulated: seconds that the simulator gave for the first ones, marked with a line. Raises
    `ConfigError` for none, or for a plan that was rejected.
    """
    if not shown or any(plan.why_not for plan in shown):
        raise ConfigError("plans draws one or more layouts that fit")
    most = max(plan.step_s for plan in shown)
    scale, unit = (1.0, "s") if most >= 1 else (1e3, "ms")
    heading = f"{title}: the best takes {shown[0].step_s * scale:.3g} {unit} a step (predicted)"
    lines, rows = [], max(rows, len(shown))
    with page(11.0, 2.2 + 0.72 * rows, heading, note) as picture:
        axes = picture.place(left=0.3, right=2.6, bottom=1.25, top=1.05)
        for row, plan in enumerate(shown):
            draw_stack(axes, row, [
                (name, sum(plan.terms[term] for term in terms) * scale, color, hatch)
                for name, terms, color, hatch in _GROUPS], height=0.42, named=not row)
            axes.annotate(str(plan.layout), (0, row - 0.27), (1, 2), size=11.5, color=INK,
                          textcoords="offset points", va="bottom")
            text = (f"{plan.step_s * scale:.3g} {unit} · {bytes_text(plan.memory_bytes)} · "
                    f"{plan.efficiency:.0%}")
            lines.append(f"{plan.layout}: {text}")
            ran = simulated[row] if row < len(simulated) else None
            if ran is not None:
                axes.plot([ran * scale] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=2.5)
                text += f"\nsimulated {ran * scale:.3g} {unit}"
                lines[-1] += f", simulated {ran * scale:.3g} {unit}"
            axes.annotate(text, (1, row), (10, 0), xycoords=("axes fraction", "data"), size=12,
                          textcoords="offset points", va="center", color=INK)
        axes.set_xlim(0, 1.01 * most * scale)
        axes.set_ylim(rows - 0.6, -0.75)
        axes.set_yticks([])
        axes.set_xlabel(f"{unit} a step", loc="right", color=QUIET)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.5 / (0.72 * rows)),
                    ncols=4, handlelength=1.5, columnspacing=1.2)
    picture.alt = f"{heading}. {note} {'; '.join(lines)}."
    return picture


def no_plan(title: str, note: str, rows: int) -> Picture:
    """Draw a sentence, in the place of `plans` where nothing fits."""
    with page(11.0, 2.2 + 0.72 * rows, f"{title}: nothing fits", note) as picture:
        picture.alt = f"{title}: nothing fits. {note}."
        return picture
