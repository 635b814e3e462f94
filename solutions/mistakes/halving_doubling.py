from dtlab.grading.mistakes import Mistake

FOLD = "    if me >= core:  # too many: a neighbour adds my vector, and gives me the sum\n"
HAND_BACK = "    if me < folded:\n        comm.send(x, core + me)\n"
THERE = "        comm.sendrecv(give, partner, inbox[: len(keep)], partner)\n"
ADD = "        comm.accumulate_(keep, inbox[: len(keep)])\n"
BACK = "        comm.sendrecv(have, partner, lack, partner)\n"
LACKING = "Some contributions are missing. "
SAME_PIECE = ("In each round, you and your partner hold the same piece: one keeps (and adds) its "
              "first half, the other its second; each sends what the other keeps, and the next "
              "round halves what was kept.")

HINTS = {
    "sums": "Some contributions are missing, or stand twice. In each round, you and your partner "
        "hold the same piece: one keeps (and adds) its first half, the other its second; each "
        "sends what the other keeps, and the next round halves what was kept. Then swap complete "
        "pieces with the same partners, the nearest first.",
    "any p": "It works for powers of two only: with other numbers, rank ^ distance may be no rank "
        "at all. Fold p − p′ of the ranks into neighbours first, and hand them the sum at the end.",
    "any n": "It fails where halves differ in size. Both partners must cut at the same place: "
        "compute the edges of a piece the same way on both sides, and cut your inbox to the size "
        "of what comes.",
    "any dtype": "It works for float32 only: make room with torch.empty_like(x), or dtype=x.dtype.",
    "bytes": "Round k moves n/2ᵏ: first one half of x, then one half of what was kept. The way "
        "back moves as much.",
    "rounds": "The distance to the partner changes by a factor of two from round to round: lg p "
        "rounds there, lg p back; in each, send and receive at once, with comm.sendrecv(give, "
        "partner, inbox, partner).",
    "memory": "More is held than the largest message that arrives: half of x; all of x only on a "
        "rank that takes in a neighbour. Make one inbox of that size, once, and use slices of it; "
        "pieces of x can be sent, and on the way back received into, as they are.",
}

MISTAKES = [
    Mistake({ADD: "        keep.copy_(inbox[: len(keep)])\n"}, "Nothing has been added: each "
            "element is what some rank held at the start. On the way there (the halving) add what "
            "comes to the half that you keep; overwrite only on the way back."),
    Mistake({"reversed(distances)": "distances"}, "The way back begins with the farthest partner: "
            "go the same way back, swap complete pieces with the same partners, the nearest first."),
    Mistake({"for distance in reversed(distances)": "for distance in []"}, "Every element is "
            "complete on some rank: the halving is right. Now go the same way back: swap complete "
            "pieces with the same partners, the nearest first."),
    Mistake({"[core >> k for k in range(1, core.bit_length())]": "[1 << k for k in "
             "range(core.bit_length() - 1)]"}, LACKING + "The halves are cut for partners who are "
            "far apart, but the nearest come first. " + SAME_PIECE),
    Mistake({"comm.sendrecv(give, partner": "comm.sendrecv(keep, partner"}, "Elements of one half "
            "are added to those of the other: a rank sends the half that it keeps. Send the half "
            "that you give away; your partner keeps that one."),
    Mistake({BACK: BACK + "        lack.add_(have) if len(lack) == len(have) else None\n"},
            "Some sums are too large: on the way back, the doubling, overwrite, don't add."),
    Mistake({FOLD: "    if me >= core:\n        return x\n" + FOLD, "if me < folded:\n        "
             "comm.recv(inbox, core + me)\n        comm.accumulate_(x, inbox)\n": "",
             HAND_BACK: ""}, "The contributions of the ranks beyond the largest power of two are "
            "missing: fold p − p′ of the ranks into neighbours before the first round."),
    Mistake({"        comm.recv(x, me - core)\n": "", HAND_BACK: ""}, "A folded rank does not hold "
            "the sum: after the last round, its neighbour must hand the sum back to it."),
    Mistake({HAND_BACK: "", "    distances =": HAND_BACK + "    distances ="}, "A folded rank does "
            "not hold the sum: its neighbour hands it back too early. Do it after the last round."),
    Mistake({"x[start * n // core : (start + distance) * n // core]":
             "x[start * (n // core) : (start + distance) * (n // core)]"}, "It fails where halves "
            "differ in size: the last elements are in no piece. Compute the edges of a piece from "
            "n itself, the same way on both sides."),
    Mistake({"return x[start * n": "start = start if distance < core else 0\n        return x[start "
             "* n", "give, partner = half(me, distance), half(me ^ distance, distance), me ^ "
             "distance": "give, partner = x, x, me ^ distance", "x[: -(-len(x) // 2)]": "x",
             "for distance in reversed(distances)": "for distance in []"}, "The whole vector goes "
            "out in every round: that is recursive doubling. Send only the half that you don't "
            "keep, then half of that half, …"),
    Mistake("""
def halving_doubling(comm, x):
    p, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunks, inbox = x.tensor_split(p), torch.empty_like(x.tensor_split(p)[0])
    for step in range(p - 1):
        keep = chunks[(comm.rank - step - 1) % p]
        comm.sendrecv(chunks[(comm.rank - step) % p], right, inbox[: len(keep)], left)
        comm.accumulate_(keep, inbox[: len(keep)])
    for step in range(p - 1):
        comm.sendrecv(chunks[(comm.rank + 1 - step) % p], right, chunks[(comm.rank - step) % p], left)
""", "More rounds than are allowed, as in a ring. Here the distance to the partner changes by a "
            "factor of two from round to round: lg p rounds there, lg p back."),
    Mistake({THERE: """        if me & distance:
            comm.send(give, partner)
            comm.recv(inbox[: len(keep)], partner)
        else:
            comm.recv(inbox[: len(keep)], partner)
            comm.send(give, partner)
"""}, "Some ranks wait while others talk: in each round, send and receive at once, with "
            "comm.sendrecv(give, partner, inbox, partner)."),
    Mistake({"    distances =": "    copy = x.clone()\n    distances ="}, "A whole copy of x is "
            "made: make one inbox, of half of x, once, and use slices of it; pieces of x can be "
            "sent, and on the way back received into, as they are."),
    Mistake({"inbox = torch.empty_like(x if me < folded else x[: -(-len(x) // 2)])":
             "inbox = torch.empty(len(x) if me < folded else -(-len(x) // 2))"}, "It works for "
            "float32 only: make the inbox with torch.empty_like, or dtype=x.dtype."),
    Mistake({"torch.empty_like(x if me < folded else x[: -(-len(x) // 2)])": "torch.empty_like(x)"},
            "The inbox is as long as x on every rank; half of x is enough where no neighbour folds in."),
    Mistake({"have, lack, partner = half(me, distance), half(me ^ distance, distance)": "have, lack, "
             "partner = half(me, 1), half(me ^ distance, distance)"}, "On the way back each rank "
            "sends the chunk with which the halving ended, in every round. What it holds doubles: "
            "send all that is complete."),
]
