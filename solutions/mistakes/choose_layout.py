from dtlab.grading.exercises.choose_layout import TOO_LARGE
from dtlab.grading.mistakes import Mistake

RECOMPUTE = '("none", "selective", "full"):'
STAGES = "(0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)"

NAMES = "Return a dictionary with all six: pp, dp, tp, micro_batch, stage, recompute."

HINTS = {
    "fits": "predict gives None for what can't be laid out (with dp = 1, say, there is no other "
        "stage than 0). Of the rest, what takes at most memory_bytes fits, and the fastest of that "
        "counts: try every pp, tp, stage and recomputation. Return all six names.",
    **dict.fromkeys(("good", "best"), "Does your search try other values of what is expected to "
        "differ?"),
    "few predictions": "What need not be asked: what can't be laid out (a stage but 0 with dp = 1, "
        "ZeRO 3 in a pipeline); more recomputation where less of it fits; a larger micro-batch on "
        "the same mesh, with the same stage, where one doesn't fit.",
}

MISTAKES = [
    Mistake({"found and found[1] <= memory_bytes": "found"},
            TOO_LARGE),
    Mistake({RECOMPUTE: '("none", "full"):'}, "Is all recomputation tried? \"selective\" lies "
            "between \"none\" and \"full\"."),
    Mistake({RECOMPUTE: '("full",):'}, "Full recomputation costs the most time: where less of it "
            "fits, that is faster."),
    Mistake({STAGES: "(0,) if dp == 1 else (0, 1)"}, "Is every stage of ZeRO tried? Without a "
            "pipeline, stages 2 and 3 take less memory."),
    Mistake({"if found[0] < best_s:": "if not best:"}, "The first layout that fits is taken: of all "
            "that fit, take the one of the fewest seconds."),
    Mistake({"if found[0] < best_s:": "if found[1] < best_s:", ", found[0]\n": ", found[1]\n"},
            "That is the layout of the least memory: of those that fit, take the fastest."),
    Mistake({"return best": "return {**best, 'micro_batch': batch // (best['dp'] * "
             "best['micro_batch'])}"}, "micro_batch is the number of samples of one micro-batch, not "
            "the number of micro-batches."),
    Mistake({STAGES: "(0,)"},
            "Is every stage of ZeRO tried? With several data-parallel ranks, stage 1 sends as much "
            "as 0 and takes less memory, 2 and 3 still less."),
    Mistake({"range(1, devices // pp + 1)": "range(1, 2)"}, "Is every tp tried that divides the "
            "devices and the heads?"),
    Mistake({"range(1, devices + 1)": "range(1, 2)"}, "Try pipelines, too: with one head and a "
            "batch of one sample, nothing else can be laid out."),
    Mistake({"range(1, batch // dp + 1)": "range(1, 2)"}, "Is every micro-batch tried that "
            "divides batch / dp? Larger ones are often faster, where they fit."),
    Mistake({"if pp * tp * dp != devices or pp > layers or heads % tp:": "if False:", STAGES: "(0, 1, 2, 3)", "                            break\n                    else:\n" "                        break  # a larger micro-batch won't fit either\n": ""},
            HINTS["few predictions"]),
    Mistake({STAGES: "(0,) if dp == 1 else (1,) if pp > 1 else (3,)"}, "Is every stage of ZeRO tried? "
            "The one that takes the least memory isn't always the fastest."),
    Mistake({"return best": "return tuple(best.values())"}, NAMES),
    Mistake({"return best": "return {key: best[key] for key in best if key != 'recompute'}"}, NAMES),
    Mistake({'"micro_batch", "stage"': '"microbatch", "stage"'}, NAMES),
]
