from dtlab.grading.mistakes import Mistake

ANSWER = "max(1, round(math.sqrt(max(ranks - 2, 0) * nbytes * beta / alpha)))"
NEARLY = "Nearly: T(k) = (p − 2 + k)(α + nβ/k), so the factor is p − 2; and don't round up, round."
WRONG_WAY = ("Expensive messages call for few segments, long vectors for many: are α and nβ the "
             "wrong way round, or is α missing?")

HINTS = {
    "long vectors": "Multiply T(k) = (p − 2 + k)(α + nβ/k) out: two of its four terms depend on "
        "k. Where is their sum least?",
    "short chains": "Nearly: with few segments, one more or less counts. The factor is p − 2; and "
        "take the nearest whole number: don't round up, nor down, as int() does.",
    "edges": "With two ranks, or a few bytes, the formula gives less than 1: there is always one "
        "segment.",
}

MISTAKES = [
    Mistake({ANSWER: "max(1, round(math.sqrt(ranks * nbytes * beta / alpha)))"}, NEARLY),
    Mistake({ANSWER: "max(1, round(math.sqrt((ranks - 1) * nbytes * beta / alpha)))"}, NEARLY),
    Mistake({ANSWER: "max(1, math.ceil(math.sqrt((ranks - 2) * nbytes * beta / alpha)))"}, NEARLY),
    Mistake({ANSWER: "max(1, int(math.sqrt((ranks - 2) * nbytes * beta / alpha)))"}, "Nearly: take "
            "the nearest whole number; don't round down, as int() does."),
    Mistake({ANSWER: "round(math.sqrt((ranks - 2) * nbytes * beta / alpha))"}, HINTS["edges"]),
    Mistake({ANSWER: "max(1, round((ranks - 2) * nbytes * beta / alpha))"}, "Without its root: the "
            "best k is a square root. Where is the derivative 0?"),
    Mistake({ANSWER: "max(1, round(math.sqrt(nbytes * beta / alpha)))"}, "A longer chain needs more "
            "segments: the number of ranks is missing."),
    Mistake({ANSWER: "max(1, round(math.sqrt((ranks - 2) * nbytes * beta)))"}, WRONG_WAY),
    Mistake({ANSWER: "max(1, round(math.sqrt((ranks - 2) * alpha / max(nbytes * beta, 1e-30))))"},
            WRONG_WAY),
    Mistake({ANSWER: "max(1, round(math.sqrt((ranks - 2) * nbytes * alpha / beta)))"}, WRONG_WAY),
    Mistake({ANSWER: "max(1, round(math.sqrt((ranks - 2) * (nbytes // 4) * beta / alpha)))"},
            "nbytes is already a number of bytes: don't divide it by the size of an element."),
    Mistake({ANSWER: "math.sqrt((ranks - 2) * nbytes * beta / alpha)"}, "A number of segments is a "
            "whole number, and at least 1: max(1, round(…)) makes it so."),
]
