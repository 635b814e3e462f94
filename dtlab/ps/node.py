"""A node: one rank's place among servers and workers, and all that a worker can ask for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps import checks, parts
from dtlab.ps.mail import Mail, Size, pack
from dtlab.ps.partition import Key
from dtlab.ps.parts import Layout, Part
from dtlab.ps.server import Policy, Server
from dtlab.ps.statistics import Statistics


class Handle:
    """A request under way. `wait` returns what the blocking call would."""

    def __init__(self, node: Node, result: Any = None):
        self._node, self._result = node, result
        self.open: dict[tuple[int, int], list[Part]] = {}  # (server, number) → its places

    def wait(self) -> Any:
        """Block until every server that was asked has answered."""
        while self.open:
            self._node.read_letter()
        return self._result


class Node:
    """Made by `join`. On a server call `serve` and nothing else; on a worker all the others."""

    def __init__(self, comm: Comm, policy: Policy):
        self.comm, self.policy = comm, policy
        self.is_worker = comm.rank in policy.workers
        self.is_server = not self.is_worker
        self.clock_count = 0
        self.finished = False
        self._mail = Mail(comm)
        self._mail.room, self._mail.to_myself = self._room, self._to_myself
        serves = comm.rank in policy.servers
        self._server = Server(comm, self._mail, policy) if serves else None
        self._layout = Layout()
        self._active = policy.active
        self._numbers = 0
        self._open: dict[tuple[int, int], Handle] = {}

    # ---- servers --------------------------------------------------------------------------------

    def serve(self) -> Statistics:
        """Servers only: serve until every worker has finished. Returns what happened here."""
        if not self.is_server or self._server is None:
            raise ConfigError(f"rank {self.comm.rank} is a worker; serve() is for servers, "
                              f"the ranks {', '.join(map(str, self.policy.servers))}")
        while not self._server.over:
            self.read_letter()
        self._mail.flush()
        return self._server.account()

    # ---- workers: the calls of an iteration -----------------------------------------------------

    def init(self, tensors: Mapping[Key, torch.Tensor], tables: Iterable[Key] = ()) -> None:
        """Make keys. Every worker calls it with the same keys and shapes, else `ConfigError`; the
        values are those of the first worker. `tables`: keys whose rows (the first dimension) are
        placed, pulled and pushed one by one. Returns once all workers have called it."""
        self._check("init")
        specs = checks.specs(self.comm.rank, tensors, frozenset(tables), self._layout.specs)
        self._layout.add(specs, self.policy.partition.place(specs, self._active))
        whole = {key: x.detach().contiguous() for key, x in tensors.items()}
        by_server = self._layout.whole(whole)
        handle = Handle(self)
        first = self.comm.rank == self.policy.workers[0]
        for server in self.policy.servers:
            mine = by_server.get(server, []) if first else []
            values = [part.read() for part in mine]
            keys = tuple((part.key, value.numel())
                         for part, value in zip(mine, values, strict=True))
            self._ask(handle, server, "init", (specs, keys), pack(values))
        handle.wait()

    def pull(self, keys: Iterable[Key],
             out: Mapping[Key, torch.Tensor] | None = None) -> dict[Key, torch.Tensor]:
        """The weights of these keys, as soon as consistency allows; into `out[key]` where given."""
        return self.pull_async(keys, out).wait()  # type: ignore[no-any-return]

    def pull_async(self, keys: Iterable[Key],
                   out: Mapping[Key, torch.Tensor] | None = None) -> Handle:
        """`pull`, without waiting: `wait()` on the handle returns the weights."""
        self._check("pull")
        rank, device, specs = self.comm.rank, self.comm.device, self._layout.specs
        result = {}
        for key in checks.as_keys(rank, keys):
            spec = checks.known(rank, key, specs)
            x = (out or {}).get(key)
            if x is None:
                x = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            result[key] = checks.fits(rank, "pull", key, x, spec)
        checks.contiguous(rank, result)
        handle = Handle(self, result)
        self._pull(handle, self._layout.whole({key: x.detach() for key, x in result.items()}))
        return handle

    def push(self, grads: Mapping[Key, torch.Tensor], weight: float = 1.0) -> None:
        """Hand in gradients (or weights, where the update rule takes those); returns once the
        servers have them. A table also takes a sparse gradient, as sparse embeddings make.

        weight: how much they count in an average, say the number of examples they are made from.
        """
        self.push_async(grads, weight).wait()

    def push_async(self, grads: Mapping[Key, torch.Tensor], weight: float = 1.0) -> Handle:
        """`push`, without waiting; leave the gradients unchanged until `wait()` has returned."""
        self._check("push")
        rank, dense = self.comm.rank, {}
        sparse: dict[int, list[Part]] = {}
        for key, g in grads.items():
            spec = checks.known(rank, key, self._layout.specs)
            checks.fits(rank, "push", key, g, spec)
            if g.layout is torch.sparse_coo:
                checks.is_table(rank, key, spec)
                g = g.detach().coalesce()
                found = self._layout.some_rows(key, g.indices()[0],
                                               g.values().reshape(-1, spec.width))
                sparse = parts.both(sparse, found)
            else:
                dense[key] = g.detach().contiguous()
        return self._push(parts.both(self._layout.whole(dense), sparse), weight)

    def pull_rows(self, key: Key, index: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Rows `index` of a table, shape (len(index), *the rest). Moves these rows only."""
        self._check("pull")
        spec, index = checks.rows(self.comm.rank, key, index, self._layout.specs)
        result = torch.empty(len(index), *spec.shape[1:], dtype=spec.dtype,
                             device=self.comm.device)
        handle = Handle(self)
        self._pull(handle, self._layout.some_rows(key, index, result.view(-1, spec.width)))
        handle.wait()
        return result

    def push_rows(self, key: Key, index: torch.Tensor | Sequence[int], grad: torch.Tensor,
                  weight: float = 1.0) -> None:
        """Hand in the gradient of rows `index` of a table; a row named twice counts twice."""
        self._check("push")
        spec, index = checks.rows(self.comm.rank, key, index, self._layout.specs)
        wanted = spec._replace(shape=(len(index), *spec.shape[1:]))
        checks.fits(self.comm.rank, "push", key, grad, wanted)
        found = self._layout.some_rows(key, index, grad.detach().reshape(-1, spec.width))
        self._push(found, weight).wait()

    def clock(self) -> None:
        """End an iteration: tell every server so. Never waits; the next pull may."""
        self._check("clock")
        self.clock_count += 1
        for server in self.policy.servers:
            self._mail.send(server, ("clock",))

    def finish(self) -> Statistics | None:
        """The worker's last call. Where workers serve as well, it serves until all have finished,
        and returns the server's account."""
        self._check("finish")
        self._to_all_servers("finish").wait()
        self.finished = True
        if self._server is None:
            return None
        while not self._server.over:
            self.read_letter()
        self._mail.flush()
        return self._server.account()

    def use_servers(self, servers: Sequence[int] | int) -> None:
        """From here on these servers (ranks; or the first so many) hold the keys. Every worker
        calls it at the same point, between iterations; what must move moves, weights and state."""
        self._check("use_servers")
        chosen = checks.active(servers, self.policy.servers)
        handle = self._to_all_servers("move", chosen)
        handle.wait()
        self._active = chosen
        for specs in self._layout.batches:
            self._layout.placement |= self.policy.partition.place(specs, chosen)

    # ---- letters --------------------------------------------------------------------------------

    def read_letter(self) -> None:
        """Wait for the next letter and do what it says."""
        self._take(*self._mail.receive())

    def _take(self, src: int, body: tuple[Any, ...], wires: list[torch.Tensor]) -> None:
        if body[0] == "reply":
            handle = self._open.pop((src, body[1]))
            places = handle.open.pop((src, body[1]))
            parts.place(places, wires)
        else:
            assert self._server is not None, f"a letter to a worker: {body}"
            self._server.handle(src, body, wires)

    def _to_myself(self, body: tuple[Any, ...], wires: list[torch.Tensor]) -> None:
        self._take(self.comm.rank, body, wires)

    def _room(self, src: int, body: tuple[Any, ...], sizes: list[Size]) -> list[torch.Tensor]:
        """Answers go straight to where they are wanted."""
        fresh = self._mail.fresh(src, body, sizes)
        if body[0] != "reply":
            return fresh
        return parts.rooms(self._open[src, body[1]].open[src, body[1]], fresh)

    def _ask(self, handle: Handle, server: int, what: str, more: tuple[Any, ...],
             wires: Sequence[torch.Tensor] = (), places: Sequence[Part] = (),
             marked: bool = False) -> None:
        """Send one request, whose answer belongs to `handle` and goes to `places`."""
        self._numbers += 1
        number = self._numbers
        handle.open[server, number] = list(places)
        self._open[server, number] = handle
        self._mail.send(server, (what, number, *more), wires, marked)

    def _to_all_servers(self, what: str, *more: Any) -> Handle:
        handle = Handle(self)
        for server in self.policy.servers:
            self._ask(handle, server, what, more)
        return handle

    def _pull(self, handle: Handle, by_server: Mapping[int, list[Part]]) -> None:
        several = len(by_server) > 1
        for server, wanted in by_server.items():
            more = (_keys(wanted), _counts(wanted), several)
            self._ask(handle, server, "pull", more, pack(list(parts.row_numbers(wanted))), wanted)

    def _push(self, by_server: Mapping[int, list[Part]], weight: float) -> Handle:
        checks.weight(self.comm.rank, weight)
        handle, several = Handle(self), len(self.policy.workers) > 1
        bad = checks.nan(self.comm.rank, by_server, self.policy.nan)
        for server, given in by_server.items():
            nans = sum(part.key in bad for part in given)
            if self.policy.nan == "drop":
                given = [part for part in given if part.key not in bad]
            wires = pack([*parts.row_numbers(given), *(part.read() for part in given)])
            more = (_keys(given), _counts(given), weight, nans)
            self._ask(handle, server, "push", more, wires, marked=several)
        return handle

    def _check(self, what: str) -> None:
        if not self.is_worker:
            raise ConfigError(f"rank {self.comm.rank} is a server: it calls serve(), not {what}()")
        if self.finished:
            raise ConfigError(f"rank {self.comm.rank}: {what} after finish; "
                              f"finish() is a worker's last call")

    def __repr__(self) -> str:
        roles = " and ".join(role for role, is_it in (
            ("server", self.comm.rank in self.policy.servers), ("worker", self.is_worker)) if is_it)
        return f"<ps.Node rank {self.comm.rank}: {roles}>"


def _keys(given: Iterable[Part]) -> tuple[Hashable, ...]:
    return tuple(part.key for part in given)


def _counts(given: Iterable[Part]) -> tuple[int | None, ...]:
    return tuple(None if part.rows is None else len(part.rows) for part in given)
