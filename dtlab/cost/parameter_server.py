"""The cost of a parameter server: the busiest port sets the pace."""

from __future__ import annotations

from dtlab.checks import check_amount, check_each, check_positive, check_whole


def parameter_server_s(workers: int, servers: int, nbytes: int, server_Bps: float,
                       worker_Bps: float | None = None, *, ways: int = 2) -> float:
    """Seconds in which `workers` workers push `nbytes` bytes each to `servers` servers that share
    them evenly, and pull as many: max(mS/(n·B_server), S/B_worker) each way.

    server_Bps, worker_Bps: bytes per second of a port, one direction; worker_Bps None: the same.
    ways: 1 for a push or a pull alone. Latencies are left out. With n ≥ m·B_worker/B_server more
    servers gain nothing. A worker pulls once its push is in; one that does both at once, block by
    block, needs about half of the time, for ports are full duplex.
    Source: Li et al., Communication efficient distributed machine learning with the parameter
    server, NeurIPS 2014. Chapter: 07.

    >>> parameter_server_s(4, 1, 10**9, 10e9), parameter_server_s(4, 8, 10**9, 10e9)
    (0.8, 0.2)
    """
    check_each(check_whole, workers=workers, servers=servers)
    check_amount("nbytes", nbytes)
    worker_Bps = server_Bps if worker_Bps is None else worker_Bps
    check_each(check_positive, server_Bps=server_Bps, worker_Bps=worker_Bps)
    check_whole("ways", ways, 1, 2)
    return ways * max(workers * nbytes / (servers * server_Bps), nbytes / worker_Bps)
