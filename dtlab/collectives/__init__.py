"""Every collective; every algorithm one function of a communicator.

`all_reduce(comm, x, algorithm="ring")` and the other collectives check their arguments, label the
messages and call the algorithm; so does `ALGORITHMS["all_reduce"]["ring"](comm, x)`.

algorithm: one of `ALGORITHMS[collective]`, or "auto", the one that costs least on `comm.machine`.
Further options go to the algorithm, such as `segments` to a chain. op: as in `Comm.accumulate_`; of
bools a sum is "or". A function must treat each element alike, for vectors are cut into pieces, and
be associative and commutative, unless the algorithm says that it need not. Raises `ConfigError` for
arguments that make no sense.

Like torch.distributed's, they are not differentiated: no gradient comes back through what was sent.
Those of `dtlab.parallel.conversions` are.
"""

# isort: off
# The registry keeps this order: simple ones first.
from dtlab.collectives.broadcast import broadcast
from dtlab.collectives.reduce import reduce
from dtlab.collectives.scatter import scatter
from dtlab.collectives.gather import gather
from dtlab.collectives.all_gather import all_gather
from dtlab.collectives.reduce_scatter import reduce_scatter
from dtlab.collectives.all_reduce import all_reduce
from dtlab.collectives import (  # noqa: F401, which register more algorithms
    pipelined_rings,
    all_reduce_doubling,
    all_reduce_trees,
    all_reduce_topology,
)
from dtlab.collectives.all_to_all import all_to_all
from dtlab.collectives.scan import exscan, scan
from dtlab.collectives.barrier import barrier
from dtlab.collectives.uneven import (
    all_gatherv,
    all_to_allv,
    gatherv,
    reduce_scatterv,
    scatterv,
)
from dtlab.collectives.objects import (
    all_gather_object,
    broadcast_object,
    gather_object,
    reduce_object,
    scatter_object,
)
from dtlab.collectives.registry import ALGORITHMS, algorithm, default_of, publish
# isort: on

__all__ = [
    "ALGORITHMS",
    "algorithm",
    "all_gather",
    "all_gather_object",
    "all_gatherv",
    "all_reduce",
    "all_to_all",
    "all_to_allv",
    "barrier",
    "broadcast",
    "broadcast_object",
    "default_of",
    "exscan",
    "gather",
    "gather_object",
    "gatherv",
    "reduce",
    "reduce_object",
    "reduce_scatter",
    "reduce_scatterv",
    "scan",
    "scatter",
    "scatter_object",
    "scatterv",
]

publish(globals())
