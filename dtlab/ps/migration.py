"""Moving shards between servers while training goes on: `Node.use_servers`.

Each server waits for the request of every worker, so that it has all earlier pushes; sends the
other servers their new shards, weights and state; and answers once it has its own new shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlab.ps.messages import Endpoint
from dtlab.ps.packing import dtype_name, pack, unpack
from dtlab.ps.partition import Key, Shards, Units, common, positions
from dtlab.ps.policy import Policy
from dtlab.ps.replication import View
from dtlab.ps.server_state import ServerState
from dtlab.ps.store import Entry

_BEFORE_ALL_IS_THERE = ("move", "shards", "lose")


class Migration:
    """One server's part. asked: worker → number of its request that waits. last: worker → number of
    its last request. moves: how often keys have moved."""

    def __init__(self, me: int):
        self._me = me
        self.asked: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.moves = 0
        self._servers: tuple[int, ...] = ()  # that hold the keys after the move
        self._received_shards: list[tuple[tuple[Any, ...], list[torch.Tensor]]] = []
        self._old: dict[Key, Entry] = {}  # this server's shards before the move
        self._new: dict[Key, Entry] | None = None  # and after it
        self._shards: Shards = {}

    def request(self, server: ServerState, worker: int, number: int,
                servers: tuple[int, ...]) -> None:
        """Take a worker's request that `servers` hold the keys."""
        self.asked[worker] = self.last[worker] = number
        self._servers = servers
        self.start_if_all_asked(server)

    def start_if_all_asked(self, server: ServerState) -> None:
        """Send shards once every worker has asked: then all earlier pushes are here."""
        all_asked = self.asked and server.clocks.running.keys() <= self.asked.keys()
        if not all_asked or self._new is not None:
            return
        for entry in server.store.entries:
            for bucket in list(entry.sums):  # no worker will add to it
                server.update(entry, bucket)
        self._old = server.store.one_by_one()
        old, new = server.shards(server.active), server.shards(self._servers)
        server.active, self._shards = self._servers, new
        self.moves += 1
        for other in server.policy.servers:
            if other != self._me:
                self._send_shards(server, other, old, new)
        self._new = {}
        for key, held in new.items():
            units = dict(held).get(self._me)
            if units is not None:
                self._new[key] = self._new_shard(server, key, units, dict(old[key]).get(self._me))
        self._finish_if_complete(server)

    def receive(self, server: ServerState, body: tuple[Any, ...],
                payload: list[torch.Tensor]) -> None:
        """Take another server's ("shards", number, from which server, [(key, units, version, what
        was read, names of the state's tensors, its numbers, dtypes and sizes), …])."""
        self._received_shards.append((body, payload))
        self._finish_if_complete(server)

    def _send_shards(self, server: ServerState, other: int, old: Shards, new: Shards) -> None:
        """Send `other` the part of its new shards that this server has; perhaps nothing."""
        moved, tensors = [], []
        for key, held in new.items():
            mine, theirs = dict(old[key]).get(self._me), dict(held).get(other)
            if mine is None or theirs is None or not len(units := common(mine, theirs)):
                continue
            entry, where = self._old[key], positions(units, mine)
            names = [name for name, x in entry.state.items() if isinstance(x, torch.Tensor)]
            numbers = {name: x for name, x in entry.state.items() if name not in names}
            parts = [entry.numbers, *(entry.state[name] for name in names)]
            parts = [part[where].reshape(-1).clone() for part in parts]
            sizes = [(dtype_name(part.dtype), part.numel()) for part in parts]
            moved.append((key, units, entry.version, entry.read, names, numbers, sizes))
            tensors += parts
        server.statistics.moved += sum(len(shard[1]) for shard in moved)
        server.outbox.send(other, ("shards", self.moves, self._me, moved), pack(tensors))

    def _new_shard(self, server: ServerState, key: Key, units: Units, mine: Units | None) -> Entry:
        """This server's new shard of `key`, filled with the part that it has already."""
        old = self._old.get(key)
        if old is not None and mine is not None and len(mine) == len(units) == len(
                common(mine, units)):
            return old
        spec = next(specs[key] for specs in server.batches if key in specs)
        shape = (len(units), spec.width) if spec.table else (len(units),)
        entry = Entry((0, 1), torch.zeros(shape, dtype=spec.dtype, device=server.comm.device),
                      server.policy.update)
        if old is not None and mine is not None:
            kept = common(mine, units)
            where, source = positions(kept, units), positions(kept, mine)
            entry.version, entry.read = old.version, dict(old.read)
            _fill(entry, where, old.numbers[source],
                  {name: x[source] if isinstance(x, torch.Tensor) else x
                   for name, x in old.state.items()})
        return entry

    def _finish_if_complete(self, server: ServerState) -> None:
        """Once all shards are here, install them and answer the workers."""
        if self._new is None or len(self._received_shards) < len(server.policy.servers) - 1:
            return
        for (*_, moved), payload in self._received_shards:
            sizes = [(getattr(torch, name), numel) for shard in moved for name, numel in shard[-1]]
            parts = iter(unpack(payload, sizes))
            for key, units, version, read, names, numbers, _ in moved:
                entry = self._new[key]
                where = positions(units, dict(self._shards[key])[self._me])
                entry.version, entry.read = version, dict(read)
                shape = (-1, *entry.numbers.shape[1:])
                value = next(parts).view(shape)
                state = {name: next(parts).view(shape) for name in names}
                _fill(entry, where, value, state | numbers)
        server.store.replace(self._new, server.batches)
        self._old, self._new, self._received_shards = {}, None, []
        asked, self.asked = self.asked, {}
        for worker, number in asked.items():
            server.reply(worker, number)


