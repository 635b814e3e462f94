"""Ranks that keep_alive: what one call leaves behind, the next one finds."""

from __future__ import annotations

import itertools
import linecache
import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dtlab.checks import check_name
from dtlab.errors import ConfigError, DtlabError, RankDied, RankFailed
from dtlab.processes.launcher import RankGroup
from dtlab.processes.run import check_backend, check_flags, check_limits, check_ranks, gather
from dtlab.ranks import serialization
from dtlab.ranks.call_checks import check_call
from dtlab.result import Result
from dtlab.tracebacks import end_at_caller

_cells = itertools.count(1)


class Session:
    """`ranks` processes that live until `close()`, with variables that last between calls.

    >>> with Session(ranks=2, echo=False) as session:
    ...     session.execute("x = torch.ones(2) * rank").values
    ...     session.execute("dtlab.collectives.all_reduce(comm, x)").values
    [None, None]
    ['tensor([1., 1.])', 'tensor([1., 1.])']

    In `execute`, each rank has its own variables, and `rank`, `size`, `comm`, `torch` and `dtlab`.
    After an error that all ranks survive, they and their variables go on. If a rank died or hung,
    all are stopped; the error says so, and the next call starts new ones. Options, of all calls,
    are those of `dtlab.run`, and so are the errors; the ranks start at the first call.
    """

    def __init__(
        self, ranks: int = 4, *, backend: str = "gloo", device: str = "cpu",
        timeout: float | None = 60.0, trace: bool = True, echo: bool = True, threads: int = 1,
    ):
        check_ranks(ranks)
        check_backend(backend, device, ranks)
        check_limits(timeout, threads)
        check_flags(trace, echo)
        self.ranks = ranks
        self._how: dict[str, Any] = {
            "backend": backend, "device": device, "threads": threads, "trace": trace,
        }
        self.timeout, self._echo = timeout, echo
        self._group: RankGroup | None = None
        self._forgotten: weakref.finalize[..., Session] | None = None  # ends the group with it
        self._closed = False
        self._turn = threading.Lock()  # calls of several threads wait for each other

    def run(self, fn: Callable[..., Any], *args: Any) -> Result:
        """Call `fn(comm, *args)` on every rank, as `dtlab.run` does."""
        check_call(fn, args, "run")
        return self._ask("call", serialization.pack_call(fn, args))

    def execute(self, source: str, name: str | None = None) -> Result:
        """Run `source` on every rank, like a notebook cell: a last expression is shown, as text.

        `name` is what tracebacks call it. `Result.values` holds these texts (or None). Raises
        `SyntaxError` if it is no Python, else as `run`.
        """
        check_name("what execute runs", source)
        check_name("its name", "" if name is None else name)
        try:
            # A syntax error is shown here, once; compiling finds a `return` outside a function too.
            compile(source, name or "<ranks>", "exec", dont_inherit=True)
        except SyntaxError as error:
            if (error.text or "").lstrip().startswith(("%", "!")):
                error.add_note("Lines with % or ! are IPython's: ranks run Python alone.")
            raise end_at_caller(error) from None
        name = name or f"<ranks {next(_cells)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            result = self._ask("execute", serialization.pack_call(source, (name,)))
        except RankFailed as error:
            if unknown := re.match(r"rank \d+ raised NameError: name '(\w+)' is not", str(error)):
                error.add_note(f"This cell runs in the ranks' processes, which don't have the "
                               f"notebook's variables: define `{unknown[1]}` in it, or pass it to "
                               f"a function: dtlab.run(fn, {unknown[1]}).")
            raise
        for rank, text in enumerate(result.values):
            if text is not None and self._echo:
                print("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()), end="")
        return result

    def _ask(self, what: str, call: int) -> Result:
        closed = ConfigError("another thread has closed this session before its ranks were done")
        try:
            with self._turn:
                if self._closed:
                    raise ConfigError("this session is closed; open a new one with Session(ranks)")
                if self._group is None or self._group.closed:
                    if self._forgotten is not None:
                        self._forgotten.detach()
                    self._group = RankGroup(self.ranks, **self._how)
                    self._forgotten = weakref.finalize(self, self._group.close)
                return gather(*self._group.call(
                    what, call, timeout=self.timeout, echo=self._echo, keep_alive=True
                ))
        except (DtlabError, KeyboardInterrupt) as error:
            if self._closed and isinstance(error, RankDied):  # `close` has killed it
                raise closed from None
            if self._group is not None and self._group.closed and not self._closed:
                self._group.close()  # a second Ctrl-C may have cut the first one's short
                error.add_note("The ranks had to be stopped, so their variables are gone; "
                               "the next call starts new ones.")
            raise end_at_caller(error) from error.__cause__
        except Exception:
            if not self._closed:
                raise
            raise closed from None
        finally:
            os.close(call)

    @property
    def alive(self) -> bool:
        """Are there ranks now, with variables?"""
        return self._group is not None and not self._group.closed

    def close(self) -> None:
        """Say goodbye to the ranks. A closed session stays closed."""
        self._closed = True
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive else "not started"
        return f"<Session of {self.ranks} ranks, {state}>"
