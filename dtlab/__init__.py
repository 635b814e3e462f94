"""dtlab: distributed training, written once; run on processes, on a simulated cluster, on GPUs.

>>> import dtlab
>>> network = dtlab.topology.uniform(ranks=4, latency_s=5e-6, bandwidth_Bps=10e9)
>>> result = dtlab.simulate(lambda comm: comm.rank ** 2, network=network)
>>> result.values
[0, 1, 4, 9]

`dtlab.run(...)` does the same on real processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dtlab.errors import (
    ConfigError,
    Deadlock,
    DtlabError,
    RankDied,
    RankFailed,
    RunTimeout,
    ShapeMismatch,
    TypeMismatch,
    UnwaitedWork,
)
from dtlab.result import Result
from dtlab.trace import Event, Message, Span, Trace
from dtlab.tracebacks import end_tracebacks_at_caller

if TYPE_CHECKING:
    from dtlab import collectives, cost, models, parallel, ps, topology
    from dtlab.calibration import calibrate
    from dtlab.comm import Comm, Recv, Send, Work
    from dtlab.grading.learner_check import check
    from dtlab.processes.joined import from_process_group
    from dtlab.processes.magic import load_ipython_extension
    from dtlab.processes.run import run
    from dtlab.processes.session import Session
    from dtlab.reliability import Failures, Goodput, goodput
    from dtlab.simulator import simulate

end_tracebacks_at_caller()

__version__ = "0.1.0"

__all__ = [
    "Comm",
    "ConfigError",
    "Deadlock",
    "DtlabError",
    "Event",
    "Failures",
    "Goodput",
    "Message",
    "RankDied",
    "RankFailed",
    "Recv",
    "Result",
    "RunTimeout",
    "Send",
    "Session",
    "ShapeMismatch",
    "TypeMismatch",
    "Span",
    "Trace",
    "UnwaitedWork",
    "Work",
    "calibrate",
    "check",
    "collectives",
    "cost",
    "from_process_group",
    "goodput",
    "load_ipython_extension",
    "models",
    "parallel",
    "ps",
    "run",
    "simulate",
    "topology",
]

# Loaded when first used, so that `import dtlab` stays quick, and so does the first call of `run`.
_LATER = {
    **dict.fromkeys(("Comm", "Recv", "Send", "Work"), "dtlab.comm"),
    "calibrate": "dtlab.calibration",
    "from_process_group": "dtlab.processes",
    "run": "dtlab.processes",
    "Session": "dtlab.processes",
    "simulate": "dtlab.simulator",
    "check": "dtlab.grading",
    "Failures": "dtlab.reliability",
    "Goodput": "dtlab.reliability",
    "goodput": "dtlab.reliability",
    "load_ipython_extension": "dtlab.processes.magic",
}
_LAZY_MODULES = ("calibration", "collectives", "comm", "cost", "grading", "models", "parallel",
                 "plots", "processes", "ps", "recording", "reliability", "simulator", "topology",
                 "widgets")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(import_module(_LATER[name]), name)
        globals()[name] = value
        return value
    if name in _LAZY_MODULES:
        return import_module(f"dtlab.{name}")
    raise AttributeError(f"module 'dtlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what a notebook offers after a dot: also what is not loaded yet."""
    return sorted({*globals(), *__all__, *_LAZY_MODULES})
