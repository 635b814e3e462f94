from dtlab.grading.mistakes import Mistake

RESULT = "list(min(permutations(sizes), key=seconds))"
FIT = ("The axis that sends the most is last, but that isn't all: do its groups fit into a server? "
       "Count for each order the rings that cross a card.")

HINTS = {
    "an order": "Return a list of the axes' names, each once; the last varies fastest.",
    **dict.fromkeys(("time", "other loads"), "A ring inside a server never touches the network: "
        "which axis gains most by that?"),
    "groups too large": "The axis that sends the most isn't always best inside: count for each "
        "order how many rings leave a server, and share its card.",
}

MISTAKES = [
    Mistake({RESULT: "list(max(permutations(sizes), key=seconds))"},
            "That is the slowest order of two axes. The last axis varies fastest, so its "
            "ranks are neighbours: one that sends much gains there."),
    Mistake({RESULT: "sorted(sizes, key=lambda name: sent[name])"}, FIT),
    Mistake({RESULT: "sorted(sizes)"}, "Another order is faster. It depends on what is sent, on the "
            "sizes, and on what the servers hold: compare the times of all orders."),
    Mistake({RESULT: "sorted(sizes, reverse=True)"}, "Another order is faster. It depends on what "
            "is sent, on the sizes, and on what the servers hold: compare the times of all orders."),
    Mistake({"2 * (size - 1) / size * sent[name]": "sent[name]"}, "A ring sends 2(k−1)/k of its "
            "vector, so an axis of two ranks sends half of what a large one does for as many "
            "bytes."),
    Mistake({"max(leaving.values(), default=0) / card_Bps": "(max(leaving.values(), default=0) > 0)"
             " / card_Bps"}, "The GPUs of a server share its card, and no other: of k rings that "
            "leave it, each has 1/k. A hop inside takes time, too: the slowest hop counts."),
    Mistake({"if there // gpus != rank // gpus:": "if place + 1 < size and there // gpus != rank // "
             "gpus:"}, "A ring closes: the hop from its last rank to its first may leave a server, "
            "too."),
    Mistake({"total += ": "total = max(total, ", "* slowest\n": "* slowest)\n"}, "The axes work one "
            "after another: their times add up."),
    Mistake({"list(min(permutations(sizes)": "list(min(permutations(n for n in sizes if sizes[n] > "
             "1)"}, "An axis of one rank is an axis, too: return all names."),
]
