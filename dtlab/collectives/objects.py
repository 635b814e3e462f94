"""Collectives of any object that pickles: what mpi4py's lower-case methods do.

All ranks make the same call. An object costs α + nβ a message, n the bytes of its pickle: it goes
in a tuple, so that it may be a tensor. What a rank gets of its own is the object itself, of another
rank's a copy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from dtlab.collectives.registry import check_at_root, check_comm, check_root
from dtlab.comm import Comm, Recv, Send
from dtlab.errors import ConfigError
from dtlab.reduction import named_op

_NAMED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add, "prod": operator.mul, "max": max, "min": min}


def broadcast_object(comm: Comm, value: Any = None, root: int = 0) -> Any:
    """Before: the root holds `value`; what others give does not count. Returns it, on every rank.

    Down a binomial tree, as `broadcast`. Cost: ⌈lg p⌉(α + nβ).
    """
    inner, p = _begin(comm, "broadcast_object", root), comm.size
    me = (comm.rank - root) % p
    bit = 1
    while bit < p:
        if bit <= me < 2 * bit:
            value = inner.recv_object((me - bit + root) % p)[0]
        elif me < bit and me + bit < p:
            inner.send((value,), (me + bit + root) % p)
        bit *= 2
    return value


def gather_object(comm: Comm, value: Any, root: int = 0) -> list[Any] | None:
    """Returns, at the root, the list of every rank's `value`; None elsewhere. Cost: at the root,
    Σ(α + n_r β) over the others."""
    inner = _begin(comm, "gather_object", root)
    if comm.rank != root:
        inner.send((value,), root)
        return None
    return [value if rank == root else inner.recv_object(rank)[0] for rank in range(comm.size)]


def all_gather_object(comm: Comm, value: Any) -> list[Any]:
    """Returns the list of every rank's `value`, on every rank. Each goes once round the ring. Cost:
    at most (p−1)(α + max n_r β)."""
    inner, p, me = _begin(comm, "all_gather_object"), comm.size, comm.rank
    values = [value] * p
    for step in range(p - 1):
        inbox: list[Any] = []
        inner.exchange(Send((values[(me - step) % p],), (me + 1) % p), Recv(inbox, (me - 1) % p))
        values[(me - step - 1) % p] = inbox[0][0]
    return values


def scatter_object(comm: Comm, values: Sequence[Any] | None = None, root: int = 0) -> Any:
    """Before: the root holds p `values`; others pass None. Returns, on rank r, values[r]. Cost: at
    the root, Σ(α + n_r β) over the others."""
    inner = _begin(comm, "scatter_object", root)
    check_at_root(comm, root, values, "the values of scatter_object")
    if comm.rank != root:
        return inner.recv_object(root)[0]
    if not isinstance(values, Sequence) or len(values) != comm.size:
        raise ConfigError(f"rank {comm.rank}: scatter_object needs a list of {comm.size} values, "
                          f"one for each rank")
    for rank, value in enumerate(values):
        if rank != root:
            inner.send((value,), rank)
    return values[root]


def reduce_object(comm: Comm, value: Any, op: Callable[[Any, Any], Any] | str,
                  root: int = 0) -> Any:
    """Returns, at the root, op(op(v_0, v_1), v_2) …, in the order of ranks; None elsewhere. op: a
    function of two values, or "sum", "prod", "max", "min", as Python adds and compares. Cost: as
    `gather_object`."""
    op = named_op(op)
    function = _NAMED.get(op) if isinstance(op, str) else op
    if not callable(function):
        raise ConfigError(f"rank {comm.rank}: reduce_object has no op {op!r}; give a function of "
                          f"two values, or one of {', '.join(_NAMED)}")
    values = gather_object(comm, value, root)
    return None if values is None else functools.reduce(function, values)


def _begin(comm: Comm, name: str, root: int | None = None) -> Comm:
    """The communicator of one call, whose messages carry its name."""
    check_comm(comm, f"{name}(comm, …)")
    if root is None:
        return comm.collective(name)
    check_root(comm, root, name)
    return comm.collective(f"{name}(root={root})")
