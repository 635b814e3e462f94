"""No argument, however wrong, ends in Python's own error, in a second's silence or in none."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import dtlab
from dtlab import (
    Comm,
    Send,
    bench,
    collectives,
    cost,
    models,
    parallel,
    plots,
    ps,
    simulate,
    topology,
    units,
    widgets,
)
from dtlab.machine import Machine
from dtlab.parallel import pipeline
from dtlab.processes.magic import RanksMagic
from dtlab.ps import election
from dtlab.recording import frames_of, stepper_frames
from dtlab.widgets import Stepper

HOSTILE: list[Any] = [
    None, True, -1, 0, 1.5, 10**12, 10**99, math.nan, math.inf, -math.inf, "", "x", "4", "²",
    "9" * 50_000, "1e99B", "torus:²x²", (1, 2), [[1]], {}, {"a": 1}, b"4", object(), torch.ones(2),
    torch.tensor(3), 1j, print, int,
]
LIMIT_S = 2.0
CASE: dict[str, Any] = {"collective": "all_reduce", "algorithm": "ring", "ranks": 4, "nbytes": 64}
MACHINE = {"alpha": 1e-6, "beta": 1e-9, "gamma": 0.0}
NETWORK = topology.uniform(2, 0, 1)
LINK = {"latency_s": 1e-6, "bandwidth_Bps": 1e9}


def quiet(comm: Comm) -> None: ...


def in_a_rank(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(comm, …)` on two simulated ranks, as a function of its other arguments."""
    return lambda **given: simulate(lambda comm: call(comm, **given), network=NETWORK)


def computes(comm: Comm, seconds: Any) -> None:
    with comm.compute("x", seconds):
        pass


def join(comm: Comm, **given: Any) -> ps.Node:
    node = ps.join(comm, **given)
    if node.is_server:
        node.serve()
    else:
        node.init({"w": torch.zeros(2)})
        node.pull(["w"])
        node.finish()
    return node


def of_a_worker(method: str, consistency: ps.Consistency = ps.ASP()) -> Callable[..., Any]:  # noqa: B008
    """That method of a worker, one of two ranks, as a function of its arguments."""
    def fn(comm: Comm, **given: Any) -> None:
        node = ps.join(comm, consistency=consistency)
        if node.is_server:
            node.serve()
        else:
            node.init({"w": torch.zeros(2), "rows": torch.zeros(3, 2)}, tables=["rows"])
            found = getattr(node, method)(**given)
            if isinstance(found, ps.Handle):
                found.wait()
            node.finish()

    return in_a_rank(fn)


