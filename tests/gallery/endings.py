"""Answers that end what they should not, never end, or take all there is."""

from __future__ import annotations

from tests.gallery.attack import MARK, RIGHT, Attack, hello

ATTACKS: tuple[Attack, ...] = (
    hello("leaves with exit code 0", "import os; os._exit(0)"),
    hello("crashes", "import ctypes; ctypes.string_at(0)"),
    hello("kills its parent", "import os; os.kill(os.getppid(), 9)", "while True: pass"),
    hello("stops its parent", "import os; os.kill(os.getppid(), 19)", "while True: pass"),
    hello("kills all that it may", "import os; os.kill(-1, 9)"),
    hello("stops its group and its session", "import os", "os.killpg(0, 19)",
          "os.kill(os.getsid(0), 19)"),
    hello("kills its siblings", "import os",
          "for pid in range(2, 5000):", "    if pid != os.getpid():",
          "        try: os.kill(pid, 9)", "        except OSError: pass"),
    hello("closes everything", "import os; os.closerange(0, 1000)", RIGHT),
    hello("leaves a daemon in a session of its own", "import os, time",
          "if os.fork() == 0:", "    os.setsid()",
          "    if os.fork() == 0: time.sleep(600)"),
    hello("starts a program that stays", "import subprocess",
          "subprocess.Popen(['sleep', '611'], start_new_session=True)"),
    hello("forks until nothing is left", "import os, time",
          "for _ in range(200):", "    if os.fork() == 0: time.sleep(600)"),
    hello("starts a thousand threads", "import threading, time",
          "def start(): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
          "for _ in range(1000): start()"),
    hello("takes all memory", "x = []", "while True: x.append(bytearray(1 << 26))"),
    hello("fills the disk", f"f = open('/tmp/{MARK}-disk', 'wb')",
          "for _ in range(100): f.write(b'x' * (1 << 20))"),
    hello("prints without end", "for _ in range(10 ** 9): print('x' * 100_000)"),
    hello("computes without end", "while True: pass"),
    hello("sleeps without end", "import time; time.sleep(10 ** 6)"),
    hello("recurses without end", "import sys; sys.setrecursionlimit(10 ** 8)",
          "def f(): return f()", "f()"),
    hello("sends messages without end", "while True: comm.isend(1, comm.rank)"),
    hello("stops itself", "import os; os.kill(os.getpid(), 19)"),
    Attack("receives into more memory than there is", """
def ring_all_reduce(comm, x):
    ops = [["recv", (comm.rank + 1) % comm.size, ["float64", [10**10]]]]
    for work in range(1000):
        comm._connection.current().tell("post", group=0, label="", ops=ops, works=[work])
    return x
""", "ring-all-reduce"),
    Attack("sends vast messages that nobody receives", """
import torch
def ring_all_reduce(comm, x):
    while True: comm.isend(torch.empty(15_000_000), (comm.rank + 1) % comm.size)
""", "ring-all-reduce"),
    Attack("rings of a hundred million numbers", """
import torch
def find_rings(*_): return [torch.zeros(100_000_000, dtype=torch.uint8)] * 2
""", "find-rings"),
    hello("ignores every signal", "import signal",
          "for n in range(1, 32):", "    try: signal.signal(n, signal.SIG_IGN)",
          "    except (OSError, ValueError): pass", "while True: pass"),
)
