"""Chapter 11: what the graders say of right answers, and of likely mistakes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, gelu, one_hot

from dtlab.collectives import all_gather, all_reduce
from tests.exercises.answers import first_hint, judged, lost

ALL_1 = {"forward", "gradients", "uneven", "bytes", "real"}
ALL_2 = {"loss", "gradient", "uneven", "stable", "bytes", "real"}


# ---- row parallel --------------------------------------------------------------------------------


def linear(comm, x, w, b, dy, *, op="sum", early=False, reduce=True, gradients=lambda comm, g: g):
    y = x @ w.T + (b if early else 0)
    y = all_reduce(comm, y, op) if reduce else y
    return y + (0 if early else b), *(gradients(comm, g) for g in (dy @ w, dy.T @ x, dy.sum(0)))


def adds_the_bias_early(*args):
    return linear(*args, early=True)


def never_reduces(*args):
    return linear(*args, reduce=False)


def averages(*args):
    return linear(*args, op="avg")


def reduces_the_bias_gradient(comm, x, w, b, dy):
    y, dx, dw, db = linear(comm, x, w, b, dy)
    return y, dx, dw, all_reduce(comm, db)


def reduces_dy(comm, x, w, b, dy):
    return linear(comm, x, w, b, all_reduce(comm, dy.clone()))


def transposes_the_gradient_of_x(comm, x, w, b, dy):
    y, _, dw, db = linear(comm, x, w, b, dy)
    return y, x @ w.T @ w, dw, db


def reduces_all_gradients(comm, x, w, b, dy):
    return linear(comm, x, w, b, dy, gradients=lambda comm, g: all_reduce(comm, g))


def gathers_the_parts(comm, x, w, b, dy):
    parts = all_gather(comm, x @ w.T)
    return parts.sum(0) + b, dy @ w, dy.T @ x, dy.sum(0)


WRONG_1 = [
    (adds_the_bias_early, ALL_1, "counts t times"),
    (never_reduces, ALL_1, "nothing was reduced"),
    (averages, ALL_1, "to be added up"),
    (reduces_the_bias_gradient, {"gradients", "uneven", "bytes", "real"}, "dy is the same"),
    (reduces_dy, {"gradients", "uneven", "bytes", "real"}, "dy is the same"),
    (transposes_the_gradient_of_x, {"gradients", "uneven", "real"}, "each rank works alone"),
    (reduces_all_gradients, {"gradients", "uneven", "bytes", "real"}, "dy is the same"),
    (gathers_the_parts, {"bytes"}, "don't gather"),
    (lambda *args: 1, ALL_1, "Return 4 tensors"),
]


# ---- the loss ------------------------------------------------------------------------------------


def loss(comm, logits, targets, first, *, highest=True, local=False, offset=True, rows=None,
         minus=True, over=1, share=True, lower=True):
    n, width = logits.shape
    top = logits.amax(1) if highest else torch.zeros(n, dtype=logits.dtype)
    z = logits - (all_reduce(comm, top, "max") if highest and not local else top)[:, None]
    column = targets - (first if offset else 0)
    mine = (column >= 0) & (column < width)
    own = torch.zeros(n, dtype=logits.dtype)
    own[mine] = (z if lower else logits)[torch.arange(n)[mine], column[mine]]
    mine_only = own.clone()
    total, target = all_reduce(comm, torch.stack([z.exp().sum(1), own]))
    target = target if share else mine_only
    gradient = z.exp() / total[:, None]
    if minus:
        gradient[torch.arange(n)[mine], column[mine]] -= 1
    return (total.log() - target).mean() / over, gradient / (rows or n)


def gathers_the_logits(comm, logits, targets, first):
    width = all_reduce(comm, torch.tensor(logits.shape[1]), "max").item()
    padded = torch.full((len(logits), width), -torch.inf, dtype=logits.dtype)
    padded[:, : logits.shape[1]] = logits
    parts = all_gather(comm, padded).unbind()
    widths = all_gather(comm, torch.tensor([logits.shape[1]])).flatten().tolist()
    whole = torch.cat([p[:, :w] for p, w in zip(parts, widths, strict=True)], 1)
    gradient = (whole.softmax(1) - one_hot(targets, whole.shape[1])) / len(targets)
    return cross_entropy(whole, targets), gradient[:, first : first + logits.shape[1]]


def ignores_the_others_maximum(*args):
    return loss(*args, local=True)


def subtracts_nothing(*args):
    return loss(*args, highest=False)


def forgets_the_offset(*args):
    return loss(*args, offset=False)


def divides_by_ranks(comm, *args):
    return loss(comm, *args, over=comm.size)


def forgets_the_mean(*args):
    return loss(*args, rows=1)


def forgets_the_target(*args):
    return loss(*args, minus=False)


def keeps_the_target_to_itself(*args):
    return loss(*args, share=False)


def takes_the_target_as_it_is(*args):
    return loss(*args, lower=False)


def returns_a_loss_for_each_row(comm, logits, *args):
    mean, gradient = loss(comm, logits, *args)
    return mean.expand(len(logits)).clone(), gradient


def divides_by_its_own_sum(comm, logits, *args):
    mean, gradient = loss(comm, logits, *args)
    return mean, logits.softmax(1) / len(logits) + gradient.clamp(max=0)


WRONG_2 = [
    (gathers_the_logits, {"bytes"}, "no rank needs others' logits"),
    (ignores_the_others_maximum, ALL_2, "it must be the largest on all ranks"),
    (subtracts_nothing, {"stable"}, "overflow"),
    (forgets_the_offset, ALL_2, "column targets − first"),
    (keeps_the_target_to_itself, ALL_2, "the others add 0"),
    (takes_the_target_as_it_is, ALL_2, "but not from the target's logit"),
    (returns_a_loss_for_each_row, ALL_2, "The loss is the mean"),
    (divides_by_its_own_sum, {"gradient", "uneven", "real"}, "over all ranks"),
    (divides_by_ranks, ALL_2, "mean over rows only"),
    (forgets_the_mean, {"gradient", "uneven", "real"}, "divide by the number of rows"),
    (forgets_the_target, {"gradient", "uneven", "real"}, "The target is missing"),
]


# ---- the lie -------------------------------------------------------------------------------------


def block(comm, x, norm, up, scale, down, bias, copy_to, reduce_from, *, h_in=True, s_in=True,
          bias_in=False, both=False, down_in=False, wrong=("scale", "norm")):
    h = x * norm
    h = copy_to(comm, h) if h_in else h
    h = copy_to(comm, h) if both else h
    h = gelu(h @ up.T)
    s = copy_to(comm, scale) if s_in else scale
    h = (h.unflatten(-1, (-1, len(scale))) * s).flatten(-2)
    y = reduce_from(comm, h @ (copy_to(comm, down) if down_in else down).T)
    return x + y + (copy_to(comm, bias) if bias_in else bias), set(wrong)


def as_it_was(*args):
    return block(*args, h_in=False, s_in=False)


def forgets_the_scale(*args):
    return block(*args, s_in=False)


def forgets_the_input(*args):
    return block(*args, h_in=False)


def copies_the_bias_too(*args):
    return block(*args, bias_in=True)


def copies_twice(*args):
    return block(*args, both=True)


def copies_a_cut_weight(*args):
    return block(*args, down_in=True)


def names_one_only(*args):
    return block(*args, wrong=("norm",))


def names_a_cut_weight(*args):
    return block(*args, wrong=("norm", "scale", "up"))


def names_the_bias(*args):
    return block(*args, wrong=("norm", "bias"))


def names_none(*args):
    return block(*args)[0]


def copies_norm_instead(comm, x, norm, up, scale, down, bias, copy_to, reduce_from):
    return block(comm, x, copy_to(comm, norm), up, scale, down, bias, copy_to, reduce_from,
                 h_in=False)


def names_both_in_one_text(*args):
    return block(*args)[0], "norm, scale"


WRONG_3 = [
    (copies_norm_instead, {"norm", "bytes", "real"}, "must be h, not `norm`"),
    (names_both_in_one_text, {"place"}, "in a set of texts"),
    (names_one_only, {"place"}, "One is missing"),
    (names_a_cut_weight, {"place"}, "each rank has the whole gradient of its own part"),
    (names_the_bias, {"place"}, "added after the sum"),
    (names_none, {"place"}, "a set of names"),
    (as_it_was, {"norm", "scale", "bytes", "real"}, "enter the region"),
    (forgets_the_scale, {"scale", "bytes", "real"}, "each multiplies its own columns"),
    (forgets_the_input, {"norm", "bytes", "real"}, "enter the region"),
    (copies_the_bias_too, {"bias", "bytes", "real"}, "added after the sum"),
    (copies_twice, {"norm", "bytes", "real"}, ""),
    (copies_a_cut_weight, {"norm", "bytes", "real"}, ""),
]


@pytest.mark.parametrize(("exercise", "answer", "rows", "hint"), [
    *(("row-parallel", *wrong) for wrong in WRONG_1),
    *(("vocab-loss", *wrong) for wrong in WRONG_2),
    *(("find-the-lie", *wrong) for wrong in WRONG_3),
], ids=[wrong[0].__name__ for wrong in (*WRONG_1, *WRONG_2, *WRONG_3)])
def test_a_wrong_answer_loses_points_and_is_told_why(exercise, answer, rows, hint):
    report = judged(exercise, answer)
    assert lost(report) == rows, str(report)
    assert hint in first_hint(report), first_hint(report)
