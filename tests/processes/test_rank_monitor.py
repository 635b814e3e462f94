"""Where a rank is, it says in pieces, and perhaps late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dtlab.processes import rank_monitor


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def answering(pipe: tuple[int, int], *pieces: bytes) -> Any:
    """A process that writes these when it gets SIGUSR1, with pauses between them, as a view."""
    ready, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        def answer(*_: object) -> None:
            for piece in pieces:
                os.write(pipe[1], piece)
                time.sleep(0.1)

        signal.signal(signal.SIGUSR1, answer)
        os.write(said, b".")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(said)
    return SimpleNamespace(pid=pid, wait_status=None)


@pytest.mark.parametrize("pieces", [
    [b'Current thread (most recent call first):\n  File "/x/mi', b'ne.py", line 3 in f\n',
     b'  File "<string>", line 1 in <module>\n'],
    [b'Current thread (most recent call first):\n', b'  File "/x/mine.py", line 3 in f\n  ...\n'],
])
def test_a_line_that_comes_in_pieces_is_waited_for(
    pipe: tuple[int, int], pieces: list[bytes],
) -> None:
    os.write(pipe[1], b'  File "/x/other.py", line 9 in g\n  File "<string>", line 1 in <mod')
    rank = answering(pipe, *pieces)
    try:
        assert rank_monitor.current_stack(rank, pipe[0]) == ["mine.py:3 in f"]
    finally:
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)


def test_who_does_not_answer_is_not_waited_for_long(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_monitor, "_ANSWER_S", 0.05)
    rank = answering(pipe)
    os.kill(rank.pid, signal.SIGSTOP)
    try:
        assert rank_monitor.current_stack(rank, pipe[0]) == []
    finally:
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