G, ROWS = {"w": torch.ones(2)}, {"key": "rows", "index": [0, 2]}
RATE = {"lr": 0.1}
PS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ps.join": (in_a_rank(join), {
        "servers": 1, "consistency": ps.BSP(), "update": ps.SGD(), "partition": ps.Hash(),
        "active": None, "colocated": False, "nan": "raise", "replicas": 0,
        "replication": ps.Chain(), "lease_s": 1.0, "grace_s": None, "checkpoints": None,
        "patience_s": None, "lost_worker": "stop"}),
    "ps.Checkpoints": (ps.Checkpoints, {"folder": "nowhere", "every": 10, "keep": 2}),
    "ps.SSP": (ps.SSP, {"staleness": 1}),
    "ps.SoftSync": (ps.SoftSync, {"n": 1}),
    "ps.BackupWorkers": (ps.BackupWorkers, {"extra": 1}),
    "ps.Quorum": (ps.Quorum, {"fraction": 0.5}),
    "ps.SGD": (ps.SGD, RATE | {"momentum": 0.0}),
    "ps.Adam": (ps.Adam, RATE | {"betas": (0.9, 0.999), "eps": 1e-8}),
    "ps.StalenessAwareSGD": (ps.StalenessAwareSGD, RATE),
    "ps.DCASGD": (ps.DCASGD, RATE | {"lam": 0.1, "adaptive": False, "decay": 0.9, "eps": 1e-7}),
    "ps.EASGD": (ps.EASGD, RATE | {"alpha": 0.1}),
    "ps.ConsistentHash": (ps.ConsistentHash, {"vnodes": 8}),
    "ps.Leader": (ps.Leader, {"sync": True}),
    "elect": (in_a_rank(partial(election.elect, until_s=0.5)), {
        "seed": 0, "wait_s": (0.15, 0.3), "beat_s": 0.05}),
    "ps.aggregate": (in_a_rank(ps.aggregate), {"x": torch.ones(2), "placement": "spread",
                                               "op": "sum"}),
    "ps.aggregate on_one": (in_a_rank(partial(ps.aggregate, x=torch.ones(2), placement="on_one")),
                            {"server": 0}),
    "ps.aggregate tree": (in_a_rank(partial(ps.aggregate, x=torch.ones(2), placement="tree")),
                          {"fanout": 2}),
    "ps.aggregate two_level": (in_a_rank(partial(ps.aggregate, x=torch.ones(2),
                                                 placement="two_level")), {"machines": [[0, 1]]}),
    "init": (of_a_worker("init"), {"tensors": {"new": torch.ones(2)}, "tables": ()}),
    "pull": (of_a_worker("pull"), {"keys": ["w"], "out": None}),
    "peek": (of_a_worker("peek"), {"keys": ["w"]}),
    "buffer": (of_a_worker("buffer"), {"keys": ["w"]}),
    "push": (of_a_worker("push"), {"grads": G, "weight": 1.0}),
    "push of": (of_a_worker("push"), {"grads": G}),
    "pull_rows": (of_a_worker("pull_rows"), ROWS),
    "push_rows": (of_a_worker("push_rows"), ROWS | {"grad": torch.ones(2, 2), "weight": 1.0}),
    "use_servers": (of_a_worker("use_servers"), {"servers": 1}),
}
LAYER: dict[str, Any] = {"batch": 1, "positions": 8, "hidden": 8}
PIPELINE = {"p": 2, "m": 4}
PARALLEL: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{name: (getattr(pipeline, name), PIPELINE) for name in (
        "naive", "gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")},
    **{name: (getattr(pipeline, name), PIPELINE | {"v": 2})
       for name in ("interleaved", "looped_bfs")},
    "exposed_s": (cost.exposed_s, {"backward_s": 0.1, "nbytes": 64, "buckets": 2, "ranks": 4,
                                   "alpha": 1e-6, "beta": 1e-9, "algorithm": "ring"}),
    "best_buckets": (cost.best_buckets, {"backward_s": 0.1, "nbytes": 64, "layers": 8, "ranks": 4,
                                         "alpha": 1e-6, "beta": 1e-9}),
    "model_state_bytes": (cost.model_state_bytes, {
        "parameters": 1e6, "ranks": 4, "stage": 1, "parameter_bytes": 2, "gradient_bytes": 2,
        "optimizer_bytes": 12}),
    "zero_sent_bytes": (cost.zero_sent_bytes, {"parameters": 1e6, "ranks": 4, "stage": 1,
                                               "itemsize": 2, "gradient_itemsize": 4}),
    "activation_bytes": (cost.activation_bytes, LAYER | {
        "heads": 2, "layers": 2, "tensor": 2, "recompute": "none"}),
    "tensor_parallel_bytes": (cost.tensor_parallel_bytes, LAYER | {
        "ranks": 2, "layers": 2, "itemsize": 2, "sequence": "regather"}),
    "training_time_s": (cost.training_time_s, {"parameters": 1e9, "tokens": 1e9, "devices": 8,
                                               "device_flops": 1e12, "efficiency": 0.5}),
    "amdahl_speedup": (cost.amdahl_speedup, {"serial": 0.1, "devices": 8}),
    "steps_to_loss": (cost.steps_to_loss, {"batch": 8, "least_steps": 30.0, "critical": 16.0}),
    "gustafson_speedup": (cost.gustafson_speedup, {"serial": 0.1, "devices": 8}),
    "parameter_server_s": (cost.parameter_server_s, {
        "workers": 4, "servers": 2, "nbytes": 64, "server_Bps": 1e9, "worker_Bps": 1e9, "ways": 2}),
    "pipeline_bubble_s": (cost.pipeline_bubble_s, {
        "schedule": "1F1B", "ranks": 2, "micro_batches": 4, "forward_s": 1.0, "backward_s": 2.0,
        "weights_s": 1.0, "chunks": 2, "message_s": 0.0}),
    "a bubble of ZB-H1": (cost.pipeline_bubble_s, {
        "schedule": "ZB-H1", "ranks": 2, "micro_batches": 4, "forward_s": 1.0, "backward_s": 2.0,
        "weights_s": 1.0}),
    "fit_critical_batch": (cost.fit_critical_batch, {"steps": {16: 60, 64: 37.5}}),
    "has_form": (cost.has_form, {"collective": "all_reduce", "algorithm": "ring"}),
    "goodput": (dtlab.goodput, {
        "nodes": 4, "failures": 0.5, "save_s": 1.0, "restart_s": 1.0, "interval_s": 60.0,
        "answer": "restart", "duration_s": 600.0, "spares": 1, "repair_s": 1.0, "copy_s": 2.0,
        "copy_restart_s": 1.0, "group": 1, "ranks_per_node": 1, "seed": 0}),
    "Failures": (dtlab.Failures, {
        "per_node_day": 0.1, "spread": "weibull", "shape": 0.7, "rack": 4, "rack_per_day": 0.1,
        "bad": 1, "bad_factor": 10.0, "exclude_after": 2, "at": [(1.0, [0])]}),
    "job_mttf_s": (cost.job_mttf_s, {"nodes": 8, "per_node_day": 0.1}),
    "young_interval_s": (cost.young_interval_s, {"save_s": 1.0, "mttf_s": 100.0}),
    "daly_interval_s": (cost.daly_interval_s, {"save_s": 1.0, "mttf_s": 100.0}),
    "availability_interval_s": (cost.availability_interval_s, {
        "save_s": 1.0, "restart_s": 1.0, "mttf_s": 100.0}),
    **{name: (getattr(cost, name), {"interval_s": 10.0, "save_s": 1.0, "restart_s": 1.0,
                                    "mttf_s": 100.0})
       for name in ("useful_share", "ettr", "availability")},
    "wall_time_s": (cost.wall_time_s, {"work_s": 100.0, "interval_s": 10.0, "save_s": 1.0,
                                       "restart_s": 1.0, "mttf_s": 100.0}),
    "Mesh": (in_a_rank(parallel.Mesh), {"dp": 1, "tp": 2}),
    "GPTConfig": (models.GPTConfig, {"layers": 1, "hidden": 8, "heads": 2, "vocab": 16,
                                     "context": 4, "kv_heads": 1, "dropout": 0.0}),
    "plan": (parallel.plan, {"shape": models.gpt_shape(2, 64, 2), "topology": NETWORK, "batch": 4,
                             "memory_bytes": 1e10, "precision": "bf16"}),
}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "time_s": (cost.time_s, CASE | MACHINE | {"itemsize": 4}),
    "form": (cost.form, CASE | {"itemsize": 4}),
    "lower_bound_s": (cost.lower_bound_s, {k: CASE[k] for k in ("collective", "ranks", "nbytes")}
                      | MACHINE),
    "bus_factor": (cost.bus_factor, {"collective": "all_reduce", "ranks": 4}),
    "predicted_s": (cost.predicted_s, CASE | {"machine": Machine(1e-6, 1e-9, 0.0)}),
    "uniform": (topology.uniform, {"ranks": 4} | LINK),
    "racks": (topology.racks, {"racks": 2, "hosts": 2, "gpus": 1, "oversubscription": 4.0,
                               "pcie_Bps": 1e9, "overhead_s": 0.0} | LINK),
    "fat_tree": (topology.fat_tree, {"k": 4, "hosts": 8, "oversubscription": 1.0,
                                     "overhead_s": 0.0} | LINK),
    "torus": (topology.torus, {"x": 2, "y": 2, "z": 1, "overhead_s": 0.0} | LINK),
    "dragonfly": (topology.dragonfly, {"groups": 2, "routers": 2, "hosts": 1} | LINK),
    "nvswitch": (topology.nvswitch, {"gpus": 4} | LINK),
    "pcie_server": (topology.pcie_server, {"gpus": 4, "switches": 2, "latency_s": 1e-6}),
    "v100_nvlink": (topology.v100_nvlink, {"detour": "gpu", "latency_s": 1e-6}),
    "compose": (topology.compose, {"server": topology.nvswitch(2), "network": topology.racks(1, 2),
                                   "nic_at": None, "nic_latency_s": 1e-6, "nic_Bps": 1e9}),
    "named": (topology.named, {"text": "torus:2x2"}),
    "with_link": (topology.with_link, {"topology": topology.torus(2, 2), "a": 0, "b": 1,
                                       "bandwidth_Bps": 1e9}),
    "with_traffic": (topology.with_traffic, {"topology": topology.torus(2, 2), "src": 0, "dst": 1,
                                             "rate_Bps": 1e6, "start_s": 0.0, "end_s": 1.0}),
    "load": (topology.load, {"path": "nowhere.yaml"}),
    "path": (topology.torus(2, 2).path, {"src": 0, "dst": 1}),
    "edge_disjoint_cycles": (topology.edge_disjoint_cycles, {
        "topology": topology.torus(2, 2), "count": 1, "wire_Bps": 1e9, "steps": 100}),
    "link_bytes": (topology.link_bytes, {"topology": NETWORK, "trace": dtlab.Trace(2)}),
    "send_together": (in_a_rank(topology.send_together), {"flows": {(0, 1): 4}}),
    "a batch": (models.digits()[0].batch, {"step": 0, "size": 4, "seed": 0}),
    "a shard": (models.digits()[0].shard, {"rank": 0, "size": 4}),
    "MLP": (models.MLP, {"widths": (64, 10)}),
    "default_of": (collectives.default_of, {"collective": "all_reduce"}),
    "labelled": (in_a_rank(lambda comm, label: comm.labelled(label)), {"label": "x"}),
    "bytes_of": (units.bytes_of, {"text": "4kB"}),
    "seconds_of": (units.seconds_of, {"text": "4us"}),
    "bandwidth_of": (units.bandwidth_of, {"text": "4GB/s"}),
    "simulate": (partial(simulate, quiet), {"network": NETWORK, "gamma": 0.0, "overhead_s": None,
                            "strands": "greenlet", "eager_bytes": 0, "timeout": None,
                            "crash": None}),
    "run": (partial(dtlab.run, 5), {"ranks": 2, "backend": "gloo", "device": "cpu", "timeout": 60.0,
                        "threads": 1, "may_die": ()}),  # 5: no process starts
    "stepper_frames": (stepper_frames, {"collective": "all_reduce", "algorithm": "ring",
                                        "ranks": 2, "root": 0}),
    "frames_of": (frames_of, {"fn": dtlab.collectives.all_reduce, "ranks": 2,
                              "collective": "all_reduce", "root": 0}),
    "split": (in_a_rank(lambda comm, color, key: comm.split(color, key)), {"color": 0, "key": 0}),
    "subgroup": (in_a_rank(lambda comm, ranks: comm.subgroup(ranks)), {"ranks": (0, 1)}),
    "compute": (in_a_rank(computes), {"seconds": 0.0}),
} | PS | PARALLEL

