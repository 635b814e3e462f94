"""What happened in a run: the messages that moved, and the work that was done.

Processes and simulator fill the same `Trace`; every plot, widget and grader reads only this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple


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


class Span(NamedTuple):
    """A stretch of work on one rank: `comm.compute(label)`, or a reduction."""

    rank: int
    kind: str  # "compute" | "reduce"
    start_s: float
    end_s: float
    label: str


class Event(NamedTuple):
    """One line of a rank's diary: a send, a receive or a span, in order of `start_s`."""

    rank: int
    kind: str  # "send" | "recv" | "compute" | "reduce"
    start_s: float  # when this rank posted it, or began the work
    end_s: float
    peer: int = -1  # the other rank of a message
    nbytes: int = 0
    label: str = ""
    moved_s: float = 0.0  # when the message began to move; before that, this rank only waited


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
    """

    def __init__(
        self,
        ranks: int,
        messages: Rows | Iterable[Sequence[Any]] = (),
        spans: Iterable[Sequence[Any]] = (),
        *,
        virtual: bool = False,
    ):
        self.ranks = ranks
        self.virtual = virtual  # True: simulated time; False: measured
        self._rows = messages if isinstance(messages, Rows) else Rows(8, messages)
        self._spans = list(spans)

    @cached_property
    def transfers(self) -> list[Message]:
        """Every message, in order of its start."""
        rows = map(Message._make, self._rows.rows())
        return sorted(rows, key=lambda m: (m.start_s, m.src, m.dst))

    @cached_property
    def spans(self) -> list[Span]:
        """Every stretch of work, in order of its start."""
        return sorted(map(Span._make, self._spans), key=lambda s: (s.start_s, s.rank))

    @cached_property
    def events(self) -> list[Event]:
        """Each rank's diary, all in one list ordered by (start, rank). A message is two events."""
        return sorted(self._diary(), key=lambda e: (e.start_s, e.rank, e.end_s, e.kind))

    def _diary(self) -> Iterator[Event]:
        for src, dst, nbytes, sent_s, wanted_s, start_s, end_s, label in self._rows.rows():
            yield Event(src, "send", sent_s, end_s, dst, nbytes, label, start_s)
            yield Event(dst, "recv", wanted_s, end_s, src, nbytes, label, start_s)
        for rank, kind, start_s, end_s, label in self._spans:
            yield Event(rank, kind, start_s, end_s, label=label, moved_s=start_s)

    # ---- counts: exact, whatever the machine ---------------------------------------------------

    def sent_bytes(self, rank: int | None = None) -> int:
        """Bytes that `rank` sent (None: all ranks together)."""
        return sum(m[2] for m in self._rows.rows() if rank is None or m[0] == rank)

    def received_bytes(self, rank: int | None = None) -> int:
        """Bytes that `rank` received (None: all ranks together)."""
        return sum(m[2] for m in self._rows.rows() if rank is None or m[1] == rank)

    def messages(self, rank: int | None = None) -> int:
        """How many messages `rank` sent (None: all ranks together)."""
        return len(self._rows) // 8 if rank is None else self._rows[::8].count(rank)

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Bytes from each rank to each other: (src, dst) → bytes, of pairs that had messages."""
        sums: dict[tuple[int, int], int] = {}
        for src, dst, nbytes, *_ in self._rows.rows():
            sums[src, dst] = sums.get((src, dst), 0) + nbytes
        return sums

    # ---- for other tools -----------------------------------------------------------------------

    def to_chrome(self, path: str | Path) -> Path:
        """Write the trace in Chrome's trace-event format (open it in Perfetto). Returns the path.

        One track a rank; times in microseconds; an arrow joins each send to its receive.
        """
        rows: list[dict[str, Any]] = []
        for rank in range(self.ranks):
            name = {"name": f"rank {rank}"}
            rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
            for tid, track in enumerate(_TRACKS):
                rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid,
                             "args": {"name": track}})
        for number, m in enumerate(self.transfers):
            for pid, track, verb, peer, begin in (
                (m.src, "send", "to", m.dst, m.sent_s),
                (m.dst, "recv", "from", m.src, m.wanted_s),
            ):
                rows.append({
                    "ph": "X", "pid": pid, "tid": _TRACKS.index(track), "ts": begin * 1e6,
                    "dur": (m.end_s - begin) * 1e6, "cat": "message",
                    "name": f"{track} {verb} {peer}",
                    "args": {"bytes": m.nbytes, "label": m.label},
                })
            flow = {"cat": "message", "name": "message", "id": number}
            rows.append(flow | {"ph": "s", "pid": m.src, "tid": _TRACKS.index("send"),
                                "ts": max(m.start_s, m.sent_s) * 1e6})
            rows.append(flow | {"ph": "f", "bp": "e", "pid": m.dst, "tid": _TRACKS.index("recv"),
                                "ts": m.end_s * 1e6})
        for s in self.spans:
            rows.append({"ph": "X", "pid": s.rank, "tid": _TRACKS.index("work"), "cat": s.kind,
                         "ts": s.start_s * 1e6, "dur": (s.end_s - s.start_s) * 1e6,
                         "name": s.label or s.kind})
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
        return path

    def __repr__(self) -> str:
        clock = "virtual" if self.virtual else "measured"
        return (f"<Trace of {self.ranks} ranks, {clock}: {self.messages()} messages, "
                f"{self.sent_bytes():,} bytes, {len(self._spans)} spans>")


_TRACKS = ("work", "send", "recv")
