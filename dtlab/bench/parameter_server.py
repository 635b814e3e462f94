"""How fast a push and a pull are on this machine, beside torch's RPC and bare Gloo."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import rpc

from dtlab import ps
from dtlab.bench.calls import TURNS_BEFORE, WARM_UP, in_a_row
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.processes import run

OURS, ROWS = "dtlab.ps", "dtlab.ps, rows of 1 kB"
KEYS, FLAT = "dtlab.ps, keys of 1 kB", "the same, in a room"
ROOM = "dtlab.ps, in a room"
RPC, RPC_TCP, GLOO = "torch.distributed.rpc", "the same, over TCP", "bare Gloo"
KEY_BYTES = 1000
SERVER, WORKER = 0, 1  # of all contestants, but for RPC over TCP: a process has one RPC only
TCP_SERVER, TCP_WORKER = 2, 3
RATE = 1e-3  # of learning: what the server multiplies gradients by


class RoundTrip(NamedTuple):
    """One contestant at one size: a gradient goes to the server, weights come back."""

    contestant: str
    nbytes: int  # each way
    time_s: float  # median over the repetitions
    fastest_s: float
    slowest_s: float
    repeats: int
    rate_Bps: float  # 2·nbytes / time
    ratio: float  # time / dtlab.ps's in the same run: over 1 is slower than dtlab.ps


def measure_ps(nbytes: int, repeats: int = 9) -> list[RoundTrip]:
    """Push and pull `nbytes` of float32 between one worker and one server, taking turns with peers.

    Server and worker are two processes. RPC makes the same update at the server; on one host it,
    too, moves bytes through shared memory, so it also runs over TCP, as it does between hosts, and
    as Gloo always does. Bare Gloo only sends and receives. Ours runs with gradients anywhere, and
    in a `Node.room`, where they need not be copied. From 1 to 16 MB also with the bytes in many
    keys of 1 kB, and in as many rows of one table, each time all in one push and one pull.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be 1 or more, not {repeats}")
    if nbytes < 4 or nbytes % 4:
        raise ConfigError(f"{nbytes} bytes are no whole number of float32 elements, 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meet")
        result = run(_take_turns, nbytes, repeats, meeting, ranks=4, trace=False, timeout=600,
                     echo=False)
    times: dict[str, list[float]] = {
        name: result.values[TCP_WORKER if name == RPC_TCP else WORKER][name]
        for name in result.values[WORKER]
    }
    ours_s = statistics.median(times[OURS])
    return [RoundTrip(name, nbytes, statistics.median(took), min(took), max(took), len(took),
                      2 * nbytes / statistics.median(took), statistics.median(took) / ours_s)
            for name, took in times.items()]


def _take_turns(comm: Comm, nbytes: int, repeats: int, meeting: str) -> dict[str, list[float]]:
    """On each rank: seconds a round trip, by contestant and repetition."""
    count, pair = nbytes // 4, comm.split(comm.rank // 2)
    assert pair is not None
    remote = _by_rpc(pair, count, f"{meeting}{comm.rank // 2}", tcp=comm.rank >= TCP_SERVER)
    if comm.rank >= TCP_SERVER:
        contestants = dict.fromkeys([OURS, ROOM, RPC, RPC_TCP, GLOO, KEYS, FLAT, ROWS], _nothing)
        contestants[RPC_TCP] = remote
    else:
        chunks = torch.zeros(count).split(KEY_BYTES // 4)
        contestants = {
            OURS: _ours(pair, {"w": torch.zeros(count)}),
            ROOM: _ours(pair, {"w": torch.zeros(count)}, flat=True),
            RPC: remote, RPC_TCP: _nothing,
            GLOO: _by_gloo(pair, count), KEYS: _ours(pair, dict(enumerate(chunks))),
            FLAT: _ours(pair, dict(enumerate(chunks)), flat=True),
            ROWS: _rows(pair, max(nbytes // KEY_BYTES, 1)),
        }
    if not 1_000_000 <= nbytes <= 16_000_000:
        del contestants[KEYS], contestants[FLAT], contestants[ROWS]
    together = in_a_row(nbytes)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-min(TURNS_BEFORE, max(together, 2)), repeats):  # the first warm up
        for name, trip in contestants.items():
            dist.barrier()
            for _ in range(together // WARM_UP):
                trip()
            begun = time.perf_counter()
            for _ in range(together):
                trip()
            if turn >= 0:
                times[name].append((time.perf_counter() - begun) / together)
    dist.barrier()
    rpc.shutdown()
    return times


def _nothing() -> None:
    """A turn of others."""


def _join(comm: Comm) -> ps.Node:
    group = comm.split(0)  # so that several such servers don't read each other's letters
    assert group is not None
    return ps.join(group, consistency=ps.ASP(), update=ps.SGD(lr=RATE))


def _serving(node: ps.Node) -> Callable[[], None]:
    """On the server: what it takes to serve one round trip."""
    node.read_letter()  # init

    def trip() -> None:
        for _ in ("push", "pull"):
            node.read_letter()

    return trip


def _ours(comm: Comm, weights: dict[Any, torch.Tensor], flat: bool = False) -> Callable[[], None]:
    """flat: gradients and weights in the node's own room, else each tensor wherever it is."""
    node = _join(comm)
    if node.is_server:
        return _serving(node)
    node.init(weights)
    gradients: Mapping[Any, torch.Tensor]
    room: Mapping[Any, torch.Tensor]
    if flat:
        gradients, room = node.room(weights), node.room(weights)
        for gradient in gradients.values():
            gradient.zero_()
    else:
        gradients = {key: torch.zeros_like(w) for key, w in weights.items()}
        room = {key: torch.empty_like(w) for key, w in weights.items()}

    def trip() -> None:
        node.push(gradients)
        node.pull(room, out=room)

    return trip


def _rows(comm: Comm, rows: int) -> Callable[[], None]:
    """As `_ours`, each kilobyte a row of one table; the rows in any order."""
    node, gradient = _join(comm), torch.zeros(rows, KEY_BYTES // 4)
    if node.is_server:
        return _serving(node)
    node.init({"table": gradient}, tables=["table"])
    index = torch.randperm(rows)

    def trip() -> None:
        node.push_rows("table", index, gradient)
        node.pull_rows("table", index)

    return trip


def _by_gloo(comm: Comm, count: int) -> Callable[[], None]:
    gradient, weights = torch.zeros(count), torch.zeros(count)
    first, second = (dist.send, dist.recv) if comm.rank == WORKER else (dist.recv, dist.send)

    def trip() -> None:
        first(gradient, 1 - comm.rank)
        second(weights, 1 - comm.rank)

    return trip


# What the server of the RPC contestant keeps: RPC calls functions of a module, by name.
_weights: dict[str, torch.Tensor] = {}


def _push(gradient: torch.Tensor) -> None:
    _weights["w"].sub_(gradient, alpha=RATE)


def _pull() -> torch.Tensor:
    return _weights["w"]


def _by_rpc(comm: Comm, count: int, meeting: str, tcp: bool) -> Callable[[], None]:
    os.environ["TP_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    only: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=300,
                                              **only)
    rpc.init_rpc(str(comm.rank), rank=comm.rank, world_size=2, rpc_backend_options=options)
    _weights["w"] = torch.zeros(count)
    if comm.rank == SERVER:
        return _nothing  # its threads do it
    gradient, call = torch.zeros(count), partial(rpc.rpc_sync, str(SERVER))

    def trip() -> None:
        call(_push, args=(gradient,))
        call(_pull)

    return trip
