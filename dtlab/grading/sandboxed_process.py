"""The work of a process just forked for a submission: it gives up its rights and serves the
referee, as a rank or as an executor of cells. The first frame says which."""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress

from dtlab.grading import sandboxed_cells, sandboxed_rank
from dtlab.grading.frames import ConnectionClosed, FrameSocket
from dtlab.grading.system_calls import restrict
from dtlab.processes.forking import die_with_parent

PROCESSOR_S = 300  # what a process may use in all; the referee is stricter with each call
OPEN_FILES = 128
_M_MMAP_THRESHOLD = -3  # <malloc.h>


def run_untrusted(sock: FrameSocket, restricted: bool) -> None:
    """Become the process that the first frame asks for. Never returns. restricted: it may only make
    the system calls that it needs."""
    code = 1
    try:
        die_with_parent()
        os.setpgid(0, 0)
        discard_output()
        os.closerange(3, sock.fileno())
        os.closerange(sock.fileno() + 1, 1024)
        first = sock.recv()
        limit_resources()
        gloo = first.kind == "rank" and bool(first.fields["gloo"])
        if gloo:
            give_back_memory()
        if restricted:
            restrict(gloo)
        if first.kind == "rank":
            sandboxed_rank.serve(sock)
        sandboxed_cells.serve(sock, first)
    except ConnectionClosed:
        code = 0  # the referee is done
    finally:
        os._exit(code)


def discard_output() -> None:
    """Discard what is written below Python's own streams, and leave nothing to read."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def give_back_memory() -> None:
    """Have blocks of a megabyte or more returned to the system once they are freed, so that this
    process is as large as what it holds. With glibc only."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def limit_resources() -> None:
    """Allow no files (so none can be shared), no core dumps, no endless computing. The referee
    limits its memory from outside."""
    for kind, limit in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
                        (resource.RLIMIT_CPU, PROCESSOR_S), (resource.RLIMIT_NOFILE, OPEN_FILES)):
        resource.setrlimit(kind, (limit, limit))
