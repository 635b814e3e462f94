"""`simulate`: run a function on every rank of a simulated cluster, in virtual time."""

from __future__ import annotations

import builtins
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

import torch

from dtlab.checks import check_amount, check_choice, check_flag, check_number
from dtlab.comm import Comm
from dtlab.errors import ConfigError, Deadlock, RankDied, RankFailed
from dtlab.ranks.call_checks import check_call, check_options
from dtlab.ranks.output import RankOutput, write
from dtlab.result import Result
from dtlab.simulator import communicator, crashes, engine, process_state, strands, streams, works
from dtlab.simulator.copies import Copies, Shared
from dtlab.simulator.deaths import Deaths
from dtlab.simulator.strands import NO_MODES, NeedsThreads, modes
from dtlab.topology import Topology
from dtlab.trace import Trace
from dtlab.tracebacks import end_at_caller, traceback_text

# The rank of the current greenlet or thread; None in the caller's.
_RANK: ContextVar[int | None] = ContextVar("rank", default=None)
MACHINERY = (__file__, engine.__file__, communicator.__file__, strands.__file__,
             streams.__file__)


def simulate(
    fn: Callable[..., Any],
    *args: Any,
    network: Topology | None = None,
    trace: bool = True,
    gamma: float = 0.0,
    overhead_s: float | None = None,
    strands: str | None = None,
    eager_bytes: float = 0,
    timeout: float | None = None,
    echo: bool = True,
    crash: Mapping[int, int] | None = None,
    detect_s: float | None = None,
    restart_s: float | None = None,
    **unknown: Any,
) -> Result:
    """Call `fn(comm, *args)` on each rank of `network`; return values, virtual time and trace.

    Data is real: a simulated all-reduce adds. Give tensors on the device "meta" when only time
    matters. As separate processes would, each rank has its own copies of `args` and of all that
    `fn` closes over or uses as globals (lists, tensors, objects, your classes and modules), its own
    gradient mode, default dtype, loggers, `print`, `sys.stdout`, filters of warnings, `os.environ`,
    and its own random numbers, seeded with its number: of torch, of `random` unless `fn` itself
    imports that, and of NumPy (whose `randn` makes two at a time; the second is lost where a rank
    waits). Ranks share what else a process has once (the working directory, signals, flags of torch
    such as `torch.use_deterministic_algorithms`), installed packages, what `fn` imports itself, and
    registered algorithms. Values come back as they are. Equal inputs give equal results, bit for
    bit. Calls of several threads take turns, so that a rank must not wait for one in a thread of
    its own.

    network: the cluster (`dtlab.topology`), always to be given; it says how many ranks there are.
    trace: record messages and spans in `Result.trace`? Without, it takes less memory.
    gamma: virtual seconds per byte that `Comm.accumulate_` reduces.
    overhead_s: seconds for which starting a message occupies its sender's port, never more than the
        message's latency; None: as `network` says.
    strands: "greenlet" (fast) or "thread" (ranks may communicate inside autograd's backward). None:
        greenlets; if a rank communicates inside backward, all begin again, as threads.
    eager_bytes: messages up to this size leave without waiting for their receiver, as MPI sends
        small ones; 0: none does, so that no buffer hides a deadlock.
    timeout: limit of real seconds, looked at whenever virtual time moves. None: no limit.
    echo: show what the ranks print, each line labelled with its rank.
    crash: rank → after how many events (calls of `post`, from which all messages come, timed waits,
        computations) it dies without a word; its value is None, and the others go on.
    detect_s: virtual seconds after such a death until the others' connections to that rank break,
        so that waiting for it raises `RankDied`; None: they never notice.
    restart_s: virtual seconds until it is started anew (`fn` from the beginning), to join the
        others at their next `Comm.shrink`; None: never.

    Raises `Deadlock` at once when no rank can go on, `RankFailed` when one raises, or has begun
    work that it neither waited for nor cancelled, `RankDied` when one calls exit, `RunTimeout`,
    `ConfigError`.
    """
    check_options(simulate, unknown)
    check_call(fn, args, "simulate")
    check_flag("trace", trace)
    check_flag("echo", echo)
    network = _check(network, gamma, strands, eager_bytes, timeout)
    if overhead_s is not None:
        network = replace(network, overhead_s=overhead_s)
    crashes_after = _checked_crashes({} if crash is None else crash, network.ranks)
    for name, seconds in (("detect_s", detect_s), ("restart_s", restart_s)):
        check_amount(name, 0 if seconds is None else seconds, " seconds")

    simulation = partial(_Simulation, Copies(fn, args, network.ranks), network, trace=trace,
                         gamma=gamma, eager_bytes=eager_bytes, echo=echo, crash=crashes_after,
                         detect_s=detect_s, restart_s=restart_s)
    first = simulation(strands or "greenlet")
    try:
        if strands != "thread" and modes() != NO_MODES:
            raise NeedsThreads  # greenlets would be in the caller's modes
        return first.run(timeout)
    except NeedsThreads:
        if strands is None:
            shown = [output.text for output in first.output]
            return simulation("thread", shown=shown).run(timeout)
        raise ConfigError("simulate is called, or a rank communicates, inside autograd's backward "
                          "or inside a torch mode, which greenlets can't do; call simulate(…, "
                          "strands=\"thread\")"
                          ) from None
    except KeyboardInterrupt as interrupt:
        raise end_at_caller(interrupt) from None


