"""Waiting for processes to end."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil

SOON_S = 10.0  # on a busy machine; on an idle one it takes a part of a second


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Collection[int]) -> None:
    deadline = time.monotonic() + SOON_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
