"""The timeline's bars are the trace's events; long traces are thinned, and that is said."""

import pytest
import torch

from dtlab import ConfigError, Message, Span, Trace, plots, simulate
from dtlab.collectives import all_reduce
from dtlab.plots.bars import Bar, bars_of, end_of, merge_slivers, side_by_side
from dtlab.plots.timeline import hatched_kinds
from dtlab.topology import uniform
from tests.plots.layout import texts_of
from tests.plots.samples import overlapped_trace, ring_trace


def test_a_message_is_drawn_at_both_ends_after_a_wait_and_a_span_with_its_label() -> None:
    trace = Trace(2, [Message(0, 1, 8, 1.0, 3.0, 3.0, 5.0, "x")])
    assert bars_of(trace) == [
        Bar(0, "posted", "send", 1.0, 3.0, 0, "→1"),
        Bar(0, "send", "send", 3.0, 5.0, 0, "→1"),
        Bar(1, "recv", "recv", 3.0, 5.0, 0, "←0"),
    ]
    trace = Trace(1, [], [Span(0, "compute", 0.0, 2.0, "forward"), Span(0, "reduce", 2.0, 3.0, "")])
    assert [(b.kind, b.track, b.text) for b in bars_of(trace)] == [
        ("compute", "work", "forward"), ("reduce", "work", "reduce")]


def test_a_stream_has_a_lane_below_its_rank() -> None:
    picture = plots.timeline(overlapped_trace(2))
    labels = [label.get_text() for label in picture.axes[0].get_yticklabels()]
    assert labels == ["rank 0", "0 · stream 1", "0 · stream 2",
                      "rank 1", "1 · stream 1", "1 · stream 2"]
    assert "4 streams" in picture.alt


def test_messages_and_work_are_drawn_in_the_stream_that_did_them() -> None:
    trace = Trace(2, [Message(0, 1, 8, 0.0, 0.0, 0.0, 2.0, "x", 1, 2)],
                  [Span(1, "reduce", 2.0, 3.0, "add", 2)])
    assert {(b.rank, b.stream, b.kind) for b in bars_of(trace)} == {
        (0, 1, "send"), (1, 2, "recv"), (1, 2, "reduce")}
    (arrow,) = [each for each in plots.timeline(trace).axes[0].collections
                if hasattr(each, "U")]  # lanes: 0 rank 0, 1 its stream, 2 rank 1, 3 its stream
    tail = float(arrow.get_offsets()[0][1])
    assert 0.5 < tail < 1.5
    assert 2.5 < tail + float(arrow.V[0]) < 3.5


def test_a_wait_is_told_by_its_pattern_and_by_the_legend() -> None:
    trace = Trace(1, waits=[Span(0, "wait", 1.0, 4.0, "")])
    assert bars_of(trace) == [Bar(0, "wait", "work", 1.0, 4.0, 0, "")]
    assert end_of(trace) == 4.0
    picture = plots.timeline(trace)
    assert {"wait", "posted"} <= hatched_kinds(bars_of(trace))
    assert any(patch.get_hatch() for patch in picture.axes[0].patches + picture.axes[0].artists)
    assert "waiting (middle)" in [text for text, _ in texts_of(picture)]
    assert "Communication exposed: rank 0 3 s" in picture.alt


def test_messages_at_the_same_time_lie_side_by_side_unless_in_two_streams() -> None:
    both = [Message(0, 1, 8, 0, 0, 0, 2, "", stream, stream) for stream in (1, 2)]
    assert {(bar.slot, bar.slots) for bar in bars_of(Trace(2, both))} == {(0, 1)}
    trace = Trace(3, [Message(0, 1, 8, 0, 0, 0, 2, ""), Message(0, 2, 8, 0, 0, 0, 2, ""),
                      Message(0, 1, 8, 2, 2, 2, 3, "")])
    sends = [bar for bar in bars_of(trace) if bar.kind == "send"]
    assert [(bar.slot, bar.slots) for bar in sends] == [(0, 2), (1, 2), (0, 2)]
    assert side_by_side([(0, 1), (0, 5), (1, 2), (1.5, 3)]) == [0, 1, 0, 2]


def test_time_in_the_bars_is_time_in_the_trace() -> None:
    result = simulate(lambda comm: all_reduce(comm, torch.ones(1000)),
                      network=uniform(4, 1e-5, 1e9), gamma=1e-9)
    bars = bars_of(result.trace)
    for kind, events in (("send", "send"), ("recv", "recv"), ("reduce", "reduce")):
        drawn = sum(bar.end_s - bar.start_s for bar in bars if bar.kind == kind)
        real = sum(e.end_s - e.moved_s for e in result.trace.events if e.kind == events)
        assert drawn == pytest.approx(real)


def test_slivers_are_merged_without_losing_the_rest() -> None:
    slivers = [Bar(0, "send", "send", k * 1e-3, k * 1e-3 + 5e-4, 0, "→1") for k in range(1000)]
    wide = Bar(1, "compute", "work", 0.0, 1.0, 1, "forward")
    merged = merge_slivers([*slivers, wide], pixel_s=0.01)
    assert wide in merged
    assert len(merged) == 2
    line = next(bar for bar in merged if bar.rank == 0)
    assert (line.start_s, line.end_s) == (0.0, slivers[-1].end_s)
    assert merge_slivers([*slivers, wide], pixel_s=1e-5) != merged


def test_too_many_arrows_are_thinned_and_the_picture_says_so() -> None:
    few = " ".join(text for text, _ in texts_of(plots.timeline(ring_trace(4))))
    many = " ".join(text for text, _ in texts_of(plots.timeline(ring_trace(16, rounds=200))))
    assert "arrows:" not in few
    assert "of 3,200 messages" in many


def test_the_words_name_who_waited() -> None:
    assert "rank 2" in plots.timeline(ring_trace(4)).alt.split("Waited")[1]
    assert "Nobody waited" in plots.timeline(Trace(3)).alt


def test_waits_at_the_same_time_count_once() -> None:
    def both(comm):
        if comm.rank:
            with comm.compute("work", seconds=1.0):
                pass
            comm.send(torch.zeros(1), 0)
        else:
            first, second = (comm.irecv(torch.zeros(1), peer) for peer in (1, 2))
            first.wait()
            second.wait()

    trace = simulate(both, network=uniform(3, 0.0, 1e9)).trace
    assert "Waited longest for a partner: rank 0 1 s" in plots.timeline(trace).alt


def test_a_window_shows_only_its_time() -> None:
    picture = plots.timeline(ring_trace(4), window=(2e-5, 4e-5))
    assert picture.axes[0].get_xlim() == pytest.approx((20, 40))
    assert picture.axes[0].get_xlabel() == "time (µs)"


def test_only_the_ranks_asked_for_have_a_lane() -> None:
    picture = plots.timeline(ring_trace(4), ranks=[1, 3])
    assert [label.get_text() for label in picture.axes[0].get_yticklabels()] == ["rank 1", "rank 3"]
    assert "shown: 2 ranks" in picture.alt
    assert "rank 2" not in picture.alt  # which waits
    assert "rank 2" in plots.timeline(ring_trace(4), ranks=[2]).alt.split("Waited")[1]
    for wrong in ([], [4], [-1, 0]):
        with pytest.raises(ConfigError, match="some of 0 to 3"):
            plots.timeline(ring_trace(4), ranks=wrong)
