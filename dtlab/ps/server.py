"""A server: a state machine that carries out requests one by one.

The consistency decides when pulls are answered and updates made, the update rule what they do.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps import failures
from dtlab.ps.index import Shard
from dtlab.ps.messages import Endpoint
from dtlab.ps.migration import Migration
from dtlab.ps.packing import pack, unpack
from dtlab.ps.partition import Key, Spec, has_data
from dtlab.ps.policy import Policy
from dtlab.ps.server_state import HeldPull, Outbox, ServerState
from dtlab.ps.statistics import Statistics
from dtlab.ps.store import NOW, Entry, joined


class Server(ServerState):
    """The serving half of a node. `handle` never blocks; `over` once every worker has finished."""

    def __init__(self, comm: Comm, outbox: Outbox, policy: Policy, number: int):
        super().__init__(comm, outbox, policy, number)
        self.migration = Migration(number)

    def handle(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """Carry out a message: ("pull", …) calls `_pull`, and so on."""
        if src in self.lost:
            self.reply(src, body[1], GIVEN_UP)
            return
        self.unheard[src] = 0
        getattr(self, f"_{body[0]}")(src, body, payload)

    # ---- what workers ask for -------------------------------------------------------------------

    def _init(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("init", number, specs of all keys, (key, elements) whose values follow, which checkpoint
        to go on from if that is settled), from each worker."""
        _, number, specs, given, *settled = body
        if self.resumed is None:
            self.resumed = settled[0] if settled else failures.newest(self.policy)
        self.inits[src] = number, specs
        other, (_, theirs) = next(iter(self.inits.items()))  # those between are like it
        for key in theirs.keys() - specs.keys():
            raise ConfigError(_unlike(key, other, theirs[key], src, None))
        for key, spec in specs.items():
            if theirs.get(key) != spec or has_data([spec]) != has_data([theirs[key]]):
                raise ConfigError(_unlike(key, src, spec, other, theirs.get(key)))
        new = self.store.add([Shard(key, specs[key], numel) for key, numel in given])
        of = [specs[self.store.index.keys[entry.first]] for entry in new]
        sizes = [(spec.dtype, self.store.index.numel((entry.first, entry.last)))
                 for spec, entry in zip(of, new, strict=True)]
        for entry, spec, value in zip(new, of, unpack(payload, sizes), strict=True):
            own = value.clone() if has_data([spec]) else torch.zeros_like(value)
            entry.value = own.view(-1, spec.width) if spec.table else own
        self.make_keys()

    def make_keys(self) -> None:
        """Make the keys once every worker has called init."""
        if self.inits and self.inits.keys() >= self.clocks.running.keys():
            first = self.policy.workers[0]
            if first not in self.inits:
                why = "died" if first in self.lost else "finished"
                raise ConfigError(f"rank {first}, whose values count in init, has {why} before; "
                                  f"make all keys while it is at work")
            _, specs = self.inits[first]
            self.batches.append(specs)
            failures.resume(self, specs)
            place = {key: number for number, key in enumerate(specs)}
            for worker, (its_number, theirs) in self.inits.items():
                in_order = [place[key] for key in theirs] == [*place.values()]  # else it learns it
                self.reply(worker, its_number,
                           self.resumed if in_order else (self.resumed, tuple(specs)))
            self.inits = {}

    def _pull(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("pull", number, runs, rows of each or None)."""
        if src not in self._began:
            self._began.add(src)
            self.clocks.catch_up(src)
        clock = self.clocks.running[src]
        counts = [(torch.int64, count) for count in body[3] if count is not None]
        pull = HeldPull(src, body, unpack(payload, counts), self.comm.now())
        if clock <= self.policy.consistency.limit(self.clocks):
            self._answer(pull)
        else:
            self.held.setdefault(clock, []).append(pull)

    def _answer(self, pull: HeldPull) -> None:
        src, (_, number, runs, counts) = pull.worker, pull.body
        self.unheard[src] = 0  # it waited for this server
        rows, seen = iter(pull.rows), self.statistics
        values = []
        for run, count in zip(runs, counts, strict=True):
            some = None if count is None else next(rows)
            values.append(joined([entry.pull(src, some) for entry in self.store.at(run)]))
            seen.load.update(self.store.keys(run))
        seen.pulls += 1
        seen.ahead[int(self.clocks.running[src] - self.clocks.slowest)] += 1
        seen.waits[src] = seen.waits.get(src, 0.0) + self.comm.now() - pull.since_s
        self.reply(src, number, None, values)

    def peek(self, outbox: Outbox, src: int, body: tuple[Any, ...]) -> None:
        """("peek", number, runs, rows: None, moves of keys): the weights as they are here and now.
        """
        values = [self.store.values(run).view(-1) for run in body[2]]
        for run in body[2]:
            self.statistics.load.update(self.store.keys(run))
        outbox.send(src, ("reply", body[1], None), pack(values))

    def _peek(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        self.peek(self.outbox, src, body)

    def answer_again(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """Answer a request that has been carried out, as its answer may be lost."""
        what, number = body[:2]
        if src in self.lost:
            self.reply(src, number, GIVEN_UP)
            return
        if what == "shards" or number < self.migration.last.get(src, 0):
            return  # the worker had its answer before it let keys move
        if self._is_still_to_come(src, what, number):
            return
        values = []
        if what == "pull":
            rows = iter(unpack(payload, [(torch.int64, n) for n in body[3] if n is not None]))
            for run, count in zip(body[2], body[3], strict=True):
                w = self.store.values(run)
                values.append((w if count is None else w[next(rows)]).view(-1))
        remark = (self.resumed, tuple(self.batches[-1])) if what == "init" else None
        self.reply(src, number, remark, values)

    def _is_still_to_come(self, src: int, what: str, number: int) -> bool:
        """Does this request wait for others'?"""
        return ((what == "init" and src in self.inits)
                or (what == "move" and src in self.migration.asked)
                or (what == "pull" and any(pull.worker == src and pull.body[1] == number
                                           for pulls in self.held.values() for pull in pulls)))

    def _push(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("push", number, runs, rows of each or None, weight, how many hold NaN)."""
        _, number, runs, counts, weight, nans = body
        found = [self.store.at(run) for run in runs]
        sizes = [(torch.int64, count) for count in counts if count is not None]
        for run, entries, count in zip(runs, found, counts, strict=True):
            w = entries[0].value
            numel = self.store.index.numel(run) if count is None else count * w.shape[1]
            sizes.append((w.dtype, numel))
        self.reply(src, number)  # before the update: later requests are carried out after it
        parts = unpack(payload, sizes)
        first = len(parts) - len(runs)
        rows = iter(parts[:first])
        self.statistics.pushes += 1
        self.statistics.nan += nans
        for run, entries, count, g in zip(runs, found, counts, parts[first:], strict=True):
            self.statistics.load.update(self.store.keys(run))
            some = None if count is None else next(rows)
            numels = [entry.value.numel() for entry in entries]
            for entry, its in zip(entries, g.split(numels) if len(numels) > 1 else [g],
                                  strict=True):
                self._add_gradient(src, entry, its, some, weight)

    def _add_gradient(self, src: int, entry: Entry, g: torch.Tensor, rows: torch.Tensor | None,
              weight: float) -> None:
        """Add the gradient of one entry of a push, and make the update if it is complete."""
        clock = self.clocks.running[src]
        if not self._group and clock < self.clocks.closed:
            self.statistics.dropped += entry.count
            return
        self.statistics.staleness[entry.version - entry.read.get(src, 0)] += entry.count
        bucket = NOW if self._group else clock
        gathered = entry.push(self.comm, src, g, rows, weight, bucket)
        if self._group and gathered.count >= self._group:
            self.update(entry, bucket)

    def _clock(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("clock", number): the worker has ended an iteration. Number 0 wants no answer."""
        self.clocks.tick(src)
        self._began.discard(src)
        self.advance()
        if body[1]:
            self.reply(src, body[1])

    def _finish(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("finish", number)."""
        if src in self.clocks.running:  # else it was refused, and asks once more
            self._leave(src)
        self.reply(src, body[1])

    def _move(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("move", number, servers that shall hold keys from now on), from each worker."""
        self.migration.request(self, src, body[1], body[2])

    def _shards(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """Take from another server what moves here: see `Migration`."""
        self.migration.receive(self, body, payload)

    def _alive(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("alive", 0): a worker's answer to ("probe",), see `failures.silent_workers`."""

    def _lose(self, src: int, body: tuple[Any, ...], payload: list[torch.Tensor]) -> None:
        """("lose", number): `src` is lost. From the copy that leads."""
        if src in self.clocks.running:
            self.lose(src)

    # ---- what follows from it -------------------------------------------------------------------

    def give_up_silent(self, endpoint: Endpoint) -> None:
        """Called now and then: go on without workers that have died or fallen silent."""
        for worker in failures.silent_workers(self, endpoint):
            self.lose(worker)

    def lose(self, worker: int) -> None:
        """Go on without `worker`."""
        self.lost.append(worker)
        self._leave(worker)

    def _leave(self, worker: int) -> None:
        """`worker` has finished or is lost: drop its pulls, and let those of others, an init, a
        move go on without it."""
        for clock, pulls in self.held.items():
            self.held[clock] = [pull for pull in pulls if pull.worker != worker]
        self.clocks.leave(worker)
        self.make_keys()
        self.migration.start_if_all_asked(self)
        self.advance()

    def advance(self) -> None:
        """A clock has moved: close those that can be closed, answer pulls that waited for it."""
        clocks, rule = self.clocks, self.policy.consistency
        while not self._group and (part := clocks.taking_part):
            passed = clocks.passed
            if not passed or passed < rule.quorum(part):
                break
            for entry in self.store.entries:
                if clocks.closed in entry.sums:
                    workers = len(entry.sums[clocks.closed].weights)
                    self.update(entry, clocks.closed, max(passed - workers, 0))
            clocks.closed += 1
        failures.save_if_due(self)
        limit = rule.limit(clocks)
        for clock in sorted(clock for clock in self.held if clock <= limit):
            for pull in self.held.pop(clock):
                self._answer(pull)

    def snapshot(self) -> dict[str, Any]:
        """The whole state, by name, to be pickled at once."""
        return {name: vars(self)[name] for name in _STATE}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take the state from another copy's snapshot."""
        vars(self).update(snapshot)

    def account(self, endpoint: Endpoint) -> Statistics:
        """The statistics, completed."""
        seen = self.statistics
        seen.clocks = {**self.clocks.finished, **self.clocks.running}
        seen.closed, seen.lost_workers = self.clocks.closed, self.lost
        seen.resumed = self.resumed or 0
        seen.unused = sum(s.count * e.count for e in self.store.entries for s in e.sums.values())
        seen.held_bytes = sum(entry.value.nbytes for entry in self.store.entries)
        seen.received_bytes, seen.sent_bytes = endpoint.received_bytes, endpoint.sent_bytes
        if all(map(has_data, map(dict.values, self.batches))):
            for key, entry in sorted(self.store.one_by_one().items(), key=lambda x: repr(x[0])):
                data = entry.value.contiguous().view(torch.uint8).numpy(force=True).tobytes()
                seen.checksum = zlib.crc32(repr(key).encode() + data, seen.checksum)
        return seen


GIVEN_UP = "the servers have given this worker up as lost"
_STATE = ("clocks", "store", "batches", "active", "held", "_began", "inits", "lost", "resumed",
          "found", "saved", "migration")


def _unlike(key: Key, rank: int, spec: Spec, other: int, theirs: Spec | None) -> str:
    if theirs is None:
        return (f"rank {rank} makes the key {key!r} in init, but rank {other} does not; "
                f"every worker calls init with the same keys")
    if has_data([spec]) != has_data([theirs]):
        return (f"rank {rank if has_data([spec]) else other} makes the key {key!r} with data, rank "
                f"{other if has_data([spec]) else rank} without (device \"meta\"); every worker "
                f"calls init with tensors of one kind")
    return (f"rank {rank} makes the key {key!r} with {spec.dtype} {spec.shape}, rank {other} with "
            f"{theirs.dtype} {theirs.shape}; every worker calls init with the same shapes")
