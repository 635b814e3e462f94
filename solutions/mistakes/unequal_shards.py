from dtlab.grading.mistakes import Mistake

TOTAL, RETURN = "samples * gradient, gradient", "total[:-1] / total[-1]"

HINTS = {
    "equal shards": "Sum samples · gradient over the ranks, and the samples, too; divide one by "
        "the other.",
    "unequal shards": "Weight each gradient by its number of samples, and divide the sum by all "
        "samples.",
    "empty shards": "It fails where a rank has no sample: it must take part, with a weight of 0.",
    "unchanged": "`all_reduce` works in place: give it a new tensor, such as `samples * gradient`.",
    "bytes": "More is sent than an all-reduce of one gradient and a number takes: don't gather "
        "all gradients, add them up.",
}

MISTAKES = [
    Mistake({TOTAL: "gradient, gradient", RETURN: "total[:-1] / comm.size"}, "An average of "
            "averages: a sample on a small shard counts more. Weight each gradient by its number of "
            "samples, and divide the sum by all samples."),
    Mistake({TOTAL: "gradient, gradient", RETURN: "total[:-1]"},
            "The sum is divided by too little: not at all, or, of weighted gradients, by the samples "
            "of one rank. Divide the sum of samples · gradient by the samples of all ranks."),
    Mistake({"    all_reduce(comm, total)\n": "", RETURN: "gradient.clone()"},
            "Each rank returns its own gradient: the others' never came."),
    Mistake({TOTAL: "gradient * (samples / all_reduce(comm, torch.tensor([samples]))), gradient",
             RETURN: "total[:-1]"}, "Nearly: the weights are float32, which has 7 digits. Divide by "
            "a number (`.item()`) or by a float64 tensor."),
    Mistake({RETURN: "total[:-1]"}, "This is the sum over all samples: divide by their number."),
    Mistake({RETURN: "total[:-1] / comm.size"},
            "The sum is divided by the number of ranks: divide by all samples."),
    Mistake({RETURN: "total[:-1] / (max(samples, 1) * comm.size)"}, "Each rank divides by its own "
            "number of samples, times the ranks. Divide by the samples of all ranks: `all_reduce` "
            "their number, too."),
    Mistake({"    all_reduce": "    if not samples:\n        return gradient.clone()\n" "    all_reduce"},
            HINTS["empty shards"]),
    Mistake({"    total =": "    gradient *= samples\n    total =", TOTAL: "gradient, gradient"},
            "The gradient that came in has changed (`all_reduce` and `*=` work in place): make a "
            "new tensor, such as `samples * gradient`."),
    Mistake({"all_reduce(comm, total)": "from dtlab.collectives import all_gather\n    " "total = all_gather(comm, total).sum(0)"},
            HINTS["bytes"]),
]
