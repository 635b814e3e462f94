from dtlab.grading.mistakes import Mistake

CUT = "x.tensor_split(segments)"
LOOP = """    for i in range(segments + 1):
        ops: list[Send | Recv] = []
        if place > 0 and i < segments:
            ops.append(Recv(parts[i], behind))
        if place < p - 1 and i > 0:
            ops.append(Send(parts[i - 1], ahead))
        comm.exchange(*ops)
"""
RECV, SEND = "if place > 0 and i < segments:", "if place < p - 1 and i > 0:"
HAVE = "Send segment i only after it has come: in round i, receive segment i while you send i − 1."
TURN = """    for part in parts:
        if place > 0:
            comm.recv(part, behind)
        if place < p - 1:
            comm.send(part, ahead)
"""
ALL = """    coming = [comm.irecv(part, behind) for part in parts if place > 0]
    going = []
    for i, part in enumerate(parts):
        if coming:
            coming[i].wait()
        if place < p - 1:
            going.append(comm.isend(part, ahead))
    [work.wait() for work in going]
"""

HINTS = {
    "values": "Send segment i only after it has come: in round i, receive segment i while you "
        "send segment i − 1.",
    "any p, root, k": "It works for root 0, or for even cuts, only. me = (comm.rank - root) % p "
        "is a rank's place in the chain, and x.tensor_split(segments) cuts any x.",
    "edges": "x may have fewer elements than there are segments, even none, and any dtype.",
    "time": "Receiving and sending take turns, or wait for more than they need. Ports are full "
        "duplex: post both together, comm.exchange(Recv(segment i, behind), Send(segment i − 1, "
        "ahead)).",
    "bytes": "Each rank sends each segment to the next one, once; no rank after the last one "
        "needs x: a chain, not a ring.",
    "memory": "More than a segment is held beside x. Segments from x.tensor_split(segments) are "
        "views: receive into them, and send them, as they are.",
}

MISTAKES = [
    Mistake({LOOP: TURN}, "Receiving and sending take turns. Ports are full duplex: post both "
            "together, comm.exchange(Recv(segment i, behind), Send(segment i − 1, ahead))."),
    Mistake({LOOP: TURN.replace("        if place < p - 1", "    for part in parts:\n        if place "
                                "< p - 1")}, "Each rank waits for all of x before it passes anything "
            "on. Pass segment i on as soon as it has come, while segment i + 1 arrives."),
    Mistake({LOOP: ALL}, "Several segments are under way at once. They share the port, so that the "
            "first arrives late: let one follow the other."),
    Mistake({"and i > 0": "and i < segments", "parts[i - 1]": "parts[i]"}, "You send segment i in "
            "the round in which it is still coming. Send segment i − 1, which you have."),
    Mistake({"and i > 0": "and i < segments", "parts[i - 1]": "parts[i].clone()"}, HAVE),
    Mistake({"    for i in range(segments + 1)": "    segments, parts = 1, [x]\n    for i in range("
             "segments + 1)"}, "It takes as long as with a single segment: cut x into `segments` "
            "and send each."),
    Mistake({CUT: "x.split(segments); segments = len(parts)"}, "x goes out in too many messages. "
            "x.tensor_split(segments) makes `segments` pieces of it; x.split(m) makes pieces of m "
            "elements."),
    Mistake({"(comm.rank - root) % p": "comm.rank"}, "Every rank has rank 0's x. A rank's place in "
            "the chain is me = (comm.rank - root) % p."),
    Mistake({CUT: "[x[i * (len(x) // segments) : (i + 1) * (len(x) // segments)] for i in "
             "range(segments)]"}, "The end of x is missing, where the segments don't divide it. "
            "x.tensor_split(segments) loses none; pass all of them on."),
    Mistake({CUT: CUT + "; parts, segments = (parts[:-1], segments - 1) if segments > 1 else "
             "(parts, 1)"}, "The end of x is missing: the last segment is never sent. Pass all of "
            "them on."),
    Mistake({SEND: "if p > 1 and i > 0:", RECV: "if p > 1 and place > 0 and i < segments:",
             "        comm.exchange(*ops)": "        if p > 1 and place == 0 and i > 0:\n            "
             "ops.append(Recv(torch.empty_like(parts[i - 1]), behind))\n        comm.exchange(*ops)"},
            "No rank after the last one needs x: a chain, not a ring."),
    Mistake({CUT: "[part.clone() for part in x.tensor_split(segments)]", "    return x": "    return x.copy_(torch.cat(parts))"},
            HINTS["memory"]),
]
