"""Chapter 14: in which order should the axes of a mesh lie on the wires of a cluster?"""

from __future__ import annotations

from functools import cache
from itertools import permutations

import torch

from dtlab.collectives import all_reduce
from dtlab.comm import Comm
from dtlab.grading.case import Case, Outcome
from dtlab.grading.draws import scale, varied
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.parallel.mesh import Mesh
from dtlab.simulator import simulate
from dtlab.topology import compose, nvswitch, uniform

INSIDE_BPS, CARD_BPS, LATENCY_S = 300e9, 25e9, 1e-6
Axes = dict[str, tuple[int, float]]  # name → size, bytes of its all-reduce


@cache
def step_s(where: tuple[int, int, float], axes: tuple[tuple[str, int, int], ...]) -> float:
    """Seconds in which every axis (name, size, bytes) all-reduces its bytes, one after another.
    where: servers, their GPUs, the speed of the network card that these share."""
    servers, gpus, card_Bps = where
    cluster = compose(nvswitch(gpus), uniform(servers, LATENCY_S, card_Bps), nic_Bps=card_Bps)

    def step(comm: Comm) -> None:
        mesh = Mesh(comm, **{name: size for name, size, _ in axes})
        for name, _, nbytes in axes:
            all_reduce(mesh[name], torch.empty(nbytes // 2, dtype=torch.bfloat16, device="meta"))

    return simulate(step, network=cluster, trace=False, echo=False).elapsed_s


def _valid(case: Case, outcome: Outcome) -> Verdict:
    value, names = outcome.values[0], sorted(case.args[0][0])
    return Verdict(sorted(value) == names, f"returned {value!r}"[:60],
                   f"{', '.join(names)}, in an order")


def _time(case: Case, outcome: Outcome) -> Verdict:
    times = {order: step_s(case.facts["where"], tuple(
        (name, case.args[0][0][name], case.args[0][1][name]) for name in order))
        for order in permutations(case.args[0][0])}
    mine, best = times[tuple(outcome.values[0])], min(times.values())
    return Verdict(mine <= 1.01 * best, f"{mine * 1e3:.4g} ms", f"{best * 1e3:.4g} ms",
                   evidence=list(outcome.values[0]))


def _build(seed: int) -> list[Check]:
    def case(servers: int, gpus: int, card_Bps: float = CARD_BPS, **axes: tuple[int, float]
             ) -> Case:
        """Build a case in which each axis sends up to twice its bytes, or those of another axis."""
        first, other = (varied(seed, len(axes), servers, gpus, axes, of) for of in ("name", "sent"))
        names = sorted(axes)[first:] + sorted(axes)[:first]
        sizes = {name: axes[name][0] for name in names}
        sent = {name: 20 * round(axes[whose][1] * scale(seed, axes, name) / 20)
                for name, whose in zip(names, names[other:] + names[:other], strict=True)}
        mesh = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return Case(f"{servers} servers of {gpus}: {mesh}",
                    [(sizes, sent, gpus, INSIDE_BPS, card_Bps)], comm=False,
                    facts={"where": (servers, gpus, card_Bps)})

    plain = [case(2, 4, tp=(4, 8e8), dp=(2, 2e8)),
             case(2, 8, tp=(4, 8e8), dp=(2, 4e8), pp=(2, 2e7))]
    other = [case(2, 4, tp=(2, 1e8), dp=(4, 6e8)),
             case(4, 4, dp=(4, 9e8), tp=(2, 3e8), pp=(2, 5e7))]
    odd = [case(4, 4, tp=(8, 4e8), dp=(2, 3e8)), case(2, 6, tp=(4, 5e8), dp=(3, 4e8)),
           case(4, 2, tp=(4, 4e8), dp=(2, 3.9e8)),
           case(2, 4, tp=(4, 8e8), dp=(2, 2e8), pp=(1, 9e8))]
    fast = [case(2, 3, 200e9, dp=(2, 4e8), tp=(3, 4e8)),
            case(4, 3, 200e9, dp=(3, 1e9), pp=(2, 6e8), tp=(2, 3e8)),
            case(4, 6, 200e9, dp=(2, 4e8), pp=(3, 3e8), tp=(4, 5e8))]
    return [
        Check("an order", 1, "each name once", [*plain, *other, *odd, *fast], _valid),
        Check("time", 3, "2 servers, 2 and 3 axes", plain, _time, _valid),
        Check("other loads", 2, "2 and 4 servers", other, _time, _valid),
        Check("groups too large", 2, "an axis that no server has room for, or of one; fast cards",
              [*odd, *fast], _time, _valid),
    ]


EXERCISE = Exercise("order-axes", "Order the axes", "order_axes", _build)
