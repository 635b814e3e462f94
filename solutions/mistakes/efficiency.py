from dtlab.grading.mistakes import Mistake

SPEEDUP, EFFICIENCY = "times[1] / t for n", "s / n for n"
SERIAL = "serial = sum(a * y for a, y in line) / sum(a * a for a, _ in line)"
LAST = "n, t = max(times.items())"
WHEREVER = "T_1 is times[1], wherever it stands: dictionaries have an order of their own."

HINTS = {
    "speedup": "The speedup is T_1/T_n; T_1 is times[1], wherever it stands.",
    "efficiency": "The efficiency is T_1/(n·T_n); T_1 is times[1], wherever it stands.",
    **dict.fromkeys(("serial share", "least squares"), "Find the one s that fits T_n/T_1 − 1/n = "
        "s·(1 − 1/n) best for all n, by least squares: a line through 0. It may lie below 0 or "
        "above 1."),
    "edges": "T_1 is times[1], wherever it stands; n devices may be more than n times as fast, or "
        "slower than one, so cut nothing off at 0 or 1.",
}

MISTAKES = [
    Mistake({SPEEDUP: "times[1] / t / n for n", EFFICIENCY: "s for n"},
            "This is the efficiency: the speedup is T_1/T_n."),
    Mistake({SPEEDUP: "t / times[1] for n", EFFICIENCY: "1 / s / n for n"},
            "It is upside down: the speedup is T_1/T_n."),
    Mistake({EFFICIENCY: "s for n"}, "This is the speedup: divide it by n."),
    Mistake({EFFICIENCY: "100 * s / n for n"}, "This is in percent: return a share of 1."),
    Mistake({EFFICIENCY: "1 / s / n for n"},
            "With times it is T_1/(n·T_n), not as with throughputs."),
    Mistake({EFFICIENCY: "n / s for n"}, "It is upside down: T_1/(n·T_n)."),
    Mistake({EFFICIENCY: "min(1.0, s / n) for n"}, "It is cut off at 1, but n devices may be more "
            "than n times as fast (their caches hold more): return what the formula gives."),
    Mistake({SERIAL: SERIAL + "; serial = min(max(serial, 0.0), 1.0)"}, "The serial share is cut "
            "off at 0 or 1, but where n devices are more than n times as fast, or slower than one, "
            "it lies beyond: return what the fit gives."),
    Mistake({SPEEDUP: "next(iter(times.values())) / t for n"}, WHEREVER),
    Mistake({SERIAL: SERIAL + "; serial = 1 - serial"},
            "This is the share that can be divided: return 1 minus it."),
    Mistake({SERIAL: f"{LAST}; serial = t / times[1]"}, "This takes all that the largest run "
            "doesn't gain for serial: 1/n of the work is still there. Solve T_n/T_1 = s + (1 − s)/n "
            "for s."),
    Mistake({SERIAL: f"{LAST}; serial = (t / times[1] - 1 / n) / (1 - 1 / n)"}, "This is from the "
            "largest run alone: fit all of them, by least squares."),
    Mistake({SERIAL: "shares = [y / a for a, y in line if a]; serial = sum(shares) / len(shares)"},
            "This is the mean of all runs' shares: with least squares, more devices weigh more."),
    Mistake({SERIAL: "import numpy as np; serial = float(np.polyfit(*zip(*line), 1)[0])"}, "This "
            "line has an intercept: the one that is asked for goes through 0, so s is "
            "Σ a·y / Σ a²."),
    Mistake({SERIAL: "import numpy as np; serial = float(np.polyfit([1 / n for n in times], "
             "[t / times[1] for t in times.values()], 1)[1])"}, "Slope and intercept are fitted as "
            "two numbers, but the slope is 1 − s: fit the one s of T_n/T_1 − 1/n = s·(1 − 1/n)."),
]
