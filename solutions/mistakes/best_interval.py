from dtlab.grading.mistakes import Mistake

MTTF = "node_mttf_h * 3600 / nodes"
YOUNG, SAVED = "math.sqrt(2 * save_s * mttf_s)", "save_s + math.sqrt("
LOST = 'if goal == "least lost time":'

HINTS = {
    "MTTF": "The job fails when any of its nodes does: N nodes fail N times as often as one. An "
        "hour has 3600 seconds.",
    "least lost time": "w/c + c/(2M) is least where its two terms are equal: c² = 2wM.",
    "best availability": "The derivative of (1 − w/c)/(M + R + c/2) is zero where c² − 2wc − "
        "2w(M + R) = 0; take the positive root.",
    "shares": "Put your c into the sum of the first goal, or into the availability of the second.",
    "edges": "Everything follows from the formulas, also for one node and for a restart of zero.",
}

MISTAKES = [
    Mistake({MTTF: "node_mttf_h * 3600"}, "That is the mean time to failure of one node. The job "
            "needs all of them, and fails when the first one does: divide by their number."),
    Mistake({MTTF: "node_mttf_h / nodes"}, "Units: the node's mean time to failure is in hours, all "
            "else in seconds."),
    Mistake({MTTF: "node_mttf_h * 60 / nodes"}, "Units: an hour has 3600 seconds; 60 make it "
            "minutes."),
    Mistake({MTTF: "node_mttf_h * 3600 * nodes"}, "More nodes fail more often: divide by their "
            "number."),
    Mistake({LOST: 'if goal != "least lost time":'}, "These are the formulas of the other "
            "goal: the least lost time has c = √(2wM), without the restart."),
    Mistake({LOST: "if True:"}, "The best availability was asked, and this is the period of the "
            "least lost time: the two differ in the restart, and in w."),
    Mistake({LOST: "if False:"}, "The least lost time was asked, and this is the period of the "
            "best availability: here failures strike at all times, and the restart plays no part."),
    Mistake({MTTF: "node_mttf_h * 3600 // nodes"}, "// rounds down: the mean time to failure is "
            "no whole number of seconds. Take /."),
    Mistake({", period_s, save_s": ", period_s / 60, save_s", "mttf_s, period_s, share": "mttf_s, "
             "period_s / 60, share"}, "Units: the period is in minutes; return seconds."),
    Mistake({YOUNG: "math.sqrt(2 * save_s * (mttf_s + restart_s))"}, "The first goal has no "
            "restart: its sum is w/c + c/(2M)."),
    Mistake({YOUNG: f"round({YOUNG})", "save_s + math.sqrt(2 * (mttf_s + restart_s) * save_s + save_s**2)":
             "round(save_s + math.sqrt(2 * (mttf_s + restart_s) * save_s + save_s**2))"},
            "Nearly: the period is no whole number of seconds. Take it from its formula, unrounded."),
    Mistake({YOUNG: YOUNG + " - save_s"}, "The period goes from the beginning of one save to that "
            "of the next: √(2wM) holds the save already."),
    Mistake({"period_s / (2 * mttf_s)": "period_s / mttf_s"}, "A failure costs half a period in the "
            "mean: c/(2M) in what is lost, too."),
    Mistake({"period_s, share": "period_s, 1 - share"}, "Of the second goal return the "
            "availability, not what is lost."),
    Mistake({"/ (mttf_s + restart_s + period_s / 2)": "/ (mttf_s + period_s / 2)"}, "The "
            "restart is missing in the availability: M + R + c/2 below."),
    Mistake({YOUNG: "math.sqrt(save_s * mttf_s)"}, "A 2 is missing: a failure costs half a period "
            "in the mean, so c/(2M), and c = √(2wM)."),
    Mistake({"math.sqrt(2 * (mttf_s + restart_s)": "math.sqrt((mttf_s + restart_s)"},
            "A 2 is missing under the root: c² − 2wc − 2w(M + R) = 0."),
    Mistake({SAVED: "math.sqrt("}, "That is the work between two saves. The period goes from the "
            "beginning of one save to that of the next: add w."),
    Mistake({SAVED: "math.sqrt(", " * save_s + save_s**2": " * save_s"}, "That is the least lost "
            "time's formula with M + R for M, only an approximation here: solve c² − 2wc − 2w(M + "
            "R) = 0 exactly."),
    Mistake({"(mttf_s + restart_s) * save_s": "mttf_s * save_s"}, "The restart is missing: nothing "
            "fails while the job restarts, so M + R pass from failure to failure."),
    Mistake({" * save_s + save_s**2": " * save_s"}, "w² is missing under the root: solve c² − 2wc "
            "− 2w(M + R) = 0 exactly."),
    Mistake({"save_s / period_s + period_s / (2 * mttf_s)": "1 - save_s / period_s - period_s / "
             "(2 * mttf_s)"}, "Of the first goal return what is lost, not what is useful."),
    Mistake({"save_s / period_s + period_s / (2 * mttf_s)": "100 * (save_s / period_s + period_s / "
             "(2 * mttf_s))", "period_s, share": "period_s, 100 * share"},
            "The shares are in per cent: return parts of 1."),
    Mistake({"(1 - save_s / period_s) * mttf_s": "mttf_s"}, "While it saves, the job does nothing "
            "useful, either: 1 − w/c."),
    Mistake({"restart_s + period_s / 2)": "restart_s + period_s)"}, "A failure costs half a period "
            "of work in the mean, not a whole one."),
]
