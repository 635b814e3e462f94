"""A collective as frames: after each step, which pieces hold whose contributions.

Frames are recorded, not drawn by hand: the algorithm runs in the simulator, on a network where
every message takes one second, and those posted together the same one. Each rank contributes a
vector of pieces with p elements each, all zero but for element r. Whatever the algorithm does,
element c of a piece then says how often rank c's contribution is in it. There are p pieces, unless
the algorithm cuts the vector otherwise.

Where pieces are only moved, never added, their contents tell which they are: see
`dtlab.recording.ownership`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from dtlab.checks import check_name, is_whole
from dtlab.collectives import ALGORITHMS
from dtlab.collectives.registry import check_algorithm
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ranks.unwritten import unwritten_is_nan
from dtlab.recording import ownership
from dtlab.recording.frames import Arrow, CollectiveFrame
from dtlab.recording.specification import Specification, arguments
from dtlab.recording.watched import BufferRegion, Notes, Posted, WatchedComm, region_of
from dtlab.simulator import simulate
from dtlab.topology import check_ranks, uniform
from dtlab.trace import Message, Trace

MOST_RANKS = 32  # more can't be read in one picture
MOST_PIECES = 16
RECORDED_WITH = {("all_reduce", "double_tree"): {"segments": 1}}  # 16 a tree could not be followed


class _Seen(NamedTuple):
    """A rank's notes, the buffer that shows its pieces, the one that shows them until that
    changes (the same one, unless partial sums stand elsewhere), and what its function returned."""

    notes: Notes
    canvas: int
    sums: int
    result: Any

    @property
    def buffers(self) -> tuple[int, int]:
        """The two of them."""
        return self.canvas, self.sums


def stepper_frames(
    collective: str, algorithm: str, ranks: int, root: int = 0) -> list[CollectiveFrame]:
    """The frames of a registered algorithm: one for the start, one for each step.

    A step is a moment at which messages arrive. A double tree is recorded with one segment a tree.
    Raises `ConfigError` for names or ranks that don't exist.
    """
    check_algorithm(collective, algorithm, auto=False)
    options = RECORDED_WITH.get((collective, algorithm), {})
    function = partial(ALGORITHMS[collective][algorithm], **options)
    return frames_of(function, ranks, collective, root=root, title=f"{collective}, {algorithm}")


def frames_of(fn: Callable[..., Any], ranks: int, collective: str = "all_reduce", *, root: int = 0,
              title: str = "") -> list[CollectiveFrame]:
    """The frames of any function `fn(comm, x)`, such as a learner's own ring.

    `x` is a vector of ranks² elements, to be cut into `ranks` pieces, or of another length if `fn`
    cuts it into others; `fn` changes it in place or returns the result. collective: what `fn` ought
    to be, and so what a complete piece is. Parameters of `fn` named x, parts, root, op are given as
    that collective's would be; `fn` needs no others. Errors of `fn` come as from `simulate`. At
    most 32 ranks, else `ConfigError`.
    """
    if not callable(fn) or isinstance(fn, type):
        raise ConfigError(f"frames are recorded of a function of (comm, x), not of {fn!r}")
    check_ranks(ranks)
    check_name("collective", collective)
    if ranks > MOST_RANKS:
        raise ConfigError(f"frames of {ranks} ranks can't be read; take {MOST_RANKS} or fewer")
    if not is_whole(root) or not 0 <= root < ranks:
        raise ConfigError(f"no root {root!r}; the ranks here are 0 to {ranks - 1}")
    inner = getattr(fn, "func", fn)  # of a functools.partial
    title = title or f"{collective}, {getattr(inner, '__name__', 'your function')}"
    recorded = first = _record(fn, title, Specification.of(collective, ranks, root), root)
    for _ in range(3):  # few elements may not show all cuts
        pieces = recorded.natural_pieces()
        if pieces == recorded.pieces:
            return recorded.frames()
        recorded = _record(fn, title, Specification.of(collective, ranks, root, pieces), root)
    return first.frames()


def _record(fn: Callable[..., Any], title: str, spec: Specification, root: int) -> _Recording:
    """Run `fn` on every rank, watched."""
    p, pieces = len(spec.wanted), spec.wanted.shape[1]

    def watched(comm: Comm) -> _Seen:
        notes = Notes()
        given = arguments(fn, spec, comm.rank, p, root)
        for tensor in given.values():
            notes.watch(tensor, 0.0)
        result = fn(WatchedComm(comm, notes, range(p)), **given)
        notes.watch(result, comm.now())
        notes.look(comm.now())
        tensors = list(given.values())
        canvas = _canvas(notes, result, tensors, comm.rank, (pieces, p))
        sums = _elsewhere(notes, canvas, tensors) or canvas
        returned = isinstance(result, torch.Tensor)
        last = next((t for t in reversed(tensors) if isinstance(t, torch.Tensor)), None)
        return _Seen(notes, canvas, sums, result if returned else last)

    with unwritten_is_nan():
        run = simulate(watched, network=uniform(p, 1.0, math.inf), overhead_s=0.0, echo=False)
    return _Recording(title, spec, run.trace, run.values)


def _canvas(notes: Notes, result: Any, given: Sequence[Any], rank: int, shape: tuple[int, int]
            ) -> int:
    """Choose the buffer to show: the result's if that lies in a whole vector; else the one in
    which the result, being one piece, stands in the rank's place; else the input's.

    0 if none does (a barrier moves no data at all).
    """
    whole = {memory: history[-1][1].view(shape) for memory, history in notes.history.items()
             if history[-1][1].numel() == shape[0] * shape[1]}
    alike = [memory for memory, pieces in whole.items() if isinstance(result, torch.Tensor)
             and rank < len(pieces) and torch.equal(pieces[rank], result.flatten())]
    where = [region_of(tensor) for tensor in (result, *given)]
    candidates = [region.memory if region else 0 for region in where]
    return next((m for m in (candidates[0], *alike, *candidates[1:]) if m in whole), 0)


def _elsewhere(notes: Notes, canvas: int, given: Sequence[Any]) -> int:
    """Return the other buffer, as large, from which messages were sent before any was sent from the
    one that was given (as by a reduce, which leaves that as it is); 0 if there is none."""
    if canvas not in [region.memory for region in map(region_of, given) if region]:
        return 0
    sent = [side.region.memory for side in notes.sent if side.region]
    numel = notes.history[canvas][0][1].numel()
    return next((m for m in takewhile(lambda m: m != canvas, sent)
                 if notes.history[m][-1][1].numel() == numel), 0)


class _Recording:
    """Cuts the notes of all ranks at the moments when messages arrived."""

    def __init__(self, title: str, spec: Specification, trace: Trace, seen: Sequence[_Seen]):
        self.title, self.spec, self.trace, self.seen = title, spec, trace, seen
        self.pieces = int(spec.wanted.shape[1])
        self.times = sorted({m.end_s for m in trace.transfers})
        self.sides = self._both_sides()
        # else show whose arrival each rank knows of
        self.data = spec.moves or all(each.canvas for each in seen)

    def natural_pieces(self) -> int:
        """Count pieces into which messages cut the vector; p if it can't be shown in as many."""
        p, whole = self.trace.ranks, self.pieces * self.trace.ranks
        if self.spec.moves or not self.data or not self.spec.judged.all(axis=1).any():
            return p
        regions = [(rank, side.region) for m, sides in self.sides
                   for rank, side in zip((m.src, m.dst), sides, strict=True) if side]
        cuts = {0, whole} | {edge for rank, region in regions
                             if region and region.memory in self.seen[rank].buffers
                             for edge in (region.first, region.first + region.length)}
        if all(cut % p == 0 for cut in cuts):
            return self.pieces
        return len(cuts) - 1 if len(cuts) - 1 <= MOST_PIECES else p

    def frames(self) -> list[CollectiveFrame]:
        """One frame for the start and one for each moment at which messages arrived."""
        p, spec = self.trace.ranks, self.spec
        record = self._moved if spec.moves else self._states if self.data else self._arrivals
        states = record()
        wanted, judged = spec.wanted, spec.judged
        if not self.data:
            wanted = np.ones((p, 1, p), bool)
            judged = np.full((p, 1), spec.synchronizes)
        vector_bytes = self.pieces * p * 4 if self.data else 0
        arrived: dict[float, list[Arrow]] = defaultdict(list)
        for m, sides in self.sides:
            arrived[m.end_s].append(Arrow(m.src, m.dst, m.nbytes, self._carried(m, sides)))
        wide = any(len(arrow.pieces) != 1 for arrows in arrived.values() for arrow in arrows)
        sent, total = 0, self.trace.sent_bytes()
        frames = []
        for step, (now, holds) in enumerate(zip([0.0, *self.times], states, strict=True)):
            arrows = tuple(arrived[now]) if step else ()
            sent += sum(arrow.nbytes for arrow in arrows)
            changed = (holds != states[max(0, step - 1)]).any(axis=2)
            frames.append(CollectiveFrame(
                self.title, step, len(self.times), holds, wanted, judged, changed, arrows,
                sent, total, vector_bytes, "piece" if self.data else "arrivals", wide))
        return frames

    def _states(self) -> list[np.ndarray]:
        """holds, after each step: what the canvas of each rank held by then."""
        p = self.trace.ranks
        states = []
        for step, now in enumerate([0.0, *self.times]):
            # What a rank does after its last message (divide, copy) belongs to the last step.
            limit = float("inf") if step == len(self.times) else now
            rows = []
            for each in self.seen:
                history = each.notes.history
                known = [held for when, held in history[each.canvas] if when <= limit]
                if len(known) < 2:  # not changed yet
                    known += [held for when, held in history[each.sums]
                              if when <= limit and held.any()]
                last = (known or [torch.zeros(self.pieces * p)])[-1]
                rows.append(last.reshape(self.pieces, p).double().numpy())
            states.append(_counted(np.stack(rows)))
        return states

    def _arrivals(self) -> list[np.ndarray]:
        """holds, after each step, of one piece: of whose arrival the rank can know by then."""
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

    def _moved(self) -> list[np.ndarray]:
        """holds, after each step, where pieces are only moved; at last, by the results."""
        p, spec = self.trace.ranks, self.spec
        given = [np.any([ownership.pieces_in(history[0][1], p) for history in
                         each.notes.history.values() if history[0][0] == 0.0], axis=0)
                 for each in self.seen]
        states = [np.stack(given).astype(np.int64)]
        for now in self.times:
            holds = states[-1].copy()
            for m, (sent, _) in self.sides:
                if sent and m.end_s == now:
                    holds[m.dst] |= ownership.pieces_in(sent.data, p)
            states.append(holds)
        for rank, each in enumerate(self.seen):
            wanted = spec.wanted[rank] & spec.judged[rank][:, None]
            ownership.correct_order_(states[-1][rank], wanted, each.result)
        return states

    def _both_sides(self) -> list[tuple[Message, tuple[Posted | None, Posted | None]]]:
        """Each message with what its sender and its receiver posted."""
        posted: dict[tuple[str, int, int | None, float], list[Posted]] = defaultdict(list)
        for rank, each in enumerate(self.seen):
            for kind, ends in (("sent", each.notes.sent), ("received", each.notes.received)):
                for end in ends:
                    posted[kind, rank, end.peer, end.when_s].append(end)

        def take(kind: str, rank: int, peer: int, when_s: float) -> Posted | None:
            ends = posted[kind, rank, peer, when_s]
            return ends.pop(0) if ends else None

        return [(m, (take("sent", m.src, m.dst, m.sent_s),
                     take("received", m.dst, m.src, m.wanted_s))) for m in self.trace.transfers]

    def _carried(self, m: Message, sides: tuple[Posted | None, Posted | None]) -> tuple[int, ...]:
        """Return the pieces of a message: by its contents, or their places at one of its ends."""
        if self.spec.moves:
            found = ownership.pieces_in(sides[0].data if sides[0] else None, self.trace.ranks)
            return tuple(int(piece) for piece in np.flatnonzero(found.any(axis=1)))
        ends = zip((m.src, m.dst), sides, strict=True)
        by_place = (self._pieces(rank, side.region) for rank, side in ends if side)
        return next((pieces for pieces in by_place if pieces), ())

    def _pieces(self, rank: int, region: BufferRegion | None) -> tuple[int, ...]:
        p = self.trace.ranks
        if region is not None and region.length == self.pieces * p:
            return tuple(range(self.pieces))  # a whole vector, wherever it lies
        if region is None or region.memory not in self.seen[rank].buffers:
            return ()
        return tuple(range(region.first // p, (region.first + region.length - 1) // p + 1))


def _counted(values: np.ndarray) -> np.ndarray:
    """Count each contribution: whole numbers, though an average divides them."""
    values = np.clip(values, -999, 999)  # what a learner's function leaves there may be anything
    whole = np.round(values)
    averaged = np.abs(values - whole).max(axis=2, keepdims=True, initial=0) > 1e-3
    least = np.where(values > 1e-6, values, np.inf).min(axis=2, keepdims=True, initial=np.inf)
    scaled = np.divide(values, least, where=np.isfinite(least), out=np.zeros_like(values))
    return np.asarray(np.where(averaged, np.round(scaled), whole).astype(np.int64))

