"""The store of a process group: where ranks leave each other their addresses when they join.

Torch's own, TCPStore, listens on a port, and asks the name server who 127.0.0.1 is: that hangs
for seconds on a laptop without network. This one is a dictionary in the launcher, which each rank
reaches over a socket pair: no port, no name, nothing to clash or to leave behind.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtlab.processes.control_channel import ChannelClosed, ControlChannel

JOINING = "joining"  # there once ranks that were started anew wait to join the others
_ADDRESSES = "survivors "
_TIMED_OUT = "the other ranks did not write what this one waits for in the store"


class RankStore(dist.Store):
    """The store, seen from a rank. `channel` leads to the launcher's `StoreServer`."""

    def __init__(self, channel: ControlChannel):
        super().__init__()
        self._channel = channel
        self._one_at_a_time = threading.Lock()

    def _ask(self, *request: Any) -> Any:
        with self._one_at_a_time:
            self._channel.send(request)
            (done, reply), _ = self._channel.recv()
        if not done:
            raise dist.DistStoreError(reply)
        return reply

    def set(self, key: str, value: str | bytes) -> None:
        """Write `value` under `key`."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value under `key`, once there is one."""
        value: bytes = self._ask("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key`; returns the sum."""
        total: int = self._ask("add", key, amount)
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if `expected` is there, or nothing and nothing expected."""
        now: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(desired))
        return now

    def check(self, keys: Sequence[str]) -> bool:
        """Are all `keys` there?"""
        there: bool = self._ask("check", list(keys))
        return there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there. Raises `DistStoreError` after `timeout`."""
        self._ask("wait", list(keys), timeout.total_seconds() if timeout else None)

    def delete_key(self, key: str) -> bool:
        """Forget `key`; was it there?"""
        there: bool = self._ask("delete_key", key)
        return there

    def num_keys(self) -> int:
        """Count the keys."""
        count: int = self._ask("num_keys")
        return count

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values under `keys`, once they are all there: one question instead of many."""
        values: list[bytes] = self._ask("multi_get", list(keys))
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write `values` under `keys`."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Write `value` behind what is under `key`."""
        self._ask("append", key, _bytes(value))

    def shrink(self, rank: int) -> tuple[int, list[int]]:
        """Wait until all living ranks have called it. Returns the new generation and its ranks."""
        number, ranks = self._ask("shrink", rank)
        return number, ranks

    def has_extended_api(self) -> bool:
        """Torch asks whether `multi_get`, `multi_set` and `append` may be used."""
        return True

    def clone(self) -> RankStore:
        """Return this store: its threads take turns, so none needs a connection of its own."""
        return self


class StoreServer:
    """The store itself, in the launcher: answers one request at a time, or later."""

    def __init__(self, ranks: int = 0) -> None:
        self._data: dict[str, bytes] = {}
        self._generation = 0  # how many shrinks there were
        self.members = set(range(ranks))  # its ranks that have neither died nor returned
        self._shrinking: dict[int, ControlChannel] = {}  # in `shrink`, or restarted
        # (channel, request, keys, deadline)
        self._waiting: list[tuple[ControlChannel, str, list[str], float]] = []

    def serve(self, channel: ControlChannel) -> bool:
        """Answer what has come on `channel`. False: its rank is gone."""
        try:
            for request, _ in channel.ready_frames():
                self._answer(channel, *request)
        except ChannelClosed:
            self._waiting = [entry for entry in self._waiting if entry[0] is not channel]
            return False
        return True

    def rank_ended(self, rank: int, died: bool = False) -> None:
        """Note that `rank` has died or returned: `shrink` does not wait for it, and ranks that are
        connecting with it start again."""
        self._shrinking.pop(rank, None)
        if rank not in self.members:
            return
        self.members.discard(rank)
        if died:
            self._data[disconnected_key(self._generation, rank)] = b""
        if self._generation:
            self._data[broken_key(self._generation)] = b""
            self.answer_waiting()
        self._shrink_if_all_called()

    def _shrink_if_all_called(self) -> None:
        if self.members and self.members <= self._shrinking.keys():
            self._generation += 1
            self.members = set(self._shrinking)
            asking, self._shrinking = self._shrinking, {}
            self._data.pop(JOINING, None)
            for channel in asking.values():
                _reply(channel, (self._generation, sorted(asking)))

    def _answer(self, channel: ControlChannel, what: str, *args: Any) -> None:
        data = self._data
        if what in ("get", "multi_get"):
            keys = [args[0]] if what == "get" else args[0]
            self._waiting.append((channel, what, keys, float("inf")))
        elif what == "wait":
            limit_s = args[1] if args[1] is not None else float("inf")
            self._waiting.append((channel, what, args[0], time.monotonic() + limit_s))
        elif what == "shrink":
            if args[0] not in self.members:
                data[JOINING] = b""
            data[disconnected_key(self._generation, args[0])] = b""
            self._shrinking[args[0]] = channel
            self._shrink_if_all_called()
        elif what == "check":
            _reply(channel, all(key in data for key in args[0]))
        elif what == "num_keys":
            _reply(channel, len(data))
        elif what == "delete_key":
            _reply(channel, data.pop(args[0], None) is not None)
        elif what == "set":
            data[args[0]] = args[1]
            _reply(channel, None)
        elif what == "append":
            data[args[0]] = data.get(args[0], b"") + args[1]
            _reply(channel, None)
        elif what == "add":
            total = int(data.get(args[0], b"0")) + args[1]
            data[args[0]] = str(total).encode()
            _reply(channel, total)
        elif what == "compare_set":
            key, expected, desired = args
            if data.get(key, b"") == expected:
                data[key] = desired
            _reply(channel, data.get(key, expected))
        self.answer_waiting()

    def answer_waiting(self) -> None:
        """Answer waiting requests whose keys are there, whose time is over, or that must fail."""
        now, still = time.monotonic(), []
        broken = broken_key(self._generation) in self._data
        current = addresses_of(self._generation) + "/"
        for entry in self._waiting:
            channel, what, keys, deadline = entry
            if all(key in self._data for key in keys):
                values = [self._data[key] for key in keys]
                _reply(channel, values[0] if what == "get" else values)
            # The addresses of an earlier generation will never be there.
            elif broken or any(key.startswith(_ADDRESSES) and not key.startswith(current)
                               for key in keys):
                _reply(channel, "a rank has died", done=False)
            elif now > deadline:
                _reply(channel, _TIMED_OUT, done=False)
            else:
                still.append(entry)
        self._waiting = still


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def disconnected_key(number: int, rank: int) -> str:
    """Return the key that is set once `rank` of generation `number` has died or called shrink."""
    return f"gone {number}/{rank}"


def addresses_of(number: int) -> str:
    """Return the prefix of the keys of the addresses of ranks of generation `number`."""
    return f"{_ADDRESSES}{number}"


def broken_key(number: int) -> str:
    """Return the key that is set once a rank of generation `number` has died or returned."""
    return f"broken {number}"


def _reply(channel: ControlChannel, answer: Any, done: bool = True) -> None:
    with contextlib.suppress(OSError):  # its rank has just died
        channel.send((done, answer))
