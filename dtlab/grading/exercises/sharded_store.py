"""Chapter 07: a store of weights over several servers, judged by values, balance, bytes, time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome, Wanted, counted
from dtlab.grading.draws import generator, numbers, varied, widest
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._server_step import EXACT, LR, stepped
from dtlab.grading.standard import F32, F64, bytes_sent, on_gloo, sum_bytes, values

SLACK = 1.05  # of bytes: a message has eight or more; a pickled object is longer than its data
LATE = 1.25  # of time
BANDWIDTH_BPS = 1e6  # where time is judged


def _case(seed: int, servers: int, workers: int, *elements: int, dtype: torch.dtype = F32,
          shuffled: bool = False, **options: Any) -> Case:
    """elements: of each key. shuffled: each rank's dictionaries list the keys in an order of its
    own."""
    sizes = list(elements)

    def drawn(whose: object) -> dict[str, torch.Tensor]:
        most = 9 if whose == "all" else widest(seed, dtype)  # weights are no secret
        return {f"w{i}": numbers((seed, servers, workers, sizes, dtype, whose, i), (n,), dtype,
                                 most) for i, n in enumerate(sizes)}

    weights, args = drawn("all"), []
    for rank in range(servers + workers):
        keys, mine = list(weights), drawn(rank) if rank >= servers else {}
        if shuffled:
            generator(seed, servers, sizes, rank).shuffle(keys)
        grads = {key: mine[key] for key in keys if key in mine}
        args.append(({key: weights[key].clone() for key in keys}, grads, servers, LR))
    nbytes = sum(sizes) * dtype.itemsize
    right = {key: stepped(w, [grads[key] for _, grads, *_ in args[servers:]])
             for key, w in weights.items()}
    text = (f"{counted(servers, 'server')}, {counted(workers, 'worker')}, {len(sizes)} keys "
            f"of up to {max(sizes)} × {str(dtype)[6:]}")
    wanted = Wanted(args_after=[()] * servers + [(right,)] * workers, names=("weights",),
                    what="weights − lr · mean", rtol=EXACT[dtype],
                    least_bytes=sum_bytes(workers, nbytes))
    even = -(-nbytes // servers) + len(weights) * dtype.itemsize  # an element more for each key
    return Case(text, args, wanted=wanted, **options, facts={
        "servers": servers, "workers": workers, "nbytes": nbytes, "even": even})


def _missing(case: Case, outcome: Outcome) -> Verdict | None:
    """Fail fewer bytes than any parameter server moves: they did not come through `comm`, or not
    through the servers."""
    servers, least = case.facts["servers"], case.facts["workers"] * case.facts["nbytes"]
    received = sum(outcome.trace.received_bytes(rank) for rank in range(servers))
    sent = sum(bytes_sent(outcome, rank) for rank in range(servers))
    if min(received, sent) >= least:
        return None
    return Verdict(False, f"servers received {received:,} B, sent {sent:,} B",
                   f"≥ {least:,} B each: every worker's gradient goes to the servers, the new "
                   "weights come from them", clue="Too little goes through the servers: every "
                   "worker's gradient goes to them, and the new weights come from them.")


def _balance(case: Case, outcome: Outcome) -> Verdict:
    """Each server receives its n-th of the workers' bytes."""
    received = [outcome.trace.received_bytes(rank) for rank in range(case.facts["servers"])]
    slack = SLACK if outcome.objects else 1.0
    most, allowed = max(received), int(slack * case.facts["workers"] * case.facts["even"])
    return _missing(case, outcome) or Verdict(
        most <= allowed, f"server {received.index(most)} received {most:,} B", f"≤ {allowed:,} B",
        f"{most:,} / {allowed:,}", evidence=received)


def _traffic(case: Case, outcome: Outcome) -> Verdict:
    """No worker sends or receives more than its gradient and the weights; none talks to another."""
    allowed, servers = int(SLACK * case.facts["nbytes"]), case.facts["servers"]
    for m in outcome.trace.transfers:
        if min(m.src, m.dst) >= servers:
            return Verdict(False, f"worker {m.src} sends to worker {m.dst}", "to servers only")
    moved = [max(bytes_sent(outcome, rank), outcome.trace.received_bytes(rank))
             for rank in range(servers, case.ranks)]
    return _missing(case, outcome) or Verdict(
        max(moved) <= allowed, f"a worker sends or receives {max(moved):,} B", f"≤ {allowed:,} B",
        f"{max(moved):,} / {allowed:,}", evidence=moved)


def _time(case: Case, outcome: Outcome) -> Verdict:
    """max(m/n, 1)·S/B each way."""
    share = max(case.facts["workers"] / case.facts["servers"], 1)
    allowed = LATE * 2 * share * case.facts["nbytes"] / BANDWIDTH_BPS
    return _missing(case, outcome) or Verdict(
        outcome.elapsed_s <= allowed, f"{outcome.elapsed_s * 1e3:.4g} ms",
        f"≤ {allowed * 1e3:.4g} ms", evidence=outcome.elapsed_s)


def _through_servers(case: Case, outcome: Outcome) -> Verdict:
    return _missing(case, outcome) or values(case, outcome)


def _build(seed: int) -> list[Check]:
    k, case = varied(seed, 6), partial(_case, seed)
    plain = [case(1, 1, 6, 4), case(1, 3, 12, 6 + k), case(2, 2, 12, 24), case(2, 3, 12, 24, 6)]
    many = [case(n, m, 60 * n, 24) for n, m in ((1, 2), (3, 3), (4, 2), (3, 6), (4, 9), (6, 1))]
    many.append(case(2, 2, 12, 24, dtype=F64))
    uneven = [case(2, 3, 1, 7 + k, 100), case(3, 2, 10 + k, 0, 1), case(4, 2, 1, 2),
              case(3, 4, 5, 5, 5, 5, 5, 5, 5 + k)]
    order = [case(n, m, 3, 8 + k, 1, 20, 5, shuffled=True) for n, m in ((1, 2), (2, 2), (3, 4))]
    huge = [case(n, m, 40_000 + 96 * k, 64, 8, 1, latency_s=0.0, bandwidth_Bps=BANDWIDTH_BPS)
            for n, m in ((1, 3), (2, 3), (4, 4), (4, 8))]
    huge.append(case(3, 3, 9_000, 7_000 + 96 * k, 5_001, 2_003, 1_200, 300, 40, 4, latency_s=0.0,
                     bandwidth_Bps=BANDWIDTH_BPS))
    return [
        Check("weights", 2, "1 or 2 servers, 1 to 3 workers", plain, values),
        Check("any servers", 1, "1 to 6 servers, 1 to 9 workers; float64", many, values),
        Check("uneven keys", 1, "sizes that n does not divide; 0; 1", uneven, values),
        Check("any order", 1, "keys in another order on each rank", order, values),
        Check("balance", 2, "huge keys and small ones", huge, _balance, values),
        Check("traffic", 1, "huge keys and small ones", huge, _traffic, values),
        Check("time", 1, "huge keys, simulated", huge, _time, values),
        on_gloo(case(2, 2, 1_000, 7 + k, 1, gloo=True), _through_servers),
    ]


EXERCISE = Exercise("sharded-store", "A sharded store", "sharded_step", _build)
