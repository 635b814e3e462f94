"""The output of ranks: labelled with the rank, in whole lines, cut if there is too much of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TextIO

LIMIT_BYTES = 1_000_000
# Gloo writes pages of a connection that has broken, which the run tells of itself.
_OF_GLOO = re.compile(r"\[\S*/gloo/\S*debug_logger\.cc:|(\[rank\d+\]:)?\[E.*ProcessGroupGloo\.cpp:")


def write(stream: TextIO, text: str) -> None:
    """Write `text`, with ? for what the encoding of a terminal lacks."""
    try:
        stream.write(text)
    except UnicodeEncodeError as error:
        stream.write(text.encode(error.encoding, "replace").decode(error.encoding))


class RankOutput:
    """Collects the text of one rank in `text`, and shows each whole line as "[rank 3] line".

    A progress bar redraws its line with carriage returns: only its last state is kept. Beyond
    `limit` characters the rest is dropped, with a notice.
    """

    def __init__(self, rank: int, show: Callable[[str], object] | None, limit: int = LIMIT_BYTES):
        self.rank = rank
        self._show = show
        self._limit = limit
        self._lines: list[str] = []
        self._open = ""  # the line that has no end yet
        self._kept = 0
        self.dropped = 0
        self.shown = 0  # the first lines, which the caller has seen before

    def feed(self, text: str) -> None:
        """Take more of what the rank printed."""
        if self._kept >= self._limit:
            self.dropped += len(text)
            return
        *whole, self._open = (self._open + text).split("\n")
        for line in whole:
            self._emit(line)
        if len(self._open) > self._limit:  # one endless line
            self._emit(self._open)
            self._open = ""

    def close(self) -> None:
        """The rank is done: show what has no line end, and how much was dropped."""
        if self._open and self._kept < self._limit:
            self._emit(self._open)
        self._open = ""
        if self.dropped:
            self._lines.append(f"… output cut: {self.dropped:,} more characters\n")
            if self._show:
                self._show(f"[rank {self.rank}] {self._lines[-1]}")

    def _emit(self, line: str) -> None:
        if self._kept >= self._limit:
            self.dropped += len(line) + 1
            return
        line = line.rstrip("\r").rsplit("\r", 1)[-1]
        if _OF_GLOO.match(line):
            return
        kept = line[: self._limit - self._kept]
        self.dropped += len(line) - len(kept)
        self._kept += len(kept) + 1
        self._lines.append(kept + "\n")
        if self._show and len(self._lines) > self.shown:
            self._show(f"[rank {self.rank}] {kept}\n")

    @property
    def text(self) -> str:
        """All that was kept, without labels."""
        return "".join(self._lines)
