"""The trace of a run: the messages that moved, and the work that was done.

Processes and simulator fill the same `Trace`; every plot, widget and grader reads only this.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from dtlab.checks import short
from dtlab.errors import ConfigError


class Message(NamedTuple):
    """One message, seen from both ends. Ranks are those of the whole run, times in seconds."""

    src: int
    dst: int
    nbytes: int
    sent_s: float  # when the sender posted it
    wanted_s: float  # when the receiver posted its side
    start_s: float  # when it began to move: both sides were there
    end_s: float  # when it had arrived
    label: str  # the collective or phase it belongs to, "" if none
    src_stream: int = 0  # which of its sender's streams sent it; 0: the rank itself
    dst_stream: int = 0


class Span(NamedTuple):
    """A stretch of work on one rank: `comm.compute(label)`, or a reduction."""

    rank: int
    kind: str  # "compute" | "reduce" | "wait"
    start_s: float
    end_s: float
    label: str
    stream: int = 0  # 0: the rank itself; 1, 2, …: what `Comm.begin` runs beside it


class Event(NamedTuple):
    """One event of a rank: a send, a receive or a span."""

    rank: int
    kind: str  # "send" | "recv" | "compute" | "reduce"
    start_s: float  # when this rank posted it, or began the work
    end_s: float
    peer: int = -1  # the other rank of a message
    nbytes: int = 0
    label: str = ""
    moved_s: float = 0.0  # when the message began to move; before that, this rank only waited
    stream: int = 0


class Speed(NamedTuple):
    """The speed of a rank, see `Trace.stragglers`."""

    rank: int
    relative: float  # to the fastest rank
    absolute: float  # to its own best


class Rows(list[Any]):
    """Many rows of `width` fields in one flat list: `extend(row)` adds one, `rows()` yields them.

    Millions of rows take a third of the memory of as many tuples, and cost the garbage collector
    nothing.
    """

    def __init__(self, width: int, rows: Iterable[Sequence[Any]] = ()):
        super().__init__()
        self.width = width
        for row in rows:
            self.extend(row)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Row by row, as tuples."""
        return zip(*[iter(self)] * self.width, strict=True)


