from dtlab.grading.mistakes import Mistake

FIRST = "min(m, p - r)"

HINTS = {
    "runs": "Return a list with, for each rank, a list of texts such as \"0F0\".",
    "any p, any m": "It fails where there are fewer micro-batches than a rank wants to begin "
        "with: begin with min(m, p − i).",
    "memory": "Rank i begins with p − i forwards: the last rank with one, the first with p.",
    "bubble": "Rank i begins with p − i forwards; with fewer it waits again and again.",
}

MISTAKES = [
    Mistake({FIRST: "min(m, p - r + 1)"}, "One forward too many: rank i begins with p − i of them, "
            "and the next waits for the first backward."),
    Mistake({FIRST: "m"}, "All forwards come first: that is GPipe. Begin with p − i forwards on "
            "rank i, then backward and forward in turn."),
    Mistake({FIRST: "min(m, p)"}, "All ranks begin with p forwards: rank i needs p − i of them; the "
            "last rank alternates from the beginning."),
    Mistake({FIRST: "min(m, max(p - r - 1, 1))"}, "One forward too few: with p − i − 1 of them a "
            "rank waits again and again. Rank i begins with p − i."),
    Mistake({FIRST: "min(m, 1)"}, "Every rank begins with one forward, so the ranks work one after "
            "the other: rank i begins with p − i, then it waits no more."),
    Mistake({FIRST: "p - r"}, HINTS["any p, any m"]),
]
