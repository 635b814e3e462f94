from dtlab.grading.mistakes import Mistake

ROOMY, WAITING = "limit >= 2 * p - 1", "2 * r if roomy else r"

HINTS = {
    "runs": "A micro-batch is held from its forward until its W (or B): do a W before the next "
        "forward, or begin with fewer forwards.",
    **dict.fromkeys(("faster", "uneven times", "as ZB-H1"), "Rank r begins with p − r forwards, as in "
        "1F1B, with I in the place of B. As many W's wait as the limit allows, and fill the gaps "
        "at the end."),
    "more room": "With more room, more forwards can go first, 2(p − r) − 1 on rank r; then W's "
        "can wait that otherwise come too early.",
}

MISTAKES = [
    Mistake({ROOMY: "True"}, "The limit doesn't count here: with 2(p − r) − 1 forwards first, a "
            "rank holds up to 2p − 1 micro-batches. Begin with fewer where the limit is lower."),
    Mistake("""
def schedule(p, m, F, B, W, comm, limit):
    return [[f"{r}{kind}{i}" for kind in "FB" for i in range(m)] for r in range(p)]
""", "All forwards come first, so every micro-batch is held: begin with p − r forwards on rank r, then "
            "backward and forward in turn."),
    Mistake({ROOMY: "False"}, HINTS["more room"]),
    Mistake({'row.append(f"{r}W': '(f"{r}W', 'row + [f"{r}W{i}" for i in range(done, m)]': "row"},
            "I is only the gradient of the input: each micro-batch needs its W, too, on each rank."),
    Mistake({WAITING: "0"}, "Every W comes right after its I, so the others wait for it: let as "
            "many W's wait as the limit allows, and fill the gaps at the end."),
    Mistake({WAITING: "m"}, "All W's come last, so every micro-batch is held until then: do the "
            "oldest W whenever more than the limit allows would be held."),
    Mistake({"{r}I{i}": "{r}B{i}", "if i + 1 - done > waiting:": "if False:",
             'row + [f"{r}W{i}" for i in range(done, m)]': "row"}, "Only the input's gradient is "
            "waited for: cut B into I and W, and do W where the rank would wait."),
]