def simulate_shared(fn: Callable[[Comm], Any], network: Topology) -> Result:
    """As `simulate`, but ranks share all objects that `fn` refers to, and nothing is printed."""
    return _Simulation(Shared(fn), network, "greenlet", echo=False).run(None)


class _Simulation:
    """One call of `simulate`: the engine, its strands, and their results."""

    def __init__(self, call: Copies | Shared, network: Topology, kind: str, *, trace: bool = True,
                 gamma: float = 0.0, eager_bytes: float = 0, echo: bool = True,
                 crash: Mapping[int, int] | None = None, detect_s: float | None = None,
                 restart_s: float | None = None, shown: Sequence[str] = ()):
        self.call = call
        self.ranks = list(range(network.ranks))  # the same int objects everywhere save memory
        self.engine = engine.Engine(network, gamma=gamma, eager_bytes=eager_bytes, trace=trace)
        self.kind = kind
        show = _as_the_caller(partial(write, sys.stdout)) if echo and sys.stdout else None
        self.output = [RankOutput(rank, show) for rank in range(network.ranks)]
        for output, text in zip(self.output, shown, strict=False):
            output.shown = text.count("\n")
        self.values: list[Any] = [None] * network.ranks
        self.elapsed_s = 0.0
        self.crash = crash or {}
        self.engine.deaths = Deaths(self.engine, network.ranks, detect_s, restart_s,
                                    self._restarted_strand)
        self._first: list[strands.Strand] = []

    def run(self, timeout: float | None) -> Result:
        strand = strands.STRANDS[self.kind]
        try:
            with _one_at_a_time(), process_state.forked(), self._routed_output():
                everyone = [strand(r, self._run_rank, self.engine.next_strand) for r in self.ranks]
                self._first = everyone
                self._run(everyone, timeout)
        finally:
            for output in self.output:
                output.close()
        if self.engine.failure is not None:
            raise self._error_of_run(*self.engine.failure)
        for rank in self.engine.crashed:
            self.values[rank] = None  # although it may have returned before its stream crashed
        trace = Trace(len(self.ranks), self.engine.messages, self.engine.spans,
                      waits=self.engine.waits, virtual=True)
        values = [self.call.returned(value) for value in self.values]
        return Result(values, self.elapsed_s, trace, [o.text for o in self.output])

    def _run(self, everyone: list[strands.Strand], timeout: float | None) -> None:
        """Run all strands to the end. Unwaited works are failures, too."""
        engine = self.engine
        try:
            engine.run(everyone, timeout)
        except Deadlock as deadlock:  # perhaps a begun function has raised an error
            engine.failure = works.failure(engine.unwaited, engine.crashed, errors_only=True)
            if engine.failure is None:
                gone = {row.rank for row in deadlock.waiting if row.doing == "returned"}
                owing = next((work for work in engine.unwaited if work.owed and work.rank in gone),
                             None)
                if owing is None:
                    raise
                first, _, _ = str(deadlock).partition("\n")
                raise Deadlock(f"{first}: rank {owing.rank} returned without calling {owing.owed}",
                               deadlock.waiting) from None
        engine.failure = engine.failure or works.failure(engine.unwaited, engine.crashed)

    def _restarted_strand(self, rank: int) -> strands.Strand:
        """A strand on which `rank` starts again, to join the others at their next shrink."""
        return self._first[rank].new_strand(0, lambda strand: self._run_rank(strand, new=True))

    def _run_rank(self, strand: strands.Strand, new: bool = False) -> None:
        """Run `strand`, from its first moment to its last."""
        _RANK.set(strand.rank)
        where = self.engine, strand.rank, self.ranks
        comm: Comm = communicator.SimComm(*where)
        if strand.rank in self.crash and not new:
            comm = crashes.CrashingComm(*where, limit=self.crash[strand.rank])
        try:
            if new:
                comm = comm.shrink()
            fn, args = self.call.take()
            value = fn(comm, *args) if args else fn(comm)  # the latter switches faster
            self.engine.end_wait(strand)
            self.values[strand.rank] = value
            self.elapsed_s = self.engine.now  # the last rank to return sets it last
            self.engine.deaths.rank_ended(strand.rank)
        except strands.Stopped:
            raise
        except strands.Crashed:
            self.engine.crash(strand.rank)
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: see _error_of_run
            self.engine.fail(strand.rank, error)

    def _error_of_run(self, rank: int, error: BaseException) -> BaseException:
        """Return what `simulate` raises when `rank` has raised `error`."""
        if isinstance(error, (KeyboardInterrupt, NeedsThreads)):
            return error.with_traceback(None)  # its frames hold autograd graphs
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            return RankDied(f"rank {rank} called exit({error.code!r}) instead of returning", rank,
                            code)
        text = traceback_text(error, MACHINERY)
        return RankFailed.from_rank(rank, self.call.returned(error.with_traceback(None)), text)

    @contextmanager
    def _routed_output(self) -> Iterator[None]:
        """Inside, what a rank prints goes to that rank's `RankOutput`, and keyboard and screen are
        refused, as a process of `run` has none."""
        out, err = _Router(self.output, sys.stdout), _Router(self.output, sys.stderr)
        with (redirect_stdout(out), redirect_stderr(err),
              _refused(builtins, "input", EOFError("EOF when reading a line")),
              _refused(torch.distributed, "init_process_group",
                       ValueError("Default process group has not been initialized")),
              _refused(sys.modules.get("matplotlib.pyplot"), "show", ConfigError(
                  "a rank has no screen: return what you would draw, or save the figure")),
              _refused(torch.autograd.profiler.profile, "_prepare_trace", ConfigError(
                  "torch profiles a process, which ranks share in simulate: use dtlab.run"))):
            yield


