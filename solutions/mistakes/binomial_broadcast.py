from dtlab.grading.mistakes import Mistake

SEND, RECV = "(me + distance + root) % p)", "(me - distance + root) % p)"
FLAT = """
def binomial_broadcast(comm, x, root):
    if comm.rank != root:
        comm.recv(x, root)
    for other in range(comm.size):
        if comm.rank == root and other != root:
            comm.send(x, other)
"""
TREE = """
def binomial_broadcast(comm, x, root):
    p, me = comm.size, (comm.rank - root) % comm.size
    {below}
    if me:
        comm.recv(x, ({parent} + root) % p)
    for child in {children}:
        if child < p:
            comm.send(x, (child + root) % p)
"""
BIT = "bit = me & -me if me else 1 << (p - 1).bit_length()"
LARGEST = ("A rank starts too late. The child with the largest subtree has the most left to do: send "
           "to that one first. (In the animation's tree it is the farthest, in that of hint 1 the "
           "nearest.)")
FOLLOWS = ("One message follows the other. Every rank that has x must send it in the very next "
           "round, so that each round doubles the number of ranks that have it.")
TWICE = ("A rank receives what it has already: each rank but the root receives x once, and no rank "
         "sends to the root.")

HINTS = {
    "values": "Every rank but the root receives once, from its parent, and then sends to its "
        "children.",
    "any p": "It works for powers of two only. A child whose number is p or more does not exist: "
        "leave it out.",
    "any root": "It works for root 0 only. Renumber the ranks: me = (comm.rank - root) % p is 0 "
        "at the root; where you send or receive, turn back: (… + root) % p.",
    "any x": "Receive straight into x, whatever its dtype and length.",
    "rounds": "Every rank that has x must send it in the very next round, and in every round that "
        "is left, so that each round doubles the number of ranks that have it.",
    "bytes": "A rank receives what it has already: each rank but the root receives x once, and no "
        "rank sends to the root.",
}

MISTAKES = [
    Mistake(FLAT, FOLLOWS),
    Mistake(TREE.format(below="pass", parent="me - 1", children="[me + 1]"), FOLLOWS),
    Mistake(TREE.format(below="pass", parent="(me - 1) // 2", children="(2 * me + 1, 2 * me + 2)"),
            "The root sends only twice, and not in every round: each rank that has x sends it on in "
            "every round that is left. In a binomial tree the root has ⌈lg p⌉ children."),
    Mistake(TREE.format(below=BIT, parent="me - bit", children="[me + (1 << k) for k in "
                        "range(bit.bit_length() - 1)]"), LARGEST),
    Mistake(TREE.format(below="bit = 1 << me.bit_length()", parent="me - bit // 2", children="[me "
                        "+ (1 << k) for k in reversed(range(bit.bit_length() - 1, p.bit_length()))]"
                        ), LARGEST),
    Mistake({"if me < distance and me + distance < p:\n            comm.send(x, " + SEND: "if me + distance < p:\n            comm.send(x, " + SEND, "elif distance <= me < 2 * distance:": "if me >= distance:"},
            HINTS["bytes"]),
    Mistake({"comm.send(x, " + SEND: "comm.send(x, " + SEND + "; comm.send(x, " + SEND, "comm.recv(x, " + RECV: "comm.recv(x, " + RECV + "; comm.recv(x, " + RECV},
            HINTS["bytes"]),
    Mistake({"(comm.rank - root) % p": "comm.rank", SEND: "me + distance)", RECV: "me - distance)"},
            "Every rank has rank 0's x. Renumber the ranks so that the root is 0: "
            "me = (comm.rank - root) % p; for send and recv, turn back: (… + root) % p."),
    Mistake({SEND: "me + distance)", RECV: "me - distance)"}, "It works for root 0 only: where you "
            "send or receive, turn back to the ranks' own numbers: (… + root) % p."),
    Mistake({" and me + distance < p": ""}, HINTS["any p"]),
    Mistake({"while distance < p": "while 2 * distance <= p"}, "It works for powers of two only: "
            "with other numbers of ranks there is one more round, in which not all send."),
    Mistake({"comm.send(x, " + SEND: "comm.send(inbox, " + SEND, "comm.recv(x, " + RECV:
             "comm.recv(inbox, " + RECV, "    p = comm.size": "    p = comm.size\n    inbox = "
             "x.clone() if comm.rank == root else torch.empty(len(x))",
             "    return x": "    return x.copy_(inbox)"},
            "It works for float32 only: receive straight into x, whatever its dtype and length."),
]