X, PARTS = torch.ones(2), torch.ones(2, 2)
GPT = models.GPTConfig(layers=1, hidden=8, heads=2, vocab=16, context=4)
BAD_MACHINES = [Machine(math.nan, 1e-9, 0.0), Machine("x", 1e-9, 0.0), Machine(1e-6, -1, 0.0),
                Machine(1e-6, 1e-9, 0.0, lanes=0), Machine(1e-6, 1e-9, 0.0, lanes=math.nan),
                Machine(1e-6, 1e-9, 0.0, overhead=math.nan)]


def special(kind: str) -> torch.Tensor:
    """A quantised tensor, or a nested one."""
    with warnings.catch_warnings(action="ignore"):
        if kind == "quantised":
            return torch.quantize_per_tensor(PARTS, 0.1, 0, torch.qint8)
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def saved(comm: Comm, folder: str) -> None:
    parallel.save(folder, parallel.DataParallel(torch.nn.Linear(2, 2), comm))


def piped(comm: Comm, stages: Any = None, loss_fn: Any = torch.nn.MSELoss(), total: Any = None,  # noqa: B008
          **options: Any) -> None:
    layer = torch.nn.Linear(2, 2) if stages is None else stages
    whole = parallel.pipeline.Pipeline(layer, SCHEDULE, comm, **options)
    whole.step(PARTS, PARTS, loss_fn, total=total)


