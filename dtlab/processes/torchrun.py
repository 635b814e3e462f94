"""Ranks that others have started: `run` uses the processes that are there.

They come from torchrun or Slurm, which is how the course leaves one machine; or a script has formed
a process group of torch.distributed. There is no launcher of ours then. Output goes where it goes
without us. Mismatches, deadlocks and `timeout` end a run as elsewhere, within the limits that
`monitor` names, on every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from dtlab.errors import ConfigError
from dtlab.processes import failures, hosts, joined
from dtlab.processes.communicator import ProcessComm
from dtlab.processes.endpoint import ProcessEndpoint, Reply
from dtlab.processes.monitor import Monitor, open_status
from dtlab.processes.process_group import is_foreign, join_group, open_communicator, place
from dtlab.processes.shared_status import RAISED, RETURNED, RUNNING
from dtlab.processes.status_writer import Threads
from dtlab.ranks.serialization import sending_back

JOIN_S = 300.0  # how long a rank waits for the others to come
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def _leave_group() -> None:
    """Join Gloo's threads: one that lets go of a tensor once the interpreter ends would abort."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # communicators hold the group too, and each other


def started(env: Mapping[str, str] = os.environ) -> tuple[int, int, int] | None:
    """(rank, ranks, rank on this host), if torchrun or Slurm has started this process as one of
    many. RANK and WORLD_SIZE alone do not say so: tutorials set them in notebooks."""
    if not all(name in env for name in _ADDRESS):
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "TORCHELASTIC_RUN_ID" not in env:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        if env.get("SLURM_NTASKS") == "1":
            return None  # srun started one process: it may start ranks of its own
    try:
        rank, size = int(env[names[0]]), int(env[names[1]])
        return rank, size, int(env.get(names[2], rank))
    except (KeyError, ValueError):
        return None


def is_joined() -> bool:
    """Are the ranks of `run` there already?"""
    return started() is not None or is_foreign()


def check_given(ranks: int) -> None:
    """Raise `ConfigError` if a script's own process group has another number of ranks."""
    if is_foreign() and ranks != (there := dist.get_world_size()):
        raise ConfigError(
            f"ranks={ranks}: this process is one of {there} of a process group, which run joins; "
            f"leave ranks= out, or call torch.distributed.destroy_process_group() first")


def run_here(
    fn: Callable[..., Any], args: tuple[Any, ...], backend: str, device: str, trace: bool,
    timeout: float | None,
) -> list[Reply]:
    """Call `fn(comm, *args)` in this process, as in all the others; everyone's replies, by rank.

    Times are those of rank 0's clock. Raises `RankFailed` on every rank if one has failed,
    `Deadlock` and `RunTimeout` as `run`; before anything runs, `RunTimeout` if not all ranks come
    (to the group within `JOIN_S`, to this call within `timeout`), and `ConfigError` if hosts run
    different versions of dtlab, torch or Python.
    """
    if not dist.is_initialized():
        rank, size, _ = started() or (0, 1, 0)
        if not 0 <= rank < size:
            raise ConfigError(f"the launcher's variables make this process rank {rank} of {size}; "
                              f"ranks count from 0")
        at = ":".join(os.environ[name] for name in _ADDRESS)
        join_group(backend, *hosts.join(rank, size, at, JOIN_S))
        atexit.register(_leave_group)
    here = joined.next_number("run")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = joined.part_of_store(f"run {here}")
    transport, connections = joined.connect(store, range(size), rank, timeout, "dtlab.run")
    threads = Threads()
    status, file = open_status(store, rank, size)
    monitor = Monitor(status, store, rank, threads, timeout)
    monitor.add(connections)
    end = ProcessEndpoint(rank, size, transport, threads, place(device, _local_rank()), status,
                          trace)
    end.find_cause = monitor.why
    comm = open_communicator(backend, end, here)
    try:
        untraced = ProcessComm(end, range(size), (here, "clock"), visible=False)
        clock, start_s = hosts.align_clocks(untraced)
        end.writer.does(RUNNING)
        monitor.publish()
        end.begin_run(start_s)
        try:
            value = fn(comm, *args)
            end.end_run()
            with sending_back(comm.rank, value):
                reply = cloudpickle.dumps(Reply(comm.now(), value, *end.recorder.rows(end.start_s),
                                                clock.uncertainty_s))
        except BaseException as error:
            end.writer.does(RAISED)
            _fail(monitor, comm.rank, error)
        end.writer.does(RETURNED)
        _wait_for_all(comm, store, monitor)
        return [cloudpickle.loads(reply) for reply in untraced._all_gather_objects(reply)]
    finally:
        monitor.close()
        end.close()
        if file is not None:
            os.close(file)


def _local_rank() -> int:
    """The number of this rank's GPU: the script's own choice, or what its launcher says."""
    if torch.cuda.is_initialized() and (chosen := torch.cuda.current_device()):
        return chosen
    *_, on_host = started() or (int(os.environ.get("LOCAL_RANK", dist.get_rank())),)
    return on_host


def _fail(monitor: Monitor, rank: int, error: BaseException) -> None:
    """Raise what ends the run: this rank's error, or that of which it is a consequence."""
    failure = failures.capture(error)
    if error is not monitor.error and not (failure.secondary and monitor.why()):
        with contextlib.suppress(dist.DistError):
            monitor.ask(lambda: monitor.verdict.set(rank, failure))
        if not isinstance(error, Exception):  # an interrupt, or sys.exit
            raise error
    raise monitor.error or failures.rank_failed(rank, failure) from None


def _wait_for_all(comm: ProcessComm, store: dist.Store, monitor: Monitor) -> None:
    """Wait until all ranks have returned; raise what ends the run instead, if anything does."""
    everyone = [f"returned/{rank}" for rank in range(comm.size)]
    error = None
    try:
        monitor.ask(monitor.publish)
        monitor.ask(lambda: store.set(f"returned/{comm.rank}", ""))
        while error is None and not monitor.ask(lambda: store.check(everyone)):
            error = monitor.error or monitor.ask(lambda: monitor.verdict.read(0.02))
    except dist.DistError as gone:
        error = monitor.error or monitor.store_is_gone(gone)
    if error is not None:
        raise error
