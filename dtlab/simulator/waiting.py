"""The table that a deadlock prints: what each strand waits for, and a hint from the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtlab.errors import Waiting, after_error, why_stuck
from dtlab.simulator.lines import learner_line
from dtlab.simulator.messages import Channel, PendingMessage
from dtlab.simulator.strands import Strand


class Agreement(str):
    """The label of a call that all `ranks` must make. made: by rank of the communicator, those that
    have made it."""

    ranks: Sequence[int]
    made: Mapping[int, object]


CRASHED = "crashed"  # what a strand "waits for" that `simulate(crash=…)` has ended


def table(strands: Sequence[Strand]) -> list[Waiting]:
    """Say what each rank is doing, and each of its streams that has something to do."""
    # Of a restarted rank, the last strand counts.
    rows = {(strand.rank, strand.stream): strand for strand in strands
            if not strand.stream or strand.is_busy()}
    return [_row(strand) for _, strand in sorted(rows.items())]


def hint(strands: Sequence[Strand]) -> str:
    """Say what went wrong, if ranks wait in different collectives, or for one that left early."""
    return why_stuck(table(strands), [_label(s) for s in strands if s.is_busy()])


def _row(strand: Strand) -> Waiting:
    if strand.done:
        return Waiting(strand.rank, CRASHED if strand.waits_for == CRASHED else "returned")
    line = str(learner_line(strand.frame()) or strand.line or "")
    line += after_error(strand.handled_error)
    beside = f" (stream {strand.stream})" if strand.stream else ""
    messages = open_messages(strand)
    if not messages:
        doing = strand.waits_for if isinstance(strand.waits_for, str) else "compute"
        missing = [rank for place, rank in enumerate(doing.ranks) if place not in doing.made] \
            if isinstance(doing, Agreement) else []
        return Waiting(strand.rank, doing + beside, " and ".join(map(str, missing[:8])), line=line)
    first = messages[0]
    doing = "send" if first.is_sent_by(strand.rank) else "recv"
    peers = list(dict.fromkeys(_peer(message, strand.rank) for message in messages))
    if len(messages) > 1:
        doing = "exchange"
    if isinstance(strand.waits_for, list):
        doing = "wait_any"
        peers.sort(key=lambda peer: (len(peer), peer))
    if label := _label(strand):
        doing += f" in {label.split('(')[0]}"
    nbytes = (first.into if first.x is None else first.x).nbytes
    known = None if nbytes < 0 else nbytes  # of an object only its sender knows
    return Waiting(strand.rank, doing + beside, " and ".join(peers), known, line)


def open_messages(strand: Strand) -> list[PendingMessage]:
    """The messages that `strand` waits for."""
    if isinstance(strand.waits_for, str):
        return []
    return [message for message in strand.waits_for
            if not (message.send_done if message.is_sent_by(strand.rank) else message.recv_done)]


def _peer(message: PendingMessage, rank: int) -> str:
    if message.is_sent_by(rank):
        return str(message.channel.dst)
    return str(message.channel.src) if isinstance(message.channel, Channel) else "anyone"


def _label(strand: Strand) -> str:
    """Return the label of the collective call in which `strand` waits; "" if it is in none."""
    for message in open_messages(strand):
        return message.label
    return strand.waits_for if isinstance(strand.waits_for, Agreement) else ""