# Calls on two simulated ranks, each of which is refused there.
LINEAR = torch.nn.Linear(2, 2)
SCHEDULE = parallel.pipeline.gpipe(2, 2)
ON_RANKS: dict[str, Callable[[Any], Any]] = {
    "isend to []": lambda comm: comm.isend(X, []),
    "recv from [1]": lambda comm: comm.recv(X, [1]),
    "recv from ([1],)": lambda comm: comm.recv(X, ([1],)),
    "sendrecv": lambda comm: comm.sendrecv(X, 1 - comm.rank, X, []),
    **{f"accumulate_ on meta of {other!r:.20}":
       lambda comm, other=other: comm.accumulate_(X.to("meta"), other)
       for other in (X, torch.ones(3, device="meta"))},
    **{f"{name} of {parts!r:.20}":
       lambda comm, name=name, parts=parts: getattr(collectives, name)(comm, *parts)
       for name, parts in (("all_gatherv", (X, 5)), ("all_to_allv", (iter([X, X]), [X, X])),
                           ("reduce_scatterv", ({0: X, 1: X},)))},
    "overwrite='no'": lambda comm: collectives.reduce_scatter(comm, PARTS, overwrite="no"),
    **{f"{method}({op!r})": lambda comm, method=method, op=op: getattr(comm, method)(op)
       for method in ("post", "exchange") for op in (3.0, "4", "ab", {}, [Send(X, 0)], (X, 1))},
    **{f"op of {name}": lambda comm, name=name: getattr(collectives, name)(comm, X, op=[])
       for name in ("all_reduce", "reduce", "scan", "exscan")},
    "op of reduce_scatter": lambda comm: collectives.reduce_scatter(comm, PARTS, op={}),
    "accumulate_ 3.0": lambda comm: comm.accumulate_(X, 3.0),
    "accumulate_ into 3.0": lambda comm: comm.accumulate_(3.0, X),
    "accumulate_ with []": lambda comm: comm.accumulate_(X.clone(), X, []),
    **{f"wait_any{given!r}": lambda comm, given=given: comm.wait_any(*given)
       for given in ((3.0,), (None,), ([3],), ([], []), ([], "1"), ([], math.nan))},
    **{f"{name} of a {kind} tensor":
       lambda comm, name=name, kind=kind: getattr(collectives, name)(comm, special(kind))
       for name in ("gather", "all_gather", "all_to_all", "broadcast")
       for kind in ("quantised", "nested")},
    **{f"zero, stage {stage!r}":
       lambda comm, stage=stage: parallel.zero(torch.nn.Linear(2, 2), comm, stage=stage)
       for stage in ([], True, 1.5, "1")},
    **{f"zero, {name}={value!r:.12}":
       lambda comm, name=name, value=value: parallel.zero(torch.nn.Linear(2, 2), comm,
                                                          **{name: value})
       for name, value in (("layers", 3), ("layers", [3]), ("layers", [LINEAR]), ("groups", 3),
                           ("algorithm", "pairwise"), ("param_dtype", torch.int32),
                           ("param_dtype", "bf16"))},
    **{f"scatter_to along {dim!r}":
       lambda comm, dim=dim: parallel.conversions.scatter_to(comm, PARTS, dim) for dim in (5, "x")},
    **{f"{name} of {x!r}":
       lambda comm, name=name, x=x: getattr(parallel.conversions, name)(comm, x)
       for name in ("gather_from", "reduce_scatter_to") for x in (X, torch.tensor(1.0))},
    "gather_linear of a vector":
       lambda comm: parallel.sequence.gather_linear(comm, X, PARTS),
    "QKVLinear's sequence": lambda comm: parallel.tensor.QKVLinear(
        comm, models.GPT(GPT).blocks[0].attention, "x"),
    "logits of no dimension": lambda comm: parallel.tensor.vocab_cross_entropy(comm, X[0], X[0]),
    "targets in a list": lambda comm: parallel.tensor.vocab_cross_entropy(comm, PARTS, [0, 1]),
    **{f"charge_compute{given!r:.20}":
       lambda comm, given=given: parallel.charge_compute(comm, *given)
       for given in ((3,), ({"a": 1.0},), ({LINEAR: "1"},), ({LINEAR: -1},), ({LINEAR: 1}, -2))},
    "MemoryMeter of 3": lambda comm: parallel.MemoryMeter(3).__enter__(),
    "watch_finite of 3": lambda comm: parallel.watch_finite(3, comm).__enter__(),
    "load_full_state_dict": lambda comm: parallel.load_full_state_dict(
        parallel.DataParallel(torch.nn.Linear(2, 2), comm), [1]),
    "Replicas' build": lambda comm: parallel.Replicas(comm, 1, 3),
    "Replicas' built": lambda comm: parallel.Replicas(comm, 1, lambda group: 3),
    "BatchSampler's shuffle": lambda comm: parallel.BatchSampler(8, 4, comm, shuffle="no"),
    **{f"Pipeline, {name}={value!r:.20}":
       lambda comm, name=name, value=value: piped(comm, **{name: value})
       for name, value in (("stages", 3), ("tied", 3), ("tied", {"w": X}), ("seconds", 3),
                           ("recompute", "x"), ("loss_fn", None), ("total", 0), ("total", "a"),
                           ("total", math.nan), ("total", -2))},
    "hybrid with two numbers of micro-batches": lambda comm: parallel.hybrid(
        models.GPT(GPT), parallel.Mesh(comm, pp=2), schedule=SCHEDULE, micro_batches=3),
    "hybrid's tokens": lambda comm: parallel.hybrid(
        models.GPT(GPT), parallel.Mesh(comm, dp=2))[0].backward([[1]], [[1]]),
    "Pipeline without a schedule": lambda comm: parallel.pipeline.Pipeline(LINEAR, [], comm),
    "a mesh's axis": lambda comm: parallel.Mesh(comm, dp=2)[["dp"]],
    "hybrid of no GPT": lambda comm: parallel.hybrid(math.nan, parallel.Mesh(comm, dp=2)),
    "hybrid on no mesh": lambda comm: parallel.hybrid(models.GPT(GPT), math.nan),
    "save": lambda comm: saved(comm, "/proc/x"),
    "save, no name": lambda comm: saved(comm, "a\0b"),
}
OF_NO_COMM: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(collectives.ALGORITHMS, (PARTS,)), "scatter": (PARTS, X), "barrier": (),
    "scatterv": (None, X), "gatherv": (X, None), "all_gatherv": (X, [X, X]),
    "all_to_allv": ([X, X], [X, X])}
