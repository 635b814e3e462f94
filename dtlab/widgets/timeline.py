"""A run's timeline, to be zoomed into and stepped through."""

from __future__ import annotations

from collections.abc import Sequence

from dtlab.plots import Picture, timeline
from dtlab.plots.bars import Bar, bars_of, end_of, merge_slivers
from dtlab.plots.picture import clock_name
from dtlab.plots.timeline import (
    STYLES,
    arrows_shown,
    lane_name,
    lanes_of,
    summary_of,
    tracks_in,
    wanted_ranks,
)
from dtlab.trace import Trace, check_is_trace
from dtlab.units import seconds_text, time_unit
from dtlab.widgets.player import Json, Player, looks

MOST_BARS = 4000  # of more, neighbours shorter than a thousandth of the run are joined
MOST_MOMENTS = 100  # of more, some, evenly spread
MOST_TOLD = 8  # ranks, in the words of a moment
DOES = {"posted": "waits for", "send": "sends to", "recv": "receives from", "compute": "does",
        "reduce": "does"}  # and with whom, or what


class TimelineExplorer(Player):
    """`plots.timeline` to be zoomed into, and a cursor over the moments at which anything changes:
    the words say what each rank does at that time.

    ranks: those to show (None: all).
    """

    drawing = "timeline"

    def __init__(self, trace: Trace, title: str = "Timeline",
                 ranks: Sequence[int] | None = None):
        check_is_trace(trace)
        self.trace, self.title, self.ranks = trace, title, ranks
        super().__init__({})

    def static(self) -> Picture:
        """The whole run, as a matplotlib figure."""
        return timeline(self.trace, self.title, ranks=self.ranks)

    def _answer(self) -> Json:
        end_s = end_of(self.trace) or 1.0
        wanted = wanted_ranks(self.trace, self.ranks)
        bars = [bar for bar in bars_of(self.trace) if bar.rank in wanted]
        lanes = lanes_of(wanted, bars)
        drawn = merge_slivers(bars, end_s / 1000) if len(bars) > MOST_BARS else bars
        arrows, moved = arrows_shown(self.trace, wanted, 0.0, end_s)
        thinned = f" · arrows: {len(arrows):,} of {moved:,} messages" if len(arrows) < moved else ""
        still = self.static()
        heading = f"{self.title} ({clock_name(self.trace.virtual)})"
        note = summary_of(self.trace, len(lanes), len(wanted)) + thinned
        scene = {
            "size": [990, 190 + max(100, min(round(62 * len(lanes)), 620))],
            "end": end_s, "unit": time_unit(end_s), "note": note, "tracks": tracks_in(bars),
            "lanes": [[lane_name(*lane), lane[0]] for lane in lanes],
            "bars": [[lanes[b.rank, b.stream], b.track, b.kind, _short(b.start_s),
                      _short(b.end_s), b.tint, b.text, b.slot, b.slots] for b in drawn],
            "messages": [[lanes[m.src, m.src_stream], lanes[m.dst, m.dst_stream],
                          _short(m.start_s), _short(m.end_s), m.src] for m in arrows],
            "kinds": {kind: {"hatch": hatch, "name": name}
                      for kind, (_, hatch, name) in STYLES.items()},
            "present": [kind for kind in STYLES if any(bar.kind == kind for bar in bars)],
            "looks": looks(self.trace.ranks), "interval_ms": 600,
        }
        whole = {"title": heading, "time": None, "label": "whole run", "words": still.alt}
        times = sorted({time for b in bars for time in (b.start_s, b.end_s)})
        every = -(-len(times) // MOST_MOMENTS) or 1
        moments = [whole, *({"title": f"{heading}, {seconds_text(at_s)}", "time": _short(at_s),
                             "label": seconds_text(at_s), "words": _doing(bars, at_s, wanted)}
                            for at_s in times[::every])]
        return {"controls": [], "scene": scene, "moments": moments, "at": 0}


def _short(seconds: float) -> float:
    return float(f"{seconds:.7g}")


def _doing(bars: list[Bar], at_s: float, ranks: set[int]) -> str:
    """Say what each rank does at `at_s`."""
    now = [bar for bar in bars if bar.start_s <= at_s < bar.end_s]
    told = []
    for rank in sorted(ranks)[:MOST_TOLD]:
        ours = [bar for bar in now if bar.rank == rank]
        doing = [f"{verb} {' and '.join(dict.fromkeys(names))}" for kind, verb in DOES.items()
                 if (names := [bar.text.lstrip("→←") for bar in ours if bar.kind == kind])]
        idle = "waits" if ours else "does nothing"
        told.append(f"rank {rank} {', '.join(doing) or idle}")
    more = f"; {len(ranks) - MOST_TOLD} more ranks" if len(ranks) > MOST_TOLD else ""
    return f"At {seconds_text(at_s)}: {'; '.join(told)}{more}."
