"""The way in: every rank calls `join`, with equal arguments."""

from __future__ import annotations

from typing import Any

from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps import checks
from dtlab.ps.consistency import BSP, Consistency
from dtlab.ps.node import Node
from dtlab.ps.partition import Hash, Partition
from dtlab.ps.server import Policy
from dtlab.ps.updates import SGD, Update


def join(
    comm: Comm,
    servers: int = 1,
    consistency: Consistency = BSP(),  # noqa: B008 - it is frozen
    update: Update = SGD(lr=0.1),  # noqa: B008
    partition: Partition = Hash(),  # noqa: B008
    *,
    active: int | None = None,
    colocated: bool = False,
    nan: str = "raise",
) -> Node:
    """Every rank calls it with equal arguments; the first `servers` ranks serve, the others work.

    consistency: who waits for whom. update: what a server does with gradients.
    partition: which server holds what.
    active: how many of the servers hold keys at first (see `Node.use_servers`); None: all.
    colocated: the servers work as well, so that every rank is a worker.
    nan: what becomes of gradients that hold NaN: "raise" (`ConfigError` at the worker), "drop"
        (left out and counted) or "pass" (used and counted).

    Raises `ConfigError` for arguments that make no sense. Chapters: 07, 08.
    """
    servers = checks.count("servers", servers, 1)
    if servers > comm.size or (servers == comm.size and not colocated):
        raise ConfigError(f"servers={servers} of {comm.size} ranks leaves no worker; take fewer "
                          f"servers or more ranks" + (
                              ", or colocated=True" if servers == comm.size else ""))
    for name, value, kind in (("consistency", consistency, Consistency),
                              ("update", update, Update), ("partition", partition, Partition)):
        _check_kind(name, value, kind)
    if nan not in ("raise", "drop", "pass"):
        raise ConfigError(f'nan is "raise", "drop" or "pass", not {nan!r}')
    ranks = tuple(range(comm.size))
    workers = ranks if colocated else ranks[servers:]
    consistency.check(len(workers))
    chosen = checks.active(servers if active is None else active, ranks[:servers])
    return Node(comm, Policy(ranks[:servers], workers, chosen, consistency, update, partition, nan))


def _check_kind(name: str, value: Any, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        known = ", ".join(sorted(each.__name__ for each in kind.__subclasses__()))
        got = f"the class {value.__name__}: add (…)" if isinstance(value, type) else repr(value)
        raise ConfigError(f"{name} must be one of ps.{kind.__name__}'s kinds, {known}; got {got}")