REFUSED: dict[str, Callable[[], Any]] = {
    "DataParallel of None": lambda: parallel.DataParallel(LINEAR, None),
    "zero of None": lambda: parallel.zero(LINEAR, None),
    "shard of None": lambda: parallel.tensor.shard(models.GPT(GPT), None),
    "ColumnLinear of None": lambda: parallel.tensor.ColumnLinear(None, 4, 4),
    "vocab_cross_entropy of None": lambda: parallel.tensor.vocab_cross_entropy(None, X, X),
    "charge_compute of None": lambda: parallel.charge_compute(None, {LINEAR: 1.0}),
    "Replicas of None": lambda: parallel.Replicas(None, 1, lambda group: None),
    "BatchSampler of None": lambda: parallel.BatchSampler(8, 4, None),
    "Pipeline of None": lambda: parallel.pipeline.Pipeline(LINEAR, SCHEDULE, None),
    "save of a path": lambda: parallel.save("model", "folder"),
    "load of a module": lambda: parallel.load("folder", LINEAR),
    "full_state_dict of a module": lambda: parallel.full_state_dict(LINEAR),
    **{name: partial(simulate, call, network=NETWORK) for name, call in ON_RANKS.items()},
    **{f"{name} of {comm!r}": partial(getattr(collectives, name), comm, *given)
       for name, given in OF_NO_COMM.items() for comm in (None, 3)},
    **{f"{name}, an algorithm, of None": partial(next(iter(algorithms.values())), None,
                                                 *OF_NO_COMM[name])
       for name, algorithms in collectives.ALGORITHMS.items()},
    **{f"check of {action}": pipeline.Schedule.of(
        [[*pipeline.gpipe(1, 1).rows[0], action]]).check
       for action in (1, "0F0", pipeline.Action(0, "Z", 0), pipeline.Action(-1, "F", 0))},
    "time of no rank": pipeline.Schedule.of([]).time,
    "time of an idle rank": pipeline.Schedule.of([[], *pipeline.gpipe(1, 1).rows]).time,
    "no time": partial(SCHEDULE.time, 0, 0),
    "layers of no GPT": partial(pipeline.gpt_layers, LINEAR),
    **{f"cut{given!r:.20}": partial(pipeline.cut, *given)
       for given in ((3, 1), ([3], 1), ([torch.nn.Tanh()], 1.5), ([torch.nn.Tanh()], "x"),
                     ([torch.nn.Tanh()], [1.0]), ([torch.nn.Tanh()], True))},
    **{f"predict {name}={value!r}": partial(
        parallel.predict, models.gpt_shape(2, 64, 2), NETWORK, **{"layout": parallel.Layout(
            {"dp": 2}), name: value})
       for name, value in (("layout", math.nan), ("memory_bytes", math.nan))},
    **{f"GPT({config!r})": partial(models.GPT, config) for config in (math.nan, [], 0)},
    "GPT's seed": partial(models.GPT, GPT, seed=math.nan),
    **{f"{machine[:4]}": partial(cost.predicted_s, **CASE, machine=machine)
       for machine in BAD_MACHINES},
    "racks": partial(topology.racks, 2, 2, gpus=1, pcie_Bps=math.nan),
    **{f"a flow {flows}": partial(simulate, topology.send_together, flows, network=NETWORK)
       for flows in ({(0, 0): 4}, {(8, 9): 4}, {(0, 1): -4}, {0: 4})},
    "digits of int64": partial(models.digits, torch.int64),
    "a critical batch of equal steps": partial(cost.fit_critical_batch, {1: 2, 2: 2}),
    "timeline of a result": lambda: plots.timeline(simulate(quiet, network=NETWORK)),
    "a picture of no cluster": partial(plots.topology, "x"),
    "flows before the run": partial(plots.flows, NETWORK, dtlab.Trace(2, virtual=True), -1),
    **{f"cost_curves with {how}": partial(plots.cost_curves, "all_reduce", ["ring"], **how)
       for how in ({"alpha": -1}, {"measured": {"ring": {64: []}}})},
    "crossovers of none": partial(plots.crossovers, "all_reduce", [], 4, 1e-6, 1e-9),
    "useful_share of no save": partial(plots.useful_share, 0, 1, 1),
    **{f"training_time of {model!r} on {device!r}": partial(
        plots.training_time, model, 1e9, device, 8) for model, device in (
            ("x", "H100 (989 TFLOP/s, 80 GB)"), (1e9, "x"))},
    **{f"fit of {sizes}": partial(plots.fit, 1e-6, 1e-9, sizes, times)
       for sizes, times in (([0, 1], [1.0, 1.0]), ([1, 2], [[], [1.0]]))},
    "no measured time": partial(plots.predicted_vs_measured, [("a", 1.0, [])]),
    "a setting without losses": partial(plots.loss_sweep, {"a": {0.1: []}}, "lr"),
    "a grid of None": partial(plots.rank_grid, None),
    "no such root": partial(plots.before_and_after, 4, 9),
    "nothing that is offered": partial(widgets.OverlapExplorer, ranks=0),
    "saves without time": partial(widgets.FailureExplorer, save_s=0),
    "traffic to itself": partial(topology.with_traffic, NETWORK, 1, 1, 1.0),
    **{f"dropout of {p}": partial(models.dropout.CounterDropout, p, 0)
       for p in (1, -0.5, math.nan, "x")},
    **{f"text_batch{given}": partial(models.text_batch, *given)
       for given in ((0, -1, 8), (0, 2, 1.5), ("x", 2, 8))},
    **{f"CNN({channels!r})": partial(models.CNN, channels) for channels in (0, "x", 1.5)},
    **{f"measure{given}": partial(bench.measure, *given)
       for given in (("all_gather", 64, 0), ("all_gather", 64.0), (["x"], 64),
                     ("all_gather", 64, 2, "ring"), ("all_gather", 64, 2, [], "x"))},
    "measure_ps": partial(bench.measure_ps, "x"),
    "measure_launch": partial(bench.measure_launch, 2, "x"),
    "calibrate": partial(dtlab.calibrate, 0),
    **{f"Session({how})": partial(dtlab.Session, 2, **how)
       for how in ({"trace": "no"}, {"echo": 1})},
    "a cell of no text": partial(dtlab.Session(2).execute, 5),
    "save a topology": partial(topology.save, 3, "nowhere.yaml"),
    **{f"save to {path!r}": partial(topology.save, NETWORK, path)
       for path in (3, "a\0b", "/proc/x")},
    **{f"run {name}={value!r}": partial(dtlab.run, quiet, ranks=2, **{name: value})
       for name, value in (("may_die", ""), ("may_die", b""), ("timeout", True))},
    "no function": partial(Stepper, fn=0),
    **{f"%%ranks {line}": partial(RanksMagic().ranks, line, "rank")
       for line in ("0", "-1", "2 3", "--timeout nan", "--timeout -3", "--timeout", "many")},
    "%%ranks of no Python": partial(RanksMagic().ranks, "2", "x ="),
}


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError("this takes too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Imports what would take too long within a limit.
torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())


