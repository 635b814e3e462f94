from dtlab.grading.mistakes import Mistake

RETURN, MEDIAN = "return float(alpha), float(beta)", "np.median(times[sizes == size])"
ROWS = "rows = np.stack([1 / t, n / t], axis=1)"
UNIT = "The unit is seconds, and seconds per byte; yours look like "
LOST = ("α is lost in the noise. Plain least squares looks at absolute errors, so a few percent of "
        "noise on the 64 MB messages outweigh every short one: make the errors relative (divide by "
        "the time), or fit α on the short messages and β on the long ones. Some times are far too "
        "long: take the median of each size first.")

HINTS = {
    "exact times": "Return two numbers: α, the seconds that a message of no bytes would take, and "
        "β, those that each byte adds.",
    "short messages": "α is lost in the noise. Plain least squares looks at absolute errors, so a "
        "few percent of noise on the 64 MB messages outweigh every short one: make the errors "
        "relative (divide by the time), or fit α on the short messages and β on the long ones, "
        "on all ten of each size: a single time may be off by a tenth or more.",
    "long messages": "β is off: the long messages decide it. Take the median of each size first, "
        "not the mean, for some times are far too long; and fit α and β together, or take α off "
        "first: even of a message of 1 MB, α may be a large part.",
    "outliers": "Times that were disturbed are far too long: take the median of each size first, "
        "not the mean.",
}

MISTAKES = [
    Mistake({RETURN: "return float(alpha), float(1 / beta)"},
            "β is seconds per byte; you returned bytes per second: take 1/β."),
    Mistake({RETURN: "return float(beta), float(alpha)"},
            "α and β are the wrong way round: return alpha, beta."),
    Mistake({RETURN: "return float(1e3 * alpha), float(1e3 * beta)"}, UNIT + "milliseconds."),
    Mistake({RETURN: "return float(1e6 * alpha), float(1e6 * beta)"}, UNIT + "microseconds."),
    Mistake({RETURN: "return float(1e9 * alpha), float(1e9 * beta)"}, UNIT + "nanoseconds."),
    Mistake({RETURN: "return float(alpha), float(beta / 8)"},
            "β is per byte, not per bit: a factor of 8."),
    Mistake({RETURN: "return float(alpha), float(beta * 8)"},
            "β is per byte, not per bit: a factor of 8."),
    Mistake({RETURN: "return 0.0, float(beta)"}, "α is missing: it is what a message of no bytes "
            "would take. " + LOST),
    Mistake({RETURN: "b, a = np.polyfit(np.log(sizes), np.log(times), 1)\n    "
             "return float(np.exp(a)), float(b)"}, "β looks like the slope of a line through the "
            "logarithms (log–log). α + nβ is no straight line there: a slope of 1 on the right, 0 "
            "on the left. Fit the numbers themselves, each weighted by its own time."),
    Mistake({RETURN: "b, a = np.polyfit(sizes, times, 1)\n    return float(a), float(b)"}, LOST),
    Mistake({RETURN: "b, a = np.polyfit(n, t, 1)\n    return float(a), float(b)"}, LOST),
    Mistake({MEDIAN: "np.min(times[sizes == size])"}, "All times come out too short, as the minimum "
            "of each size does: the noise goes both ways. Take the median."),
    Mistake({MEDIAN: "np.mean(times[sizes == size])"}, "Times that were disturbed are far too long: "
            "take the median of each size, not the mean."),
]
