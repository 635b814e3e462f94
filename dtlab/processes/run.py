"""`run`: one function, N processes."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dtlab.checks import check_flag, check_whole, is_real, is_whole
from dtlab.comm import Comm
from dtlab.errors import ConfigError, DtlabError, RankDied, RankFailed, RunTimeout
from dtlab.processes import torchrun
from dtlab.processes.endpoint import Reply
from dtlab.processes.launcher import RankGroup
from dtlab.processes.process_group import check_device
from dtlab.ranks.call_checks import check_call, check_options
from dtlab.ranks.serialization import pack_call
from dtlab.result import Result
from dtlab.trace import Trace
from dtlab.tracebacks import end_at_caller

BACKENDS = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
_RANKS_PER_CORE = 32
_FOUR = type("DefaultRanks", (int,), {})(4)  # tells ranks=4 from a call that names no number


def run(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = _FOUR,
    backend: str = "gloo",
    device: str = "cpu",
    timeout: float | None = 60.0,
    trace: bool = True,
    echo: bool = True,
    threads: int = 1,
    may_die: Collection[int] = (),
    max_restarts: int = 0,
    **unknown: Any,
) -> Result:
    """Call `fn(comm, *args)` on `ranks` processes at once; returns what each returned.

    `fn` may be any function: a lambda, a closure, one from a notebook cell. Each rank gets its own
    copy of `args`. The output of ranks is shown as it comes, labelled (`echo=False`: only collected
    in `Result.output`). `timeout` is in seconds, None for no limit. Raises `RankFailed` when a
    rank raises, or has begun work that it neither waited for nor cancelled, `RankDied` when one
    dies, `Deadlock` when no rank can go on, `RunTimeout` after `timeout`, `ConfigError` for
    arguments that make no sense. Whatever happens, no process is left.

    backend: "gloo", or "nccl" for GPUs. device: `Comm.device`, "cpu" or "cuda", whose GPUs the
        ranks take in turn. threads: of torch, in each rank. trace: record `Result.trace`?
    may_die: ranks that may die without failing the run: their value is then None, and the others go
        on. A rank that talks to one of them must expect its death: `RankDied` where it waits for
        it. See `Comm.shrink` and `Comm.wait_any`.
    max_restarts: how often ranks are started anew after one has died, raised or hung: all of them,
        `fn` from the beginning, as torchrun does (TORCHELASTIC_RESTART_COUNT says how often it has
        been), so that `fn` should load a checkpoint first. With `may_die`, only a rank that has
        died, which then joins the others at their next `Comm.shrink`. `ConfigError` restarts none.

    Under torchrun, or Slurm with MASTER_ADDR and MASTER_PORT, the ranks are those that it started,
    however many; in a process group that a script has formed, they are the group's, and a `ranks`
    that contradicts it is a `ConfigError`. `echo`, `threads`, `may_die` and `max_restarts` don't
    count there. Mismatches and deadlocks are named, and `timeout` and Ctrl-C end every wait, as
    here; but between hosts the sizes of messages are not compared, and a rank that computes is not
    stopped: it hears of the end at its next message.
    """
    check_options(run, unknown)
    check_ranks(ranks)
    joins = torchrun.is_joined()
    if joins and ranks is not _FOUR:
        torchrun.check_given(ranks)
    check_backend(backend, device, 1 if joins else ranks)
    check_limits(timeout, threads)
    check_flags(trace, echo)
    check_may_die(may_die, ranks)
    check_whole("max_restarts", max_restarts, 0, 1000)
    check_call(fn, args, "run")
    try:
        if joins:
            replies = torchrun.run_here(fn, args, backend, device, trace, timeout)
            return gather(replies, [""] * len(replies))
        return launch(fn, args, int(ranks), backend, device, timeout=timeout, trace=trace,
                      echo=echo, threads=threads, may_die=may_die, max_restarts=max_restarts)
    except DtlabError as error:
        error.__traceback__ = None  # our own frames would only hide the rank's
        raise
    except KeyboardInterrupt as interrupt:
        raise end_at_caller(interrupt) from None


def launch(
    fn: Callable[..., Any], args: Sequence[Any], ranks: int, backend: str = "gloo",
    device: str = "cpu", *, timeout: float | None, trace: bool = False, echo: bool = False,
    threads: int = 1, may_die: Collection[int] = (), max_restarts: int = 0,
) -> Result:
    """Do as `run` on new processes, whatever has started this one. Arguments are as checked."""
    call = pack_call(fn, tuple(args))
    how = partial(RankGroup, ranks, backend=backend, device=device, threads=threads, trace=trace)
    try:
        for count in range(max_restarts + 1):
            env = {"TORCHELASTIC_RESTART_COUNT": str(count),
                   "TORCHELASTIC_MAX_RESTARTS": str(max_restarts)} if max_restarts else {}
            try:
                with how(env=env) as group:
                    return gather(*group.call("call", call, timeout=timeout, echo=echo,
                                              may_die=may_die, restarts=max_restarts))
            except (RankDied, RankFailed, RunTimeout) as error:
                if may_die or count == max_restarts or isinstance(error, ConfigError):
                    raise
                if echo:
                    first, _, _ = str(error).partition("\n")
                    print(f"{first}; restart {count + 1} of {max_restarts}", file=sys.stderr)
        raise AssertionError("the last start returns or raises")
    finally:
        os.close(call)


def introduce(comm: Comm) -> str:
    """Return the name of the rank's process: an example of a function for ranks."""
    return f"process {os.getpid()}"


