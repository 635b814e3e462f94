"""The ways to lay out a training step on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import NamedTuple

from dtlab.checks import check_flag, check_name, check_whole
from dtlab.cost.memory import RECOMPUTE
from dtlab.models.shapes import Shape
from dtlab.parallel.planner.schedules import CHUNKED, GENERATORS, TWO_CHUNKS

AXES = ("pp", "dp_replicate", "dp", "ep", "cp", "tp")
LARGEST_MICRO_BATCH = 64  # that `layouts` tries, as powers of two


class Layout(NamedTuple):
    """A layout of a step. mesh: sizes of its axes, in any order, the last one varying fastest:
    pp stages; dp ranks with samples of their own, over which ZeRO shards, and dp_replicate copies
    of them (HSDP); ep ranks that share a layer's experts and have samples of their own; cp parts of
    the context; tp slices of each matrix.
    A rank with samples computes `micro_batches` of `micro_batch` each, with `schedule`, one of
    `planner.GENERATORS`, and `chunks` a rank if it has several. balanced: the output layer counts
    as the blocks that it is worth when stages are cut, otherwise each has as many, rounded up.
    stage: of ZeRO. recompute: "none", "selective" (all but the products of matrices; with stored
    scores, these alone) or "full", in `recompute_layers` of a rank's layers, None for all.
    sequence: sequence parallelism beside tensor parallelism; regather: each gathered input is
    dropped and gathered once more in backward. overlap: parameters are gathered and gradients
    reduced beside computation; overlap_tp: activations as well, beside matrix products, keys and
    values beside attention, and tokens for experts beside another micro-batch. reduce_each:
    gradients are reduced after every micro-batch, not once. gather_once: with ZeRO 3, parameters
    are gathered once a step, and stay until its end."""

    mesh: dict[str, int]
    micro_batch: int = 1
    micro_batches: int = 1
    schedule: str = "1F1B"
    chunks: int = 1
    stage: int = 0
    recompute: str = "none"
    sequence: bool = False
    recompute_layers: int | None = None
    balanced: bool = False
    regather: bool = True
    overlap: bool = True
    overlap_tp: bool = False
    reduce_each: bool = False
    gather_once: bool = False

    @property
    def pp(self) -> int:
        return self.mesh.get("pp", 1)

    @property
    def replicas(self) -> int:
        return self.mesh.get("dp_replicate", 1)

    @property
    def dp(self) -> int:
        return self.mesh.get("dp", 1)

    @property
    def ep(self) -> int:
        return self.mesh.get("ep", 1)

    @property
    def cp(self) -> int:
        return self.mesh.get("cp", 1)

    @property
    def tp(self) -> int:
        return self.mesh.get("tp", 1)

    @property
    def samplers(self) -> int:
        """Groups of ranks that have samples of their own."""
        return self.replicas * self.dp * self.ep

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.samplers * self.micro_batch * self.micro_batches

    @property
    def reduces_at_once(self) -> bool:
        """Are gradients reduced as backward computes them, and not once at the end of a step?"""
        return self.reduce_each or (self.pp == 1 and (self.stage > 1 or self.micro_batches == 1))

    @property
    def starts(self) -> int:
        """The kernels that a layer's backward starts, in those of its forward: once for the inputs'
        gradients, once for the weights', and once to compute it again."""
        return 3 if self.recompute == "full" else 2

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
    """Return why no device could run `layout`, or empty."""
    pp, cp, tp, v, m = layout.pp, layout.cp, layout.tp, layout.chunks, layout.micro_batches
    experts = shape.experts
    for name in ("micro_batch", "micro_batches", "chunks"):
        check_whole(name, getattr(layout, name))
    if layout.recompute_layers is not None:
        check_whole("recompute_layers", layout.recompute_layers, 0)
    for name in ("sequence", "balanced", "regather", "overlap", "overlap_tp", "reduce_each",
                 "gather_once"):
        check_flag(name, getattr(layout, name))
    check_name("schedule", layout.schedule)
    if layout.schedule not in GENERATORS:
        return f"the planner knows the schedules {', '.join(GENERATORS)}, not {layout.schedule!r}"
    if layout.recompute not in RECOMPUTE:
        return f"recompute is one of {', '.join(RECOMPUTE)}, not {layout.recompute!r}"
    if layout.stage not in (0, 1, 2, 3):
        return f"ZeRO has the stages 1, 2 and 3 (0: none), not {layout.stage!r}"
    if shape.heads % tp:
        return f"{shape.heads} heads can't be shared equally by tp={tp}"
    if not shape.latent and shape.grouped % tp and tp % shape.grouped:
        return f"{shape.grouped} heads of keys and values can't be shared equally by tp={tp}"
    for what, size in (("a hidden size", shape.hidden), ("MLPs", shape.width),
                       ("experts", experts.width if experts else 0)):
        if size % tp:
            return f"{what} of {size} can't be cut for tp={tp}"
    if layout.ep > 1 and (experts is None or experts.number % layout.ep):
        return f"{experts.number} experts can't be shared equally by ep={layout.ep}" if experts \
            else "ep needs a model with experts"
    if shape.positions % (2 * cp if cp > 1 else 1):
        return f"{shape.positions} positions can't be cut into the 2·cp blocks of cp={cp}"
    if pp * v > shape.layers:
        return f"{shape.layers} layers are fewer than {pp * v} stages"
    if layout.sequence and (tp == 1 or shape.positions // cp % tp):
        return f"sequence parallelism can't cut {shape.positions // cp} positions for tp={tp}" \
            if tp > 1 else "sequence parallelism needs tp"
    if v > 1 and layout.schedule not in CHUNKED:
        return f"chunks need a schedule that has them: {', '.join(CHUNKED)}"
    if v > 1 and pp == 1:
        return "chunks need a pipeline, but pp is 1"
    if v > 1 and layout.schedule == "interleaved" and m % pp:
        return f"interleaved chunks need micro-batches that pp={pp} divides"
    if layout.schedule in TWO_CHUNKS and (v != 2 or m < 2 * pp):
        return f"{layout.schedule} has 2 chunks a rank, and 2·pp micro-batches or more"
    return ""


def layouts(shape: Shape, ranks: int, batch: int, hosts: int = 1) -> Iterator[Layout]:
    """All that `plan` tries, in one order of the axes, of `ranks` on `hosts`. Context is cut
    from 16,384 positions on; copies are made of groups of the size of a host, or several."""
    for pp, tp, cp, ep in product(_divisors(ranks), _divisors(ranks),
                                  _divisors(ranks) if shape.positions >= 16_384 else [1],
                                  _divisors(ranks) if shape.experts else [1]):
        if ranks % (pp * tp * cp * ep):
            continue
        dp = ranks // (pp * tp * cp * ep)
        mesh = {"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp}
        mesh = {name: size for name, size in mesh.items() if size > 1 or name in ("pp", "dp", "tp")}
        if batch % (dp * ep) or pp > shape.layers or impossible(shape, Layout(mesh)):
            yield Layout(mesh)  # one, to say why not
            continue
        each, sharded = batch // (dp * ep), dp * ep * cp > 1
        inside = ranks // hosts // (tp * cp * ep)  # samplers that share a host
        for micro_batch in (b for b in _divisors(each)
                            if b & (b - 1) == 0 and b <= LARGEST_MICRO_BATCH):
            for schedule, chunks in _schedules(shape, pp, each // micro_batch):
                for stage in (0,) if not sharded else (0, 1) if pp > 1 else (0, 1, 2, 3):
                    for recompute in RECOMPUTE:
                        for sequence in (False, True) if tp > 1 else (False,):
                            found = Layout(mesh, micro_batch, each // micro_batch, schedule, chunks,
                                           stage, recompute, sequence,
                                           balanced=bool(shape.layers % (pp * chunks)))
                            yield found
                            if stage == 3 and 1 < inside < dp and dp % inside == 0:
                                yield found._replace(mesh={
                                    "dp_replicate": dp // inside, **mesh, "dp": inside})


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
    """Return `layout` with its axes in each order; those of one rank are the same anywhere. Copies
    stay outermost, and with context or expert parallelism all axes in the order of `AXES`."""
    real = [name for name in AXES if layout.mesh.get(name, 1) > 1 and name != "dp_replicate"]
    outer = [name for name in layout.mesh if name == "dp_replicate"]
    every = [tuple(real)] if layout.cp * layout.ep > 1 else permutations(real)
    return [layout._replace(mesh={name: layout.mesh[name] for name in (*outer, *order)}
                            or {"dp": 1}) for order in every]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
