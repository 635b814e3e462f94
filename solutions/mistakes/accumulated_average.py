from dtlab.grading.mistakes import Mistake

LOOP = "        total[:-1] += len(batch) * gradient(batch)\n        total[-1] += len(batch)\n"
REDUCE, RETURN = 'all_reduce(comm, total, algorithm="ring")', "total[:-1] / total[-1]"
NONE = "torch.zeros(length, dtype=torch.float64)"

HINTS = {
    "equal": "Add up samples · gradient over a rank's micro-batches, and the samples; sum both "
        "over the ranks, and divide one by the other.",
    "unequal": "Weigh each gradient with its number of samples, and divide the sum by all samples "
        "of all ranks.",
    "empty": "A rank without micro-batches must take part in the all-reduce all the same, with "
        "zeros of the given length, and a count of 0.",
    "traffic": "More is sent than it takes. Add up on each rank first; one all-reduce of the sums, "
        "after the last micro-batch, is enough.",
}

MISTAKES = [
    Mistake({LOOP: "        total[:-1] += gradient(batch) / len(batches)\n",
             RETURN: "total[:-1] / comm.size"}, "An average of averages: a sample in a small "
            "micro-batch counts more. Weigh each gradient with its number of samples, and divide "
            "the sum by all samples of all ranks."),
    Mistake({f"    {REDUCE}": f"    total[:-1] /= total[-1].clamp(min=1)\n    {REDUCE}",
             RETURN: "total[:-1] / comm.size"}, "Each rank's mean is right, but a rank with few "
            "samples counts as much as one with many: add up sums, and divide by all samples of "
            "all ranks."),
    Mistake({"len(batch) * gradient": "gradient", "+= len(batch)": "+= 1"}, "All micro-batches "
            "count alike, whatever their size: weigh each with its samples."),
    Mistake({"total[-1] += len(batch)": "total[-1] += 1"}, "The sum is divided by the number of "
            "micro-batches: divide it by the number of samples."),
    Mistake({"len(batch) * gradient": "gradient"}, "The gradients of micro-batches are means, each "
            "divided by its samples already: multiply each by them before you add it up."),
    Mistake({"total[-1] +=": "total[-1] ="}, "Only the samples of each rank's last micro-batch are "
            "counted: add the counts up."),
    Mistake({f"    {REDUCE}\n": ""}, "Each rank has the mean over its own samples only: nothing is "
            "reduced over the ranks."),
    Mistake({RETURN: "total[:-1]"}, "This is the sum over all samples: divide by their number."),
    Mistake({f"    {REDUCE}": f"    mine = max(total[-1].item(), 1)\n    {REDUCE}",
             RETURN: "total[:-1] / mine"}, "Divided by the samples of this rank only: add up the "
            "counts of all ranks, too."),
    Mistake({"total[:-1] +=": "total[:-1] ="}, "Only the last micro-batch of each rank counts: add "
            "the gradients up."),
    Mistake({RETURN: RETURN + " / comm.size"}, "The gradients are divided by the number of ranks: "
            "the sum over all ranks, divided by all samples, is the mean already."),
    Mistake({f"    {REDUCE}\n": f"    if not batches:\n        return {NONE}\n    {REDUCE}\n"},
            HINTS["empty"]),
    Mistake({LOOP: "        part = torch.cat([len(batch) * gradient(batch), torch.tensor([float(len(batch))])])\n"
             "        total += all_reduce(comm, part, algorithm=\"ring\")\n", f"    {REDUCE}\n": ""},
            "A reduction for each micro-batch: ranks with fewer of them leave the others waiting. "
            "Add up on each rank first; one all-reduce of the sums is enough."),
    Mistake({f"    {REDUCE}\n": "    for one in total[:-1].split(1), total[-1:].split(1):\n"
             "        [all_reduce(comm, part, algorithm=\"ring\") for part in one]\n"},
            "The gradients are reduced in many small parts: one all-reduce of the sums, after the "
            "last micro-batch, is enough."),
    Mistake({LOOP: "        pass\n    if batches:\n        whole = torch.cat(batches)\n"
             "        total[:-1] = len(whole) * gradient(whole)\n        total[-1] = len(whole)\n"},
            "All micro-batches at once are what there is no room for: call gradient for one after "
            "the other, and add up."),
    Mistake({f"    {REDUCE}": f"    total[:-1] /= total[-1].clamp(min=1)\n    {REDUCE}"}, "The "
            "gradients are divided twice: by this rank's samples, and by all. The second is enough."),
]
