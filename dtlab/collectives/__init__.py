"""Every collective; every algorithm one function of a communicator.

`all_reduce(comm, x, algorithm="ring")` and its sisters check their arguments, label the messages
and call the algorithm; the algorithms themselves stand alone in `ALGORITHMS`.
"""

from dtlab.collectives.all_reduce import all_reduce
from dtlab.collectives.barrier import barrier
from dtlab.collectives.broadcast import broadcast
from dtlab.collectives.reduce import reduce
from dtlab.collectives.registry import ALGORITHMS, algorithm

__all__ = ["ALGORITHMS", "algorithm", "all_reduce", "barrier", "broadcast", "reduce"]
