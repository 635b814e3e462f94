from dtlab.grading.mistakes import Mistake

TERM, PULL = "lam * g * g * (w - backups[worker])", "backups[worker] = w.clone()"
UPDATE = "w -= lr * (g + " + TERM + ")"

HINTS = {
    **dict.fromkeys(("equation", "a pull makes it anew"), "The update is w ← w − lr·[g + λ·g⊙g⊙(w "
        "− w_bak)], w_bak what that worker pulled last."),
    "own backup": "A pull keeps a copy in backups[worker]; a push reads it, and leaves it there: "
        "more pushes may follow.",
    "loss under delay": "Training with your update ends at a higher loss than DC-ASGD does.",
}

MISTAKES = [
    Mistake({UPDATE: "w = w - lr * (g + " + TERM + ")"},
            "w never changes: a push changes w in place, with w -= … or w.sub_(…)."),
    Mistake({"g + lam": "g - lam"}, "The sign is wrong: the gradient is corrected towards where the "
            "weights are now, w − w_bak, not back to where they were."),
    Mistake({TERM: "lam * g * (g * (w - backups[worker])).sum()"}, "g ⊙ g ⊙ (w − w_bak) is element "
            "by element: g * g * (w - backup). Yours sums over all elements (an outer product, or a "
            "dot product)."),
    Mistake({TERM: "lam * (g * g).sum() * (w - backups[worker])"}, "g is squared as a whole: yours "
            "multiplies by the number g·g. Element by element: g * g."),
    Mistake({TERM: "lam * g * (w - backups[worker])"},
            "g is there only once: the correction is g ⊙ g ⊙ (w − w_bak)."),
    Mistake({PULL: "backups[worker] = w"}, "That is plain SGD: w − w_bak is zero, or is missing. A "
            "backup has to be a copy, w.clone(), for `backups[worker] = w` is the same tensor and "
            "moves with w; and it is made anew at a pull, not at a push."),
    Mistake({TERM: TERM + " / (0.05 * g * g + 1e-7).sqrt()"}, "λ is divided by √(mean of g²): that "
            "is the adaptive variant; the exercise uses λ as it is."),
    Mistake({"backups[worker]": "backups[0]"}, "One backup for all workers: each worker's pull "
            "overwrites the others'. Keep one for each: backups[worker]."),
    Mistake({UPDATE: UPDATE + "\n        " + PULL}, "The backup is made anew at a push. It is what "
            "the worker pulled, and stays until its next pull."),
    Mistake({PULL: "backups.setdefault(worker, w.clone())"}, "The backup is made once and never "
            "again. Make it anew at each pull of that worker."),
    Mistake({UPDATE: "g += " + TERM + "; w -= lr * g"},
            "The gradient g was changed: it belongs to the worker. Compute with copies."),
    Mistake({"    return w": "    return None"}, "A pull must return the weights."),
    Mistake({"lr * (g": "(g"}, "The learning rate is missing."),
    Mistake({"(w - backups[worker])": "(w - backups.pop(worker))"}, "The backup is thrown away at a "
            "push: more pushes may follow. It stays until the worker's next pull."),
    Mistake({UPDATE: "w -= lr * g\n        w -= lr * " + TERM}, "The step is taken in two, and the "
            "first has moved w before the correction looks at it: compute all of it from the old w."),
    Mistake({TERM: "lam * g * (w - backups[worker]) ** 2"},
            "The square is on g, not on w − w_bak: the correction is g ⊙ g ⊙ (w − w_bak)."),
    Mistake({UPDATE: "w -= lr * g + " + TERM},
            "The learning rate multiplies the correction, too: w ← w − η·[g + …]."),
]
