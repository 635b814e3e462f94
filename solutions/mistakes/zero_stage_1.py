from dtlab.grading.mistakes import Mistake

MEAN, KEEP = 'reduce_scatter(comm, rows(grad), op="avg")', 'state.setdefault("v", torch.zeros_like(mean))'
SHARD, BACK = "rows(weights)[comm.rank] - lr * v", "weights.copy_(all_gather(comm, shard)"
REDUCE = "    from dtlab.collectives import all_reduce\n    mean ="
ALL_REDUCED = 'rows(all_reduce(comm, grad, "avg"))[comm.rank].clone()'

HINTS = {
    "weights": "v = mu · v_before + the mean of all ranks' gradients; then weights − lr · v.",
    "any length": "It fails where N does not divide n: pad both vectors with zeros, at the end, to a "
        "multiple of N, and cut what was gathered to n elements.",
    "state": "`state` has to hold this rank's shard of the momentum, ⌈n/N⌉ elements, all of it and no "
        "more: another rank goes on with it.",
    "traffic": "One reduce-scatter of the gradients and one all-gather of the weights are enough. (An "
        "all-reduce sends as much as both: the sums of all shards to every rank.)",
}

MISTAKES = [
    Mistake({"weights.copy_": "weights = weights.clone().copy_"}, "The weights are as they were: "
            "write the new ones into `weights` itself (weights.copy_(…)), not into a copy."),
    Mistake({', op="avg"': ""}, "The gradients are summed, but not averaged: divide by the number "
            "of ranks, or op=\"avg\"."),
    Mistake({MEAN: MEAN + " / comm.size"},
            "The gradients are divided by the number of ranks twice."),
    Mistake({"all_gather(comm, shard).flatten()": "torch.stack([shard if r == comm.rank else row "
             "for r, row in enumerate(rows(weights))]).flatten()"},
            "Each rank has its own new shard only: the others never got it. All-gather the shards."),
    Mistake({KEEP: "torch.zeros_like(mean)"}, "Each step is as if v had been zero before: keep v "
            "in `state`, the new one (`v = mu * v + mean` makes another tensor), as nothing else "
            "lasts from step to step; and step with lr · v."),
    Mistake({"v.mul_(mu).add_(mean)": "v.mul_(mu).add_(mean, alpha=1 - mu)"},
            "v = mu · v_before + mean: the mean isn't multiplied by 1 − mu here."),
    Mistake({"add_(mean)": "add_(mean, alpha=lr)", "- lr * v": "- v"}, "lr is in v, as if it were the "
            "same in every step: v = mu · v_before + mean; then weights − lr · v, with this "
            "step's lr."),
    Mistake({SHARD: "rows(weights)[comm.rank] - lr * (mean + mu * v)"}, "That is Nesterov's step: "
            "here weights − lr · v, no more."),
    Mistake({SHARD: "rows(weights)[comm.rank - 1] - lr * v"}, "Gradient and weights are of different "
            "shards: reduce_scatter leaves row comm.rank of the gradient here; take that row of "
            "the weights."),
    Mistake({".view(comm.size, -1)\n": ".view(-1, comm.size).T.contiguous()\n"}, "The shards are "
            "every N-th element, but what all_gather returns is flattened row by row: cut into N "
            "rows, .view(N, -1)."),
    Mistake({KEEP: 'state.setdefault("v", torch.zeros_like(mean, dtype=torch.float64))'},
            "v has the weights' dtype: in float64, a float32 momentum takes twice the memory, and "
            "what is computed from it twice the bytes."),
    Mistake({"    shard =": '    state["mean"] = mean\n    shard ='}, "`state` keeps something "
            "besides v: only the momentum lasts from step to step."),
    Mistake({SHARD: "rows(weights)[comm.rank] + lr * v"}, "That goes uphill: weights − lr · v."),
    Mistake({SHARD: "rows(weights)[comm.rank] - v"}, "The learning rate is missing: "
            "weights − lr · v."),
    Mistake({MEAN: "rows(grad)[comm.rank].clone()"}, "Each rank steps with a shard of its own "
            "gradient: reduce-scatter the gradients first."),
    Mistake({"    mean =": "    whole = len(weights) // comm.size * comm.size\n    weights, grad = "
             "weights[:whole], grad[:whole]\n    mean ="}, "The last n mod N elements never "
            "change: pad the vector with zeros to a multiple of N."),
    Mistake({"    mean =": REDUCE, MEAN: 'all_reduce(comm, grad, "avg")', SHARD: "weights - lr * v",
             BACK + ".flatten()[: len(weights)])": "weights.copy_(shard)"},
            "Every rank keeps the momentum of all weights: nothing is sharded. Keep that of this "
            "rank's N-th only."),
    Mistake({MEAN: MEAN + "\n    whole = torch.zeros(comm.size, len(mean), dtype=mean.dtype)",
             "torch.zeros_like(mean)": "whole[comm.rank]"},
            "A view keeps the whole vector alive: `state` holds a shard, and with it all of the "
            "vector that it was cut from. .clone() it."),
    Mistake({"    mean =": REDUCE, MEAN: ALL_REDUCED}, HINTS["traffic"]),
]
