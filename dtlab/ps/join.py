"""`join`, by which ranks form a parameter server: all call it, with equal arguments."""

from __future__ import annotations

from dataclasses import replace
from re import sub
from typing import Any

from dtlab.checks import check_flag, short
from dtlab.comm import Comm
from dtlab.errors import ConfigError
from dtlab.ps import checks
from dtlab.ps.checkpoint import Checkpoints
from dtlab.ps.consistency import BSP, Consistency
from dtlab.ps.node import Node
from dtlab.ps.partition import Hash, Partition
from dtlab.ps.policy import Policy
from dtlab.ps.replication import Chain, Replication
from dtlab.ps.updates import SGD, Update

GRACE = 10  # leases: see `grace_s`


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
    replicas: int = 0,
    replication: Replication = Chain(),  # noqa: B008
    lease_s: float = 1.0,
    grace_s: float | None = None,
    checkpoints: Checkpoints | None = None,
    patience_s: float | None = None,
    lost_worker: str = "stop",
) -> Node:
    """Every rank calls it with equal arguments; the first `servers` ranks serve, the others work.

    consistency: which pulls wait for which clocks. update: what a server does with gradients.
    partition: which server holds what.
    active: how many of the servers hold keys at first (see `Node.use_servers`); None: all.
    colocated: the servers work as well, so that every rank is a worker.
    nan: what happens to gradients that hold NaN: "raise" (`ConfigError` at the worker), "drop"
        (left out and counted) or "pass" (used and counted).
    replicas: copies of each key beside the first; `servers` must divide by replicas + 1. Then one
        rank more serves: rank `servers`, the configuration master.
    replication: how copies keep up with each other: Chain(), Leader(sync=True).
    lease_s: a copy that is silent for longer is declared dead; seconds, virtual in the simulator.
    grace_s: how long a leader that has lost touch with the master keeps requests; then it refuses
        them, and the worker's call raises `Unavailable`. None: 10 leases. A rank that is silent for
        20 leases more is given up.
    checkpoints: where to keep them; None: nowhere.
    patience_s: a worker that has died, or is silent for longer without waiting for an answer, is
        lost; None: a worker may be silent for ever. With replicas more than 2 leases: a worker may
        wait that long for another server to get a new head. lost_worker: "stop" (`RankDied`) or
        "go on" without it.

    Raises `ConfigError` for arguments that make no sense. Chapters: 07, 08.
    """
    if not isinstance(comm, Comm):
        raise ConfigError(f"join's first argument is the communicator, not {short(comm)}")
    servers = checks.count("servers", servers, 1)
    check_flag("colocated", colocated)
    if servers > comm.size or (servers == comm.size and not colocated):
        raise ConfigError(f"servers={servers} of {comm.size} ranks leaves no worker; take fewer "
                          f"servers or more ranks" + (
                              ", or colocated=True" if servers == comm.size else ""))
    for name, value, kind in (("consistency", consistency, Consistency),
                              ("update", update, Update), ("partition", partition, Partition),
                              ("replication", replication, Replication)):
        _check_kind(name, value, kind)
    if nan not in ("raise", "drop", "pass"):
        raise ConfigError(f'nan is "raise", "drop" or "pass", not {short(nan)}')
    ranks = tuple(range(comm.size))
    copies = _copies(servers, replicas, lease_s, colocated, comm.size)
    logical = tuple(copies) or ranks[:servers]
    workers = ranks if colocated else ranks[servers + bool(copies):]
    consistency.check(len(workers))
    if active is not None:
        active = checks.count("active", active, 1)
    chosen = checks.chosen_servers(len(logical) if active is None else active, logical)
    policy = Policy(logical, workers, chosen, consistency, update, partition, nan,
                    checkpoints=checkpoints, patience_s=patience_s, lost_worker=lost_worker)
    if grace_s is None:
        grace_s = GRACE * lease_s
    grace_s = checks.amount("grace_s, if it is not None,", grace_s, above=False)
    if copies:
        policy = replace(policy, replication=replication, copies=copies, master=servers,
                         lease_s=float(lease_s), grace_s=grace_s)
    _check_losses(policy)
    if not copies:  # else a rank may be dead already
        _check_equal(comm, policy)
        comm = comm.split(0)  # type: ignore[assignment]  # its messages meet no others
    return Node(comm, policy)


def _check_equal(comm: Comm, policy: Policy) -> None:
    """Raise `ConfigError` unless all ranks call `join` with equal arguments."""
    mine = {name: sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in vars(policy).items()}
    first, *others = comm.labelled("join")._all_gather_objects(mine)
    for rank, theirs in enumerate(others, 1):
        for name in mine:
            if theirs[name] != first[name]:
                raise ConfigError(f"every rank calls join with equal arguments; rank {rank} comes "
                                  f"with {name}={theirs[name]}, rank 0 with {first[name]}")


def _check_losses(policy: Policy) -> None:
    if policy.lost_worker not in ("stop", "go on"):
        raise ConfigError(f'lost_worker is "stop" or "go on", not {short(policy.lost_worker)}')
    if policy.patience_s is not None:
        patience_s = checks.amount("patience_s, if it is not None,", policy.patience_s)
        if patience_s <= 2 * policy.lease_s:
            raise ConfigError(f"patience_s={patience_s} is too short with replicas: a worker may "
                              f"wait 2 leases for another server's new head; take more than "
                              f"{2 * policy.lease_s:g} s")
    if policy.checkpoints is not None and not isinstance(policy.checkpoints, Checkpoints):
        raise ConfigError(f"checkpoints is a ps.Checkpoints, not {short(policy.checkpoints)}")


def _copies(servers: int, replicas: int, lease_s: float, colocated: bool,
            ranks: int) -> dict[int, tuple[int, ...]]:
    """Server → the ranks of its copies, head first; empty if there is one copy of all."""
    replicas = checks.count("replicas", replicas, 0)
    checks.amount("lease_s", lease_s)
    if not replicas:
        return {}
    if colocated:
        raise ConfigError("colocated servers have no replicas; take servers of their own")
    if servers % (replicas + 1):
        raise ConfigError(f"servers={servers} can't hold {replicas + 1} copies of each key; take "
                          f"a multiple of {replicas + 1}")
    if ranks < servers + 2:
        raise ConfigError(f"{servers} servers, the master and a worker need {servers + 2} ranks; "
                          f"there are {ranks}")
    groups = servers // (replicas + 1)
    return {server: tuple(range(server, servers, groups)) for server in range(groups)}


def _check_kind(name: str, value: Any, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        known = ", ".join(sorted(each.__name__ for each in kind.__subclasses__()))
        got = f"the class {value.__name__}: add (…)" if isinstance(value, type) else short(value)
        raise ConfigError(f"{name} must be one of ps.{kind.__name__}'s kinds, {known}; got {got}")
