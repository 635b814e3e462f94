"""The frames of a collective: what `dtlab.recording.recorder` records, and `stepper` draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Arrow:
    """A message of this step; `pieces` are those it carried, () if that is unknown."""

    src: int
    dst: int
    nbytes: int
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveFrame:
    """The state of all ranks after step `step` of `steps`; step 0 is the start.

    holds[r, j, c]: how often rank c's contribution is in piece j of rank r. Shape (p, pieces, p).
    Where pieces are only moved (scatter, all-to-all, …): whether rank r has got piece j of
    rank c; in the end, whether it lies in its place (2: another one lies there).
    wanted[r, j, c]: whether it must be there in the end; judged[r, j]: whether piece j of rank r
    matters in the end at all (a reduce asks nothing of other ranks than the root).
    arrows: the messages that arrived in this step. Bytes are those of the little vector used here.
    """

    title: str
    step: int
    steps: int
    holds: np.ndarray
    wanted: np.ndarray
    judged: np.ndarray
    changed: np.ndarray  # (p, pieces): whether this step changed the piece
    arrows: tuple[Arrow, ...]
    sent_bytes: int
    total_bytes: int
    vector_bytes: int
    what: str  # "piece", or "arrivals" if only who knows of whose arrival could be watched
    wide: bool  # whether messages of any of the frames carry several pieces, or unknown ones

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        return int(self.holds.shape[0])

    @property
    def pieces(self) -> int:
        """Into how many pieces the vector is cut."""
        return int(self.holds.shape[1])

    @property
    def complete(self) -> np.ndarray:
        """complete[r, j]: piece j of rank r holds just what it must in the end, each part once."""
        right = (self.holds == self.wanted).all(axis=2)
        return np.asarray(right & self.judged)

    @property
    def done(self) -> bool:
        """True if every piece that matters is complete."""
        return bool(self.complete.sum() == self.judged.sum())

    @property
    def wrong(self) -> np.ndarray:
        """wrong[r, j]: holds what can't be undone: a part twice, a foreign or misplaced one."""
        own = np.eye(self.ranks, dtype=bool)[:, None, :]  # may be there until it is overwritten
        excess = (self.holds > (self.wanted | own)).any(axis=2)
        return np.asarray(excess & self.judged)
