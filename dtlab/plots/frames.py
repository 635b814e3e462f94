"""A collective as a film: after each step, which pieces hold whose contributions.

The film is a recording, not a drawing: the algorithm runs in the simulator, on a network where
every message takes one second, and each rank contributes a vector of p pieces with p elements
each, all zero but for element r. Whatever the algorithm does, element c of a piece then says how
often rank c's contribution is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dtlab.collectives import ALGORITHMS
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.plots import goals
from dtlab.plots.watched import Notes, Region, WatchedComm, region_of, unwritten_is_nan
from dtlab.simulator import simulate
from dtlab.simulator.isolation import private
from dtlab.topology import check_ranks, uniform
from dtlab.trace import Trace

MOST_RANKS = 32  # more can't be read in one picture
FILMED_WITH = {("all_reduce", "double_tree"): {"segments": 1}}  # 16 a tree could not be followed


@dataclass(frozen=True)
class Arrow:
    """A message of this step; `pieces` are those it carried, () if that can't be told."""

    src: int
    dst: int
    nbytes: int
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """The state of all ranks after step `step` of `steps`; step 0 is the start.

    holds[r, j, c]: how often rank c's contribution is in piece j of rank r. Shape (p, pieces, p).
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
    what: str  # "piece", or "news" if only the spreading of news could be watched
    wide: bool  # whether messages anywhere in the film carry several pieces, or unknown ones

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
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
        """Whether every piece that matters is complete."""
        return bool(self.complete.sum() == self.judged.sum())

    @property
    def wrong(self) -> np.ndarray:
        """wrong[r, j]: holds something that can't be undone: a part twice, or a foreign one."""
        own = np.eye(self.ranks, dtype=bool)[:, None, :]  # may be there until it is overwritten
        excess = (self.holds > (self.wanted | own)).any(axis=2)
        return np.asarray(excess & self.judged)


def stepper_frames(
    collective: str, algorithm: str, ranks: int, root: int = 0, op: Any = "sum"
) -> list[Frame]:
    """The film of a registered algorithm: one frame for the start, one for each step.

    A step is a moment at which messages arrive. `op` only enters the title: contributions are
    counted by adding them. A double tree is filmed with one segment a tree. Raises `ConfigError`
    for names or ranks that don't exist.
    """
    known = ALGORITHMS.get(collective, {})
    if algorithm not in known:
        names = ", ".join(f"{c} {a}" for c, algorithms in ALGORITHMS.items() for a in algorithms)
        raise ConfigError(f"no algorithm {collective!r} {algorithm!r}; there are: {names}")
    title = f"{collective}, {algorithm}" + ("" if op == "sum" else f", {op}")
    options = FILMED_WITH.get((collective, algorithm), {})
    return frames_of(partial(known[algorithm], **options), ranks, collective, root=root,
                     title=title)


def frames_of(
    fn: Callable[..., Any], ranks: int, collective: str = "all_reduce", *, root: int = 0,
    title: str = "",
) -> list[Frame]:
    """The film of any function `fn(comm, x)`, such as a learner's own ring.

    `x` is a vector of ranks² elements, to be cut into `ranks` pieces; `fn` changes it in place or
    returns the result. collective: what `fn` ought to be, and so what a complete piece is.
    Parameters of `fn` named x, parts, root, op are given as that collective's would be; `fn` needs
    no others. Errors of `fn` come as from `simulate`. At most 32 ranks, else `ConfigError`.
    """
    check_ranks(ranks)
    if ranks > MOST_RANKS:
        raise ConfigError(f"a film of {ranks} ranks can't be read; take {MOST_RANKS} or fewer")
    if not 0 <= root < ranks:
        raise ConfigError(f"no root {root!r}; the ranks here are 0 to {ranks - 1}")
    goal = goals.goal_of(collective, ranks, root)

    def watched(comm: Comm) -> tuple[Notes, int]:
        notes = Notes()
        given = goals.arguments(fn, goal, comm.rank, ranks, root)
        for tensor in given.values():
            notes.watch(tensor, 0.0)
        result = private(fn)(WatchedComm(comm, notes, range(ranks)), **given)
        notes.watch(result, comm.now())
        notes.look(comm.now())
        return notes, _canvas(notes, result, list(given.values()), comm.rank, ranks)

    with unwritten_is_nan():
        run = simulate(watched, network=uniform(ranks, 1.0, float("inf")), echo=False)
    title = title or f"{collective}, {getattr(fn, '__name__', 'your function')}"
    return _Film(title, goal, run.trace, run.values).frames()


def _canvas(notes: Notes, result: Any, given: Sequence[Any], rank: int, ranks: int) -> int:
    """Which buffer shows the pieces: the result's if that lies in a whole vector; else the one in
    which the result, being one piece, stands in the rank's place; else the input's.

    0 if none does (a barrier moves no data at all).
    """
    whole = {memory: history[-1][1].view(ranks, ranks) for memory, history in notes.history.items()
             if history[-1][1].numel() == ranks * ranks}
    alike = [memory for memory, pieces in whole.items()
             if isinstance(result, torch.Tensor) and torch.equal(pieces[rank], result.flatten())]
    where = [region_of(tensor) for tensor in (result, *given)]
    candidates = [region.memory if region else 0 for region in where]
    return next((m for m in (candidates[0], *alike, *candidates[1:]) if m in whole), 0)


