"""A collective, step by step: play it, step through it, scrub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlab.collectives import ALGORITHMS, default_of
from dtlab.errors import ConfigError
from dtlab.plots import Picture, stepper
from dtlab.plots.stepper import cargo, describe, heading, progress
from dtlab.recording import CollectiveFrame, frames_of, stepper_frames
from dtlab.widgets.player import Json, Player, looks, runs_of, select, slider

MOST_RANKS = 16
ON_A_PAGE = range(2, 9)  # ranks, where no kernel records others


class Stepper(Player):
    """The pieces that each rank holds, with their contributions, after each step.

    Choose collective, algorithm and number of ranks from lists that read the registry; or give
    `fn(comm, x)`, such as your own ring, and watch that: `collective` then says what it ought to
    be. Shows errors of `fn` (a deadlock, an exception) instead of a drawing.
    """

    drawing = "stepper"

    def __init__(self, collective: str | Callable[..., Any] = "all_reduce",
                 algorithm: str | None = None, ranks: int = 4, *,
                 fn: Callable[..., Any] | None = None, root: int = 0):
        if not isinstance(collective, str):  # Stepper(my_ring)
            fn, collective = collective, "all_reduce"
        self.fn, self.root, self._watched = fn, root, collective
        self.has_runs = fn is None and root == 0
        self._counts = sorted({*range(1, MOST_RANKS + 1), ranks})
        chosen: Json = {"ranks": ranks}
        if fn is None:
            known = ALGORITHMS.get(collective)
            algorithm = algorithm or (default_of(collective) if known else "")
            chosen = {"collective": collective, "algorithm": algorithm, "ranks": ranks}
        super().__init__(chosen)

    @property
    def frame(self) -> CollectiveFrame:
        """The frame that is shown."""
        return self._frames[self.at]

    def static(self, step: int | None = None) -> Picture:
        """The frame that is shown, or that after `step` (−1: the last), as a matplotlib figure."""
        frames = self._frames
        if step is not None and step not in range(-len(frames), len(frames)):
            raise ConfigError(f"static(step={step}): there are {len(frames) - 1} steps, after each "
                              "of which there is a frame; 0 is the beginning, -1 the last")
        return stepper(self.frame if step is None else frames[step])

    def _answer(self) -> Json:
        ranks = self.choice["ranks"]
        root, controls = min(self.root, ranks - 1), [slider("ranks", "ranks", self._counts)]
        if self.fn is not None:
            frames = frames_of(self.fn, ranks, self._watched, root=root)
        else:
            collective, algorithm = self.choice["collective"], self.choice["algorithm"]
            known = ALGORITHMS.get(collective, {})
            if known and algorithm not in known and hasattr(self, "_frames"):
                algorithm = default_of(collective)
                self.choice = self.choice | {"algorithm": algorithm}
            frames = stepper_frames(collective, algorithm, ranks, root)
            controls = [select("collective", "collective", [*ALGORITHMS]),
                        select("algorithm", "algorithm", [*known]), *controls]
        self._frames = frames
        return shown(frames) | {"controls": controls}


def shown(frames: list[CollectiveFrame]) -> Json:
    """Frames as a player takes them: arrays as strings of a digit a value."""
    first, last = frames[0], len(frames) - 1
    moments = [{
        "title": heading(frame), "note": progress(frame), "words": describe(frame),
        "label": f"{frame.step} of {last}", "step": frame.step,
        "holds": _digits(frame.holds), "changed": _digits(frame.changed & bool(frame.step)),
        "state": "".join("w" if wrong else "c" if complete else "j" if judged else " "
                         for wrong, complete, judged in zip(
                             frame.wrong.flat, frame.complete.flat, frame.judged.flat,
                             strict=True)),
        "arrows": [[a.src, a.dst, a.pieces[0] if len(a.pieces) == 1 and not frame.wide else -1,
                    cargo(a, frame)] for a in frame.arrows],
    } for frame in frames]
    scene = {"size": [990, 594], "ranks": first.ranks, "pieces": first.pieces, "steps": last,
             "wide": first.wide, "arrivals": first.what == "arrivals",
             "wanted": _digits(first.wanted), "looks": looks(first.ranks)}
    return {"scene": scene, "moments": moments, "at": min(1, last)}


def _digits(values: np.ndarray) -> str:
    return "".join("-" if value < 0 else str(min(int(value), 9)) for value in values.flat)


def runs() -> list[Json]:
    """All that a page without a kernel may choose."""
    return runs_of(Stepper(), (
        {"collective": collective, "algorithm": algorithm, "ranks": ranks}
        for collective, algorithms in ALGORITHMS.items() for algorithm in algorithms
        for ranks in ON_A_PAGE))
