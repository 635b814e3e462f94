from dtlab.grading.mistakes import Mistake

ENTER, SCALE, NAMED = "copy_to(comm, x * norm)", "copy_to(comm, scale)", '{"norm", "scale"}'
BIAS = "It is added after the sum, to what is the same on all ranks"
PARTS = "up and down are cut: each rank has the whole gradient of its own part."

HINTS = {
    "forward": "y is the same as before: the sum over the ranks of their parts, and then x and bias, "
        "once.",
    "place": "Return y and a set of the names of the arguments whose gradients the printed layer "
        "gets wrong, of norm, up, scale, down, bias.",
    "norm": "The gradient of `norm` or of x is wrong, which lie before the region: what enters it "
        "through copy_to, once, is h; x and y at the end are the same on all ranks already.",
    "scale": "The gradient of `scale` is wrong: all ranks hold it, and each multiplies its own "
        "columns by it, so each has a part of its gradient.",
    "bias": "The gradient of `bias` is wrong: it is added after the sum, to what is the same on "
        "all ranks.",
    "bytes": "More is reduced than must be: one copy_to for each tensor that is the same on all "
        "ranks and enters the region, and none for others.",
}

MISTAKES = [
    Mistake({"h @ down.T)\n    return x + y + bias": "h @ down.T + bias)\n    return x + y"},
            "The bias is added on every rank before the sum, so it counts t times: leave it where "
            "it was, after."),
    Mistake({NAMED: '{"norm"}'}, "One is missing: which other tensor is the same on all ranks, and "
            "meets columns that differ?"),
    Mistake({NAMED: '{"scale"}'}, "One is missing: what lies before the region gets its gradient "
            "from all ranks' columns."),
    *(Mistake({NAMED: names}, PARTS) for names in (
        '{"norm", "scale", "up"}', '{"norm", "scale", "down"}', '{"norm", "scale", "up", "down"}',
        '{"up", "down"}', '{"norm", "up"}')),
    *(Mistake({NAMED: names}, f"{BIAS}: the gradient of bias is right.") for names in (
        '{"norm", "bias"}', '{"norm", "scale", "bias"}', '{"scale", "bias"}', '{"bias"}')),
    Mistake({", " + NAMED: ', "norm, scale"'},
            "Name them one by one, in a set of texts: {\"up\", \"bias\"}."),
    Mistake({", " + NAMED: ""},
            "Return y and a set of names: the gradients that the layer above gets wrong."),
    Mistake({ENTER: "x * copy_to(comm, norm)"},
            "The gradient of x is wrong, which the layers before this one would go on with: what "
            "enters the region through copy_to must be h, not `norm`."),
    Mistake({ENTER: "copy_to(comm, x) * copy_to(comm, norm)", "return x": "return 0 * x + x"},
            "More is reduced than must be: x and norm each enter through copy_to, where one copy "
            "of h, after the norm, will do."),
    Mistake({ENTER: "x * norm", SCALE: "scale"}, "The gradient of `norm` is wrong, which lies "
            "before the region, and that of `scale`: what is the same on all ranks must enter the "
            "region through copy_to."),
    Mistake({ENTER: "x * norm"}, "The gradient of `norm` is wrong, which lies before the region: "
            "does h enter the region through copy_to?"),
    Mistake({SCALE: "scale"}, "The gradient of `scale` is wrong: all ranks hold it, and each "
            "multiplies its own columns by it, so each has a part of its gradient."),
    Mistake({"+ bias": "+ copy_to(comm, bias)"}, f"The gradient of `bias` is wrong. {BIAS}: no "
            "copy_to there."),
    Mistake({"return x": "return copy_to(comm, x)"}, "The gradient of x is wrong: x is added after the "
            "sum, to what is the same on all ranks: no copy_to there."),
    Mistake({"y = reduce_from(comm, h @ down.T)": "y = copy_to(comm, reduce_from(comm, h @ down.T))"},
            "y's gradient is the same on all ranks: a copy_to after the sum multiplies it by their "
            "number."),
    Mistake({ENTER: "copy_to(comm, copy_to(comm, x * norm))"}, "h enters the region twice, so its "
            "gradient is reduced twice: one copy_to is enough."),
    Mistake({"@ down.T": "@ copy_to(comm, down).T"}, "The gradient of `down` is reduced over the "
            "ranks, but down is cut: each rank has a part of its own, and the whole gradient of "
            "it."),
    Mistake({"@ up.T": "@ copy_to(comm, up).T"}, "The gradient of `up` is reduced over the ranks, "
            "but up is cut: each rank has a part of its own, and the whole gradient of it."),
    Mistake({ENTER: "copy_to(comm, copy_to(comm, x) * norm)"}, "x enters through copy_to, and h once "
            "more, so the gradient of x is reduced twice: one copy of h, after the norm, will do."),
    Mistake({ENTER: "copy_to(comm, x) * norm"}, "The gradient of `norm` is wrong: x enters the region "
            "before it is multiplied by norm. What enters is h, after the norm."),
    Mistake({SCALE: "scale", "h @ down.T": "copy_to(comm, h) @ down.T"}, "h is this rank's own "
            "columns there, and differs from rank to rank: copy_to is for `scale`, which is the same "
            "on all ranks, before it is multiplied by them."),
    Mistake({"reduce_from(comm, h @ down.T)\n    return x + y + bias":
             "reduce_from(comm, x + h @ down.T + bias)\n    return y"}, "x and bias are added on every "
            "rank before the sum, so they count t times: leave them where they were, after."),
    *(Mistake({NAMED: names}, PARTS) for names in ('{"up", "scale"}', '{"down", "scale"}')),
    Mistake({NAMED: '{"norm", "up", "scale", "down", "bias"}'}, PARTS + " And bias is added after "
            "the sum, to what is the same on all ranks."),
]