# ---- arguments that make no sense ---------------------------------------------------------------


def check_ranks(ranks: Any) -> None:
    """Raise `ConfigError` unless this machine can hold that many ranks."""
    if not is_whole(ranks) or int(ranks) < 1:
        raise ConfigError(f"ranks={ranks!r}: how many processes? Give a whole number, at least 1")
    cores = os.cpu_count() or 1
    if int(ranks) > _RANKS_PER_CORE * cores:
        raise ConfigError(
            f"ranks={ranks}: this machine's {cores} cores can usefully hold "
            f"{_RANKS_PER_CORE * cores} processes; dtlab.simulate runs the same function "
            f"on thousands of simulated ranks"
        )


def check_backend(backend: str, device: str, ranks: int) -> None:
    """Raise `ConfigError` unless torch has this backend, and the machine such devices."""
    built = [name for name, available in BACKENDS.items() if available()]
    if backend not in built:
        raise ConfigError(
            f"backend={backend!r} is not available in this torch; choose one of: {', '.join(built)}"
        )
    check_device(device)
    if backend == "nccl" and torch.device(device).type != "cuda":
        raise ConfigError("backend='nccl' moves data between GPUs only; add device='cuda'")
    if backend == "nccl" and ranks > (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"ranks={ranks}: NCCL takes one GPU for each rank, and this machine has {gpus}; "
            f"use fewer ranks, or backend='gloo'"
        )


def check_limits(timeout: Any, threads: Any) -> None:
    """Raise `ConfigError` unless both are positive numbers."""
    if timeout is not None and not (is_real(timeout) and timeout > 0):
        raise ConfigError(f"timeout={timeout!r}: give seconds, more than 0, or None for no limit")
    if not is_whole(threads) or threads < 1:
        raise ConfigError(f"threads={threads!r}: how many threads a rank? At least 1")


def check_flags(trace: Any, echo: Any) -> None:
    """Raise `ConfigError` unless both are True or False."""
    check_flag("trace", trace)
    check_flag("echo", echo)


def check_may_die(may_die: Any, ranks: int) -> None:
    """Raise `ConfigError` unless these are ranks."""
    listed = isinstance(may_die, (Sequence, Set)) and not isinstance(may_die, (str, bytes))
    known = listed and all(map(is_whole, may_die))
    if not known or not set(may_die) <= set(range(ranks)):
        raise ConfigError(f"may_die={may_die!r}: name ranks, which are 0 to {ranks - 1}")


# ---- what came back -----------------------------------------------------------------------------


def gather(replies: Sequence[Reply], output: list[str]) -> Result:
    """One result of what all ranks replied."""
    values = [reply.value for reply in replies]
    elapsed_s = max(reply.done_s for reply in replies)
    return Result(values, elapsed_s, merge(replies), output)


def merge(replies: Sequence[Reply]) -> Trace:
    """One trace of what all ranks recorded: the k-th send of a pair and context meets its k-th
    receive. A message moves once both have posted it, and ends when the first of them knows."""
    sides: dict[tuple[int, int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for rank, reply in enumerate(replies):
        for sends, peer, context, *rest in reply.messages:
            pair = (rank, peer) if sends else (peer, rank)
            sides[*pair, context][0 if sends else 1].append(rest)
    messages = []
    for (src, dst, _), (sent, received) in sides.items():
        for (nbytes, sent_s, left_s, label, src_stream), (_, wanted_s, got_s, _, dst_stream) in zip(
            sent, received, strict=False
        ):
            begin_s = max(sent_s, wanted_s)
            end_s = max(begin_s, min(left_s, got_s))
            messages.append((src, dst, nbytes, sent_s, wanted_s, begin_s, end_s, label,
                             src_stream, dst_stream))
    spans = [(rank, *span) for rank, reply in enumerate(replies) for span in reply.spans]
    waits = [(rank, *wait) for rank, reply in enumerate(replies) for wait in reply.waits]
    return Trace(len(replies), messages, spans, waits=waits,
                 clock_uncertainty_s=[reply.clock_uncertainty_s for reply in replies])