@pytest.mark.parametrize("name", CALLS)
def test_a_hostile_argument_is_taken_or_answered_in_one_sentence(name: str) -> None:
    call, fitting = CALLS[name]
    faults = []

    def note(error: BaseException) -> None:
        faults.append(f"{parameter}={value!r:.40}: {type(error).__name__}: {error!s:.60}")

    for parameter in fitting:
        for value in HOSTILE:
            try:
                with within(LIMIT_S):
                    call(**fitting | {parameter: value})
            except dtlab.DtlabError as error:
                cause = error.__cause__  # what a rank has raised
                if cause is not None and not isinstance(cause, dtlab.DtlabError):
                    note(cause)
            except Exception as error:
                note(error)
    assert faults == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_in_words(name: str) -> None:
    with within(LIMIT_S), pytest.raises(dtlab.DtlabError) as caught:
        REFUSED[name]()
    cause = caught.value.__cause__ or caught.value  # what a rank has raised
    assert isinstance(cause, (dtlab.ConfigError, dtlab.ShapeMismatch)), repr(cause)


def test_whole_numbers_may_be_numpys() -> None:
    i = np.int64
    for x, same in ((topology.torus(i(2), i(3)), topology.torus(2, 3)),
                    (topology.fat_tree(i(4), i(8)), topology.fat_tree(4, 8))):
        assert x.path(0, 5) == same.path(0, 5)
        assert {*map(type, x.graph())} <= {int, str}
    assert topology.edge_disjoint_cycles(topology.torus(i(2), i(3)), i(1), steps=i(10_000))
    assert torch.equal(models.GPT(GPT, seed=i(1)).tokens.weight,
                       models.GPT(GPT, seed=1).tokens.weight)
    assert models.GPTConfig(i(1), i(8), i(2)).layers == 1
    assert len(pipeline.cut([torch.nn.Tanh()], i(1))) == 1

    def summed(comm: Comm) -> float:
        x = collectives.broadcast(comm, X * comm.rank, root=i(1))
        comm.sendrecv(x.clone(), i(1 - comm.rank), x, np.int32(1 - comm.rank))
        collectives.all_reduce(comm, x, algorithm="double_tree", segments=i(2))
        return x.sum().item()

    assert simulate(summed, network=NETWORK).values == [4.0, 4.0]
    assert dtlab.run(summed, ranks=i(2), threads=i(1), may_die=[i(1)]).values == [4.0, 4.0]


def test_the_words_name_what_there_is_and_what_to_do() -> None:
    with pytest.raises(dtlab.ConfigError, match="choose one of flat, binomial, chain, scatter_all"):
        stepper_frames("broadcast", "nope", 4)
    with pytest.raises(dtlab.ConfigError, match=r"all_reduce.* takes a communicator, not None"):
        collectives.all_reduce(None, X)
    with pytest.raises(dtlab.ConfigError, match=r"seconds of compute.* not -1"):
        dtlab.run(partial(computes, seconds=-1), ranks=1)


def test_a_hostile_topology_file_is_answered_in_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, text, says in (
        ("deep", "ranks: " + "[" * 1500 + "]" * 1500, "nested too deeply"),
        ("many", f"ranks: {10**8}\nlinks: []", "262,144 or less"),
        ("digits", f"ranks: {'9' * 5000}\nlinks: []", "too large a number"),
        ("long", " " * 10_000_001, "too large"),
        ("pipe", "", "no ordinary file"),
    ):
        file = tmp_path / f"{name}.yaml"
        if text:
            file.write_text(text)
        with within(5 * LIMIT_S), pytest.raises(dtlab.ConfigError, match=says):
            topology.load(file)


