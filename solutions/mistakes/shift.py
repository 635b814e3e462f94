from dtlab.grading.mistakes import Mistake

MOVE, INTO = "comm.sendrecv(x, right, arrived, left)", "arrived = torch.empty_like(x)"

HINTS = {
    "edges": "One rank alone gets its own x back, as a new tensor; x may be empty, or of any "
        "shape and dtype.",
    "time": "The shift takes as long as several messages one after the other. Ports are full "
        "duplex: all ranks can send and receive at once, with comm.sendrecv, or by posting both "
        "(comm.exchange, comm.isend) before waiting for either.",
    "bytes": "Each rank sends its x once and nothing else; don't pass on what others sent.",
}

MISTAKES = [
    Mistake({"return arrived": "return x.clone()"},
            "Each rank returned its own x: return the tensor that you received into."),
    Mistake({MOVE: "comm.sendrecv(x, left, arrived, right)"},
            "It went round the wrong way: send to rank + 1, receive from rank − 1."),
    Mistake({MOVE: """if comm.rank == 0:
        comm.send(x, right)
        comm.recv(arrived, left)
    else:
        comm.recv(arrived, left)
        comm.send(arrived, right)"""}, "Each rank sends its own x to its right, not what it has "
            "received, and returns what comes from its left."),
    *(Mistake({INTO: room, MOVE: "works = comm.isend(x, right), comm.irecv(arrived, left)\n    "
               "early = arrived.clone()\n    [work.wait() for work in works]",
               "return arrived": "return early"}, "This is no rank's x. What you receive into is "
              "whole once `wait` has returned: read it then.")
      for room in (INTO, "arrived = torch.zeros_like(x)")),
    *(Mistake({INTO: room, MOVE: """if comm.rank < comm.size - 1:
        comm.send(x, right)
    if comm.rank > 0:
        comm.recv(arrived, left)"""}, "Rank 0 receives nothing: close the circle. The last rank "
              "sends to rank 0: (comm.rank + 1) % comm.size.")
      for room in (INTO, "arrived = torch.zeros_like(x)")),
    Mistake({"return arrived": "return x.copy_(arrived)"}, "x belongs to the caller: receive into a "
            "new tensor, torch.empty_like(x), and leave x as it is."),
    Mistake({"return x.clone()": "return x"}, "It is right, but x itself: return a new tensor, "
            "x.clone() if there is one rank."),
    Mistake({"    if comm.size == 1:\n        return x.clone()\n": ""}, "A rank can't send to "
            "itself: one rank alone gets its own x back, as a new tensor."),
    Mistake({INTO: "arrived = torch.empty(len(x))"}, "x may be of any shape and dtype: receive into "
            "torch.empty_like(x)."),
    Mistake({MOVE: "others = [torch.empty_like(x) for _ in range(comm.size)]\n    works = [work for "
             "r in range(comm.size) if r != comm.rank for work in (comm.isend(x, r), "
             "comm.irecv(others[r], r))]\n    [work.wait() for work in works]\n    "
             "arrived = others[left]"}, "Each rank sends its x to all others, one message after "
            "the other: only the right neighbour needs it."),
    Mistake({MOVE: """if comm.rank % 2 == 0:
        comm.send(x, right)
        comm.recv(arrived, left)
    else:
        comm.recv(arrived, left)
        comm.send(x, right)"""}, "Even ranks send first, then odd ones: two messages or more, one "
            "after the other. Ports are full duplex: all ranks can send and receive at once, with "
            "comm.sendrecv, or by posting both before waiting for either."),
]