@contextmanager
def _refused(module: Any, name: str, error: Exception) -> Iterator[None]:
    """Inside, `module.name` raises `error` in a rank; in the caller's other threads it does not."""
    if module is None:  # not imported
        yield
        return
    real = getattr(module, name)

    def refuse(*args: Any, **options: Any) -> Any:
        if _RANK.get() is None:
            return real(*args, **options)
        raise end_at_caller(error)

    setattr(module, name, refuse)
    try:
        yield
    finally:
        setattr(module, name, real)


class _Router(io.TextIOBase):
    """Replaces stdout and stderr: gives each text to the rank that is running."""

    def __init__(self, output: list[RankOutput], outside: TextIO | None):  # None: it is closed
        self._output, self._outside = output, outside

    def write(self, text: str) -> int:
        rank = _RANK.get()
        if rank is None:  # the caller's other threads
            return self._outside.write(text) if self._outside else 0
        self._output[rank].feed(text)
        return len(text)

    def flush(self) -> None:
        if self._outside and not getattr(self._outside, "closed", False):
            self._outside.flush()


def _as_the_caller(write: Callable[[str], object]) -> Callable[[str], object]:
    """Return `write` as run by the caller, who may be a rank of an outer simulation."""
    rank = _RANK.get()

    def show(text: str) -> None:
        token = _RANK.set(rank)
        try:
            write(text)
        finally:
            _RANK.reset(token)

    return show


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Simulations of several threads run one after another: the process has one standard output
    and one random generator of torch. A simulation inside a rank holds the lock already."""
    if _RANK.get() is not None:
        yield
        return
    with _LOCK:
        yield


_LOCK = threading.Lock()


def _check(network: Any, gamma: float, kind: str | None, eager_bytes: float,
           timeout: float | None) -> Topology:
    """Return `network`; raise `ConfigError` for arguments that make no sense."""
    if not isinstance(network, Topology):
        raise ConfigError(f"network must be a Topology such as dtlab.topology.uniform(4, 5e-6, "
                          f"10e9), not {network!r}")
    check_amount("gamma", gamma, " seconds per byte")
    if kind is not None:
        check_choice("kind of strands", kind, strands.STRANDS)
    check_number("eager_bytes", eager_bytes)
    if eager_bytes < 0:
        raise ConfigError(f"eager_bytes must be a number of bytes, 0 or more, not {eager_bytes!r}")
    check_number("timeout", 1 if timeout is None else timeout)
    if timeout is not None and timeout <= 0:
        raise ConfigError(f"timeout must be more than 0 seconds, or None, not {timeout!r}")
    return network


def _checked_crashes(crash: Any, ranks: int) -> Mapping[int, int]:
    if not isinstance(crash, Mapping) or not all(
        isinstance(rank, int) and rank in range(ranks) and isinstance(events, int) and events >= 0
        for rank, events in crash.items()
    ):
        raise ConfigError(f"crash is a dict of rank → number of events, such as {{0: 5}}, with "
                          f"ranks 0 to {ranks - 1}; not {crash!r}")
    return crash
