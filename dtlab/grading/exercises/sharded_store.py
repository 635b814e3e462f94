"""Chapter 07: a store of weights over several servers, judged by values, balance, bytes, time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._server_step import judge_vector, numbers, step_clue, wanted
from dtlab.grading.exercises._standard import not_sent

F32, F64 = torch.float32, torch.float64
LR = 0.3  # no share of a few ranks
SLACK = 1.05  # of bytes: a pickled object is a little longer than its data
LATE = 1.25  # of time
BANDWIDTH_BPS = 1e6  # where time is judged
Sizes = Mapping[str, int]
_CUT = ("Cut every key into one part per server (w.tensor_split(servers)), or lay all keys end to "
        "end and cut that; no hash can cut a huge key.")


def _case(servers: int, workers: int, sizes: Sizes, seed: int, dtype: torch.dtype = F32,
          shuffled: bool = False, **options: Any) -> Case:
    """shuffled: each rank's dictionaries list the keys in an order of its own."""
    random = torch.Generator().manual_seed(7919 * seed + 100 * servers + workers)
    weights = {key: numbers(n, dtype, random) for key, n in sizes.items()}
    args = []
    for rank in range(servers + workers):
        keys = list(sizes)
        if shuffled:
            keys = [keys[i] for i in torch.randperm(len(keys), generator=random).tolist()]
        grads = {key: numbers(sizes[key], dtype, random) for key in keys if rank >= servers}
        args.append(({key: weights[key].clone() for key in keys}, grads, servers, LR))
    biggest = max(sizes.values(), default=0)
    text = (f"{servers} server{'s' * (servers > 1)}, {workers} worker{'s' * (workers > 1)}, "
            f"{len(sizes)} keys of up to {biggest} × {str(dtype)[6:]}")
    facts = {"servers": servers, "workers": workers, "weights": weights,
             "nbytes": sum(sizes.values()) * dtype.itemsize, "item": dtype.itemsize}
    return Case(text, args, facts=facts, **options)


# ---- values ------------------------------------------------------------------------------------


def _flat(tensors: Mapping[str, torch.Tensor], keys: Any) -> torch.Tensor:
    return torch.cat([tensors[key].flatten() for key in keys])


def _values(case: Case, outcome: Outcome) -> Verdict:
    weights, servers = case.facts["weights"], case.facts["servers"]
    grads = [args[1] for args in case.args[servers:]]
    for rank in range(servers, case.ranks):
        mine = outcome.after[rank][0]
        if not isinstance(mine, dict) or set(mine) != set(weights) or not all(
                isinstance(x, torch.Tensor) for x in mine.values()):
            return Verdict(False, f"rank {rank}: weights are no longer its keys and tensors",
                           f"the keys {', '.join(weights)}",
                           clue="Leave the dictionary as it is; change its tensors in place.")
        for key, before in weights.items():
            right = wanted(before, [g[key] for g in grads], LR)
            bad = judge_vector(f"rank {rank}: weights[{key!r}]", mine[key], right)
            if bad is not None:
                return bad if bad.clue else bad._replace(clue=_clue(case, outcome))
    return not_sent(outcome, 2 * (len(grads) - 1) * case.facts["nbytes"]) or Verdict(
        True, "the new weights, on every worker", "weights − lr · mean")


def _clue(case: Case, outcome: Outcome) -> str:
    weights, servers = case.facts["weights"], case.facts["servers"]
    after = [args[0] for args in outcome.after[servers:]]
    if any(mine[key].shape != w.shape for mine in after for key, w in weights.items()):
        return ""
    found = step_clue([_flat(mine, weights) for mine in after], _flat(weights, weights),
                      [_flat(args[1], weights) for args in case.args[servers:]], LR, case.ranks)
    if found:
        return found
    wrong = {key for key, w in weights.items() for mine in after
             if judge_vector("", mine[key], wanted(
                 w, [args[1][key] for args in case.args[servers:]], LR))}
    if len(wrong) < sum(w.numel() > 0 for w in weights.values()):
        return (f"Some keys are right, but {', '.join(sorted(wrong))} "
                f"{'is' if len(wrong) == 1 else 'are'} not: do both ends agree which server holds "
                "them, and where the cuts are?")
    return "What a server adds up must be the same part of the same key, from every worker."


# ---- cost --------------------------------------------------------------------------------------


