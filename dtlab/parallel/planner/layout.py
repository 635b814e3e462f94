"""How a training step can be laid out on a cluster, and all the ways to do so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import NamedTuple

from dtlab.checks import check_whole
from dtlab.cost.memory import RECOMPUTE
from dtlab.cost.pipeline import SCHEDULES
from dtlab.models.shapes import Shape


class Layout(NamedTuple):
    """How a step is laid out. mesh: sizes of pp, dp and tp, the last axis varying fastest.
    A dp rank computes `micro_batches` of `micro_batch` samples each, with `schedule`, and `chunks`
    if it is interleaved. stage: of ZeRO. recompute: see `cost.activation_bytes`. sequence: sequence
    parallelism beside tensor parallelism."""

    mesh: dict[str, int]
    micro_batch: int = 1
    micro_batches: int = 1
    schedule: str = "1F1B"
    chunks: int = 1
    stage: int = 0
    recompute: str = "none"
    sequence: bool = False

    @property
    def pp(self) -> int:
        return self.mesh.get("pp", 1)

    @property
    def dp(self) -> int:
        return self.mesh.get("dp", 1)

    @property
    def tp(self) -> int:
        return self.mesh.get("tp", 1)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.dp * self.micro_batch * self.micro_batches

    def __str__(self) -> str:
        parts = [",".join(f"{name}={size}" for name, size in self.mesh.items()),
                 f"{self.micro_batches} × {self.micro_batch}"]
        if self.pp > 1:
            parts.append(self.schedule + (f" ×{self.chunks}" if self.chunks > 1 else ""))
        parts += [f"ZeRO {self.stage}"] if self.stage else []
        parts += [f"{self.recompute} recomputation"] if self.recompute != "none" else []
        parts += ["sequence"] if self.sequence else []
        return ", ".join(parts)


def impossible(shape: Shape, layout: Layout) -> str:
    """Why no device could run `layout`, or empty."""
    pp, tp, v, m = layout.pp, layout.tp, layout.chunks, layout.micro_batches
    for name in ("micro_batch", "micro_batches", "chunks"):
        check_whole(name, getattr(layout, name))
    if layout.schedule not in SCHEDULES:
        return f"the planner knows the schedules {', '.join(SCHEDULES)}, not {layout.schedule!r}"
    if layout.recompute not in RECOMPUTE:
        return f"recompute is one of {', '.join(RECOMPUTE)}, not {layout.recompute!r}"
    if layout.stage not in (0, 1, 2, 3):
        return f"ZeRO has the stages 1, 2 and 3 (0: none), not {layout.stage!r}"
    if shape.heads % tp:
        return f"{shape.heads} heads can't be shared equally by tp={tp}"
    if shape.hidden % tp:
        return f"a hidden size of {shape.hidden} can't be cut for tp={tp}"
    if pp * v > shape.layers:
        return f"{shape.layers} layers are fewer than {pp * v} stages"
    if layout.sequence and (tp == 1 or shape.positions % tp):
        return f"sequence parallelism can't cut {shape.positions} positions for tp={tp}" \
            if tp > 1 else "sequence parallelism needs tp"
    if layout.stage and layout.dp == 1:
        return "ZeRO shards over dp, which has one rank"
    if layout.stage == 3 and pp > 1:
        return "ZeRO 3 would gather the parameters anew for each micro-batch of a pipeline"
    if v > 1 and (layout.schedule != "interleaved" or m % pp):
        return f"chunks need the interleaved schedule, and micro-batches that pp={pp} divides"
    return ""


def layouts(shape: Shape, ranks: int, batch: int) -> Iterator[Layout]:
    """All that `plan` tries, in one order of the axes."""
    for pp, tp in product(_divisors(ranks), repeat=2):
        if ranks % (pp * tp):
            continue
        mesh = {"pp": pp, "dp": ranks // pp // tp, "tp": tp}
        if batch % mesh["dp"] or shape.heads % tp or pp > shape.layers:
            yield Layout(mesh)  # one, to say why not
            continue
        each = batch // mesh["dp"]
        for micro_batch in (b for b in _divisors(each) if b & (b - 1) == 0 and b <= 64):
            for schedule, chunks in _schedules(shape, pp, each // micro_batch):
                for stage in (0,) if mesh["dp"] == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3):
                    for recompute in RECOMPUTE:
                        for sequence in (False, True) if tp > 1 else (False,):
                            yield Layout(mesh, micro_batch, each // micro_batch, schedule, chunks,
                                         stage, recompute, sequence)


def _schedules(shape: Shape, pp: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1F1B", 1
        return
    yield from (("gpipe", 1), ("1F1B", 1))
    if micro_batches >= pp:
        yield "ZB-H1", 1
    if micro_batches % pp == 0:
        yield from (("interleaved", v) for v in range(2, 9) if shape.layers % (pp * v) == 0)


def orders(layout: Layout) -> list[Layout]:
    """`layout` with its axes in each order; those of one rank are the same anywhere."""
    real = [name for name, size in layout.mesh.items() if size > 1]
    return [layout._replace(mesh={name: layout.mesh[name] for name in order} or {"dp": 1})
            for order in permutations(real)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