class ShardTransfers:
    """Shards on their way to other servers, as one copy of a replicated server sees them.

    The copy that answers for a server sends them; but it may die, and so may the head that they
    were sent to. So each copy keeps them until it is certain that they are there, and when the
    copies of either server change they are sent again. They carry a number: what comes twice counts
    once. `sent`: server → what it is given.
    """

    def __init__(self, endpoint: Endpoint, policy: Policy, shard: int):
        self._endpoint = endpoint
        self._views = {server: View(0, copies) for server, copies in policy.copies.items()
                       if server != shard}
        self.sent: dict[int, tuple[tuple[Any, ...], Sequence[torch.Tensor]]] = {}

    def send(self, server: int) -> None:
        """Send `server` what it is given, to its head."""
        body, payload = self.sent[server]
        self._endpoint.send(self._views[server].head, body, payload)

    def change(self, server: int, view: View, answers: bool) -> None:
        """The master has announced the copies of another server. answers: does this copy send?"""
        if view.epoch > self._views[server].epoch:
            self._views[server] = view
            if answers and server in self.sent:
                self.send(server)

    def awaited(self) -> dict[int, tuple[int, int]]:
        """The heads that may lack what they are given, see `Watch.check`."""
        views = {server: self._views[server] for server in self.sent}
        return {view.head: (server, view.epoch) for server, view in views.items()}

    def send_again(self) -> None:
        """Send all of `sent` again."""
        for server in self.sent:
            self.send(server)

    def request_done(self, what: str) -> None:
        """A request of this kind is carried out. After a move, a worker asks for something else
        only once all servers have answered, so all shards have arrived."""
        if what not in _BEFORE_ALL_IS_THERE:
            self.sent.clear()


def _fill(entry: Entry, where: Any, value: torch.Tensor, state: dict[Any, Any]) -> None:
    """Put weights and state in their place in `entry`."""
    entry.numbers[where] = value
    for name, x in state.items():
        if not isinstance(x, torch.Tensor):
            entry.state[name] = x
        else:
            if name not in entry.state:
                entry.state[name] = torch.zeros_like(entry.numbers)
            entry.state[name][where] = x
