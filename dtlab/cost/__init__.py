"""Closed forms: what each algorithm costs, before anyone runs it.

The machine of the α–β–γ model: a message of n bytes takes α + nβ, reducing n bytes takes nγ, and
every rank can send and receive at once. `form(...)` gives an algorithm's `Form`; the functions here
answer single questions about it. One file holds the forms of one collective.
"""

from dtlab.cost import all_reduce, barrier, broadcast_reduce, pieces, scan  # noqa: F401
from dtlab.cost.failures import (
    availability,
    availability_interval_s,
    daly_interval_s,
    ettr,
    job_mttf_s,
    useful_share,
    wall_time_s,
    young_interval_s,
)
from dtlab.cost.large_batch import fit_critical_batch, steps_to_loss
from dtlab.cost.memory import activation_bytes, model_state_bytes, zero_sent_bytes
from dtlab.cost.model import (
    Form,
    bounds_s,
    bus_factor,
    costs,
    forget,
    form,
    has_form,
    lower_bound_s,
    messages,
    predicted_s,
    remembered,
    rounds,
    sent_bytes,
    time_s,
)
from dtlab.cost.overlap import best_buckets, exposed_s
from dtlab.cost.parameter_server import parameter_server_s
from dtlab.cost.pipeline import micro_batches_in_flight, pipeline_bubble_s
from dtlab.cost.tensor_parallel import tensor_parallel_bytes
from dtlab.cost.training_time import amdahl_speedup, gustafson_speedup, training_time_s

__all__ = [
    "Form",
    "activation_bytes",
    "amdahl_speedup",
    "availability",
    "availability_interval_s",
    "best_buckets",
    "bounds_s",
    "bus_factor",
    "costs",
    "daly_interval_s",
    "ettr",
    "exposed_s",
    "fit_critical_batch",
    "gustafson_speedup",
    "training_time_s",
    "forget",
    "form",
    "has_form",
    "job_mttf_s",
    "lower_bound_s",
    "messages",
    "micro_batches_in_flight",
    "model_state_bytes",
    "parameter_server_s",
    "pipeline_bubble_s",
    "predicted_s",
    "remembered",
    "rounds",
    "sent_bytes",
    "steps_to_loss",
    "tensor_parallel_bytes",
    "time_s",
    "useful_share",
    "wall_time_s",
    "young_interval_s",
    "zero_sent_bytes",
]
