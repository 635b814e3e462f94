"""Predicted against measured: a dot for each, near the diagonal if the prediction is right."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from dtlab.errors import ConfigError
from dtlab.plots.palette import HUES, INK, QUIET
from dtlab.plots.picture import Picture, page


def predictions(pairs: Mapping[str, Sequence[tuple[float, float]]], unit: str, title: str,
                note: str = "") -> Picture:
    """The (measured, predicted) pairs of each group, above 0, on logarithmic scales, a colour for
    each group. Dashed: a fifth off. Raises `ConfigError` if there is none."""
    every = [pair for group in pairs.values() for pair in group]
    if not every or min(map(min, every)) <= 0:
        raise ConfigError("predictions draws pairs of numbers above 0")
    error = statistics.median(abs(ours / real - 1) for real, ours in every)
    heading = f"{title}: half of {len(every)} are within {error:.0%}"
    low, high = min(map(min, every)) / 1.3, max(map(max, every)) * 1.3
    with page(8.5, 6.6, heading, note) as picture:
        axes = picture.place(left=1.0, right=0.3, bottom=1.3, top=1.05)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        for factor, style in ((1.0, "-"), (1.2, "--"), (1 / 1.2, "--")):
            axes.plot([low, high], [factor * low, factor * high], style, color=QUIET, linewidth=1)
        for (name, group), color in zip(pairs.items(), HUES, strict=False):
            axes.plot(*zip(*group, strict=True), "o", color=color, markersize=5, alpha=0.7,
                      label=name, markeredgewidth=0)
        axes.set_xlabel(f"measured, {unit}", loc="right", color=INK)
        axes.set_ylabel(f"predicted, {unit}", loc="top", color=INK)
        picture.explain(axes.get_legend_handles_labels()[0], len(pairs))
    groups = "; ".join(f"{name}: {len(group)}" for name, group in pairs.items())
    picture.alt = f"{heading}. {note} {groups}."
    return picture
