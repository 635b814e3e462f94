from dtlab.grading.mistakes import Mistake

TAKE_BACK = "        take(first, -1)  # put them back\n    return None"
BACKTRACK = ("There are two here, but most first rings cut off the second: when there is no second "
             "ring, take the first one back and go on searching (backtracking).")
WIRES = ("Take the first ring's wires away before you look for the second. (Backwards round the same "
         "ring is over the same wires: only a link of two wires serves both.)")

HINTS = {
    "easy meshes": "Go on only along `links`; they lead both ways. A ring visits each rank "
        "exactly once, and its last rank has a link to the first.",
    "bundled wires": "A link of two wires may be used twice: count wires, don't only mark links "
        "as used.",
    "misleading meshes": "Most first rings cut off the second: when there is no second ring, take "
        "the first one back and go on searching (backtracking).",
    "no rings": "These links hold no two rings without a common wire, so the answer is None. "
        "Return it once every possibility has been tried.",
}

MISTAKES = [
    Mistake({TAKE_BACK: "        return None\n    return None"}, BACKTRACK),
    Mistake({TAKE_BACK: "    return [list(range(ranks)), list(range(ranks))]"}, HINTS["no rings"]),
    Mistake({"        take(first, 1)\n": "", "        take(first, -1)  # put them back\n": ""}, WIRES),
    Mistake({"return [first, second]": "return [first, first[::-1]]"}, WIRES),
    Mistake({"free[b][a] = wires": "free[b][a] = 1"}, HINTS["bundled wires"]),
    Mistake({"return [first, second]": "return [first + first[:1], second + second[:1]]"},
            "Name the first rank once: a ring closes by itself."),
    Mistake({"return [first, second]": "return [list(zip(r, r[1:] + r[:1])) for r in (first, "
             "second)]"}, "A ring is the list of its ranks, in their order, not of its links: "
            "[0, 3, 2, …], not [(0, 3), (3, 2), …]."),
    Mistake({"return [first, second]": "return first"},
            "Return two lists of ranks: return [first, second]."),
    Mistake({"if free[here][path[0]]:": "if True:"}, "The last rank must have a link to the first "
            "one, too: a path is no ring yet."),
    Mistake({"zip(ring, [*ring[1:], ring[0]], strict=True)": "zip(ring, ring[1:])"}, "The wire from "
            "the last rank back to the first is in both rings: it is a wire of the ring like all "
            "others, take it away, too."),
    Mistake({"free[a][b] = free[b][a] = wires": "free[a][b] = wires"}, "None comes back, even where "
            "every rank is joined to every other. Does the function return what it finds? And do "
            "links lead both ways, (0, 3) from 3 to 0, too?"),
]
