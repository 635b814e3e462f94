"""The post: letters between the processes of one host, sooner than over Gloo.

Gloo wakes a thread of its own for each message, which then wakes the one that waits: two turns of
the scheduler, many times what a small object costs otherwise. A letter goes through a socket of the
host (AF_UNIX), which the receiver itself reads. So parameter servers write to each other; tensors
they lay on the shelf. Collectives, and all that is sent with `Comm.send`, travel over Gloo.

Each rank has one such socket, for all communicators, and the other end of everyone's. They have no
names: the launcher makes them, and gives them to its ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtlab.comm import Send, Work
from dtlab.processes.board import ANYONE, EPOCH, RECV, SEND
from dtlab.processes.messages import pickled

if TYPE_CHECKING:
    from dtlab.processes.communicator import GlooComm

POSSIBLE = sys.platform == "linux"  # elsewhere such sockets are cut short, or are none at all
MOST_RANKS = 64  # more would need too many open files: then letters go over Gloo, too
_HEAD = struct.Struct("=I?Q")  # sender, does more of it follow, context
_PIECE_BYTES = 1 << 16  # of a letter: what is longer goes in several
_TIMEVAL = struct.Struct("@ll")
_LOOK_S = 0.5  # who waits for long looks so often whether the sender lives


def boxes(ranks: int) -> list[tuple[socket.socket, socket.socket]]:
    """For each rank of a new crew: the end from which it reads, and that to which all others write.
    Empty where there is no post."""
    if not POSSIBLE or not 1 < ranks <= MOST_RANKS:
        return []
    return [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(ranks)]


class Post:
    """The post as rank `rank` of the run uses it. Threads may share it."""

    def __init__(self, rank: int, box: socket.socket, others: Sequence[socket.socket]):
        """box: what rank `rank` reads from; others: where it writes to, for each rank of the run.
        All are the post's from here on."""
        self._rank, self._box, self._others = rank, box, others
        box.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO,
                       _TIMEVAL.pack(int(_LOOK_S), int(_LOOK_S % 1 * 1e6)))
        self._room = bytearray(_HEAD.size + _PIECE_BYTES)
        self._pieces: dict[tuple[int, int], bytearray] = defaultdict(bytearray)
        self._come: dict[int, deque[tuple[int, bytes]]] = {}  # context → letters nobody has asked
        self._turn = threading.Condition(threading.Lock())  # of the threads that read
        self._reading = False
        self._late: dict[int, deque[bytes]] = {}  # receiver → what it has no room for yet
        self._order = threading.Lock()

    def send(self, letter: bytes, dst: int, context: int) -> None:
        """Send to rank `dst` of the run, and return at once."""
        for begin in range(0, len(letter) or 1, _PIECE_BYTES):
            piece = letter[begin : begin + _PIECE_BYTES]
            more = begin + _PIECE_BYTES < len(letter)
            self._send(_HEAD.pack(self._rank, more, context) + piece, dst)

    def _send(self, data: bytes, dst: int) -> None:
        with self._order:
            if (late := self._late.get(dst)) is not None:
                late.append(data)
                return
            try:
                self._others[dst].send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:  # the system keeps some 200 that nobody has read
                self._late[dst] = deque([data])
            except ConnectionError:
                raise RuntimeError(_gone(dst)) from None
            else:
                return
        threading.Thread(target=self._carry, args=(dst,), daemon=True, name="post").start()

    def _carry(self, dst: int) -> None:
        """Send what was late as soon as there is room. In a thread of its own."""
        while True:
            with self._order:
                if not self._late[dst]:
                    del self._late[dst]
                    return
                data = self._late[dst][0]
            with contextlib.suppress(OSError):  # it has died: others will say so
                self._others[dst].send(data)
            self._late[dst].popleft()

    def late(self) -> list[int]:
        """The ranks for which I have letters that the system has not taken yet."""
        return list(self._late)

    def receive(self, srcs: Iterable[int], context: int) -> tuple[int, bytes]:
        """Wait for the next letter from one of the ranks `srcs` of the run. Returns whose, and the
        letter. Raises `RuntimeError` if one of them has died."""
        with self._turn:
            while True:
                if (found := self._found(srcs, context)) is not None:
                    return found
                if self._reading:
                    self._turn.wait()
                    continue
                self._reading = True
                self._turn.release()
                try:
                    nbytes = self._next()
                finally:
                    self._turn.acquire()
                    self._reading = False
                    self._turn.notify_all()
                if nbytes:
                    self._sort(nbytes)
                else:
                    self._look_after(srcs)

    def _next(self) -> int:
        """Read what comes next into my room. 0: nothing for now."""
        try:
            return self._box.recv_into(self._room)
        except BlockingIOError:
            return 0

    def _sort(self, nbytes: int) -> None:
        """Put what was read where it will be looked for."""
        src, more, context = _HEAD.unpack_from(self._room)
        letter = bytes(memoryview(self._room)[_HEAD.size : nbytes])
        if more or (src, context) in self._pieces:
            self._pieces[src, context] += letter
            if more:
                return
            letter = bytes(self._pieces.pop((src, context)))
        if context not in self._come:
            self._come[context] = deque()
            old = [other for other in self._come if other < context - context % EPOCH]
            for other in old:  # of runs that have failed: see `EPOCH`
                del self._come[other]
        self._come[context].append((src, letter))

    def _found(self, srcs: Iterable[int], context: int) -> tuple[int, bytes] | None:
        come = self._come.get(context, ())
        for place, found in enumerate(come):
            if found[0] in srcs:
                del come[place]  # type: ignore[union-attr]
                return found
        return None

    def _look_after(self, srcs: Iterable[int]) -> None:
        """Raise `RuntimeError` if one of them has died: then nobody reads its box."""
        for src in srcs:
            look = select.poll()
            look.register(self._others[src], 0)
            if look.poll(0):
                raise RuntimeError(_gone(src))


