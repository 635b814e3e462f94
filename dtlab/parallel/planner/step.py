"""A planned step as a program: the messages and the seconds of computation that the planner adds
up, on tensors without data. Simulating it shows what the sum leaves out: who waits for whom.
"""

from __future__ import annotations

import math
from collections import deque

import torch

from dtlab.collectives import all_gather, all_reduce, reduce_scatter
from dtlab.comm import Comm, Work
from dtlab.cost.pipeline import SCHEDULES
from dtlab.parallel import pipeline
from dtlab.parallel.mesh import Mesh
from dtlab.parallel.planner.layout import Layout
from dtlab.parallel.planner.work import RankWork

GENERATORS = dict(zip(SCHEDULES, (pipeline.gpipe, pipeline.one_f_one_b, pipeline.interleaved,
                                  pipeline.zb_h1), strict=True))


class PlannedStep:
    """One step of `layout` on the rank of `comm`."""

    def __init__(self, comm: Comm, layout: Layout, work: RankWork):
        mesh = Mesh(comm, **layout.mesh)
        self.comm, self.layout, self.work = comm, layout, work
        pp, self.dp, self.tp = (mesh[name] if name in mesh.axes else comm.subgroup([comm.rank])
                                for name in ("pp", "dp", "tp"))
        # Gradients go the other way, on a communicator of their own.
        back = pp.subgroup(list(range(pp.size))[::-1])
        self.way = {"F": pp, "B": back, "I": back}
        options = (layout.chunks,) if layout.schedule == "interleaved" else ()
        schedule = GENERATORS[layout.schedule](layout.pp, layout.micro_batches, *options)
        self.actions, self.last = schedule.rows[pp.rank], schedule.stages - 1
        self.layers = work.layers // layout.chunks
        self.at_once = layout.pp == 1 and (layout.stage > 1 or layout.micro_batches == 1)
        self.under_way: list[Work] = []

    def run(self) -> None:
        size = self.work.message_bytes
        coming = {kind: deque(way.irecv(_empty(size), (way.rank - 1) % way.size)
                              for action in self.actions
                              if action.kind == kind and self._far(action))
                  for kind, way in self.way.items()}
        for action in self.actions:
            if action.kind != "W" and self._far(action):
                coming[action.kind].popleft().wait()
            self._compute(action)
            if action.kind != "W" and self._far(action, after=True):
                way = self.way[action.kind]
                self.under_way.append(way.isend(_empty(size), (way.rank + 1) % way.size))
        for work in self.under_way:
            work.wait()
        whole = self.work.layers * self.work.layer_bytes + self.work.ends_bytes
        if not self.at_once:
            all_reduce(self.dp, _empty(whole))
        elif self.layout.stage in (1, 2):
            all_gather(self.dp, _empty(whole / self.dp.size))
        self._charge("optimizer", self.work.optimizer_s)

    def _far(self, action: pipeline.Action, after: bool = False) -> bool:
        """Does the input of `action` come from another rank? after: does its output go to one?"""
        ends = (0, self.last) if action.kind == "F" else (self.last, 0)
        return self.layout.pp > 1 and action.stage != ends[after]

    def _compute(self, action: pipeline.Action) -> None:
        kind, work = action.kind, self.work
        seconds = {"F": work.forward_s, "B": work.backward_s, "W": work.weights_s,
                   "I": work.backward_s - work.weights_s}[kind]
        reduces = {"F": work.reduces[0], "W": 0}.get(kind, work.reduces[1])
        gathered = self._gather(kind, work.layer_bytes)
        if ends := self._gather(kind, work.ends_bytes):
            ends.wait()
        if action.stage == self.last and kind != "W":
            self._charge("output", (1 if kind == "F" else 2) * work.output_s)
        for layer in range(self.layers):
            if gathered:
                gathered.wait()
                gathered = None
                if layer < self.layers - 1:
                    gathered = self._gather(kind, work.layer_bytes)
            for _ in range(reduces or 1):
                self._charge(kind, seconds / (reduces or 1))
                if reduces:
                    all_reduce(self.tp, _empty(work.reduced_bytes))
            self._reduce(kind, work.layer_bytes)
        self._reduce(kind, work.ends_bytes)

    def _gather(self, kind: str, nbytes: float) -> Work | None:
        """With ZeRO 3, parameters."""
        if self.layout.stage < 3 or kind == "W":
            return None
        return self.dp.begin(all_gather, _empty(nbytes / self.dp.size))

    def _reduce(self, kind: str, nbytes: float) -> None:
        """Gradients leave while this rank goes on: all-reduced, or with ZeRO reduce-scattered."""
        if kind == "B" and self.at_once:
            if self.layout.stage:
                parts = _empty(nbytes / self.dp.size).expand(self.dp.size, -1)
                self.under_way.append(self.dp.begin(reduce_scatter, parts))
            else:
                self.under_way.append(self.dp.begin(all_reduce, _empty(nbytes)))

    def _charge(self, label: str, seconds: float) -> None:
        with self.comm.compute(label, seconds):
            pass


def _empty(nbytes: float) -> torch.Tensor:
    return torch.empty(math.ceil(nbytes / 2), dtype=torch.bfloat16, device="meta")
