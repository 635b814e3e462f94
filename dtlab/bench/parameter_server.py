"""The speed of a push and a pull on this machine, beside torch's RPC and bare Gloo."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import rpc

from dtlab import ps
from dtlab.bench.calls import TURNS_BEFORE, in_a_row, spread, take_turns
from dtlab.checks import check_whole
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.processes import run

OURS, ROWS = "dtlab.ps", "dtlab.ps, rows of 1 kB"
KEYS, FLAT = "dtlab.ps, keys of 1 kB", "the same, in a buffer"
RPC, RPC_TCP, GLOO = "torch.distributed.rpc", "the same, over TCP", "bare Gloo"
KEY_BYTES = 1000
SERVER, WORKER = 0, 1  # of all contestants, but for RPC over TCP: a process has one RPC only
TCP_SERVER, TCP_WORKER = 2, 3
RATE = 1e-3  # of learning: what the server multiplies gradients by


class ServerContestant(NamedTuple):
    """The work of one rank: for a round trip, and once all is measured."""

    trip: Callable[[], object]
    end: Callable[[], object]


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

    Server and worker are two processes; all contestants return fresh weights, and every message of
    ours is traced. RPC makes the same update at the server. Between processes of one host it moves
    tensors without sockets, so it also runs over TCP, as it does between hosts, and as Gloo always
    does. Bare Gloo only sends and receives. From 1 to 16 MB ours also runs with the bytes in many
    keys of 1 kB, wherever these are and in a `Node.buffer`, and in as many rows of one table, each
    time all in one push and one pull.
    """
    check_whole("repeats", repeats)
    check_whole("nbytes", nbytes, 0)
    if nbytes < 4 or nbytes % 4:
        raise ConfigError(f"{nbytes} bytes are no whole number of float32 elements, 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meet")
        result = run(_take_turns, nbytes, repeats, meeting, ranks=4, trace=True, timeout=600,
                     echo=False)
    times: dict[str, list[float]] = {
        name: result.values[TCP_WORKER if name == RPC_TCP else WORKER][name]
        for name in result.values[WORKER]
    }
    ours_s = statistics.median(times[OURS])
    return [RoundTrip(name, nbytes, *spread(took), 2 * nbytes / statistics.median(took),
                      statistics.median(took) / ours_s)
            for name, took in times.items()]


def _take_turns(comm: Comm, nbytes: int, repeats: int, meeting: str) -> dict[str, list[float]]:
    """Return this rank's seconds a round trip, by contestant and repetition."""
    count, pair = nbytes // 4, comm.split(comm.rank // 2)
    assert pair is not None
    remote = _by_rpc(pair, count, f"{meeting}{comm.rank // 2}", tcp=comm.rank >= TCP_SERVER)
    names = [OURS, RPC, RPC_TCP, GLOO]
    if 1_000_000 <= nbytes <= 16_000_000:
        names += [KEYS, FLAT, ROWS]
    absent = ServerContestant(_nothing, _nothing)
    if comm.rank >= TCP_SERVER:
        contestants = dict.fromkeys(names, absent) | {RPC_TCP: remote}
    else:
        small = dict(enumerate(torch.zeros(count).split(KEY_BYTES // 4)))
        make: dict[str, Callable[[], ServerContestant]] = {
            OURS: lambda: _ours(pair, {"w": torch.zeros(count)}), RPC: lambda: remote,
            RPC_TCP: lambda: absent, GLOO: lambda: _by_gloo(pair, count),
            KEYS: lambda: _ours(pair, small), FLAT: lambda: _ours(pair, small, flat=True),
            ROWS: lambda: _rows(pair, max(nbytes // KEY_BYTES, 1)),
        }
        contestants = {name: make[name]() for name in names}
    together = in_a_row(nbytes)
    times = take_turns(comm, {name: trip for name, (trip, _) in contestants.items()}, repeats,
                       together, before=min(TURNS_BEFORE, max(together, 2)))
    for _, end in contestants.values():
        end()
    dist.barrier()
    rpc.shutdown()
    return times


def _nothing() -> None:
    """Do nothing in a turn of others."""


def _join(comm: Comm) -> ps.Node:
    return ps.join(comm, consistency=ps.ASP(), update=ps.SGD(lr=RATE))


def _serving(node: ps.Node) -> ServerContestant:
    """The server's side of one node."""
    node.process_message()  # init

    def trip() -> None:
        for _ in ("push", "pull"):
            node.process_message()

    return ServerContestant(trip, node.serve)


def _ours(comm: Comm, weights: dict[Any, torch.Tensor], flat: bool = False) -> ServerContestant:
    """flat: gradients and weights in the node's own buffers, else each tensor wherever it is."""
    node = _join(comm)
    if node.is_server:
        return _serving(node)
    node.init(weights)
    gradients = (node.buffer(weights) if flat
                 else {key: torch.zeros_like(w) for key, w in weights.items()})
    pulled = node.buffer(weights) if flat else weights
    for gradient in gradients.values():
        gradient.zero_()

    def trip() -> None:
        node.push(gradients)
        node.pull(pulled, out=pulled if flat else None)

    return ServerContestant(trip, node.finish)


def _rows(comm: Comm, rows: int) -> ServerContestant:
    """Do as `_ours`, but each kilobyte is a row of one table, and the rows are in random order."""
    node, gradient = _join(comm), torch.zeros(rows, KEY_BYTES // 4)
    if node.is_server:
        return _serving(node)
    node.init({"table": gradient}, tables=["table"])
    index = torch.randperm(rows)

    def trip() -> None:
        node.push_rows("table", index, gradient)
        node.pull_rows("table", index)

    return ServerContestant(trip, node.finish)


def _by_gloo(comm: Comm, count: int) -> ServerContestant:
    gradient = torch.zeros(count)
    first, second = (dist.send, dist.recv) if comm.rank == WORKER else (dist.recv, dist.send)

    def trip() -> None:
        first(gradient, 1 - comm.rank)
        second(torch.empty(count), 1 - comm.rank)

    return ServerContestant(trip, _nothing)


# What the server of the RPC contestant keeps: RPC calls functions of a module, by name.
_weights: dict[str, torch.Tensor] = {}


def _push(gradient: torch.Tensor) -> None:
    _weights["w"].sub_(gradient, alpha=RATE)


def _pull() -> torch.Tensor:
    return _weights["w"]


def _by_rpc(comm: Comm, count: int, meeting: str, tcp: bool) -> ServerContestant:
    os.environ["TP_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    only: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=300,
                                              **only)
    rpc.init_rpc(str(comm.rank), rank=comm.rank, world_size=2, rpc_backend_options=options)
    _weights["w"] = torch.zeros(count)
    if comm.rank == SERVER:
        return ServerContestant(_nothing, _nothing)  # its threads do it
    gradient, call = torch.zeros(count), partial(rpc.rpc_sync, str(SERVER))

    def trip() -> None:
        call(_push, args=(gradient,))
        call(_pull)

    return ServerContestant(trip, _nothing)