def _gone(rank: int) -> str:
    return f"Connection closed by peer: rank {rank} of the run has ended"


class Letters:
    """The post as one communicator uses it: the board says who waits for whom, letters stand in the
    trace, and the ledger counts them among this communicator's messages."""

    def __init__(self, comm: GlooComm, post: Post):
        self._comm, self._post = comm, post
        self._others = {world for world in comm.members if world != comm.end.rank}

    def send(self, x: Any, dst: int, wires: Sequence[torch.Tensor] = ()) -> list[Work]:
        """Send an object to `dst`, then these tensors over Gloo, and return at once: what to wait
        for until they have left."""
        comm, way, letter = self._comm, self._comm.way(dst, True), pickled(x)
        with comm.end.lock:
            way.announce_letter()
            posted_s = time.perf_counter()
            self._post.send(letter, way.world, comm.context)
        self._note(True, way.world, len(letter), posted_s)
        return comm.post(*(Send(wire, dst) for wire in wires)) if wires else []

    def expect(self, src: int) -> None:
        """What comes from `src` has room already."""

    def receive(self, src: int | None = None) -> tuple[int, Any]:
        """Wait for the next object, of all or from `src`. Returns whose it is, and itself."""
        comm, end = self._comm, self._comm.end
        posted_s = time.perf_counter()
        world = ANYONE if src is None else comm.members[src]
        number = -1 if src is None else comm.received[src]
        end.waits((world,), comm.label, RECV, comm.context, 0, False, world, number)
        try:
            srcs = self._others if src is None else (world,)
            world, letter = self._post.receive(srcs, comm.context)
        finally:
            end.runs()
        src = comm.members.index(world)
        with end.lock:
            comm.way(src, False).announce_letter()
        self._note(False, world, len(letter), posted_s)
        return src, pickle.loads(letter)

    def flush(self) -> None:
        """Wait until the system has taken all letters; then they arrive."""
        comm, end = self._comm, self._comm.end
        for world in self._others.intersection(self._post.late()):
            number = comm.sent[comm.members.index(world)] - 1
            end.waits((world,), comm.label, SEND, comm.context, 0, True, world, number)
            while world in self._post.late():
                time.sleep(0.001)
            end.runs()

    def _note(self, sends: bool, world: int, nbytes: int, posted_s: float) -> None:
        comm = self._comm
        if comm.end.traced and comm.visible:
            comm.end.rows.append((sends, world, comm.context, nbytes, posted_s,
                                  time.perf_counter(), comm.label))
