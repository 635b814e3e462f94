"""Chapter 11: the cross-entropy of logits of which each rank has some columns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from dtlab.grading.case import Case, Outcome
from dtlab.grading.exercise import Check, Exercise, Verdict
from dtlab.grading.exercises._tensor_parallel import judge_bytes, judge_part, normal, returned


def _whole(case: Case) -> tuple[Tensor, Tensor, list[int]]:
    return (torch.cat([a[0] for a in case.args], 1), case.args[0][1],
            [a[0].shape[1] for a in case.args])


def _loss(case: Case, outcome: Outcome) -> Verdict:
    values = returned(outcome, 2)
    if isinstance(values, Verdict):
        return values
    logits, targets, widths = _whole(case)
    right, t = cross_entropy(logits, targets), case.ranks
    parts = logits.split(widths, 1)
    own = torch.stack([p.exp().sum(1) for p in parts])
    top = logits.amax(1)
    target = logits.gather(1, targets[:, None])[:, 0]
    owner = targets[:, None].ge(torch.tensor(widths).cumsum(0)).sum(1)
    highest = torch.stack([p.amax(1) for p in parts])
    local = torch.stack([(p - m[:, None]).exp().sum(1)
                         for p, m in zip(parts, highest, strict=True)]).sum(0).log()
    wrong = judge_part("loss", [v[0] for v in values], [right] * t, [
        ("The loss is divided by the number of ranks: it is the mean over rows only.",
         lambda r: right / t),
        ("The loss is added up over the ranks: all have the same one.", lambda r: right * t),
        ("This is the sum over the rows: take the mean.", lambda r: right * len(targets)),
        ("Each rank sees its own columns only: the sum of the exponentials is over all.",
         lambda r: (own[r].log() - target).mean()),
        ("Each rank takes off the largest of its own logits: it must be the largest on all ranks.",
         lambda r: (local - target + highest.gather(0, owner[None])[0]).mean()),
        ("The largest logit is taken off in the exponentials, but not from the target's logit.",
         lambda r: right - top.mean()),
        ("Only the rank that has the target's column knows its logit: the others add 0, in an "
         "all-reduce.", lambda r: right + ((target - top) * (owner != r)).mean()),
    ], "Three numbers of each row are over all ranks: the largest logit, the sum of exp(logit − "
        "largest), and the target's logit less the largest, which the rank with its column gives "
        "(column targets − first there), and the others as 0. The loss is the mean of log(sum) − "
        "target's.")
    if wrong and any(isinstance(v[0], Tensor) and not bool(v[0].isfinite().all()) for v in values):
        wrong = wrong._replace(sure=True, clue="The exponentials overflow: subtract the largest "
                               "logit of the row first, the largest on all ranks.")
    return wrong or Verdict(True, "right on every rank", "that of one device")


def _gradient(case: Case, outcome: Outcome) -> Verdict:
    values = returned(outcome, 2)
    if isinstance(values, Verdict):
        return values
    logits, targets, widths = _whole(case)
    softmax = logits.softmax(1)
    whole = (softmax - one_hot(targets, logits.shape[1])) / len(targets)
    split = list(whole.split(widths, 1))
    bare = (softmax / len(targets)).split(widths, 1)
    wrong = judge_part("the gradient", [v[1] for v in values], split, [
        ("The gradient is that of the sum: divide by the number of rows.",
         lambda r: split[r] * len(targets)),
        ("The target is missing: its column's gradient is softmax − 1, if this rank has it.",
         lambda r: bare[r]),
    ], "It is (softmax − one-hot)/rows, in this rank's own columns: divide by the sum of the "
        "exponentials over all ranks, and take 1 off in column targets − first.")
    return wrong or Verdict(True, "right on every rank", "(softmax − one-hot)/n, own columns")


def _bytes(case: Case, outcome: Outcome) -> Verdict:
    t, rows = case.ranks, len(case.args[0][1])
    return judge_bytes(case, outcome, 2 * (t - 1) * (3 * -(-rows // t) * 8 + 24),
                       "three numbers a row",
                       "Too much moves: no rank needs others' logits. Reduce the largest logit, "
                       "the sum of the exponentials and the target's logit.")


def _build(seed: int) -> list[Check]:
    def case(rows: int, *widths: int, scale: float = 1.0, gloo: bool = False) -> Case:
        random = torch.Generator().manual_seed(31 * seed + rows + sum(widths))
        targets = torch.randint(sum(widths), (rows,), generator=random)
        args, first = [], 0
        for width in widths:
            args.append((scale * normal(random, rows, width), targets, first))
            first += width
        return Case(f"{len(widths)} ranks, {rows} rows, {sum(widths)} words", args, library=True,
                    latency_s=1e-6, bandwidth_Bps=1e9, gloo=gloo)

    k = seed % 3
    even = [case(4, 3, 3), case(6 + k, 5, 5, 5), case(9, 2, 2, 2, 2)]
    odd = [case(5 + k, 4, 2, 1), case(1, 1, 1), case(7, 9)]
    stable = [case(4, 3, 3, scale=1e4), case(5, 4, 4, 4, scale=1e3)]
    large = [case(20 + k, 300, 300, 300), case(16, 1000, 1000)]
    return [
        Check("loss", 2, "2 to 4 ranks", even, _loss),
        Check("gradient", 3, "of each rank's own logits", even, _gradient, provided=_loss),
        Check("uneven", 1, "columns that t doesn't divide; one rank", odd, _gradient,
              provided=_loss),
        Check("stable", 1, "logits of thousands", stable, _loss, "The exponentials overflow, or "
              "vanish: subtract the largest logit of the row, the same on all ranks."),
        Check("bytes", 2, "three numbers a row", large, _bytes, provided=_loss),
        Check("real", 1, "3 ranks over Gloo", [case(8, 4, 3, 2, gloo=True)], _gradient,
              provided=_loss),
    ]


EXERCISE = Exercise("vocab-loss", "Cross-entropy over a cut vocabulary", "11", 2, "vocab_loss",
                    _build)
