"""A node: one rank among servers and workers, and all that a worker can ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps import checks, slices
from dtlab.ps.handle import Handle
from dtlab.ps.index import Shard
from dtlab.ps.master import Master, MasterLog
from dtlab.ps.messages import Buffers, Endpoint, ReceivedMessage, fresh
from dtlab.ps.packing import Size, pack
from dtlab.ps.partition import Key, Spec, has_data
from dtlab.ps.policy import Policy
from dtlab.ps.replica_loop import serve_replica
from dtlab.ps.retry import Requests
from dtlab.ps.server import Server
from dtlab.ps.sharding import Buffer, RequestPlan, ShardMap, all_fit, check_contiguous
from dtlab.ps.slices import Bundle, Slice, Slices
from dtlab.ps.statistics import Statistics


class Node:
    """A node of `join`. On a server call `serve` and nothing else; on a worker all others."""

    def __init__(self, comm: Comm, policy: Policy):
        self.comm, self.policy = comm, policy
        self.is_worker = comm.rank in policy.workers
        self.is_server = not self.is_worker
        self.clock_count = 0
        self.finished = False
        self._endpoint = Endpoint(comm, policy.peers(comm.rank), policy.may_die)
        self._endpoint.owed = "finish()" if self.is_worker else "serve()"
        self._server: Server | None = None
        self._requests: Requests | None = None
        if policy.replication:
            self._requests = Requests(self._endpoint, policy)
        else:  # with replicas, a reply that is late might overwrite a newer one
            self._endpoint.buffers = self._buffers
            if comm.rank in policy.servers:
                self._server = Server(comm, self._endpoint, policy, comm.rank)
        self._shards = ShardMap()
        self._active = policy.active
        self._moves = 0  # of keys, by `use_servers`
        self._numbers = 0
        self._open: dict[int, Handle] = {}  # number of a request → its handle

    # ---- servers --------------------------------------------------------------------------------

    def serve(self) -> Statistics | MasterLog:
        """Servers only: serve until every worker has finished. Returns what happened here."""
        if not self.is_server:
            raise ConfigError(f"rank {self.comm.rank} is a worker; serve() is for servers, the "
                              f"ranks {', '.join(map(str, sorted(self.policy.serving)))}")
        found: Statistics | MasterLog
        if self.comm.rank == self.policy.master:
            found = Master(self.comm, self._endpoint, self.policy).serve()
        elif self._server is None:
            found = serve_replica(self.comm, self._endpoint, self.policy)
        else:
            while not self._server.over:
                self.process_message()
            found = self._server.account(self._endpoint)
        self._endpoint.close()
        return found

    # ---- workers: the calls of an iteration -----------------------------------------------------

    def init(self, tensors: Mapping[Key, torch.Tensor], tables: Iterable[Key] = ()) -> int:
        """Make keys. Every worker calls it with the same keys and shapes, else `ConfigError`; the
        values are those of the first worker. `tables`: keys whose rows (the first dimension) are
        placed, pulled and pushed one by one. Returns once all workers have called it: the clock
        of the checkpoint from which the values are instead, or 0."""
        self._check("init")
        of_rows = frozenset(checks.key_list(self.comm.rank, tables, "init's tables"))
        specs = checks.specs_of(self.comm.rank, tensors, of_rows, self._shards.specs)
        handle, held, by_server = Handle(self), {}, {}
        first = self.comm.rank == self.policy.workers[0]
        if first:
            held = self._make(specs)
            plan = self._shards.plan(self.comm.rank, tuple(specs))
            by_server = plan.cut([x.detach().contiguous() for x in tensors.values()])
        for server in self.policy.servers:
            given = tuple((shard.key, shard.numel) for shard in held.get(server, []))
            self._ask(handle, server, "init", (specs, given),
                      pack([each.read() for each in by_server.get(server, [])]))
        handle.wait()
        resumed, order = handle.remark if isinstance(handle.remark, tuple) else (
            handle.remark, tuple(specs))
        if not first:
            self._make({key: specs[key] for key in order})
        return resumed or 0

    def _make(self, specs: dict[Key, Spec]) -> dict[int, list[Shard]]:
        """Add these keys in this order, the first worker's, in which all workers number them."""
        return self._shards.add(specs, self.policy.partition.place(specs, self._active))

    def pull(self, keys: Iterable[Key],
             out: Mapping[Key, torch.Tensor] | None = None) -> dict[Key, torch.Tensor]:
        """The weights of these keys, as soon as consistency allows; into `out[key]` where given."""
        return self.pull_async(keys, out).wait()  # type: ignore[no-any-return]

    def pull_async(self, keys: Iterable[Key],
                   out: Mapping[Key, torch.Tensor] | None = None) -> Handle:
        """Do as `pull`, without waiting: `wait()` on the handle returns the weights."""
        self._check("pull")
        if isinstance(out, Buffer) and keys is out and out.plan.age is self._shards.age:
            return self._pull(dict(out.tensors), out.slices)
        if out is not None:
            checks.check_mapping(self.comm.rank, "pull's out", out)
        plan, xs = self._targets("pull", keys, {} if out is None else out)
        return self._pull(dict(zip(plan.keys, xs, strict=True)), plan.cut(xs))

    def push(self, grads: Mapping[Key, torch.Tensor], weight: float = 1.0) -> None:
        """Hand in gradients (or weights, where the update rule takes those); returns once the
        servers have them. A table also takes a sparse gradient, as sparse embeddings make.

        What a worker pushes for one key within a clock adds up, if it is gradients, as those of
        micro-batches do; weights are averaged.
        weight: how much they count in an average, say the number of examples they are made from;
        of gradients, a worker counts with the mean weight of its pushes within the clock.
        """
        self.push_async(grads, weight).wait()

    def push_async(self, grads: Mapping[Key, torch.Tensor], weight: float = 1.0) -> Handle:
        """Do as `push`, without waiting; don't change the gradients until `wait()` has returned."""
        self._check("push")
        rank, shards = self.comm.rank, self._shards
        if isinstance(grads, Buffer) and grads.plan.age is shards.age:
            return self._push(grads.slices, weight)
        checks.check_mapping(rank, "push", grads)
        plan, xs = shards.plan(rank, tuple(grads)), list(grads.values())
        all_fit(rank, "push", plan, xs)
        sparse = {}
        if {*map(attrgetter("layout"), xs)} - {torch.strided}:
            sparse = {key: x for key, x in grads.items() if x.layout is not torch.strided}
            plan = shards.plan(rank, tuple(key for key in grads if key not in sparse))
            xs = [grads[key] for key in plan.keys]
        if not all(map(torch.Tensor.is_contiguous, xs)):
            xs = [x.contiguous() for x in xs]
        given = plan.cut(xs)
        for key, g in sparse.items():
            spec = shards.specs[key]
            checks.check_table(rank, key, spec)
            if g.layout is not torch.sparse_coo or g.sparse_dim() > 1:  # of elements, not rows
                g = g.to_dense().to_sparse(1)
            g = g.detach().coalesce()
            values = g.values().reshape(-1, spec.width)
            for server, found in shards.some_rows(key, g.indices()[0], values, True).items():
                given.setdefault(server, []).extend(found)
        return self._push(given, weight)

    def buffer(self, keys: Iterable[Key]) -> Buffer:
        """Tensors for these keys, as a mapping, their elements not set: for `pull(b, out=b)` or,
        once gradients are written into them, `push(b)`.

        Small keys that go to one server lie end to end there, as they travel. So nothing is copied
        or looked at key by key, and thousands of keys are as fast as one."""
        self._check("buffer")
        plan = self._shards.plan(self.comm.rank, tuple(checks.key_list(self.comm.rank, keys)))
        return Buffer(plan, torch.device("meta") if plan.is_meta else self.comm.device)

    def pull_rows(self, key: Key, index: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Rows `index` of a table, shape (len(index), *the rest). Moves these rows only."""
        self._check("pull")
        spec, index = checks.table_rows(self.comm.rank, key, index, self._shards.specs)
        device = self.comm.device if has_data([spec]) else torch.device("meta")
        result = torch.empty(len(index), *spec.shape[1:], dtype=spec.dtype, device=device)
        rows = self._shards.some_rows(key, index, result.view(-1, spec.width))
        self._pull({key: result}, rows).wait()
        return result

    def push_rows(self, key: Key, index: torch.Tensor | Sequence[int], grad: torch.Tensor,
                  weight: float = 1.0) -> None:
        """Hand in the gradient of rows `index` of a table; a row named twice counts twice."""
        self._check("push")
        spec, index = checks.table_rows(self.comm.rank, key, index, self._shards.specs)
        wanted = spec._replace(shape=(len(index), *spec.shape[1:]))
        checks.check_fit(self.comm.rank, "push", key, grad, wanted)
        found = self._shards.some_rows(key, index, grad.detach().reshape(-1, spec.width), True)
        self._push(found, weight).wait()

    def clock(self) -> None:
        """End an iteration: tell every server so. Never waits; the next pull may."""
        self._check("clock")
        self.clock_count += 1
        if self._requests:
            self._to_all_servers("clock")
        else:
            for server in self.policy.servers:
                self._endpoint.send(server, ("clock", 0))

    def finish(self) -> Statistics | None:
        """The worker's last call. Where workers serve as well, it serves until all have finished,
        and returns the server's account."""
        self._check("finish")
        self._to_all_servers("finish").wait()
        self.finished = True
        found = None
        if self._requests:
            self._endpoint.send(self.policy.master, ("finish",))
        elif self._server is not None:
            while not self._server.over:
                self.process_message()
            found = self._server.account(self._endpoint)
        self._endpoint.close()
        return found

    def use_servers(self, servers: Sequence[int] | int) -> None:
        """Let these servers (ranks, or a number of them) hold the keys from here on. Every worker
        calls it at the same point, between iterations; what must move moves, weights and state."""
        self._check("use_servers")
        chosen = checks.chosen_servers(servers, self.policy.servers)
        for handle in dict.fromkeys(self._open.values()):  # they name keys by their old numbers
            handle.wait()
        self._to_all_servers("move", chosen).wait()
        self._active = chosen
        self._moves += 1
        self._shards.move([self.policy.partition.place(specs, chosen)
                           for specs in self._shards.batches])

    # ---- messages -------------------------------------------------------------------------------

    def process_message(self) -> None:
        """Wait for the next message, at most `Policy.check_interval_s`, and process it."""
        message = self._endpoint.receive(self.policy.check_interval_s)
        if message is not None:
            self._process(message)
        elif self._requests:
            self._requests.check()
        if self._server is not None:
            self._server.give_up_silent(self._endpoint)

    def unavailable(self) -> None:
        """A call raises `Unavailable`."""
        if self._requests:
            self._requests.on_unavailable()

    def _process(self, message: ReceivedMessage) -> None:
        src, body, payload = message
        if body[0] == "reply":
            self._on_reply(src, body, payload)
        elif body[0] == "probe":
            self._endpoint.send(src, ("alive", 0))
        elif self._requests:
            self._requests.on_message(src, body)
        else:
            assert self._server is not None, f"a request to a worker: {body}"
            self._server.handle(src, body, payload)

    def _on_reply(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("reply", number of the request, remark)."""
        _, number, remark = body
        handle = self._open.get(number)
        if handle is None:  # answered before: it was asked twice
            return
        if self._requests and not self._requests.accept_reply(src, handle.open[number][0], body):
            return
        del self._open[number]
        handle.on_reply(number, remark, payload)

    def _buffers(self, src: int, body: tuple[Any, ...], sizes: Sequence[Size]) -> Buffers:
        """Return where parts are received: replies go straight to where they are wanted."""
        if body[0] != "reply" or body[1] not in self._open or not sizes:
            return fresh(src, body, sizes)
        return slices.receive_buffers(self._open[body[1]].open[body[1]][1])

    def _ask(self, handle: Handle, server: int, what: str, more: tuple[Any, ...],
             payload: Sequence[torch.Tensor] = (), wanted: Sequence[Slice | Bundle] = ()) -> None:
        """Send one request, whose reply belongs to `handle` and goes to `wanted`."""
        self._numbers += 1
        number = self._numbers
        handle.open[number], self._open[number] = (server, list(wanted)), handle
        (self._requests or self._endpoint).send(server, (what, number, *more), payload)

    def peek(self, keys: Iterable[Key]) -> dict[Key, torch.Tensor]:
        """The weights as they are, whatever the clocks; where there are copies, from any of them,
        so that all share the load. They may be older than what this worker has pushed."""
        self._check("peek")
        plan, xs = self._targets("peek", keys, {})
        found = dict(zip(plan.keys, xs, strict=True))
        return self._pull(found, plan.cut(xs), "peek").wait()  # type: ignore[no-any-return]

    def _to_all_servers(self, what: str, *more: Any) -> Handle:
        handle = Handle(self)
        for server in self.policy.servers:
            self._ask(handle, server, what, more)
        return handle

    def _targets(self, verb: str, keys: Iterable[Key],
                 out: Mapping[Key, torch.Tensor]) -> tuple[RequestPlan, list[torch.Tensor]]:
        """Plan a request for these keys, and the tensors that they fill: of `out`, or new ones."""
        rank, device = self.comm.rank, self.comm.device
        plan = self._shards.plan(rank, tuple(checks.key_list(rank, keys)))
        device = torch.device("meta") if plan.is_meta else device
        xs = [torch.empty(spec.shape, dtype=spec.dtype, device=device) if x is None else x
              for x, spec in zip(map(out.get, plan.keys), plan.specs, strict=True)]
        all_fit(rank, verb, plan, xs)
        check_contiguous(rank, plan, xs)
        return plan, xs

    def _pull(self, xs: dict[Key, torch.Tensor], by_server: Mapping[int, Slices],
              what: str = "pull") -> Handle:
        handle = Handle(self, xs)
        for server, wanted in by_server.items():
            more: tuple[Any, ...] = (tuple(each.run for each in wanted),
                                     slices.counts(wanted))
            if what == "peek":
                more = (*more, self._moves)
            self._ask(handle, server, what, more, pack(list(slices.row_numbers(wanted))), wanted)
        return handle

    def _push(self, by_server: Mapping[int, Slices], weight: float) -> Handle:
        checks.amount(f"rank {self.comm.rank}: a push's weight", weight)
        handle = Handle(self)
        values = {server: [each.read() for each in given] for server, given in by_server.items()}
        sent = [*chain(*values.values())]
        checks.check_dtypes(self.comm.rank, by_server, sent)
        bad = checks.keys_with_nan(self.comm.rank, by_server, sent, self.policy.nan)
        for server, given in by_server.items():
            nans = sum(key in bad for each in given for key in each.keys) if bad else 0
            if bad and self.policy.nan == "drop":
                given = [left for each in given for left in each.without(bad)]
                values[server] = [each.read() for each in given]
            payload = pack([*slices.row_numbers(given), *values[server]])
            runs = tuple(each.run for each in given)
            more = (runs, slices.counts(given), weight, nans)
            self._ask(handle, server, "push", more, payload)
        return handle

    def _check(self, what: str) -> None:
        if not self.is_worker:
            raise ConfigError(f"rank {self.comm.rank} is a server: it calls serve(), not {what}()")
        if self.finished:
            raise ConfigError(f"rank {self.comm.rank}: {what} after finish; "
                              f"finish() is a worker's last call")

    def __repr__(self) -> str:
        roles = " and ".join(role for role, is_it in (
            ("master", self.comm.rank == self.policy.master),
            ("server", self.comm.rank in self.policy.serving), ("worker", self.is_worker)) if is_it)
        return f"<ps.Node rank {self.comm.rank}: {roles}>"
