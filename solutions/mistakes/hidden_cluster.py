from dtlab.grading.mistakes import Mistake

MESHES = "product((1, 2, 4, 8, 16), (1, 2, 4, 8))"

HINTS = {
    "runs": "run gives None for what doesn't fit or can't be laid out (with dp = 1, say, there is "
        "no other stage than 0): count that as endless seconds, and return all six names.",
    **dict.fromkeys(("fast network", "slow network"), "Does your search try other values of what "
        "is expected to differ? Where each change alone is slower, change two at once."),
    "few runs": "It takes more than 200 runs. Keep what each layout took, so that none runs twice; climb "
        "from a few meshes; and try few changes in each step.",
}

MISTAKES = [
    Mistake({'run(*layout) or float("inf")': "run(*layout) or 0.0"}, "None means that a layout "
            "doesn't run, not that it takes no time: count it as endless seconds."),
    Mistake({MESHES: "product((1,), (1, 2, 4, 8))"}, "pp is 1 there: where the network is slow, "
            "only a pipeline is fast."),
    Mistake({MESHES: "product((1, 2, 4, 8, 16), (1,))"}, "tp is 1 there: inside a server it is cheap, "
            "and with it fewer ranks reduce gradients over the slow network."),
    Mistake({"for kept in kinds": 'for kept in ("full",)'}, "That computes everything again: where "
            "memory is left, keep more of it."),
    Mistake({"(micro, 2 * micro)": "(micro,)"}, "Are larger micro-batches tried? "
            "With ZeRO 3 parameters travel anew for each."),
    Mistake({"        if layout not in seen:\n            seen[layout]": "        seen[layout]"},
            HINTS["few runs"]),
    Mistake({"return dict(zip(names, min(ends, key=seconds), strict=True))":
             "best = dict(zip(names, min(ends, key=seconds), strict=True))\n    return {**best, "
             "'micro_batch': batch // (best['dp'] * best['micro_batch'])}"}, "micro_batch is the "
            "number of samples of one micro-batch, not the number of micro-batches."),
    Mistake({"return dict(zip(names, min(ends, key=seconds), strict=True))":
             "return min(ends, key=seconds)"}, "Return a dictionary with pp, dp, tp, micro_batch, "
            "stage, recompute."),
]
