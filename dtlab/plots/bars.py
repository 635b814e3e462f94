"""A trace as bars: what the timeline draws. Pure data, no drawing."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from dtlab.trace import Message, Trace

MOST_SLOTS = 4  # messages side by side in one track; further ones lie on top of each other


class Bar(NamedTuple):
    """One rectangle of the timeline: `kind` gives its style, `tint` the colour's rank."""

    rank: int
    kind: str  # "compute" | "reduce" | "wait" | "send" | "recv" | "posted": unmatched
    track: str  # "work" | "send" | "recv": where in the lane of its rank, or stream
    start_s: float
    end_s: float
    tint: int
    text: str
    slot: int = 0  # of `slots` equal shares of the track, from the top
    slots: int = 1
    stream: int = 0  # 0: the rank itself


def end_of(trace: Trace) -> float:
    """Return when the last message, span or wait of `trace` ends, in seconds; 0 if none."""
    ends = [message.end_s for message in trace.transfers]
    return max([*ends, *(span.end_s for span in (*trace.spans, *trace.waits))], default=0.0)


def bars_of(trace: Trace) -> list[Bar]:
    """Every span and wait once; every message at both ends, after the wait for its partner."""
    bars = [Bar(s.rank, s.kind, "work", s.start_s, s.end_s, s.rank,
                "" if s.kind == "wait" else s.label or s.kind, stream=s.stream)
            for s in (*trace.spans, *trace.waits)]
    ends: dict[tuple[int, int, str], list[tuple[float, Message]]] = defaultdict(list)
    for m in trace.transfers:
        ends[m.src, m.src_stream, "send"].append((m.sent_s, m))
        ends[m.dst, m.dst_stream, "recv"].append((m.wanted_s, m))
    for (rank, stream, track), posted in ends.items():
        posted.sort(key=lambda pair: (pair[0], pair[1].end_s))
        slot_of = side_by_side([(begin, m.end_s) for begin, m in posted])
        slots = min(MOST_SLOTS, max(slot_of) + 1)
        for (begin, m), slot in zip(posted, slot_of, strict=True):
            peer = f"→{m.dst}" if track == "send" else f"←{m.src}"
            rest = m.src, peer, slot % MOST_SLOTS, slots, stream
            if m.start_s > begin:
                bars.append(Bar(rank, "posted", track, begin, m.start_s, *rest))
            bars.append(Bar(rank, track, track, m.start_s, m.end_s, *rest))
    return bars


def side_by_side(stretches: list[tuple[float, float]]) -> list[int]:
    """Return for each stretch, in order of its begin, the lowest slot that is free by then."""
    free_at: list[float] = []
    chosen = []
    for begin, end in stretches:
        slot = next((s for s, free in enumerate(free_at) if free <= begin), len(free_at))
        if slot == len(free_at):
            free_at.append(end)
        free_at[slot] = end
        chosen.append(slot)
    return chosen


def merge_slivers(bars: list[Bar], pixel_s: float) -> list[Bar]:
    """Join neighbours in one track that are each under 2 pixels wide and under 1 pixel apart.

    Then a picture has no more bars than it has pixels, however long the trace.
    """
    last: dict[tuple[int, int, str, str, int], Bar] = {}
    done: list[Bar] = []
    for bar in sorted(bars, key=lambda b: b.start_s):
        key = bar.rank, bar.stream, bar.track, bar.kind, bar.slot
        before = last.get(key)
        narrow = bar.end_s - bar.start_s < 2 * pixel_s
        if before and narrow and not before.text and bar.start_s - before.end_s < pixel_s:
            last[key] = before._replace(end_s=max(before.end_s, bar.end_s))
            continue
        if before:
            done.append(before)
        last[key] = bar._replace(text="") if narrow else bar
    return done + list(last.values())
