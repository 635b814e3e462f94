"""Answers that say that they are right: forged scores, frames and objects."""

from __future__ import annotations

from tests.gallery.attack import MARK, Attack, hello

_OWN_SOCKET = """
import gc, json, os, struct
def sockets():
    from dtlab.grading.frames import FrameSocket
    return [x for x in gc.get_objects() if type(x) is FrameSocket]
def frame(kind, **fields):
    text = json.dumps([kind, 0, fields, []]).encode()
    return struct.pack("!Q", len(text)) + text
"""
_RIGHT = '"value": ["tuple", [["int", "0"], ["int", "4"], ["int", "3"], ["int", "1"]]]'

ATTACKS: tuple[Attack, ...] = (
    hello("prints a score", 'print("hello-ranks: 4 of 4 points")', 'print(\'{"points": 4}\')'),
    hello("returns a report", "from dtlab.grading import Report, Row",
          "return Report('hello-ranks', '', [Row('who am I', True, 4, 4, '', '', '')])"),
    hello("returns an object that equals everything",
          "return type('Same', (), {'__eq__': lambda *_: True, '__hash__': lambda _: 0})()"),
    hello("returns a tuple that equals everything",
          "return type('Same', (tuple,), {'__eq__': lambda *_: True})((9, 9, 9, 9))"),
    hello("returns an object that runs code where it is unpickled",
          "import os",
          f"harm = (os.system, ('touch /tmp/{MARK}-unpickled',))",
          "return type('Bomb', (), {'__reduce__': lambda _: harm})()"),
    hello("raises an error that runs code where it is unpickled",
          "import os",
          f"harm = (os.system, ('touch /tmp/{MARK}-raised',))",
          "raise type('Bomb', (Exception,), {'__reduce__': lambda _: harm})()"),
    hello("returns a quantised tensor", "import torch",
          "return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)"),
    hello("returns a tensor of four-bit numbers", "import torch",
          "return torch.zeros(4, dtype=torch.uint8).view(torch.uint4)"),
    hello("returns tensors of no memory, none stored, and none at all", "import torch",
          "return torch.ones(4, device='meta'), torch.eye(3).to_sparse(), torch.ones(0, 1 << 40)"),
    hello("returns a dictionary with a tensor for a key", "import torch",
          "return {torch.ones(2): float('nan'), (1,): -0.0, 'x' * 10_000: [[]] * 1000}"),
    hello("returns a list a thousand deep", "x = []",
          "for _ in range(900): x = [x]", "return x"),
    hello("returns a number of a million digits", "return 10 ** 1_000_000"),
    hello("raises an error with escape sequences",
          "raise ValueError('\\x1b[2J\\x1b]0;owned\\x07 <script>alert(1)</script>')"),
    hello("sends the referee a result of its own",
          f"blob = frame('return', **{{{_RIGHT}, 'after': ['tuple', []], 'peak': 0, 'printed': '', "
          "'at': ''})",
          "for s in sockets(): os.write(s.fileno(), blob * 3)", before=_OWN_SOCKET),
    hello("sends the referee an endless header",
          "for s in sockets(): os.write(s.fileno(), struct.pack('!Q', 1 << 62) + b'x' * 1000)",
          before=_OWN_SOCKET),
    hello("sends the referee a header a hundred thousand deep",
          "text = b'[' * 100_000",
          "for s in sockets(): os.write(s.fileno(), struct.pack('!Q', len(text)) + text)",
          before=_OWN_SOCKET),
    hello("sends the referee half a frame", "for s in sockets(): os.write(s.fileno(), b'\\0' * 5)",
          "import time; time.sleep(100)", before=_OWN_SOCKET),
    hello("sends the referee frames that it has not asked for",
          "for _ in range(20_000):",
          "    for s in sockets(): os.write(s.fileno(), frame('wait', works=[7], at=''))",
          before=_OWN_SOCKET),
    hello("sends the referee frames of streams that there are not",
          "for n in range(50_000):",
          "    text = json.dumps(['now', n + 1, {}, []]).encode()",
          "    for s in sockets(): os.write(s.fileno(), struct.pack('!Q', len(text)) + text)",
          before=_OWN_SOCKET),
    hello("sends the referee gigabytes for a stream that there is not",
          "text = json.dumps(['now', 7, {}, [60_000_000]]).encode()",
          "blob = struct.pack('!Q', len(text)) + text + bytes(60_000_000)",
          "for _ in range(100):",
          "    for s in sockets(): s._sock.sendall(blob)", before=_OWN_SOCKET),
    hello("sends the referee an endless length, and a message without its bytes",
          "text = b'[\"now\", 0, {}, [1e400]]'",
          "blob = frame('post', group=0, label='', ops=[['send', 0, None]], works=[1], at='')",
          "blob = blob if comm.rank else struct.pack('!Q', len(text)) + text",
          "for s in sockets(): s._sock.sendall(blob)", "import time; time.sleep(1)",
          before=_OWN_SOCKET),
    hello("returns a dictionary whose keys have one hash",
          "class Many(dict):",
          "    def items(self): return [(k * ((1 << 61) - 1), 0) for k in range(80_000)]",
          "return Many()"),
    hello("receives under numbers of one hash",
          "works = [k * ((1 << 61) - 1) for k in range(90_000)]",
          "comm._connection.current().tell('post', group=0, label='', works=works,",
          "                                ops=[['recv', 0, None]] * len(works))"),
    Attack("returns thousands of actions in one text", """
def one_f_one_b(p, m):
    return [[" ".join([f"{r}F0 {r}B0"] * (100_000 // p))] for r in range(p)]
""", "one-f-one-b"),
    Attack("steps on weights that fill the referee's memory", """
import torch
def train(job, disk):
    def zeros(*shape): return torch.zeros(shape, dtype=torch.float64)
    n, indices = 16_000, torch.arange(4)
    weights, velocities = ([zeros(n, 6), b, zeros(3, n), zeros(3)] for b in (zeros(n), zeros(n, 1)))
    job._ask(job._plan, job._disk.data, indices, zeros(4, 1), 0.1, weights, velocities)
""", "restart-bits"),
    hello("waits until the virtual clock has no room", "inbox = []", "work = comm.irecv(inbox)",
          "for _ in range(3): comm.wait_any([work], 1e308)"),
    hello("raises an error that says it is the referee's", "raise NotYourOwn",
          before="class NotYourOwn(Exception): pass"),
)
