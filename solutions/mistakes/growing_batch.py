from dtlab.grading.mistakes import Mistake

GROWN = "min(most, int(batch * first / rate + 1e-9))"
RATE, STEPS = "rates.append(rate * grown / batch)", "math.ceil(count * batch / grown)"
ROUNDED = ("Batches are rounded up, or to the nearest: round them down, so that no rate exceeds the "
           "first.")

HINTS = {
    "batches": "A stage whose rate was divided by f has a batch f times as large, and the first "
        "stage's rate.",
    "samples": "Each stage by itself: s steps with batches of b samples see s·b samples; divide by "
        "the new batch, and round up.",
    "noise scale": "Where the batch is rounded down, the rate has to fall a little, too: rate over "
        "batch is what stays.",
    "limit": "A batch above the largest is cut to it; the rate that goes with it keeps rate over "
        "batch, and the steps are those of the batch that was cut.",
    "edges": "The first stage stays as it is; a stage of 0 steps stays a stage, of 0 steps.",
    "loss": "Keep each stage's noise scale and its samples: then the loss comes out the same.",
}

MISTAKES = [
    Mistake({RATE: "rates.append(rate)"}, "The rate still falls, and the batch grows as well: the "
            "noise scale is divided twice. The rate is this stage's noise scale times its batch."),
    Mistake({RATE: "rates.append(first)"}, "The first stage's rate does not fit a batch that was "
            "rounded or cut: rate over batch is what stays."),
    Mistake({GROWN: "min(most, int(batch * (first / rate) ** 2 + 1e-9))"}, "The batch grows by the "
            "square of the factor: that keeps the deviation of a single step. The noise scale is "
            "rate over batch."),
    Mistake({GROWN: "min(most, int(batch * rate / first + 1e-9))"},
            "The batch shrinks with the rate: it has to grow as the rate falls."),
    *(Mistake({GROWN: f"min(most, {whole})"}, "A batch is an int, of whole samples: int(…) rounds it "
              "down to one; a division of floats, also by //, leaves a float.")
      for whole in ("batch * first / rate", "(batch * first / rate + 1e-9) // 1")),
    Mistake({STEPS: "count"}, "As many steps as before, with larger batches: that is many times "
            "the samples. Keep the samples."),
    Mistake({STEPS: "count * batch // grown"}, "The last samples of a stage are missing: round "
            "the steps up."),
    Mistake({STEPS: "round(count * batch / grown)"}, "Rounded to the nearest, some stages see "
            "fewer samples than before: round the steps up."),
    Mistake({STEPS: "count * batch / grown"}, "A number of steps is whole: round up."),
    Mistake({GROWN: "int(batch * first / rate + 1e-9)"},
            "A batch is above `most`, which the devices don't hold."),
    Mistake({GROWN: "min(most, round(batch * first / rate))"}, ROUNDED),
    Mistake({GROWN: "min(most, math.ceil(batch * first / rate))"}, ROUNDED),
    Mistake({GROWN: "min(most, int(batch * first / rate))"}, "0.3 / 0.1 is a little less than 3 in "
            "floating point: add 1e-9 before you round down."),
    Mistake({GROWN: "min(most, batch * int(first / rate + 1e-9))"}, "The factor is rounded, and the "
            "batch with it: multiply first, then round down to whole samples."),
    Mistake({"return rates, batches, steps": "return list(zip(rates, batches, steps))"},
            "Return three lists, rates, batches and steps, and not a list of stages."),
    Mistake({"    for rate, count in schedule:\n": "    for rate, count in schedule:\n"
             "        batch, first = (batches[-1], before) if batches else (batch, first)\n"
             "        before = rate\n"}, "The batch grows from that of the stage before, but rates, "
            "samples and rounding belong to the batch that the schedule was made for."),
    Mistake({"    for rate, count in schedule:\n": "    grown, before = batch, first\n"
             "    for rate, count in schedule:\n", GROWN: "min(most, int(grown * before / rate + "
             "1e-9))\n        before = rate"}, "The batch grows from that of the stage before, "
            "which was rounded: take the first stage's batch and rate."),
    Mistake({"batch * first / rate + 1e-9": "batch * (first / rate)"}, "A quotient such as 0.3 / 0.1 "
            "is a little less than 3 in floating point, so a batch is one too small: add 1e-9 before "
            "you round down."),
]
