from dtlab.grading.mistakes import Mistake

PLACES, ZERO = "places = memory.abs().topk(min(k, len(g))).indices", "memory[places] = 0"
ADD = "total.index_add_(0, everywhere.flatten(), all_gather(comm, values).flatten())"
LOST = ("The memory ends as it began, so what isn't sent is lost. `memory += g` changes the tensor "
        "that you were given; `memory = memory + g` makes a new one. Choose from the sum, and set to "
        "0 only the places that you sent.")

HINTS = {
    **dict.fromkeys(("mean", "memory"), "memory += g; send its k largest entries (by absolute "
        "value, with their signs) and their places; set these to 0 in the memory. Return the sum "
        "of what all ranks sent, divided by comm.size. g belongs to the caller."),
    "edges": "If k is larger than the vector, send all of it: k = min(k, len(g)).",
    "bytes": "Send only k values and their k places (all_gather), not a whole vector.",
}

MISTAKES = [
    Mistake({"total / comm.size": "total"},
            "That is the sum over the ranks: divide by comm.size."),
    Mistake({"total / comm.size": "total / everywhere.flatten().bincount(minlength=len(g)).clamp(1)"},
            "Each place is divided by the number of ranks that sent it: divide by all of them."),
    Mistake({ADD: "total.index_add_(0, places, values)"}, "Only this rank's own entries are in the "
            "result: add up what all ranks sent."),
    Mistake({"memory.abs().topk": "memory.topk"}, "The largest are those of largest absolute value: "
            "x.abs().topk(k), then x at these places, with their signs."),
    Mistake({"values = memory[places]": "values = memory.abs()[places]"}, "What was sent has lost "
            "its signs: take only the places from x.abs().topk(k), and the values from x."),
    Mistake({ADD: "total[everywhere.flatten()] = all_gather(comm, values).flatten()"}, "Two ranks "
            "may send the same place, and their values must be added: total[places] = values "
            "overwrites. Take total.index_add_(0, places, values), or add one rank after the "
            "other."),
    Mistake({"memory += g": "memory = memory + g"}, LOST),
    Mistake({ZERO: "memory.zero_()"}, LOST),
    Mistake({"memory += g": "memory.copy_(g)"}, "What was not sent in earlier calls is gone: memory "
            "+= g, don't overwrite it."),
    Mistake({ZERO: "pass"}, "What was sent is still in the memory, and will be sent again: set the "
            "memory to 0 at the places that you sent."),
    Mistake({ZERO: "pass", "return total / comm.size": "memory -= total / comm.size\n    "
             "return total / comm.size"},
            "What leaves the memory is what *this* rank sent, not the mean."),
    Mistake({PLACES: PLACES.replace("memory", "g")}, "Choose from g + memory, not from g alone: what "
            "waits in the memory must be sent as well, once it is large."),
    Mistake({"return total / comm.size": "return total[places] / comm.size"}, "Return a whole vector "
            "like g, with 0 where no rank has sent."),
    Mistake({"    memory += g\n": "    g += memory\n    memory.copy_(g)\n"},
            "g belongs to the caller: change only the memory."),
    Mistake({"min(k, len(g))": "k"}, HINTS["edges"]),
    Mistake({ADD: "[total.add_(row) for row in all_gather(comm, torch.zeros_like(g).index_copy_(0, "
             "places, values))]", "    everywhere = all_gather(comm, places)\n": ""},
            "Send only values and their k places (all_gather), not a whole vector."),
    Mistake({"values = memory[places]": "values = memory[places] * 0"}, "Only zeros are sent: take "
            "the values out of the memory before you set their places to 0."),
    Mistake({"values = memory[places]": "values = memory.abs()[places]", ZERO: "memory[places] -= "
             "values"}, "What was sent has lost its signs: take only the places from x.abs().topk(k), "
            "and the values from x."),
    Mistake({"    " + ZERO + "\n": "", "    return total": "    memory[everywhere.flatten()] = 0\n"
             "    return total"}, "The memory is cleared at the places that other ranks sent, too: "
            "clear only those that this rank sent."),
    Mistake("""
def top_k_mean(comm, g, memory, k):
    from dtlab.collectives import all_gather
    memory += g
    total = sum(all_gather(comm, memory)) / comm.size
    places = total.abs().topk(min(k, len(g))).indices
    memory[places], mean = 0, torch.zeros_like(g)
    mean[places] = total[places]
    return mean
""", "Those are the largest entries of the mean. Each rank chooses the k largest of its own memory."),
    Mistake({"    memory += g\n": "    memory, kept = memory + g, memory\n", "    return total":
             "    kept.copy_(g)\n    kept[places] = 0\n    return total"}, "What was not sent in "
            "earlier calls is gone: memory += g, don't overwrite it."),
]
