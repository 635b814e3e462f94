from dtlab.grading.mistakes import Mistake

TOP = 'logits - all_reduce(comm, logits.amax(1), "max")[:, None]'
LOSS = "(total.log() - target).mean()"
UNEVEN = "Ranks may have different widths: this rank's columns begin at `first`, not at rank · width."

HINTS = {
    "uneven": UNEVEN,
    "loss": "Three numbers of each row are over all ranks: the largest logit, the sum of "
        "exp(logit − largest), and the target's logit less the largest, which the rank with its "
        "column gives (column targets − first there), and the others as 0. The loss is the mean "
        "of log(sum) − target's.",
    "gradient": "It is (softmax − one-hot)/rows, in this rank's own columns: divide by the sum of "
        "the exponentials over all ranks, and take 1 off in column targets − first.",
    "stable": "The exponentials overflow, or vanish: subtract the largest logit of the row, the "
        "same on all ranks.",
    "bytes": "Too much moves: no rank needs others' logits. Reduce the largest logit, the sum of "
        "the exponentials and the target's logit.",
}

MISTAKES = [
    Mistake({LOSS: LOSS + " / comm.size"},
            "The loss is divided by the number of ranks: it is the mean over rows only."),
    Mistake({LOSS: "all_reduce(comm, (total.log() - target).mean())"},
            "The loss is added up over the ranks: all have the same one."),
    Mistake({LOSS: "(total.log() - target).sum()"}, "This is the sum over the rows: take the mean."),
    Mistake({LOSS: "(total.log() - target)"},
            "This is a loss for each row. The loss is the mean of them."),
    Mistake({"all_reduce(comm, torch.stack([z.exp().sum(1), own]))":
             "z.exp().sum(1), all_reduce(comm, own)"},
            "Each rank sees its own columns only: the sum of the exponentials is over all."),
    Mistake({TOP: "logits - logits.amax(1)[:, None]"},
            "Each rank takes off the largest of its own logits: it must be the largest on all "
            "ranks."),
    Mistake({"own[mine] = z[at]": "own[mine] = logits[at]"},
            "The largest logit is taken off in the exponentials, but not from the target's logit."),
    Mistake({"total, target = all_reduce(comm, torch.stack([z.exp().sum(1), own]))":
             "total, target = all_reduce(comm, z.exp().sum(1)), own"},
            "Only the rank that has the target's column knows its logit: the others add 0, in an "
            "all-reduce."),
    Mistake({"targets - first": "targets"},
            "The targets are numbers of columns among all ranks': here it is column "
            "targets − first, if this rank has it."),
    Mistake({TOP: "logits"}, "The exponentials overflow, or vanish: subtract the largest logit of "
            "the row first, the largest on all ranks."),
    Mistake({"gradient / rows": "gradient"},
            "The gradient is that of the sum: divide by the number of rows."),
    Mistake({"    gradient[at] -= 1\n": ""},
            "The target is missing: its column's gradient is softmax − 1, if this rank has it."),
    Mistake({"z.exp() / total[:, None]": "z.softmax(1)"},
            "The softmax is over this rank's own columns: divide by the sum of the exponentials "
            "over all ranks."),
    Mistake({"    gradient = z.exp()": "    [all_reduce(comm, z[:, :1] + 0) for _ in range(width)]\n    gradient = z.exp()"},
            HINTS["bytes"]),
    Mistake("""
def vocab_loss(comm, logits, targets, first):
    from dtlab.collectives import all_gather
    whole = torch.cat([*all_gather(comm, logits)], 1).requires_grad_()
    loss = torch.nn.functional.cross_entropy(whole, targets)
    loss.backward()
    return loss.detach(), whole.grad[:, first : first + logits.shape[1]].clone()
""", "All logits are gathered, which moves too much, and fails where ranks have different widths: reduce "
            "the largest logit, the sum of the exponentials and the target's logit."),
    Mistake({"mine = (column >= 0) & (column < width)": "column = column.clamp(0, width - 1)\n"
             "    mine = column >= 0"}, "A rank that lacks the target's column takes another one: it "
            "adds 0 there, and takes 1 off nowhere."),
    Mistake({"gradient[at] -= 1": "gradient[mine] -= 1"}, "1 is taken off all columns of a row: only "
            "the target's own has it."),
    Mistake({"gradient / rows": "gradient / rows / comm.size"}, "The gradient is divided by the number "
            "of ranks: it is that of the mean over rows only."),
    Mistake({"rows, width = logits.shape\n": "rows, width = logits.shape\n    first = comm.rank * "
             "width\n"}, UNEVEN),
    Mistake({"z = " + TOP: "z = logits - all_reduce(comm, logits.logsumexp(1))[:, None]",
             "total.log()": "0 * total", "/ total[:, None]": "* 1"}, "Logarithms of sums can't be added "
            "up over the ranks: add up the sums of the exponentials, then take the logarithm."),
    Mistake({LOSS: "(target - total.log()).mean()"}, "The sign is wrong: the loss is log(sum) − the "
            "target's."),
    Mistake({"gradient / rows": "-gradient / rows"}, "The gradient's sign is wrong: softmax, minus 1 in "
            "the target's column."),
    Mistake({"gradient / rows": "all_reduce(comm, gradient / rows)"}, "The gradient is that of this rank's "
            "own columns: don't reduce it."),
    Mistake({"torch.stack([z.exp().sum(1), own])": "torch.stack([z.exp().sum(1), own]), \"avg\""},
            "The sums are averaged over the ranks: add them up."),
    Mistake({"total, target = all_reduce(comm, torch.stack([z.exp().sum(1), own]))": "total, target = "
             "all_reduce(comm, z.exp().sum(1)), all_reduce(comm, own, \"max\")"}, "The target's logit is "
            "negative, once the largest is taken off, so the largest of it and 0 is 0: add up."),
]
