"""A collective, step by step: play it, step through it, scrub."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dtlab.collectives import ALGORITHMS, default_of
from dtlab.errors import DtlabError
from dtlab.plots import Picture, stepper
from dtlab.plots.stepper import HEIGHT_IN
from dtlab.recording import Frame, frames_of, stepper_frames
from dtlab.widgets.explorer import Explorer, choice, dropdown
from dtlab.widgets.player import Player

MOST_RANKS = 16


class Stepper(Explorer):
    """Who holds which piece with whose contributions, after each step.

    Choose collective, algorithm and number of ranks from lists that read the registry; or give
    `fn(comm, x)`, such as your own ring, and watch that: `collective` then says what it ought to
    be. Shows errors of `fn` (a deadlock, an exception) instead of a picture.
    """

    def __init__(self, collective: str | Callable[..., Any] = "all_reduce",
                 algorithm: str | None = None, ranks: int = 4, *,
                 fn: Callable[..., Any] | None = None, root: int = 0):
        if not isinstance(collective, str):  # Stepper(my_ring)
            fn, collective = collective, "all_reduce"
        self.fn, self.root = fn, root
        self._frames: list[Frame] = []
        if fn is None:
            algorithms = list(ALGORITHMS.get(collective, {}))
            algorithm = algorithm or (default_of(collective) if algorithms else "")
            stepper_frames(collective, algorithm, ranks, root)  # raises for what doesn't exist
        self.collective = dropdown("collective", [*ALGORITHMS], collective) if fn is None else None
        self.algorithm = dropdown("algorithm", algorithms, algorithm) if fn is None else None
        self._watched = collective
        counts = sorted({*range(1, MOST_RANKS + 1), ranks})
        self.ranks = choice("ranks", [(str(p), p) for p in counts], ranks, width="260px")
        self.player = Player("step", "step", 1000, self._update)
        chosen = [self.collective, self.algorithm, self.ranks] if fn is None else [self.ranks]
        super().__init__(chosen, self.player.controls)
        if self.collective is not None and self.algorithm is not None:
            self.collective.observe(self._other_collective, "value")
            self.algorithm.observe(self._reload, "value")
        self.ranks.observe(self._reload, "value")
        self._load()

    @property
    def frame(self) -> Frame:
        """The frame that is shown."""
        return self._frames[self.player.at]

    def forward(self) -> None:
        """One step forward, unless at the end."""
        self.player.step(1)

    def back(self) -> None:
        """One step back, unless at the start."""
        self.player.step(-1)

    def static(self, step: int | None = None) -> Picture:
        """The frame that is shown, or that after `step` (−1: the last), as a matplotlib figure."""
        return stepper(self.frame if step is None else self._frames[step])

    def _other_collective(self, change: Any) -> None:
        assert self.algorithm is not None
        names = list(ALGORITHMS[change["new"]])
        self.algorithm.unobserve(self._reload, "value")  # else the frames are recorded twice
        self.algorithm.options = names
        self.algorithm.value = default_of(change["new"])
        self.algorithm.observe(self._reload, "value")
        self._load()

    def _reload(self, _: Any) -> None:
        self._load()

    def _record(self) -> list[Frame]:
        p = self.ranks.value
        root = min(self.root, p - 1)
        if self.fn is not None:
            return frames_of(self.fn, p, self._watched, root=root)
        assert self.collective is not None
        assert self.algorithm is not None
        return stepper_frames(self.collective.value, self.algorithm.value, p, root)

    def _load(self) -> None:
        """Record the frames that the controls ask for, and show the first step."""
        try:
            frames = self._record()
        except DtlabError as error:
            if not self._frames:
                raise
            self._say(str(error), alarm=True)
            return
        self._frames, self._name = frames, (frames[0].title, frames[0].ranks)
        last = len(frames) - 1
        self.player.load([f"{step} of {last}" for step in range(last + 1)], min(1, last))
        self._update()

    def _update(self) -> None:
        number = self.player.at
        self._show((self._name, number), partial(self._draw, self._frames[number]))
        for near in (number + 1, number - 1):
            if 0 <= near < len(self._frames):
                self._ahead((self._name, near), partial(self._draw, self._frames[near]))

    @staticmethod
    def _draw(frame: Frame) -> Picture:
        return stepper(frame, height_in=HEIGHT_IN)
