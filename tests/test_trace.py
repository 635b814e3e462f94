"""The trace: counts, order, and Chrome's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtlab
from dtlab import Comm, Message, Span, Trace, run, simulate, topology
from dtlab.collectives import all_reduce
from dtlab.trace import Rows

MESSAGES = [  # src, dst, nbytes, sent, wanted, start, end, label
    Message(1, 0, 8, 2.0, 1.0, 2.0, 4.0, "second"),
    Message(0, 1, 4, 0.0, 1.0, 1.0, 3.0, "first"),
    Message(0, 2, 2, 4.0, 0.0, 4.0, 4.0, ""),
]
SPANS = [Span(1, "reduce", 3.0, 3.5, "sum"), Span(0, "compute", 0.0, 0.5, "forward")]


def work(comm: Comm) -> None:
    with comm.compute("forward", seconds=0.001):
        pass
    all_reduce(comm, torch.ones(9))


def recorded() -> Trace:
    return simulate(work, network=topology.uniform(4, 1e-6, 1e9), gamma=1e-9).trace


def test_counts_by_rank_and_in_all() -> None:
    trace = Trace(3, MESSAGES, SPANS)
    assert [trace.sent_bytes(r) for r in range(3)] == [6, 8, 0]
    assert [trace.received_bytes(r) for r in range(3)] == [8, 4, 2]
    assert [trace.messages(r) for r in range(3)] == [2, 1, 0]
    assert (trace.sent_bytes(), trace.received_bytes(), trace.messages()) == (14, 14, 3)


def test_everything_is_in_order_of_time_and_a_message_is_two_events() -> None:
    trace = Trace(3, MESSAGES, SPANS)
    assert [m.label for m in trace.transfers] == ["first", "second", ""]
    assert [s.label for s in trace.spans] == ["forward", "sum"]
    found = [(e.rank, e.kind, e.start_s, e.end_s, e.peer, e.nbytes) for e in trace.events]
    assert found == [
        (0, "compute", 0.0, 0.5, -1, 0), (0, "send", 0.0, 3.0, 1, 4), (2, "recv", 0.0, 4.0, 0, 2),
        (0, "recv", 1.0, 4.0, 1, 8), (1, "recv", 1.0, 3.0, 0, 4), (1, "send", 2.0, 4.0, 0, 8),
        (1, "reduce", 3.0, 3.5, -1, 0), (0, "send", 4.0, 4.0, 2, 2),
    ]


def test_rows_take_tuples_and_give_them_back() -> None:
    rows = Rows(3, [(1, 2, 3)])
    rows.extend((4, 5, 6))
    assert list(rows.rows()) == [(1, 2, 3), (4, 5, 6)]
    assert Trace(1, Rows(8)).events == []
    with pytest.raises(ValueError):
        list(Rows(2, [(1, 2, 3)]).rows())


def test_an_empty_trace_answers_everything() -> None:
    trace = simulate(lambda comm: None, network=topology.uniform(3, 0, 1)).trace
    assert (trace.messages(), trace.sent_bytes(0), trace.events, trace.virtual) == (0, 0, [], True)


def test_it_tells_what_it_is() -> None:
    assert repr(recorded()).startswith("<Trace of 4 ranks, virtual: 24 messages, 216 bytes")
    assert "measured" in repr(Trace(2))


def test_times_of_a_message_follow_one_another() -> None:
    for m in recorded().transfers:
        assert m.start_s == max(m.sent_s, m.wanted_s)
        assert m.end_s >= m.start_s + 1e-6 * (1 - 1e-9)
        assert m.label.startswith("all_reduce(float32 [9], algorithm=ring, op=sum)")


def test_simulated_and_real_runs_send_the_same() -> None:
    simulated, real = recorded(), run(work, ranks=4, echo=False).trace
    assert sorted(m[:3] for m in simulated.transfers) == sorted(m[:3] for m in real.transfers)
    assert {s.label for s in simulated.spans} == {s.label for s in real.spans}
    assert (simulated.virtual, real.virtual) == (True, False)


def test_without_a_trace_everything_else_is_the_same() -> None:
    network = topology.uniform(4, 1e-6, 1e9)
    with_it, without = (simulate(work, network=network, trace=t) for t in (True, False))
    assert without.trace.events == []
    assert without.elapsed_s == with_it.elapsed_s


def chrome(trace: Trace, folder: Path) -> list[dict[str, Any]]:
    path = trace.to_chrome(folder / "trace.json")
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] in ("ms", "ns")
    rows: list[dict[str, Any]] = document["traceEvents"]
    return rows


def test_chrome_events_have_what_the_format_asks_for(tmp_path: Path) -> None:
    """Trace Event Format, Google 2016: the fields that each phase must have."""
    rows = chrome(recorded(), tmp_path)
    needs = {"X": {"name", "cat", "pid", "tid", "ts", "dur"}, "M": {"name", "pid", "args"},
             "s": {"name", "cat", "id", "pid", "tid", "ts"},
             "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"}}
    for row in rows:
        assert needs[row["ph"]] <= row.keys()
        assert all(row[key] >= 0 for key in ("ts", "dur") if key in row)
    assert {row["args"]["name"] for row in rows if row["ph"] == "M"} >= {
        "rank 0", "rank 3", "send", "recv", "work"}
    assert sum(row["ph"] == "X" and row["cat"] != "wait" for row in rows) == 2 * 24 + 4 + 12


def test_chrome_arrows_join_each_send_to_its_receive(tmp_path: Path) -> None:
    rows = chrome(recorded(), tmp_path)
    slices = [row for row in rows if row["ph"] == "X" and row["cat"] == "message"]
    starts = {row["id"]: row for row in rows if row["ph"] == "s"}
    ends = {row["id"]: row for row in rows if row["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 24
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        for arrow, kind in ((start, "send to"), (end, "recv from")):
            assert any(  # the arrow must lie on a slice of its track, else it is not drawn
                s["name"].startswith(kind) and (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"])
                and s["ts"] - 1e-6 <= arrow["ts"] <= s["ts"] + s["dur"] + 1e-6 for s in slices)


def test_a_message_is_drawn_on_both_ranks_and_its_arrow_spans_the_movement(tmp_path: Path) -> None:
    trace = Trace(2, [Message(0, 1, 4, 1.0, 2.0, 2.0, 5.0, "x")],
                  [Span(0, "compute", 1.0, 1.5, "f")])
    rows = chrome(trace, tmp_path)
    boxes = [(r["pid"], r["name"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X"]
    assert sorted(boxes) == [
        (0, "f", 1e6, 5e5), (0, "send to 1", 1e6, 4e6), (1, "recv from 0", 2e6, 3e6)]
    arrow = [(r["ph"], r["pid"], r["ts"]) for r in rows if r["ph"] in "sf"]
    assert arrow == [("s", 0, 2e6), ("f", 1, 5e6)]


def test_a_result_shows_itself_in_one_line() -> None:
    result = simulate(lambda comm: torch.ones(50), network=topology.uniform(6, 0, 1))
    assert isinstance(result, dtlab.Result)
    assert result.ranks == 6
    assert "\n" not in repr(result)
    assert len(repr(result)) < 400
    assert "6 ranks" in repr(result)


def test_bytes_by_pair_sum_up_to_what_each_rank_sent_and_received() -> None:
    trace = recorded()
    pairs = trace.bytes_by_pair()
    for rank in range(4):
        assert sum(n for (src, _), n in pairs.items() if src == rank) == trace.sent_bytes(rank)
        assert sum(n for (_, dst), n in pairs.items() if dst == rank) == trace.received_bytes(rank)


# ---- streams and waits --------------------------------------------------------------------------


def test_events_name_the_stream_that_did_them_and_without_one_it_is_0() -> None:
    message, span = (0, 1, 8, 0.0, 0.0, 0.0, 1.0, "x"), (1, "reduce", 1.0, 2.0, "add")
    for trace, streams in ((Trace(2, [(*message, 1, 2)], [(*span, 2)]), [1, 2, 2]),
                           (Trace(2, [message], [span]), [0, 0, 0])):
        assert [(e.rank, e.kind) for e in trace.events] == [
            (0, "send"), (1, "recv"), (1, "reduce")]
        assert [e.stream for e in trace.events] == streams
        assert trace.bytes_by_pair() == {(0, 1): 8}


def test_each_stream_has_tracks_of_its_own_in_chrome(tmp_path: Path) -> None:
    trace = Trace(2, [Message(0, 1, 8, 0.0, 0.0, 0.0, 1.0, "x", 1, 2)],
                  [Span(0, "compute", 0.0, 2.0, "f"), Span(1, "reduce", 1.0, 2.0, "add", 2)],
                  waits=[Span(0, "wait", 2.0, 3.0, "")])
    rows = chrome(trace, tmp_path)
    name_of = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows
               if r["ph"] == "M" and r["name"] == "thread_name"}
    assert len(name_of) == len({(pid, name) for (pid, _), name in name_of.items()})
    drawn = [(r["pid"], name_of[r["pid"], r["tid"]], r["name"]) for r in rows if r["ph"] == "X"]
    assert sorted(drawn) == [
        (0, "stream 1: send", "send to 1"), (0, "wait", "wait"), (0, "work", "f"),
        (1, "stream 2: recv", "recv from 0"), (1, "stream 2: work", "add")]
    arrows = [(r["ph"], name_of[r["pid"], r["tid"]]) for r in rows if r["ph"] in "sf"]
    assert arrows == [("s", "stream 1: send"), ("f", "stream 2: recv")]


stretches = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 8),
                               st.integers(0, 2)), max_size=12)


@given(waits=stretches, work=stretches)
def test_waiting_is_exposed_in_the_seconds_in_which_no_stream_of_the_rank_works(
    waits: list[tuple[int, int, int, int]], work: list[tuple[int, int, int, int]]
) -> None:
    """Times are whole seconds, so a second lies wholly in a stretch or wholly outside."""
    trace = Trace(3, (), [Span(r, "compute", b, b + n, "", stream) for r, b, n, stream in work],
                  waits=[Span(r, "wait", b, b + n, "", stream) for r, b, n, stream in waits])
    for rank in range(3):
        waited = {t for r, b, n, stream in waits if (r, stream) == (rank, 0)
                  for t in range(b, b + n)}
        busy = {t for r, b, n, _ in work if r == rank for t in range(b, b + n)}
        assert trace.exposed_s(rank) == len(waited - busy)
    assert trace.exposed_s() == sum(trace.exposed_s(rank) for rank in range(3))