class _Film:
    """Cuts the notes of all ranks at the moments when messages arrived."""

    def __init__(self, title: str, goal: goals.Goal, trace: Trace,
                 values: Sequence[tuple[Notes, int]]):
        self.title, self.goal, self.trace = title, goal, trace
        self.notes = [notes for notes, _ in values]
        self.canvas = [memory for _, memory in values]
        self.times = sorted({m.end_s for m in trace.transfers})
        self.data = all(self.canvas)  # else show how the news spreads

    def frames(self) -> list[Frame]:
        """One frame for the start and one for each moment at which messages arrived."""
        p, goal = self.trace.ranks, self.goal
        states = self._states() if self.data else self._news()
        wanted, judged = goal.wanted, goal.judged
        if not self.data:
            wanted = np.ones((p, 1, p), bool)
            judged = np.full((p, 1), goal.spreads_news)
        vector_bytes = p * p * 4 if self.data else 0
        arrived: dict[float, list[Arrow]] = defaultdict(list)
        for m, pieces in zip(self.trace.transfers, self._carried(), strict=True):
            arrived[m.end_s].append(Arrow(m.src, m.dst, m.nbytes, pieces))
        wide = any(len(arrow.pieces) != 1 for arrows in arrived.values() for arrow in arrows)
        sent, total = 0, self.trace.sent_bytes()
        frames = []
        for step, (now, holds) in enumerate(zip([0.0, *self.times], states, strict=True)):
            arrows = tuple(arrived[now]) if step else ()
            sent += sum(arrow.nbytes for arrow in arrows)
            changed = (holds != states[max(0, step - 1)]).any(axis=2)
            frames.append(Frame(
                self.title, step, len(self.times), holds, wanted, judged, changed, arrows,
                sent, total, vector_bytes, "piece" if self.data else "news", wide,
            ))
        return frames

    def _states(self) -> list[np.ndarray]:
        """holds, after each step: what the canvas of each rank held by then."""
        p = self.trace.ranks
        states = []
        for step, now in enumerate([0.0, *self.times]):
            # What a rank does after its last message (divide, copy) belongs to the last step.
            limit = float("inf") if step == len(self.times) else now
            rows = []
            for notes, memory in zip(self.notes, self.canvas, strict=True):
                known = [held for when, held in notes.history[memory] if when <= limit]
                rows.append((known or [torch.zeros(p * p)])[-1].reshape(p, p).double().numpy())
            states.append(_counted(np.stack(rows)))
        return states

    def _news(self) -> list[np.ndarray]:
        """holds, after each step, of one piece: whose news can have reached the rank by then."""
        p = self.trace.ranks
        states = [np.eye(p, dtype=np.int64)[:, None, :]]
        known_at = [(-1.0, states[0])]
        for now in self.times:
            holds = states[-1].copy()
            for m in self.trace.transfers:
                if m.end_s == now:
                    before = next(s for when, s in reversed(known_at) if when <= m.start_s)
                    holds[m.dst] |= before[m.src]
            states.append(holds)
            known_at.append((now, holds))
        return states

    def _carried(self) -> list[tuple[int, ...]]:
        """Which pieces each message carried, by where its data lay at one of its two ends."""
        sides: dict[tuple[str, int, int | None, float], list[Region | None]] = defaultdict(list)
        for rank, notes in enumerate(self.notes):
            for kind, posted in (("sent", notes.sent), ("received", notes.received)):
                for side in posted:
                    sides[kind, rank, side.peer, side.when_s].append(side.region)
        carried = []
        for m in self.trace.transfers:
            ends = (("sent", m.src, m.dst, m.sent_s), ("received", m.dst, m.src, m.wanted_s))
            regions = [(end[1], sides[end].pop(0)) for end in ends if sides[end]]
            found = (self._pieces(rank, region) for rank, region in regions)
            carried.append(next((pieces for pieces in found if pieces), ()))
        return carried

    def _pieces(self, rank: int, region: Region | None) -> tuple[int, ...]:
        if region is None or region.memory != self.canvas[rank]:
            return ()
        p = self.trace.ranks
        return tuple(range(region.first // p, (region.first + region.length - 1) // p + 1))


def _counted(values: np.ndarray) -> np.ndarray:
    """How often each contribution is there: whole numbers, though an average divides them."""
    values = np.clip(values, -999, 999)  # what a learner's function leaves there may be anything
    whole = np.round(values)
    averaged = np.abs(values - whole).max(axis=2, keepdims=True, initial=0) > 1e-3
    least = np.where(values > 1e-6, values, np.inf).min(axis=2, keepdims=True, initial=np.inf)
    scaled = np.divide(values, least, where=np.isfinite(least), out=np.zeros_like(values))
    return np.asarray(np.where(averaged, np.round(scaled), whole).astype(np.int64))

