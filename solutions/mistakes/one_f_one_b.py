from dtlab.grading.mistakes import Mistake

FIRST = "min(m, p - r)"

TOO_FEW = ("Too few forwards come first, so a rank waits again and again: rank r begins with "
           "min(m, p − r) of them.")
ALTERNATING = """
def one_f_one_b(p, m):
    rows = []
    for r in range(p):
        first = p - r - 1
        row = [f"{r}F{i}" for i in range(first)]
        for i in range(m - first):
            row += [f"{r}F{first + i}", f"{r}B{i}"]
        rows.append(row + [f"{r}B{i}" for i in range(m - first, m)])
    return rows
"""

HINTS = {
    "runs": "Return a list with, for each rank, a list of texts such as \"0F0\".",
    "any p, any m": "It fails where there are fewer micro-batches than a rank wants to begin "
        "with: begin with min(m, p − r).",
    "memory": "Rank r begins with p − r forwards: the last rank with one, the first with p.",
    "bubble": "Rank r begins with p − r forwards, as with fewer it waits again and again; and "
        "backwards go through the micro-batches in the order of the forwards.",
}

MISTAKES = [
    Mistake({FIRST: "min(m, p - r + 1)"}, "One forward too many: rank r begins with p − r of them, "
            "and the next waits for the first backward."),
    Mistake({FIRST: "m"}, "All forwards come first: that is GPipe. Begin with p − r forwards on "
            "rank r, then backward and forward in turn."),
    Mistake({FIRST: "min(m, p)"}, "All ranks begin with p forwards: rank r needs p − r of them; the "
            "last rank alternates from the beginning."),
    Mistake({FIRST: "min(m, max(p - r - 1, 1))"}, TOO_FEW),
    Mistake({FIRST: "min(m, 1)"}, TOO_FEW),
    Mistake({FIRST: "min(m, r + 1)"}, "The other way round: rank 0 begins with the most forwards, "
            "p of them, and the last rank with one."),
    Mistake({FIRST: "min(m, p - r - 1)"}, "One forward too few: the last rank would begin with a "
            "backward. Rank r begins with p − r forwards."),
    Mistake(ALTERNATING.replace("range(m - first, m)]", "reversed(range(m - first, m))]")
            .replace("p - r - 1", "min(m, p - r - 1)"), "The last backwards go through the "
            "micro-batches the other way round: 0 comes first, as the next stage does it first."),
    Mistake({"return rows": "return rows[::-1]"}, "The lists are in another order than the ranks: "
            "rank r has stage r, and its list is number r."),
    Mistake({FIRST: "p - r"}, HINTS["any p, any m"]),
    Mistake(ALTERNATING, HINTS["any p, any m"]),
]
