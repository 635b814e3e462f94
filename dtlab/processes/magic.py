"""`%load_ext dtlab`, then `%%ranks 4` atop a cell: the cell runs on every rank."""

from __future__ import annotations

import atexit
import traceback
from typing import Any

from dtlab.errors import ConfigError
from dtlab.processes.run import check_limits, check_ranks
from dtlab.processes.session import Session

_USAGE = "%%ranks [how many] [--timeout seconds] [--new]"


class RanksMagic:
    """One session a kernel: ranks and their variables last from cell to cell."""

    def __init__(self) -> None:
        self.session: Session | None = None
        atexit.register(self.close)

    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on every rank, in a session that lasts: %%ranks [N] [--timeout S] [--new]

        Without N, as many ranks as before (first: 4). Another N, or --new, starts new ranks.
        Each rank has `rank`, `size`, `comm`, `torch` and `dtlab`; its last expression is shown.
        """
        ranks, timeout, new = self._options(line.split())
        check_limits(timeout, 1)
        if ranks is not None:
            check_ranks(ranks)
        session = self.session
        if session is None or new or ranks not in (None, session.ranks):
            self.close()
            session = self.session = Session(ranks or (session.ranks if session else 4))
        session.timeout = timeout
        try:
            session.execute(cell)
        except SyntaxError as error:  # IPython would show its own frames, and ours, with this one
            raise ConfigError("\n".join(["the cell can't be run:", *(
                line.rstrip() for line in traceback.format_exception_only(error))])) from None

    def close(self) -> None:
        """Say goodbye to the ranks."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def _options(self, words: list[str]) -> tuple[int | None, float | None, bool]:
        ranks, timeout, new = None, 60.0, False
        rest = iter(words)
        for word in rest:
            try:
                if word == "--new":
                    new = True
                elif word == "--timeout":
                    timeout = float(next(rest, ""))
                elif ranks is None:
                    ranks = int(word)
                else:
                    raise ValueError("a second number")
            except ValueError:
                raise ConfigError(f"%%ranks {' '.join(words)}: use {_USAGE}") from None
        return ranks, timeout, new


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext dtlab` calls this."""
    ipython.register_magic_function(RanksMagic().ranks, "cell", "ranks")