def _balance(case: Case, outcome: Outcome) -> Verdict:
    """Each server receives its n-th of the workers' bytes; an element more for each key."""
    servers, workers = case.facts["servers"], case.facts["workers"]
    even = -(-case.facts["nbytes"] // servers) + len(case.facts["weights"]) * case.facts["item"]
    allowed = int(SLACK * workers * even)
    got = [outcome.trace.received_bytes(rank) for rank in range(servers)]
    most = max(got)
    nbytes = f"{most:,} / {allowed:,}"
    if missing := _missing(case, outcome):
        return missing
    if most <= allowed:
        return Verdict(True, "even", "m·S/n bytes a server", nbytes)
    return Verdict(False, f"server {got.index(most)} received {most:,} B", f"≤ {allowed:,} B",
                   nbytes, clue=_balance_clue(got, servers))


def _balance_clue(got: list[int], servers: int) -> str:
    if servers > 1 and sorted(got)[-2] == 0:
        return (f"Server {got.index(max(got))} gets everything, and the others nothing: that is "
                f"one server. {_CUT}")
    if min(got) == max(got) or min(got) > 0.9 * max(got):
        return "Every server gets more than its share: send each one only its own part."
    return f"Whole keys go to one server each, whatever their size. {_CUT}"


def _missing(case: Case, outcome: Outcome) -> Verdict | None:
    """Fewer bytes than any parameter server moves: they did not come through `comm`, or not
    through the servers."""
    servers, least = case.facts["servers"], case.facts["workers"] * case.facts["nbytes"]
    got = sum(outcome.trace.received_bytes(rank) for rank in range(servers))
    sent = sum(outcome.trace.sent_bytes(rank) for rank in range(servers))
    if min(got, sent) >= least:
        return None
    return Verdict(False, f"servers received {got:,} B, sent {sent:,} B", f"≥ {least:,} B each",
                   clue="Every worker's gradient goes to the servers, and the new weights come "
                        "from them; don't add gradients among workers.")


def _traffic(case: Case, outcome: Outcome) -> Verdict:
    """No worker sends or receives more than its gradient and the weights; none talks to another."""
    servers, n = case.facts["servers"], case.facts["nbytes"]
    allowed = int(SLACK * n)
    if missing := _missing(case, outcome):
        return missing
    for rank in range(servers, case.ranks):
        sent, got = outcome.trace.sent_bytes(rank), outcome.trace.received_bytes(rank)
        if max(sent, got) > allowed:
            clue = ("A worker sends each server its part only, not the whole gradient."
                    if sent > allowed else
                    "A worker gets from each server that server's part, nothing else.")
            verb = "sent" if sent > allowed else "received"
            return Verdict(False, f"worker {rank} {verb} {max(sent, got):,} B", f"≤ {allowed:,} B",
                           f"{max(sent, got):,} / {allowed:,}", clue=clue)
    return Verdict(True, "S out, S in, for each worker", "S out, S in", f"{n:,} / {allowed:,}")


def _time(case: Case, outcome: Outcome) -> Verdict:
    """max(m/n, 1)·S/B each way."""
    servers, workers = case.facts["servers"], case.facts["workers"]
    best_s = 2 * max(workers / servers, 1) * case.facts["nbytes"] / BANDWIDTH_BPS
    came, expected = f"{outcome.elapsed_s * 1e3:.4g} ms", f"≤ {LATE * best_s * 1e3:.4g} ms"
    if missing := _missing(case, outcome):
        return missing
    if outcome.elapsed_s <= LATE * best_s:
        return Verdict(True, came, expected)
    clue = ("Ports are idle. If every worker sends to server 0 first, the other servers wait: "
            "post all sends and receives together (comm.exchange), or let worker w begin with "
            "server w % servers.")
    if outcome.elapsed_s >= 2.5 * best_s:
        clue = ("It takes several times as long as necessary: are workers served one after the "
                "other, or keys, while all others wait? Post what belongs together "
                "in one comm.exchange.")
    return Verdict(False, came, expected, clue=clue)


def _real(case: Case, outcome: Outcome) -> Verdict:
    verdict = _values(case, outcome)
    return _missing(case, outcome) or verdict if verdict.passed else verdict


def _build(seed: int) -> list[Check]:
    k = seed % 3

    def case(servers: int, workers: int, *sizes: int, **options: Any) -> Case:
        return _case(servers, workers, {f"w{i}": n for i, n in enumerate(sizes)}, seed, **options)

    plain = [case(1, 1, 6, 4), case(1, 3, 12, 6 + k), case(2, 2, 12, 24), case(2, 3, 12, 24, 6)]
    many = [case(n, m, 60 * n, 24) for n, m in ((1, 2), (3, 3), (4, 2), (3, 6), (4, 9), (6, 1))]
    many.append(case(2, 2, 12, 24, dtype=F64, hint="It works for float32 only: make room with "
                     "torch.empty_like, or dtype=w.dtype."))
    uneven = [case(2, 3, 1, 7 + k, 100), case(3, 2, 10 + k, 0, 1), case(4, 2, 1, 2),
              case(3, 4, 5, 5, 5, 5, 5, 5, 5 + k)]
    order = [case(n, m, 3, 8 + k, 1, 20, 5, shuffled=True) for n, m in ((1, 2), (2, 2), (3, 4))]
    huge = [case(n, m, 40_000 + 96 * k, 64, 8, 1, latency_s=0.0, bandwidth_Bps=BANDWIDTH_BPS)
            for n, m in ((1, 3), (2, 3), (4, 4), (4, 8))]
    real = [case(2, 2, 1_000, 7 + k, 1, gloo=True)]
    return [
        Check("weights", 2, "1 or 2 servers, 1 to 3 workers", plain, _values),
        Check("any servers", 1, "1 to 6 servers, 1 to 9 workers", many, _values,
              "It works for some numbers of servers and workers only: the ranks below `servers` "
              "serve, all the others work."),
        Check("uneven keys", 1, "sizes that n does not divide; 0; 1", uneven, _values,
              "It fails where a key does not divide evenly, or is smaller than the number of "
              "servers: w.tensor_split(servers) cuts any size, into parts that may be empty."),
        Check("any order", 1, "keys in another order on each rank", order, _values,
              "It fails where ranks list their keys in different orders: agree on one order, "
              "sorted(weights)."),
        Check("balance", 2, "one huge key and small ones", huge, _balance, provided=_values),
        Check("traffic", 1, "one huge key and small ones", huge, _traffic, provided=_values),
        Check("time", 1, "one huge key, simulated", huge, _time, provided=_values),
        Check("real", 1, "2 servers, 2 workers over Gloo", real, _real,
              "It works in the simulator, but not on real processes over Gloo."),
    ]


EXERCISE = Exercise("sharded-store", "A sharded store", "07", 1, "sharded_step", _build)
