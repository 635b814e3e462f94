from dtlab.grading.mistakes import Mistake

RATES = "rates = fair_rates(list(left))"

HINTS = {
    "alone": "A flow that shares nothing takes its bytes over its narrowest link's capacity.",
    "equal flows": "Flows that share a link share its capacity: look at all links of a route.",
    "one ends": "When a flow ends, the others share what it leaves. Go from end to end: work out "
        "all rates, go on to the next end, take off what has moved, work out all rates again.",
    "held back elsewhere": "Not every flow can use its equal share of a link: one that is held "
        "back elsewhere leaves the rest to the others. Fix the rates on the tightest link, take "
        "them off all other links, repeat.",
    "unseen clusters": "Fix the tightest link's flows first, and take what they use from every "
        "link that they cross; when a flow ends, work out all rates again.",
    "edges": "Without flows return an empty list; a flow of 0 bytes ends at 0 s, and slows down "
        "no other flow.",
}

MISTAKES = [
    Mistake({"return ends": "return [8 * end for end in ends]"},
            "Capacities are bytes per second, sizes are bytes: no factor of 8."),
    Mistake({"return ends": "return [1e3 * end for end in ends]"},
            "The unit is seconds; yours look like milliseconds."),
    Mistake({"return ends": "return [1e6 * end for end in ends]"},
            "The unit is seconds; yours look like microseconds."),
    Mistake({"return ends": "return max(ends, default=0.0)"},
            "Return a list of numbers, the seconds at which each flow ends."),
    Mistake({"return ends": "return sorted(ends)"},
            "Return one time for each flow, in the order of `sizes`, not of the ends."),
    Mistake({"    return ends": "    return [n / min(capacity[link] for link in route) for n, route "
             "in zip(sizes, routes)]"}, "Each flow is timed as if it were alone on its narrowest "
            "link; those who share a link share its capacity."),
    Mistake({"    return ends": "    return [n / capacity[route[0]] for n, route in zip(sizes, "
             "routes)]"}, "Each flow is timed on the first link of its route, and not on the "
            "narrowest: look at all links of a route."),
    Mistake({"    return ends": "    return [sum(n / capacity[link] for link in route) for n, route "
             "in zip(sizes, routes)]"}, "The times on the links of a route don't add up: bytes "
            "cross all of them at once, and the narrowest sets the pace."),
    Mistake({"free = dict(capacity)": "free = capacity"}, "Is `capacity` changed? `free = "
            "capacity` is no copy, but the same dictionary: what is taken off it is still off when "
            "the rates are worked out anew. Write free = dict(capacity)."),
    Mistake({"ends[flow] = now": "ends[flow] = step"}, "These are the lengths of the last "
            "stretches, each from one end to the next, not the times at which flows end: add the "
            "stretches up, now += dt."),
    Mistake({"    while left:\n": "    rates = fair_rates(list(left))\n    return [n / rates[f] if n "
             "else 0.0 for f, n in enumerate(sizes)]\n    while left:\n"}, "The rates are worked "
            "out once: when a flow ends, the others share what it leaves. Go from end to end: work "
            "out all rates, go on to the next end, take off what has moved, and again."),
    Mistake({RATES: "rates = {f: min(capacity[link] / sum(link in routes[g] for g in left) for link "
             "in routes[f]) for f in left}"}, "Not every flow can use its equal share of a link: "
            "one that is held back elsewhere leaves the rest to the others. Fill up: fix the rates "
            "on the tightest link, take them off all other links, repeat."),
    Mistake({"                for link in routes[flow]:\n                    free[link] -= share\n":
             "                free[tightest] -= share\n"}, "Too fast: is a link carrying more than it "
            "can? Fix the tightest link's flows first, and take what they use from every link that "
            "they cross."),
]
