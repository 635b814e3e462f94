"""Ranks that torchrun has started: `run` uses the processes that are there.

That is how the course leaves one machine. There is no launcher of ours then, and no shared status:
neither mismatches nor deadlocks are named; output goes where torchrun sends it; and torchrun stops
the other ranks when one fails.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch.distributed as dist

from dtlab.processes import failures, hosts
from dtlab.processes.communicator import ProcessComm
from dtlab.processes.endpoint import Reply
from dtlab.processes.process_group import join_group, open_communicator, open_endpoint

JOIN_S = 300.0  # how long a rank waits for the others to come
_PATIENCE_S = 2.0  # how long a rank waits to hear which rank has failed
_calls = 0


def _leave_group() -> None:
    """Join Gloo's threads: one that lets go of a tensor once the interpreter ends would abort."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # communicators hold the group too, and each other


def launched() -> bool:
    """Was this process started as one of many, by torchrun or alike?"""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def run_here(
    fn: Callable[..., Any], args: tuple[Any, ...], backend: str, device: str, trace: bool
) -> list[Reply]:
    """Call `fn(comm, *args)` in this process, as in all the others; everyone's replies, by rank.

    Times are those of rank 0's clock. Raises `RankFailed` on every rank that gets here after one
    has failed; before anything runs, `RunTimeout` if not all ranks come within `JOIN_S`, and
    `ConfigError` if hosts run different versions of dtlab, torch or Python.
    """
    global _calls
    if not dist.is_initialized():
        join_group(backend, *hosts.join(JOIN_S))
        atexit.register(_leave_group)
    here, _calls = _calls, _calls + 1
    end = open_endpoint(backend, device, int(os.environ.get("LOCAL_RANK", 0)), None, trace)
    comm = open_communicator(backend, end, here)
    clock, start_s = hosts.align_clocks()
    end.begin_run(start_s)
    store = dist.PrefixStore(f"dtlab/{here}", dist.distributed_c10d._get_default_store())
    try:
        value = fn(comm, *args)
        end.end_run()
        reply = cloudpickle.dumps(Reply(comm.now(), value, *end.recorder.rows(end.start_s),
                                        clock.uncertainty_s))
    except Exception as error:
        failure = failures.capture(error)
        if failure.secondary:
            _raise_failure(store, _PATIENCE_S)
        store.set("failed", pickle.dumps((comm.rank, failure)).hex())
        raise failures.rank_failed(comm.rank, failure) from None
    _wait_for_all(comm, store)
    replies: list[Any] = [None] * comm.size
    dist.all_gather_object(replies, reply)
    return [pickle.loads(reply) for reply in replies]


def _wait_for_all(comm: ProcessComm, store: dist.Store) -> None:
    """Until all ranks have returned; raise `RankFailed` if one of them has raised instead."""
    store.set(f"returned/{comm.rank}", "")
    everyone = [f"returned/{rank}" for rank in range(comm.size)]
    while not store.check(everyone):
        _raise_failure(store, 0.005)


def _raise_failure(store: dist.Store, patience_s: float) -> None:
    """Raise for the rank that failed, if one says so within this time."""
    until = time.monotonic() + patience_s
    while not store.check(["failed"]):
        if time.monotonic() > until:
            return
        time.sleep(patience_s / 4)
    rank, failure = pickle.loads(bytes.fromhex(store.get("failed").decode()))
    raise failures.rank_failed(rank, failure)