class Trace:
    """The messages and spans of one run, and questions about them.

    `messages` are `Message`s or tuples of their fields (or such `Rows`); `spans` likewise.
    `clock_uncertainty_s[rank]`: the times of a rank whose host has a clock of its own are those of
    rank 0's clock to within this; 0.0 on rank 0's host, and in virtual time.
    """

    def __init__(
        self,
        ranks: int,
        messages: Rows | Iterable[Sequence[Any]] = (),
        spans: Iterable[Sequence[Any]] = (),
        *,
        waits: Iterable[Sequence[Any]] = (),
        virtual: bool = False,
        clock_uncertainty_s: Sequence[float] = (),
    ):
        self.ranks = ranks
        self.clock_uncertainty_s = list(clock_uncertainty_s) or [0.0] * ranks
        self.virtual = virtual  # True: simulated time; False: measured
        rows = (Message(*message) for message in messages)
        self._rows = messages if isinstance(messages, Rows) else Rows(_WIDTH, rows)
        self._spans, self._waits = list(spans), list(waits)

    @cached_property
    def transfers(self) -> list[Message]:
        """Every message, in order of its start."""
        rows = map(Message._make, self._rows.rows())
        return sorted(rows, key=lambda m: (m.start_s, m.src, m.dst))

    @cached_property
    def spans(self) -> list[Span]:
        """Every stretch of work, in order of its start."""
        return sorted((Span(*span) for span in self._spans), key=lambda s: (s.start_s, s.rank))

    @cached_property
    def waits(self) -> list[Span]:
        """Every stretch in which a rank, or a stream, did nothing but wait: for messages, or for
        what it had begun. In order of its start."""
        return sorted((Span(*wait) for wait in self._waits), key=lambda s: (s.start_s, s.rank))

    @cached_property
    def events(self) -> list[Event]:
        """The events of all ranks, ordered by (start, rank). A message is two events."""
        return sorted(self._events(), key=lambda e: (e.start_s, e.rank, e.end_s, e.kind))

    def _events(self) -> Iterator[Event]:
        for m in self.transfers:
            yield Event(m.src, "send", m.sent_s, m.end_s, m.dst, m.nbytes, m.label, m.start_s,
                        m.src_stream)
            yield Event(m.dst, "recv", m.wanted_s, m.end_s, m.src, m.nbytes, m.label, m.start_s,
                        m.dst_stream)
        for s in self.spans:
            yield Event(s.rank, s.kind, s.start_s, s.end_s, label=s.label, moved_s=s.start_s,
                        stream=s.stream)

    # ---- counts: exact, whatever the machine ---------------------------------------------------

    def sent_bytes(self, rank: int | None = None) -> int:
        """Bytes that `rank` sent (None: all ranks together)."""
        return sum(m[2] for m in self._rows.rows() if rank is None or m[0] == rank)

    def received_bytes(self, rank: int | None = None) -> int:
        """Bytes that `rank` received (None: all ranks together)."""
        return sum(m[2] for m in self._rows.rows() if rank is None or m[1] == rank)

    def messages(self, rank: int | None = None) -> int:
        """Count the messages that `rank` sent (None: all ranks together)."""
        rows = self._rows
        return len(rows) // _WIDTH if rank is None else rows[::_WIDTH].count(rank)

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Bytes from each rank to each other: (src, dst) → bytes, of pairs that had messages."""
        sums: dict[tuple[int, int], int] = {}
        for src, dst, nbytes, *_ in self._rows.rows():
            sums[src, dst] = sums.get((src, dst), 0) + nbytes
        return sums

    def exposed_s(self, rank: int | None = None) -> float:
        """Seconds in which `rank` only waited for messages: it waited, for them or for what it had
        begun, and neither it nor its streams computed or reduced. None: of all ranks together."""
        ranks = range(self.ranks) if rank is None else (rank,)
        return sum(_exposed_s([w for w in self.waits if w.rank == r and not w.stream],
                              [s for s in self.spans if s.rank == r]) for r in ranks)

    # ---- for other tools -----------------------------------------------------------------------

    def stragglers(self) -> list[Speed]:
        """Score the speed of what each rank marks with `comm.compute(label)`, by rank: scores of 1
        are the best, 0.5 is half as fast.

        relative: the median seconds of the fastest rank, divided by this rank's; absolute: this
        rank's own best seconds, divided by its median. Both are means over the labels that all
        ranks have, weighted by this rank's time. A rank of a slow machine is low in the first, one
        that has become slow in both. NVIDIA's resiliency extension scores so, too.
        """
        seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for span in self.spans:
            if span.kind == "compute" and span.end_s > span.start_s:
                seconds[span.label][span.rank].append(span.end_s - span.start_s)
        common = [by_rank for by_rank in seconds.values() if len(by_rank) == self.ranks]
        fastest = [min(map(median, by_rank.values())) for by_rank in common]
        speeds = []
        for rank in range(self.ranks if common else 0):
            mine = [by_rank[rank] for by_rank in common]
            weights = [sum(each) for each in mine]
            relative = [best / median(each) for best, each in zip(fastest, mine, strict=True)]
            absolute = [min(each) / median(each) for each in mine]
            speeds.append(Speed(rank, fmean(relative, weights), fmean(absolute, weights)))
        return speeds

    def to_chrome(self, path: str | Path) -> Path:
        """Write the trace in Chrome's trace-event format (open it in Perfetto). Returns the path.

        Tracks for the work, the waits, the sends and the receives of each rank, and of each of its
        streams; times in microseconds; an arrow joins each send to its receive. `otherData` says
        to within how much the ranks' clocks agree.
        """
        rows: list[dict[str, Any]] = []
        streams = {(e.rank, e.stream) for e in self.events}
        for rank in range(self.ranks):
            rows.append({"ph": "M", "name": "process_name", "pid": rank,
                         "args": {"name": f"rank {rank}"}})
        for rank, stream in sorted(streams | {(rank, 0) for rank in range(self.ranks)}):
            for kind in _TRACKS:
                name = f"stream {stream}: {kind}" if stream else kind
                rows.append({"ph": "M", "name": "thread_name", "pid": rank,
                             "tid": _track(stream, kind), "args": {"name": name}})
        for number, m in enumerate(self.transfers):
            sends, receives = _track(m.src_stream, "send"), _track(m.dst_stream, "recv")
            for pid, tid, kind, peer, begin in (
                (m.src, sends, "send to", m.dst, m.sent_s),
                (m.dst, receives, "recv from", m.src, m.wanted_s),
            ):
                rows.append({"ph": "X", "pid": pid, "tid": tid, "ts": begin * 1e6,
                             "dur": (m.end_s - begin) * 1e6, "cat": "message",
                             "name": f"{kind} {peer}",
                             "args": {"bytes": m.nbytes, "label": m.label}})
            flow = {"cat": "message", "name": "message", "id": number}
            rows.append(flow | {"ph": "s", "pid": m.src, "tid": sends,
                                "ts": max(m.start_s, m.sent_s) * 1e6})
            rows.append(flow | {"ph": "f", "bp": "e", "pid": m.dst, "tid": receives,
                                "ts": m.end_s * 1e6})
        for s in (*self.spans, *self.waits):
            rows.append({"ph": "X", "pid": s.rank, "cat": s.kind, "ts": s.start_s * 1e6,
                         "tid": _track(s.stream, "wait" if s.kind == "wait" else "work"),
                         "dur": (s.end_s - s.start_s) * 1e6, "name": s.label or s.kind})
        path = Path(path)
        path.write_text(json.dumps({
            "traceEvents": rows, "displayTimeUnit": "ms",
            "otherData": {"clock_uncertainty_us": [1e6 * s for s in self.clock_uncertainty_s]}}))
        return path

    def __repr__(self) -> str:
        clock = "virtual" if self.virtual else "measured"
        return (f"<Trace of {self.ranks} ranks, {clock}: {self.messages()} messages, "
                f"{self.sent_bytes():,} bytes, {len(self._spans)} spans>")


def check_is_trace(value: object) -> None:
    """Raise `ConfigError` unless `value` is a `Trace`."""
    if not isinstance(value, Trace):
        raise ConfigError(f"a Trace is needed, such as result.trace, not {short(value)}")


_WIDTH = len(Message._fields)
_TRACKS = ("work", "wait", "send", "recv")


def _track(stream: int, kind: str) -> int:
    """The number of a track in Perfetto."""
    return len(_TRACKS) * stream + _TRACKS.index(kind)


def _exposed_s(waits: Sequence[Span], work: Sequence[Span]) -> float:
    """Add up the `waits`, less what of them lies in one or more of `work`; both by start."""
    total_s, ends = 0.0, iter(_joined(work))
    busy = next(ends, None)
    for start_s, end_s in _joined(waits):
        while busy and busy[1] <= start_s:
            busy = next(ends, None)
        total_s += end_s - start_s
        while busy and busy[0] < end_s:
            total_s -= min(busy[1], end_s) - max(busy[0], start_s)
            if busy[1] > end_s:
                break
            busy = next(ends, None)
    return total_s


def _joined(spans: Sequence[Span]) -> Iterator[tuple[float, float]]:
    """The stretches that one or more of `spans`, in order of their start, cover."""
    start_s = end_s = float("-inf")
    for span in spans:
        if span.start_s > end_s:
            if end_s > start_s:
                yield start_s, end_s
            start_s = span.start_s
        end_s = max(end_s, span.end_s)
    if end_s > start_s:
        yield start_s, end_s
