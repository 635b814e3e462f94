from dtlab.grading.mistakes import Mistake

ROWS, BACK = "[d for d in range(p) if d & hop]", "moving[rows] = arriving"
MOVE = "comm.sendrecv(leaving, (me + hop) % p, arriving, (me - hop) % p)"
END = "    result[origin] = moving\n"
COPY = ("The result holds this rank's own parts only: what arrived is not in it. `m[rows]` with a "
        "list of rows is a copy, and what is received into a copy is lost: receive into a tensor of "
        "its own, then write it back, `m[rows] = arrived`.")
ALL = ("All parts leave in every round. In the round of hop 2^k only those move whose distance d has "
       "the bit 2^k: half of them.")

HINTS = {
    "values": "At the start row d is for the rank d further on: parts.roll(-r, 0). In the round "
        "of hop 2^k, the rows whose d has that bit move 2^k ranks ahead, and what comes takes "
        "their places; after the rounds, row d has come from rank (r − d) % p.",
    "any p": "It works for powers of two only. Bruck's hops go (r + 2^k) % p, for any p; partners "
        "r ^ 2^k exist for powers of two only.",
    "any parts": "parts has shape (p, …), any dtype, and may be empty: torch.empty_like makes a "
        "buffer for what arrives.",
    "rounds": "It takes more than ⌈lg p⌉ rounds. Let parts hop 1, 2, 4, … ranks ahead, all that "
        "move in a round in one message: one sendrecv per round.",
    "bytes": "In the round of hop 2^k, only rows d with d & 2^k move: half of them, or fewer.",
}

MISTAKES = [
    Mistake({BACK: "moving[rows].copy_(arriving)"}, COPY),
    Mistake({END: "    result.copy_(moving)\n"}, "Only the last turn is missing: row d has come "
            "from d ranks back, so it belongs into row (r − d) % p of the result."),
    Mistake({END: "    result.copy_(moving.roll(me, 0))\n"}, "All parts have come, in the wrong "
            "order: row d has come from d ranks back, from rank (r − d) % p. That order runs "
            "backwards; a roll alone does not reverse it."),
    Mistake({"[(me - d) % p for d": "[(me - d + 1) % p for d"}, "All parts have come, but the rows "
            "stand 1 too far down: after the rounds, row d has come from rank (r − d) % p."),
    Mistake({"[(me - d) % p for d": "[(me - d - 1) % p for d"}, "All parts have come, but the rows "
            "stand 1 too far up: after the rounds, row d has come from rank (r − d) % p."),
    Mistake({"parts.roll(-me, 0)": "parts.roll(me, 0)"}, "Some parts are not for this rank. At the "
            "start row d is for the rank d further on: parts.roll(-r, 0)."),
    Mistake({"parts.roll(-me, 0)": "parts.clone()"}, "Some parts are not for this rank: the first "
            "turn is missing. At the start row d is for the rank d further on: parts.roll(-r, 0)."),
    Mistake({"(me + hop) % p, arriving, (me - hop) % p": "(me - hop) % p, arriving, (me + hop) % p"},
            "The rows travel the wrong way: in the round of hop 2^k they go 2^k ranks ahead, and "
            "what comes is from 2^k ranks back."),
    Mistake({"moving = parts.roll(-me, 0)": "moving = parts\n    moving[:] = parts.roll(-me, 0)"},
            "parts belongs to the caller: let the parts travel in a copy (parts.roll makes one; "
            "parts[…] = … does not)."),
    Mistake("""
def bruck_all_to_all(comm, parts):
    p, me, result = comm.size, comm.rank, parts.clone()
    for d in range(1, p):
        comm.sendrecv(parts[(me + d) % p], (me + d) % p, result[(me - d) % p], (me - d) % p)
    return result
""", "Sending each part straight to its rank takes p − 1 rounds. Let parts hop 1, 2, 4, … ranks ahead, "
            "many in one message: one sendrecv per round."),
    Mistake({MOVE: "[comm.sendrecv(a, (me + hop) % p, b, (me - hop) % p) for a, b in zip(leaving, "
             "arriving)]"}, "Each part travels in a message of its own: send all rows that move in a "
            "round together, moving[rows], with one sendrecv."),
    Mistake({"while hop < p:": "for _ in range(p.bit_length() - 1):"}, "The last round is missing "
            "where p is no power of two: it takes ⌈lg p⌉ rounds, so go on while hop < p."),
    Mistake({"leaving = moving[rows]": "leaving = moving", BACK: "moving[rows] = arriving[rows]"},
            ALL),
    Mistake("""
def bruck_all_to_all(comm, parts):
    p, me, moving, hop = comm.size, comm.rank, parts.clone(), 1
    while hop < p:
        rows = [s for s in range(p) if s & hop != me & hop]
        arriving = torch.empty_like(moving[rows])
        comm.sendrecv(moving[rows], me ^ hop, arriving, me ^ hop)
        moving[rows] = arriving
        hop *= 2
    return moving
""", HINTS["any p"]),
    Mistake({"    return result": "    return result.float()"}, "parts may have any dtype: "
            "torch.empty_like makes a buffer for what arrives."),
]
