"""The recorder: one rank's side of the trace."""

from __future__ import annotations

import time
from operator import itemgetter
from typing import Any

Row = tuple[Any, ...]


class Recorder:
    """Takes down messages, spans and waits; times are those of `time.perf_counter`.

    Its lists are appended to directly, by all threads of the rank: where four ranks share two
    cores, every call counts.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled
        # (sends, peer, context, bytes, posted_s, done_s, label, stream)
        self.messages: list[Row] = []
        self.spans: list[Row] = []  # (kind, start_s, end_s, label, stream)
        self.waits: list[Row] = []  # the same

    def clear(self) -> None:
        """A new run begins."""
        self.messages, self.spans, self.waits = [], [], []

    def add_span(self, kind: str, begun_s: float, label: str, stream: int) -> None:
        """A strand has worked from `begun_s` until now."""
        if self.enabled:
            self.spans.append((kind, begun_s, time.perf_counter(), label, stream))

    def add_wait(self, begun_s: float, label: str, stream: int) -> None:
        """A strand has waited from `begun_s` until now."""
        if self.enabled:
            self.waits.append(("wait", begun_s, time.perf_counter(), label, stream))

    def rows(self, start_s: float) -> tuple[list[Row], list[Row], list[Row]]:
        """Messages in order of posting, spans and waits, in seconds since `start_s`."""
        messages = [(*rest, posted_s - start_s, done_s - start_s, label, stream)
                    for *rest, posted_s, done_s, label, stream in self.messages]
        messages.sort(key=itemgetter(4))
        spans, waits = (
            [(kind, begin_s - start_s, end_s - start_s, label, stream)
             for kind, begin_s, end_s, label, stream in rows]
            for rows in (self.spans, self.waits)
        )
        return messages, spans, waits
