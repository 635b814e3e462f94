from dtlab.grading.mistakes import Mistake

RECOMPUTE = '("none", "selective", "full"):'
STAGES = "(0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)"

NAMES = "Return a dictionary with all six: pp, dp, tp, micro_batch, stage, recompute."

HINTS = {
    "fits": "predict gives None for what can't be laid out (with dp = 1, say, there is no other "
        "stage than 0): test for None before you unpack it. If nothing fits, you have not tried "
        "every pp, tp, stage and recomputation.",
    **dict.fromkeys(("good", "best"), "Does your search try other values of what is expected to "
        "differ?"),
    "few predictions": "Don't ask for what can't be laid out: no stage but 0 with dp = 1, no "
        "ZeRO 3 in a pipeline. And once you know that a micro-batch doesn't fit, a larger one won't, "
        "either.",
}

MISTAKES = [
    Mistake({"found and found[1] <= memory_bytes": "found"},
            "The fastest of all takes more memory than there is: leave out what doesn't fit before "
            "you compare times."),
    Mistake({RECOMPUTE: '("none", "full"):'}, "Not all kinds of recomputation are tried: \"selective\" "
            "lies between \"none\" and \"full\"."),
    Mistake({RECOMPUTE: '("full",):'}, "Only full recomputation is tried, which costs the most "
            "time: where less of it fits, that is faster."),
    Mistake({STAGES: "(0,) if dp == 1 else (0, 1)"}, "The search stops at stage 1 of ZeRO: without a "
            "pipeline, stages 2 and 3 take less memory."),
    Mistake({"if found[0] < best_s:": "if not best:"}, "The first layout that fits is taken: of all "
            "that fit, take the one of the fewest seconds."),
    Mistake({"if found[0] < best_s:": "if found[1] < best_s:", ", found[0]\n": ", found[1]\n"},
            "That is the layout of the least memory: of those that fit, take the fastest."),
    Mistake({"return best": "return {**best, 'micro_batch': batch // (best['dp'] * "
             "best['micro_batch'])}"}, "micro_batch is the number of samples of one micro-batch, not "
            "the number of micro-batches."),
    Mistake({STAGES: "(0,)"},
            "The search stays at stage 0 of ZeRO: with several data-parallel ranks, stage 1 sends "
            "as much and takes less memory, 2 and 3 still less."),
    Mistake({"range(1, devices // pp + 1)": "range(1, 2)"}, "tp stays 1: try what divides the "
            "devices and the heads."),
    Mistake({"range(1, devices + 1)": "range(1, 2)"}, "pp stays 1: try pipelines, too."),
    Mistake({"range(1, batch // dp + 1)": "range(1, 2)"}, "Micro-batches of one sample only: "
            "larger ones are faster, where they fit."),
    Mistake({"if pp * tp * dp != devices or pp > layers or heads % tp:": "if False:", STAGES: "(0, 1, 2, 3)", "                            break\n                    else:\n" "                        break  # a larger micro-batch won't fit either\n": ""},
            HINTS["few predictions"]),
    Mistake({"return best": "return tuple(best.values())"}, NAMES),
    Mistake({"return best": "return {key: best[key] for key in best if key != 'recompute'}"}, NAMES),
    Mistake({'"micro_batch", "stage"': '"microbatch", "stage"'}, NAMES),
]
