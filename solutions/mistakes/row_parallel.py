from dtlab.grading.mistakes import Mistake

Y = "all_reduce(comm, x @ weight.T) + bias"
RETURN = "dy @ weight, dy.T @ x, dy.sum(0)"
MANY = "dy is the same on all ranks, and whole: don't reduce it, or what comes of it."

HINTS = {
    "forward": "y is the sum over the ranks of x Wᵀ, each of its own part, in one all-reduce; "
        "then b.",
    "gradients": "Backward each rank works alone, on its own x and W: dy W, dyᵀ x, and the sum of "
        "dy's rows.",
    "bytes": "More moves than one all-reduce of y: don't gather x or the weight, and send nothing "
        "backward.",
}

MISTAKES = [
    Mistake({Y: "all_reduce(comm, x @ weight.T + bias)"},
            "The bias is added on every rank before the sum, so it counts t times: add it after."),
    Mistake({Y: "x @ weight.T + bias"},
            "y is a part of the sum: nothing was reduced over the ranks."),
    Mistake({Y: 'all_reduce(comm, x @ weight.T, "avg") + bias'},
            "The parts were averaged: they are to be added up."),
    Mistake({Y: "all_reduce(comm, x @ weight.T)"}, "The bias is missing."),
    Mistake({RETURN: "dy @ weight, dy.T @ x, all_reduce(comm, dy.sum(0))"}, MANY),
    Mistake({"    return": "    dy = all_reduce(comm, dy.clone())\n    return"}, MANY),
    Mistake({RETURN: "*(all_reduce(comm, g) for g in (dy @ weight, dy.T @ x, dy.sum(0)))"}, MANY),
    Mistake({RETURN: '*(all_reduce(comm, g, "avg") for g in (dy @ weight, dy.T @ x, dy.sum(0)))'},
            "The gradients are averaged over the ranks: each rank keeps its own."),
    Mistake({"dy.sum(0)": "dy.mean(0)"},
            "The gradient of the bias is the sum of dy's rows, not their mean."),
    Mistake({Y: "sum(all_gather(comm, x @ weight.T)) + bias",
             "    y =": "    from dtlab.collectives import all_gather\n    y ="},
            "More moves than one all-reduce of y: don't gather the parts of y."),
    Mistake({Y: "torch.cat([*all_gather(comm, x)], 1) @ torch.cat([*all_gather(comm, weight)], 1).T + "
             "bias", "    y =": "    from dtlab.collectives import all_gather\n    y ="},
            "The inputs and the weight are gathered, which moves more than y, and fails where ranks "
            "hold different numbers of columns: multiply what this rank has, and add up the results."),
    Mistake({"dy @ weight,": "all_reduce(comm, dy @ weight),"}, MANY),
    Mistake({"dy.T @ x,": "all_reduce(comm, dy.T @ x),"}, MANY),
    Mistake({"dy @ weight, dy.T @ x": "dy.T @ x, dy @ weight"}, "The order is y, and then the "
            "gradients of x, of weight and of bias."),
    Mistake({"dy.T @ x": "x.T @ dy"}, "The gradient of weight has weight's shape: dyᵀ x, not xᵀ dy."),
    Mistake({"dy.sum(0)": "dy.sum(0) * (comm.rank == 0)"}, "Each rank holds the whole bias, and needs "
            "its whole gradient: also those that don't add it."),
    Mistake({Y: "all_reduce(comm, x @ weight.T + bias / comm.size)", RETURN: "dy @ weight / comm.size, "
             "dy.T @ x / comm.size, dy.sum(0)"}, "The gradients are divided by the number of ranks: "
            "each is that of this rank's own columns, and whole."),
    Mistake({Y: "all_reduce(comm, x @ weight.T) + bias * (comm.rank == 0)"}, "After the sum, the bias is "
            "added on one rank only: y is the same on all."),
]
