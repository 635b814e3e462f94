"""Functions of every fork server: the launcher's and the grader's."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time

import torch

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent() -> None:
    """Let this process end when the one that started it ends, however it ends."""
    parent, libc = os.getppid(), ctypes.CDLL(None)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=watch, daemon=True).start()


def share_memory() -> None:
    """Prepare to fork: use no threads of torch, which a fork would lack; and keep the garbage
    collector from touching, and so copying, every page that forks share."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def kill_group(pid: int) -> None:
    """Kill a fork and the processes it started (unless they left its group)."""
    for kill in (os.killpg, os.kill):  # the group is not there yet in a fork's first moments
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
