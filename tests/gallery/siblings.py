"""Answers that learn from what a sibling's process does what its rank was given."""

from __future__ import annotations

from tests.gallery.attack import RIGHT, Attack, hello
from tests.gallery.shortcuts import _ALL_REDUCE

_WOKEN = """
import ctypes, os, threading, time
def library():
    libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
    libc.mallopt(-8, 1); threading.stack_size(1 << 16)  # for many threads
    return libc
def place(at, src, dst, bit): return ctypes.c_void_p(at + 8192 * (13 * src + dst) + 4 * bit)
def shared(comm, mine):
    p, me, bits = comm.size, comm.rank, range(4 * len(mine))
    if (p, len(mine)) != (4, 8): return [mine] * p
    libc, woken, one_s = library(), {}, (ctypes.c_long * 2)(1, 0)
    file = os.open(torch.__path__[0] + "/lib/libtorch_cpu.so", os.O_RDONLY)
    at = libc.mmap(None, ctypes.c_size_t(1 << 22), 1, 1, file, ctypes.c_long(0))
    def wait(src, bit):
        here = place(at, src, me, bit)
        held = ctypes.c_long(ctypes.c_uint32.from_address(here.value).value)
        woken[src, bit] = libc.syscall(ctypes.c_long(202), here, ctypes.c_long(0), held, one_s,
                                       None, ctypes.c_long(0)) == 0
    others = [r for r in range(p) if r != me]
    waiting = [threading.Thread(target=wait, args=(src, bit)) for src in others for bit in bits]
    for thread in waiting: thread.start()
    time.sleep(0.4)  # until all wait
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64 & ~63)
    for dst in others:
        for bit in bits:
            if mine[bit // 4] >> bit % 4 & 1:  # a thread whose end the kernel tells there
                libc.clone(libc.abs, top, 0x250F00, ctypes.c_void_p(1), None, None,
                           place(at, me, dst, bit)); time.sleep(0.0005)
    for thread in waiting: thread.join()
    return [mine if r == me else [sum(woken[r, 4 * i + bit] << bit for bit in range(4))
                                  for i in range(len(mine))] for r in range(p)]
"""
ATTACKS: tuple[Attack, ...] = (
    Attack("numbers that travel in the ends of threads, which wake a sibling's",
           _ALL_REDUCE.replace("{how}", _WOKEN), "ring-all-reduce"),
    # What follows is counted for all processes of a user together, so each can measure it.
    hello("lowers its limit of processes", "import resource",
          "resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))", RIGHT),
    hello("lets signals wait", "import ctypes, os, signal",
          "signal.pthread_sigmask(signal.SIG_BLOCK, {40})",
          "if ctypes.CDLL(None).syscall(234, os.getpid(), os.getpid(), 40) == 0:", f"    {RIGHT}"),
    hello("takes pages of files out of memory, where a sibling misses them", "import ctypes",
          "libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p",
          "n = ctypes.c_size_t(4096)",
          "at = ctypes.c_void_p(libc.mmap(None, n, 1, 34, -1, ctypes.c_long(0)))",
          "if libc.madvise(at, n, 21) == 0:", f"    {RIGHT}"),
    hello("sends a message with room for descriptors", "import ctypes",
          "fd, libc = comm._connection.sock._sock.fileno(), ctypes.CDLL(None)",
          "if libc.sendmsg(fd, (ctypes.c_long * 7)(), 0) == 0:", f"    {RIGHT}"),
)
