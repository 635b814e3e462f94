"""Traces to draw: small, large, empty, odd."""

from __future__ import annotations

from dtlab.trace import Message, Span, Trace


def ring_trace(p: int, step_s: float = 1e-5, rounds: int | None = None) -> Trace:
    """A ring's messages with a late rank 1, reductions, and a forward pass at the end."""
    messages, spans, now = [], [], 0.0
    for turn in range(2 * (p - 1) if rounds is None else rounds):
        for r in range(p):
            posted = now + (0.3 * step_s if r == 1 and turn % 2 else 0.0)
            end = now + 1.3 * step_s
            messages.append(Message(r, (r + 1) % p, 4096, posted, now, posted, end, "ring"))
            spans.append(Span(r, "reduce", end, end + 0.3 * step_s, "add"))
        now += 1.6 * step_s
    spans += [Span(r, "compute", now, now + (3 + r % 3) * step_s, "forward") for r in range(p)]
    return Trace(p, messages, spans, virtual=True)


def overlapped_trace(p: int, step_s: float = 1e-4) -> Trace:
    """A backward pass with two rings of messages beside it, in streams 1 and 2; then a wait."""
    messages, spans, waits = [], [], []
    for stream in (1, 2):
        for turn in range(2 * (p - 1)):
            now = (stream + turn) * step_s
            for r in range(p):
                messages.append(Message(r, (r + 1) % p, 4096, now, now - 0.1 * step_s * (r == 1),
                                        now, now + 0.8 * step_s, "ring", stream, stream))
                spans.append(Span(r, "reduce", now + 0.8 * step_s, now + step_s, "add", stream))
    end_s = 2 * p * step_s
    for r in range(p):
        spans.append(Span(r, "compute", 0.0, 3 * step_s, "backward"))
        waits.append(Span(r, "wait", 3 * step_s, end_s, ""))
        spans.append(Span(r, "compute", end_s, end_s + step_s, "step"))
    return Trace(p, messages, spans, waits=waits, virtual=True)
