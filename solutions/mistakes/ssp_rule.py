from dtlab.grading.mistakes import Mistake

RULE = 'request == "push" or clock - min(clocks) <= staleness'

HINTS = {
    "the rule": "A pull may be answered if its worker is at most s clocks ahead of the slowest "
        "worker; a push always.",
    "pushes": "A push is finished work: it is always accepted.",
}

MISTAKES = [
    Mistake({RULE: 'request == "push" or clock - min(clocks) < staleness'},
            "Off by one, too strict: a worker that is s clocks ahead may still read."),
    Mistake({RULE: 'request == "push" or clock - min(clocks) <= staleness + 1'},
            "Off by one, too lax: a worker that is s + 1 clocks ahead may not read."),
    Mistake({RULE: 'request == "push" or clock <= min(clocks)'}, "s is missing, so that is BSP: a worker "
            "may read while it is at most s clocks ahead of the slowest."),
    Mistake({RULE: 'request == "push" or clock <= staleness'}, "The clock itself is compared with s: "
            "what counts is how far it is ahead of the slowest, clock − min(clocks)."),
    Mistake({RULE: 'request == "push" or clock - min(clocks) == staleness'}, "A worker that is less than "
            "s clocks ahead may read, too: compare with <=."),
    Mistake({RULE: "True"}, "Every pull is answered: that is ASP. Do you compare with the fastest "
            "worker? It is the slowest that holds the others back: min(clocks)."),
    Mistake({RULE: 'request == "push" or max(clocks) - clock <= staleness'}, "You bound how far a "
            "worker is behind the fastest; SSP bounds how far it is ahead of the slowest, and never "
            "stops the slow one."),
    Mistake({RULE: 'request == "push" or max(clocks) - min(clocks) <= staleness'}, "You look at the "
            "distance of the slowest from the fastest. What counts is how far the one who asks is "
            "ahead."),
    Mistake({RULE: 'request == "pull" or clock - min(clocks) <= staleness'}, "You hold back pushes "
            "and let pulls through. A push is finished work and always welcome; it is readers who "
            "may have to wait."),
    Mistake({RULE: 'bool(request == "push" or clock - sum(clocks) / len(clocks) <= staleness)'},
            "You compare with the average worker. It is the slowest that counts: min(clocks)."),
    Mistake({RULE: "clock - min(clocks) <= staleness"}, "You hold back pushes as well as pulls. A "
            "push is finished work: it is always accepted."),
    Mistake({RULE: "False"}, "Nothing is ever allowed."),
    Mistake({"return request": "request"}, "Return True or False."),
    Mistake({"return " + RULE: "others = list(clocks)\n    others.remove(clock)\n    return request == "
             "'push' or clock - min(others) <= staleness"}, "A worker that is alone is the slowest, too: it "
            "never waits. `clocks` holds its own clock as well, so take min(clocks)."),
]
