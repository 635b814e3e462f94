"""A planned step as a program: the messages and the seconds of computation that the planner adds
up, on tensors without data. Simulating it shows what the sum leaves out: who waits for whom."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtlab.collectives import all_gather, all_reduce, reduce_scatter
from dtlab.comm import Comm, Work
from dtlab.parallel.mesh import Mesh
from dtlab.parallel.pipeline.action import Action
from dtlab.parallel.planner.layout import Layout
from dtlab.parallel.planner.schedules import schedule_of
from dtlab.parallel.planner.wires import rings_of
from dtlab.parallel.planner.work import RankWork


class Group:
    """The ranks along some axes, and the rings on which they send."""

    def __init__(self, mesh: Mesh, names: tuple[str, ...], host_of: Callable[[int], int]):
        names = tuple(name for name, size in mesh.axes.items() if name in names and size > 1)
        self.comm = mesh[names] if names else mesh.comm.subgroup([mesh.comm.rank])
        self.size = self.comm.size
        ranks = mesh.ranks(*names) if names else [mesh.comm.rank]
        self.rings = [mesh.comm.subgroup(ring) for ring in rings_of(ranks, host_of)]

    def begin(self, collective: Callable[..., object], nbytes: float) -> list[Work]:
        """Begin a `collective` of `nbytes` in all, of which each ring sends its part."""
        if self.size == 1 or not nbytes:
            return []
        nbytes /= len(self.rings)
        x = _empty(nbytes if collective is all_reduce else nbytes / self.size)
        x = x.expand(self.size, -1) if collective is reduce_scatter else x
        return [ring.begin(collective, x) for ring in self.rings]

    def exchange(self, nbytes: float) -> list[Work]:
        """Begin all messages of an all-to-all at once."""
        comm, part = self.comm, nbytes / self.size
        others = [(comm.rank + n) % self.size for n in range(1, self.size)]
        return [work for peer in others for work in (comm.irecv(_empty(part), peer),
                                                     comm.isend(_empty(part), peer))]


class PlannedStep:
    """One step of `layout` on the rank of `comm`, whose kernels wait `idle_s` a layer to be
    started, forward and backward."""

    def __init__(self, comm: Comm, layout: Layout, work: RankWork, idle_s: tuple[float, float],
                 host_of: Callable[[int], int]):
        mesh = Mesh(comm, **layout.mesh)
        self.comm, self.layout, self.work, self.idle_s = comm, layout, work, idle_s
        self.tp, self.cp, self.ep, self.shard, self.experts, self.copies = (
            Group(mesh, names, host_of) for names in (
                ("tp",), ("cp",), ("ep",), ("dp", "ep", "cp"), ("dp", "cp"), ("dp_replicate",)))
        pp = Group(mesh, ("pp",), host_of).comm
        # Gradients have a communicator of their own, so that they never meet activations.
        back = pp.subgroup(range(pp.size))
        self.way = {"F": pp, "B": back, "I": back}
        schedule = schedule_of(layout.schedule, layout.pp, layout.micro_batches, layout.chunks)
        self.actions, self.last = schedule.rows[pp.rank], schedule.stages - 1
        self.rank_of, self.rank = schedule.rank_of, pp.rank
        self.layers = sum(work.stages[stage] for stage in schedule.stages_of(pp.rank))
        self.ends = sum(stage in (0, self.last) for stage in schedule.stages_of(pp.rank))
        self.under_way: list[Work] = []

    def run(self) -> None:
        size, own = self.work.message_bytes, self.work.parameters
        receives = {action: self.way[action.kind].irecv(_empty(size), source)
                  for action in self.actions
                  if (source := self._neighbour(action, -1)) is not None}
        whole = self.layers * own.layer + (self.ends > 0) * own.ends
        routed = self.layers * own.experts
        if self.layout.stage == 3 and self.layout.gather_once:
            self._gather(whole, routed)
        for action in self.actions:
            if action in receives:
                receives[action].wait()
            self._compute(action)
            if (target := self._neighbour(action, 1)) is not None:
                way = self.way[action.kind]  # a message has the wire to itself, as with NCCL
                self.under_way.append(way.begin(
                    lambda _, way=way, target=target: way.send(_empty(size), target)))
        _wait(self.under_way)
        if not self.layout.reduces_at_once:
            _wait(self._reduce(whole, routed))
        if self.layout.stage in (1, 2):
            self._gather(whole, routed)
        self._charge("optimizer", self.work.optimizer_s)

    def _neighbour(self, action: Action, step: int) -> int | None:
        """The rank of the stage before `action`'s on its way (−1), or after it (1), if there is
        one, and on another rank."""
        stage = action.neighbour(step, self.last + 1)
        return None if stage is None or self.rank_of[stage] == self.rank else self.rank_of[stage]

    def _compute(self, action: Action) -> None:
        kind, work, back = action.kind, self.work, action.kind != "F"
        seconds = {"F": work.forward_s, "B": work.backward_s, "W": work.weights_s,
                   "I": work.backward_s - work.weights_s}[kind]
        reduces = self.layout.reduces_at_once and kind in "BW"  # these end the gradients of weights
        gathers = self.layout.stage == 3 and not self.layout.gather_once and kind != "W"
        ends, layers = work.parameters.ends / max(self.ends, 1), work.stages[action.stage]
        one = work.parameters.layer, work.parameters.experts
        if gathers and action.stage in (0, self.last):
            self._gather(ends, 0.0)
        ahead = gathers and self.layout.overlap
        following = self._begin_gather(*one) if ahead and layers else []
        if action.stage == self.last and kind != "W":
            self._charge("output", (2 if back else 1) * work.output_s)
        for layer in range(layers):
            _wait(following if ahead or not gathers else self._begin_gather(*one))
            following = self._begin_gather(*one) if ahead and layer < layers - 1 else []
            self._layer(kind, seconds, back)
            if reduces:
                self._wait_unless_overlap(self._reduce(*one))
        if reduces and action.stage in (0, self.last):
            self._wait_unless_overlap(self._reduce(ends, 0.0))

    def _layer(self, kind: str, seconds: float, back: bool) -> None:
        """Do one layer's computation, and then the messages within it."""
        work, weights = self.work, 1 / self.layout.starts  # W's share of backward's kernels
        idle_s = self.idle_s[back] * {"I": 1 - weights, "W": weights}.get(kind, 1.0)
        if kind == "W":
            self._charge(kind, seconds + idle_s)
            return
        hides, products = self.layout.overlap_tp, 2 if kind == "B" else 1
        products_s = hides * products * work.products_s
        attention_s = hides * (work.again if back else 1) * work.attention_s
        exchanges = round(work.ep_exchanges[back])
        self._charge(kind, idle_s)  # nothing hides behind waiting for kernels
        tokens = [w for _ in range(hides * exchanges) for w in self.ep.exchange(work.ep_bytes)]
        self._charge(kind, seconds - products_s - attention_s)
        keys = [w for collective in (all_gather, reduce_scatter)[: 1 + back]
                for w in self.cp.begin(collective, work.cp_bytes)]
        self._charge(kind, attention_s)
        _wait(keys)
        during = [w for _ in range(round(work.tp_halves[back]))
                  for w in self.tp.begin(all_gather, work.tp_bytes)]
        self._charge(kind, products_s)
        _wait(during + tokens)
        for _ in range(0 if hides else exchanges):
            _wait(self.ep.exchange(work.ep_bytes))

    def _begin_gather(self, dense: float, routed: float) -> list[Work]:
        held = self.work.recipe.activation
        return (self.shard.begin(all_gather, dense * held)
                + self.experts.begin(all_gather, routed * held))

    def _gather(self, dense: float, routed: float) -> None:
        _wait(self._begin_gather(dense, routed))

    def _reduce(self, dense: float, routed: float) -> list[Work]:
        """Begin to all-reduce; with ZeRO to reduce-scatter, with copies to all-reduce as well."""
        sent = self.work.recipe.reduced
        collective: Any = reduce_scatter if self.layout.stage else all_reduce
        copied = dense / self.shard.size + routed / self.experts.size
        return (self.shard.begin(collective, dense * sent)
                + self.experts.begin(collective, routed * sent)
                + self.copies.begin(all_reduce, copied * sent))

    def _wait_unless_overlap(self, works: list[Work]) -> None:
        """Let `works` go on beside this rank's computation, or with overlap off wait for them."""
        if self.layout.overlap:
            self.under_way += works
        else:
            _wait(works)

    def _charge(self, label: str, seconds: float) -> None:
        if seconds:
            with self.comm.compute(label, seconds):
                pass


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()


def _empty(nbytes: float) -> torch.Tensor:
    return torch.empty(math.ceil(nbytes / 2), dtype=torch.bfloat16, device="meta")
